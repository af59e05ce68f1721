"""How a call's indices follow from its tensors: a signature, folded for one variant, as a straight list of steps.

A *variant* is which inputs are present and how the conditionals over params come out. Its steps are data; ``tileops.core.check``
turns them into code.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from tileops.core.spec.diagnostics import Diagnostic
from tileops.core.spec.expr import (
    Binary,
    Compare,
    Const,
    Expr,
    Func,
    IfElse,
    Logic,
    Name,
    Seq,
    Star,
    Unary,
    compile_expr,
    names,
    rewrite,
    walk,
)
from tileops.core.spec.model import Entry, ParamType, Rule, Signature, TensorDecl


@attrs.frozen
class Position:
    """``fixed`` axes plus the lengths of ``splices``, counted from the front or from the back."""

    fixed: int
    splices: tuple[Expr, ...] = ()
    from_end: bool = False


@attrs.frozen
class Rank:
    """The tensor has ``fixed`` axes plus the lengths of ``known``; at least so many if a splice is ``open``."""

    tensor: str
    fixed: int
    known: tuple[Expr, ...]
    open: bool


@attrs.frozen
class SolveAxis:
    """``scale * name + rest`` is the axis's size; ``rest`` None means nothing is added."""

    tensor: str
    at: Position
    name: str
    scale: int = 1
    rest: Expr | None = None


@attrs.frozen
class SolveSplice:
    tensor: str
    start: Position
    stop: Position
    name: str


@attrs.frozen
class CheckAxis:
    tensor: str
    at: Position
    expr: Expr


@attrs.frozen
class CheckSplice:
    tensor: str
    start: Position
    expr: Expr


@attrs.frozen
class SolveDType:
    tensor: str
    name: str
    choices: tuple[str, ...]


@attrs.frozen
class CheckDType:
    tensor: str
    options: tuple[Expr, ...]


@attrs.frozen
class Derive:
    """A name of ``let``."""

    name: str
    expr: Expr


@attrs.frozen
class Require:
    rule: Rule
    expr: Expr


Step = Rank | SolveAxis | SolveSplice | CheckAxis | CheckSplice | SolveDType | CheckDType | Derive | Require


@attrs.frozen
class Folded:
    """A tensor's axes, dtype and (for outputs) condition in one variant."""

    decl: TensorDecl
    axes: tuple[Expr, ...]
    dtype: Expr
    when: Expr


@attrs.frozen
class Solution:
    """The steps of a variant in order, its outputs, the indices it binds, and what it can't: (place, message) pairs."""

    steps: tuple[Step, ...]
    outputs: tuple[Folded, ...]
    bound: tuple[str, ...]
    faults: tuple[tuple[Any, str], ...]


def tests(signature: Signature) -> tuple[Expr, ...]:
    """The conditions over params and presence by which shapes and dtypes are folded, in order of appearance."""
    found: dict[Expr, None] = {}
    for tensor in (*signature.inputs.values(), *signature.outputs.values()):
        for node in (*walk(tensor.shape.expr), *walk(plain_dtype(tensor.dtype.expr))):
            if isinstance(node, IfElse) and names(node.test) <= signature.params.keys():
                found[node.test] = None
    return tuple(found)


def fold(expr: Expr, present: Mapping[str, bool], truth: Mapping[Expr, bool]) -> Expr:
    """Decide what a variant decides: ``present(x)``, known conditions, and the logic above them."""

    def change(node: Expr) -> Expr | None:
        match node:
            case Func(name="present", args=(Name(id=id),)) if id in present:
                return Const(present[id])
            case IfElse(test=test, then=then, other=other):
                decided = Const(truth[test]) if test in truth else go(test)
                if isinstance(decided, Const):
                    return go(then if decided.value else other)
            case Unary(op="not", value=value) if isinstance(inner := go(value), Const):
                return Const(not inner.value)
            case Logic(op=op, items=items):
                short = op == "or"
                left = []
                for item in map(go, items):
                    if not isinstance(item, Const):
                        left.append(item)
                    elif bool(item.value) is short:
                        left.append(Const(short))
                        break
                if not left:
                    return Const(not short)
                return left[0] if len(left) == 1 else Logic(op, tuple(left))
        return None

    def go(node: Expr) -> Expr:
        return rewrite(node, change)

    return go(expr)


