"""The closed expression language of specs: parsed by Python's grammar into our own small tree, then emitted as Python.

Shapes (``[*B, N]``), dtypes (``float16 | T``) and rules share the grammar; ``kinds.py`` checks what a place allows.
Nothing outside the node classes below is reachable, and the size of an expression is bounded.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, lru_cache, partial
from operator import is_
from typing import Any

import attrs

from tileops.core.spec.dtypes import BITS

MAX_LENGTH = 1000
MAX_NODES = 300
MAX_DEPTH = 30  # Python takes 200 nested parentheses: 2 expressions (a type's body, its arguments), 3 for each level
MAX_LITERAL = 2**63

# The words of the language. What Python reads beyond them (comments, escapes, other alphabets, 0x1F) is refused.
_BLANKS = str.maketrans("\t\n\r\f\v", " " * 5)
_WORDS = re.compile(
    r"""(?:[ ] | '[^'\\\x00-\x1f\ud800-\udfff]*' | "[^"\\\x00-\x1f\ud800-\udfff]*"
        | [A-Za-z_][A-Za-z0-9_]* | [-+*/%|=!<>()\[\],]
        | (?:[0-9][0-9_]*(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?(?![\w.]) )*""",
    re.VERBOSE | re.ASCII,
)


class ExprError(Exception):
    """Text outside the language; ``offset`` counts characters from its start, ``code`` is the diagnostic's."""

    def __init__(self, message: str, offset: int = 0, hint: str | None = None, code: str = "S202"):
        super().__init__(message)
        self.message, self.offset, self.hint, self.code = message, offset, hint, code


@attrs.frozen
class Expr:
    """A node; ``at`` is its offset in the text and takes no part in equality."""

    at: int = attrs.field(default=0, eq=False, repr=False, kw_only=True)

    @cached_property
    def free(self) -> frozenset[str]:
        """The names that have to be known; dtypes' names and the tensors in present() and same_as() are none."""
        match self:
            case Name(id=id):
                return frozenset() if id in BITS else frozenset((id,))
            case Func(name="present" | "same_as"):
                return frozenset()
            case Comp(body=body, var=var, over=over, test=test):
                inner = body.free | (test.free if test else frozenset())
                return over.free | (inner - {var})
        return frozenset().union(*(c.free for c in children(self)))

    @cached_property
    def conditional(self) -> bool:
        """Whether a condition stands in it that the variant of a call may decide."""
        match self:
            case IfElse() | Logic() | Unary(op="not") | Func(name="present"):
                return True
        return any(c.conditional for c in children(self))


@attrs.frozen
class Const(Expr):
    value: int | float | bool | str | None = attrs.field(eq=lambda value: (type(value), value))  # 1 is not True


@attrs.frozen
class Name(Expr):
    id: str


@attrs.frozen
class Seq(Expr):
    """A list display: a shape, or the right side of ``in``."""

    items: tuple[Expr, ...]


@attrs.frozen
class Star(Expr):
    """A splice ``*B`` inside a list display."""

    value: Expr


@attrs.frozen
class Unary(Expr):
    op: str
    value: Expr


@attrs.frozen
class Binary(Expr):
    op: str
    left: Expr
    right: Expr


@attrs.frozen
class Compare(Expr):
    """``left op x op x ...``, chained as in Python."""

    left: Expr
    rest: tuple[tuple[str, Expr], ...]


@attrs.frozen
class Logic(Expr):
    op: str
    items: tuple[Expr, ...]


@attrs.frozen
class IfElse(Expr):
    test: Expr
    then: Expr
    other: Expr


@attrs.frozen
class Func(Expr):
    name: str
    args: tuple[Expr, ...]


@attrs.frozen
class Item(Expr):
    """``value[index]``: indexing, or a named type's application."""

    value: Expr
    args: tuple[Expr, ...]


@attrs.frozen
class Comp(Expr):
    """A generator inside all, any, sum, min or max."""

    body: Expr
    var: str
    over: Expr
    test: Expr | None


_BINARY = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "//", ast.Mod: "%", ast.BitOr: "|"}
_UNARY = {ast.USub: "-", ast.Not: "not"}
_COMPARE = {
    ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
    ast.In: "in", ast.NotIn: "not in", ast.Is: "is", ast.IsNot: "is not",
}  # fmt: skip
_OTHERS = {ast.Div: "'/'", ast.Pow: "'**'", ast.UAdd: "a leading '+'", ast.ListComp: "a list comprehension"}
_CONSTANTS = {"true": True, "false": False, "none": None}