def _axes(shape: Expr) -> tuple[Expr, ...]:
    return shape.items if isinstance(shape, Seq) else (Star(shape),)


def _linear(expr: Expr, name: str) -> tuple[int, Expr | None] | None:
    """(c, e) with expr = c * name + e and a literal c; None where it isn't so."""
    if name not in names(expr):
        return 0, expr
    match expr:
        case Name():
            return 1, None
        case Binary(op="*", left=Const(value=int(c)), right=x) | Binary(op="*", left=x, right=Const(value=int(c))):
            inner = _linear(x, name)
            return inner and (c * inner[0], None if inner[1] is None else Binary("*", Const(c), inner[1]))
        case Binary(op="+" | "-" as op, left=left, right=right):
            a, b = _linear(left, name), _linear(right, name)
            if a is None or b is None:
                return None
            sign = 1 if op == "+" else -1
            if b[1] is None:
                return a[0] + sign * b[0], a[1]
            return a[0] + sign * b[0], Binary(op, a[1] or Const(0), b[1])
    return None


class _Solver:
    def __init__(self, signature: Signature, inputs: tuple[Folded, ...]) -> None:
        self.sig, self.inputs = signature, inputs
        self.known: set[str] = {*signature.params}
        self.steps: list[Step] = []
        self.checks: list[Step] = []
        self.pending = [(t, i) for t in inputs for i in range(len(t.axes))]
        self.dtypes = list(inputs)
        self.lets = dict(signature.let)
        self.ranked: set[str] = set()

    def run(self) -> None:
        while self._dtypes() or self._lets() or self._axes(lone=True) or self._axes(lone=False):
            pass

    def _is_known(self, expr: Expr) -> bool:
        return names(expr) <= self.known

    def _lets(self) -> bool:
        ready = [n for n, text in self.lets.items() if self._is_known(text.expr)]
        for name in ready:
            self.steps.append(Derive(name, self.lets.pop(name).expr))
            self.known.add(name)
        return bool(ready)

    def _dtypes(self) -> bool:
        for tensor in self.dtypes:
            match tensor.dtype:
                case Name(id=id) if id in self.sig.indices and id not in self.known:
                    self.steps.append(SolveDType(tensor.decl.name, id, self.sig.indices[id].choices))
                    self.known.add(id)
                case expr if all(self._is_known(o) for o in dtype_options(expr)):
                    self.checks.append(CheckDType(tensor.decl.name, dtype_options(expr)))
                case _:
                    continue
            self.dtypes.remove(tensor)
            return True
        return False

    def _position(self, tensor: Folded, index: int) -> Position | None:
        """Where an axis stands: from the front or, behind a splice of unknown length, from the back."""
        before, after = tensor.axes[:index], tensor.axes[index + 1 :]
        for axes, from_end in ((before, False), (after, True)):
            splices = tuple(a.value for a in axes if isinstance(a, Star))
            if all(map(self._is_known, splices)):
                return Position(len(axes) - len(splices) + from_end, splices, from_end)
        return None

    def _rank(self, tensor: Folded) -> None:
        """Emit the rank check of a tensor once at most one of its splices is unknown."""
        splices = [a.value for a in tensor.axes if isinstance(a, Star)]
        known = tuple(s for s in splices if self._is_known(s))
        if tensor.decl.name not in self.ranked and len(splices) - len(known) <= 1:
            self.ranked.add(tensor.decl.name)
            self.steps.append(Rank(tensor.decl.name, len(tensor.axes) - len(splices), known, len(splices) > len(known)))

    def _axes(self, lone: bool) -> bool:
        for tensor, i in self.pending:
            self._rank(tensor)
            at = self._position(tensor, i)
            if at is None or tensor.decl.name not in self.ranked:
                continue
            step = self._axis(tensor.decl.name, tensor, i, at, lone)
            if step is not None:
                self.pending.remove((tensor, i))
                (self.checks if isinstance(step, CheckAxis | CheckSplice) else self.steps).append(step)
                return True
        return False

    def _axis(self, name: str, tensor: Folded, i: int, at: Position, lone: bool) -> Step | None:
        match tensor.axes[i]:
            case Star(value=value) if self._is_known(value):
                start = at if not at.from_end else Position(at.fixed - 1, (*at.splices, value), from_end=True)
                return CheckSplice(name, start, value)
            case Star(value=Name(id=id)) if id in self.sig.indices:
                behind = tensor.axes[i + 1 :]
                splices = tuple(a.value for a in behind if isinstance(a, Star))
                if at.from_end or not all(map(self._is_known, splices)):
                    return None
                self.known.add(id)
                return SolveSplice(name, at, Position(len(behind) - len(splices), splices, from_end=True), id)
            case Star():
                return None
            case expr if self._is_known(expr):
                return CheckAxis(name, at, expr)
            case Name(id=id) if id in self.sig.indices:
                self.known.add(id)
                return SolveAxis(name, at, id)
            case expr if not lone and len(unknown := names(expr) - self.known) == 1:
                (id,) = unknown
                linear = _linear(expr, id)
                if (
                    linear is not None
                    and linear[0] > 0
                    and id in self.sig.indices
                    and (linear[1] is None or self._is_known(linear[1]))
                ):
                    self.known.add(id)
                    return SolveAxis(name, at, id, *linear)
        return None


def dtype_options(dtype: Expr) -> tuple[Expr, ...]:
    if isinstance(dtype, Binary) and dtype.op == "|":
        return (*dtype_options(dtype.left), *dtype_options(dtype.right))
    return (dtype,)


def solve(signature: Signature, present: Mapping[str, bool], truth: Mapping[Expr, bool]) -> Solution:
    """The steps for the variant with these inputs present and these conditions true."""

    def folded(decl: TensorDecl) -> Folded:
        when = fold(decl.when.expr, present, truth) if decl.when else Const(True)
        return Folded(
            decl, _axes(fold(decl.shape.expr, present, truth)), fold(plain_dtype(decl.dtype.expr), present, truth), when
        )

    solver = _Solver(signature, tuple(folded(d) for n, d in signature.inputs.items() if present[n]))
    solver.run()
    faults: list[tuple[Any, str]] = []
    for tensor, i in solver.pending:
        unknown = sorted(names(tensor.axes[i]) - solver.known)
        which = f"index '{unknown[0]}'" if unknown else f"axis {i}"
        faults.append((tensor.decl.shape.place, f"{which} of input {tensor.decl.name} can't be determined"))
    faults += [(t.decl.dtype.place, f"the dtype of input {t.decl.name} can't be determined") for t in solver.dtypes]
    requires = []
    for rule in signature.where:
        expr = fold(rule.text.expr, present, truth)
        if expr != Const(True):
            requires.append(Require(rule, expr))
            faults += _unbound(expr, solver.known, rule.text.place, f"the rule '{rule.text}'")
    outputs = tuple(map(folded, signature.outputs.values()))
    for output in outputs:
        if output.when == Const(False):
            continue
        for expr in (*output.axes, output.dtype):
            faults += _unbound(expr, solver.known, output.decl.place, f"output {output.decl.name}")
    bound = tuple(n for n in (*signature.indices, *signature.let) if n in solver.known)
    return Solution((*solver.steps, *solver.checks, *requires), outputs, bound, tuple(faults))