@lru_cache(maxsize=4096)
def parse(text: str) -> Expr:
    """Parse one expression; raises ExprError with the offset of the fault."""
    if len(text) > MAX_LENGTH:
        raise ExprError(f"expression of {len(text)} characters; at most {MAX_LENGTH} are allowed", code="S201")
    flat = text.translate(_BLANKS)
    at = 0 if (known := _WORDS.match(flat)) is None else known.end()
    if at < len(flat):
        raise ExprError(f"{flat[at]!r} is not part of the expression language", at, code="S201")
    body = flat.lstrip()
    try:
        tree = ast.parse(body, mode="eval").body
    except SyntaxError as e:
        at = len(flat) - len(body) + max(0, (e.offset or 1) - 1)
        raise ExprError(f"not an expression: {e.msg}", at, code="S201") from None
    except (ValueError, RecursionError, MemoryError):
        raise ExprError("not an expression: it nests too deeply", code="S201") from None
    return _Builder(body, len(flat) - len(body)).build(tree)


class _Builder:
    def __init__(self, text: str, shift: int) -> None:
        self._lines = text.encode()
        self._shift = shift
        self._nodes = self._depth = 0

    def build(self, node: ast.AST) -> Expr:
        self._nodes += 1
        self._depth += 1
        at = self._shift + len(self._lines[: getattr(node, "col_offset", 0)].decode())
        if self._nodes > MAX_NODES:
            raise ExprError(f"expression of more than {MAX_NODES} parts", at, code="S201")
        if self._depth > MAX_DEPTH:
            raise ExprError(f"expression nested more than {MAX_DEPTH} deep", at, code="S201")
        built = self._build(node, at)
        self._depth -= 1
        return built

    def _build(self, node: ast.AST, at: int) -> Expr:
        match node:
            case ast.Constant(value=bool() | None | str() as value):
                return Const(value, at=at)
            case ast.Constant(value=int() | float() as value):
                if not -MAX_LITERAL < value < MAX_LITERAL:
                    raise ExprError("a number outside 64 bits", at, code="S201")
                return Const(value, at=at)
            case ast.Name(id=id):
                return Const(_CONSTANTS[id], at=at) if id in _CONSTANTS else Name(id, at=at)
            case ast.List(elts=items) | ast.Tuple(elts=items):
                return Seq(tuple(map(self.build, items)), at=at)
            case ast.Starred(value=value):
                return Star(self.build(value), at=at)
            case ast.UnaryOp(op=op, operand=value) if type(op) in _UNARY:
                return Unary(_UNARY[type(op)], self.build(value), at=at)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
                return Binary(_BINARY[type(op)], self.build(left), self.build(right), at=at)
            case ast.BoolOp(op=op, values=values):
                return Logic("and" if isinstance(op, ast.And) else "or", tuple(map(self.build, values)), at=at)
            case ast.Compare(left=left, ops=ops, comparators=others):
                rest = tuple((_COMPARE[type(op)], self.build(other)) for op, other in zip(ops, others, strict=True))
                return Compare(self.build(left), rest, at=at)
            case ast.IfExp(test=test, body=then, orelse=other):
                return IfElse(self.build(test), self.build(then), self.build(other), at=at)
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]):
                return Func(name, tuple(map(self.build, args)), at=at)
            case ast.Subscript(value=value, slice=ast.Tuple(elts=args)):
                return Item(self.build(value), tuple(map(self.build, args)), at=at)
            case ast.Subscript(value=value, slice=index) if not isinstance(index, ast.Slice):
                return Item(self.build(value), (self.build(index),), at=at)
            case ast.GeneratorExp(
                elt=body, generators=[ast.comprehension(target=ast.Name(id=var), is_async=0) as loop]
            ):
                if len(loop.ifs) > 1:
                    raise ExprError("a comprehension takes one condition", at, code="S201")
                condition = self.build(loop.ifs[0]) if loop.ifs else None
                return Comp(self.build(body), var, self.build(loop.iter), condition, at=at)
        word = _OTHERS.get(type(getattr(node, "op", node)), type(node).__name__)
        raise ExprError(f"{word} is not part of the expression language", at, code="S201")


_FIELDS = {kind: tuple(f.name for f in attrs.fields(kind) if f.name != "at") for kind in Expr.__subclasses__()}