def _unbound(expr: Expr, known: set[str], place: Any, what: str) -> list[tuple[Any, str]]:
    return [(place, f"{what} uses '{n}', which is unbound") for n in sorted(names(expr) - known)]


def plain_dtype(dtype: Expr) -> Expr:
    """``coalesce(p, T)`` as the conditional that it is; ``same_as(x)`` stays: only a call knows x's dtype."""

    def change(node: Expr) -> Expr | None:
        match node:
            case Func(name="coalesce", args=(first, second)):
                return IfElse(Compare(first, (("is", Const(None)),)), second, first)
        return None

    return rewrite(dtype, change)


# -- is every index determined? ----------------------------------------------------------------------------------------


def _samples(type_: ParamType) -> list[Any]:
    values: dict[str, list[Any]] = {
        "bool": [False, True], "int": [0, 1], "float": [0.0, 1.0], "list[int]": [(1,)],
        "literal": [*type_.choices], "dtype": [*type_.choices],
    }  # fmt: skip
    return [*values[type_.base], *([None] if type_.optional else [])]


def _variants(signature: Signature) -> Iterator[tuple[dict[str, bool], dict[Expr, bool]]]:
    """Variants that calls can have: all values of the params that are asked, and each optional input alone on and off."""
    asked = tests(signature)
    conditions = [d.when.expr for d in signature.inputs.values() if d.when]
    used = sorted(set().union(*(names(e) for e in (*asked, *conditions))) & signature.params.keys())
    free = [n for n, d in signature.inputs.items() if d.optional]
    corners = {frozenset(), frozenset(free), *(frozenset([n]) for n in free), *(frozenset(free) - {n} for n in free)}
    seen = set()
    for values in itertools.islice(itertools.product(*(_samples(signature.params[n].type) for n in used)), 64):
        for on in corners:
            env: dict[str, Any] = dict(zip(used, values, strict=True))
            for name, decl in signature.inputs.items():
                env[f"present({name})"] = decl.when is None and (not decl.optional or name in on)
            for name, decl in signature.inputs.items():
                if decl.when:
                    env[f"present({name})"] = bool(compile_expr(decl.when.expr)(env))
            for name in signature.outputs:
                env[f"present({name})"] = True
            present = {n: env[f"present({n})"] for n in signature.inputs}
            outcome = {t: bool(compile_expr(t)(env)) for t in asked}
            key = (tuple(present.values()), tuple(outcome.values()))
            if key not in seen:
                seen.add(key)
                yield present, outcome


def check_solvable(entry: Entry) -> Iterator[Diagnostic]:
    """Findings about indices that no call determines, or that some variant of a call leaves unbound where it needs them."""
    signature = entry.signature
    for decl in signature.inputs.values():
        for text in (decl.shape, decl.dtype):
            for node in walk(text.expr):
                if isinstance(node, IfElse) and not names(node.test) <= signature.params.keys():
                    message = f"a condition of input {decl.name} may ask only params and present()"
                    yield Diagnostic(text.place, "error", "S203", message)
                    return
    determined: set[str] = set()
    faults: dict[tuple[Any, str], str] = {}
    for present, truth in _variants(signature):
        solution = solve(signature, present, truth)
        determined.update(solution.bound)
        absent = [n for n, there in present.items() if not there]
        for fault in solution.faults:
            faults.setdefault(
                fault, f" when {' and '.join(absent)} {'is' if len(absent) == 1 else 'are'} absent" if absent else ""
            )
    for index in signature.indices.values():
        if index.name not in determined:
            message = f"no call can determine the index '{index.name}'"
            yield Diagnostic(
                index.place, "error", "S205", message, "let it stand alone on some axis of an input, or as c*X + e"
            )
    for (place, message), absent_text in faults.items():
        if not any(f"'{i}'" in message for i in signature.indices if i not in determined):
            yield Diagnostic(place, "error", "S206", message + absent_text)