def children(node: Expr) -> Iterator[Expr]:
    """The direct parts of a node."""
    for field in _FIELDS[type(node)]:
        value = getattr(node, field)
        parts = value if isinstance(value, tuple) else (value,)
        for part in parts:
            part = part[1] if isinstance(part, tuple) else part
            if isinstance(part, Expr):
                yield part


def walk(node: Expr) -> Iterator[Expr]:
    yield node
    for child in children(node):
        yield from walk(child)


def names(node: Expr) -> frozenset[str]:
    """Free names of an expression."""
    return node.free


def rewrite(node: Expr, change: Callable[[Expr], Expr | None]) -> Expr:
    """The tree with the nodes replaced for which ``change`` returns one; replacements are not visited again."""
    replaced = change(node)
    return _rebuild(node, lambda part: rewrite(part, change)) if replaced is None else replaced


def _rebuild(node: Expr, change: Callable[[Expr], Expr]) -> Expr:
    """The node with its parts changed; itself where none is another."""
    old = {name: getattr(node, name) for name in _FIELDS[type(node)]}
    new = {name: _changed(value, change) for name, value in old.items()}
    return node if all(new[name] is old[name] for name in old) else type(node)(**new, at=node.at)


def _changed(value: Any, change: Callable[[Expr], Expr]) -> Any:
    if isinstance(value, Expr):
        return change(value)
    if not isinstance(value, tuple):
        return value
    parts = tuple(_changed(part, change) for part in value)
    return value if all(map(is_, parts, value)) else parts


def substitute(node: Expr, values: Mapping[str, Expr]) -> Expr:
    """Replace free names by expressions."""
    return rewrite(node, lambda n: values.get(n.id) if isinstance(n, Name) else None)


def anchored(node: Expr, at: int) -> Expr:
    """A copy that says it stands at one offset, for an expression that another text brings in."""
    return attrs.evolve(_rebuild(node, lambda part: anchored(part, at)), at=at)


def unparse(node: Expr) -> str:
    """The expression as text again, in the language's own spelling and with no parenthesis too many."""
    return ast.unparse(ast.parse(_emit(node, lambda name: name, _Spelling), mode="eval"))


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def broadcast(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that all broadcast to, aligned from the right; ValueError if there is none."""
    rank = max(map(len, shapes), default=0)
    out = []
    for axis in zip(*((1,) * (rank - len(s)) + tuple(s) for s in shapes), strict=True):
        sizes = {n for n in axis if n != 1}
        if len(sizes) > 1:
            raise ValueError(f"{' and '.join(str(tuple(s)) for s in shapes)} don't broadcast")
        out.append(sizes.pop() if sizes else 1)
    return tuple(out)


def visible(s_q: int, s_kv: int, causal: bool, left: int, right: int) -> int:
    """Scores that a mask leaves: query i, at i' = i + s_kv - s_q, sees key j if i' - left <= j <= i' + right.

    -1 leaves a side unbounded; ``causal`` makes the right side 0.
    """
    if causal:
        right = 0

    def ramp(m: int) -> int:  # sum of clamp(x, 0, s_kv) over x <= m
        return 0 if m <= 0 else m * (m + 1) // 2 if m <= s_kv else s_kv * (s_kv + 1) // 2 + (m - s_kv) * s_kv

    first, last = s_kv - s_q, s_kv - 1
    ends = s_q * s_kv if right < 0 else ramp(last + right + 1) - ramp(first + right)
    starts = 0 if left < 0 else ramp(last - left) - ramp(first - left - 1)
    return ends - starts


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "len": len, "prod": math.prod, "sum": sum, "min": min, "max": max, "all": all, "any": any,
    "ceil_div": ceil_div, "broadcast": broadcast, "visible": visible,
}  # fmt: skip


class _Spelling:
    """How emitted code spells what differs between its readers."""

    variable = staticmethod(lambda var: var)
    logic = staticmethod(lambda op, items: f"({f' {op} '.join(items)})")
    negate = staticmethod(lambda item: f"(not {item})")
    choose = staticmethod(lambda test, then, other: f"({then} if {test} else {other})")
    compare = staticmethod(lambda left, rest: f"({left} {' '.join(f'{op} {x}' for op, x in rest)})")
    func = staticmethod(lambda name, args: f"{name}({', '.join(args)})")
    seq = staticmethod(lambda items: f"[{', '.join(items)}]")
    const = staticmethod(repr)


class Concrete(_Spelling):
    """Python over ints and strings."""

    variable = staticmethod(lambda var: f"_{var}")
    seq = staticmethod(lambda items: f"({''.join(f'{i}, ' for i in items)})")


class Symbolic(Concrete):
    """Python over sizes that may be symbolic: nothing converts a symbolic comparison to a bool.

    The emitted code expects ``sym`` in its globals: ``tileops.core.check.symbolic``.
    """

    logic = staticmethod(lambda op, items: f"sym.{op}_({', '.join(f'lambda: {i}' for i in items)})")
    negate = staticmethod(lambda item: f"sym.not_({item})")
    choose = staticmethod(lambda test, then, other: f"sym.choose({test}, lambda: {then}, lambda: {other})")

    @staticmethod
    def compare(left: str, rest: list[tuple[str, str]]) -> str:
        def pair(a: str, op: str, b: str) -> str:
            match op:
                case "==" | "in":
                    return f"sym.{'same' if op == '==' else 'within'}({a}, {b})"
                case "!=" | "not in":
                    return f"sym.not_({pair(a, '==' if op == '!=' else 'in', b)})"
            return f"({a} {op} {b})"

        lefts = [left, *(x for _, x in rest)]
        pairs = [pair(a, op, b) for a, (op, b) in zip(lefts, rest, strict=False)]
        return pairs[0] if len(pairs) == 1 else Symbolic.logic("and", pairs)

    @staticmethod
    def func(name: str, args: list[str]) -> str:
        return f"{f'sym.{name}' if name in ('min', 'max', 'all', 'any', 'broadcast') else name}({', '.join(args)})"


def _emit(node: Expr, name: Callable[[str], str], spell: type[_Spelling]) -> str:
    go = partial(_emit, name=name, spell=spell)
    match node:
        case Const(value=value):
            return spell.const(value)
        case Name(id=id):
            return repr(id) if id in BITS and spell is not _Spelling else name(id)
        case Seq(items=items):
            return spell.seq([go(i) for i in items])
        case Star(value=value):
            return f"*{go(value)}"
        case Unary(op="not", value=value):
            return spell.negate(go(value))
        case Unary(op=op, value=value):
            return f"({op}{go(value)})"
        case Binary(op=op, left=left, right=right):
            return f"({go(left)} {op} {go(right)})"
        case Compare(left=left, rest=rest):
            return spell.compare(go(left), [(op, go(x)) for op, x in rest])
        case Logic(op=op, items=items):
            return spell.logic(op, [go(i) for i in items])
        case IfElse(test=test, then=then, other=other):
            return spell.choose(go(test), go(then), go(other))
        case Func(name="present", args=(Name(id=id),)) if spell is not _Spelling:
            return name(f"present({id})")
        case Func(name=fn, args=args):
            return spell.func(fn, [go(a) for a in args])
        case Item(value=value, args=args):
            return f"{go(value)}[{', '.join(go(a) for a in args)}]"
        case Comp(body=body, var=var, over=over, test=test):
            shown = spell.variable(var)

            def local(id: str) -> str:
                return shown if id == var else name(id)

            condition = f" if {_emit(test, local, spell)}" if test else ""
            return f"({_emit(body, local, spell)} for {shown} in {go(over)}{condition})"
    raise AssertionError(node)


def emit(node: Expr, name: Callable[[str], str], spell: type[_Spelling] = Concrete) -> str:
    """Python source of an expression; ``name`` spells its names, and ``present(x)`` is asked for under that name."""
    return _emit(rewrite(node, _unfiltered) if spell is Symbolic else node, name, spell)


def _unfiltered(node: Expr) -> Expr | None:
    """A comprehension whose condition is part of its value, since an ``if`` would turn it into a bool."""
    match node:
        case Func(name="all" | "any" | "sum" as name, args=(Comp(body=body, test=Expr() as test) as comp,)):
            value = {
                "all": Logic("or", (Unary("not", test), body)),
                "any": Logic("and", (test, body)),
                "sum": IfElse(test, body, Const(0)),
            }[name]
            return Func(name, (rewrite(Comp(value, comp.var, comp.over, None), _unfiltered),))
    return None


@lru_cache(maxsize=4096)
def compile_expr(node: Expr) -> Callable[[Mapping[str, Any]], Any]:
    """A function from an environment (names, and ``present(x)`` as keys) to the value.

    Raises what the arithmetic raises: ZeroDivisionError, or KeyError for a name that is unbound.
    """
    source = f"lambda env: {emit(node, lambda n: f'env[{n!r}]')}"
    function: Callable[[Mapping[str, Any]], Any] = eval(compile(source, "<spec expression>", "eval"), dict(FUNCTIONS))
    return function
