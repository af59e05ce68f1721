"""The ``signature`` of an entry: its names, and its shapes, dtypes and rules as checked expressions."""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable
from typing import Any, cast

import attrs
import yaml

from tileops.core.spec.diagnostics import did_you_mean
from tileops.core.spec.dtypes import BITS
from tileops.core.spec.expr import (
    FUNCTIONS,
    Binary,
    Comp,
    Const,
    Expr,
    ExprError,
    Func,
    IfElse,
    Item,
    Name,
    Seq,
    Star,
    anchored,
    names,
    parse,
    rewrite,
    substitute,
    walk,
)
from tileops.core.spec.kinds import Kind, Scope, of_param
from tileops.core.spec.model import (
    Index,
    NamedType,
    Param,
    ParamType,
    Predicate,
    Rule,
    Signature,
    Symbolic,
    TensorDecl,
    Text,
)
from tileops.core.spec.predicates import PREDICATES, TENSOR_ARGUMENTS
from tileops.core.spec.source import Node, Source
from tileops.core.spec.values import canonical

KEYS = ("forall", "types", "params", "let", "inputs", "outputs", "where", "symbolic")
_TENSOR_KEYS = {
    "input": ("dtype", "shape", "optional", "when", "mutated", "contiguous", "values", "requires"),
    "output": ("dtype", "shape", "when", "layout"),
}
_WORD = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_RESERVED = {*BITS, *FUNCTIONS, *keyword.kwlist, "present", "same_as", "coalesce", "true", "false", "none", "self"}
_INDEX_KIND: dict[str, Kind] = {"Dim": "int", "Shape": "shape", "DType": "dtype"}
PREDECLARED = {"Mat": NamedType("Mat", ("t", "R", "C"), parse("[R, C] if not t else [C, R]"))}


@attrs.define
class SignatureReader:
    """Reads one signature; the scope grows as names are declared. A faulty name stays in it, as ``any``."""

    src: Source
    node: Node
    indices: dict[str, Index] = attrs.field(factory=dict)
    params: dict[str, Param] = attrs.field(factory=dict)
    types: dict[str, NamedType] = attrs.field(factory=lambda: dict(PREDECLARED))
    let: dict[str, Text] = attrs.field(factory=dict)
    inputs: dict[str, TensorDecl] = attrs.field(factory=dict)
    outputs: dict[str, TensorDecl] = attrs.field(factory=dict)
    kinds: dict[str, Kind] = attrs.field(factory=dict)
    choices: dict[str, tuple[str, ...]] = attrs.field(factory=dict)
    tensors: dict[str, str] = attrs.field(factory=dict)  # to "inputs" or "outputs"
    broken: list[str] = attrs.field(factory=list)  # tensors that are declared, but not well

    def read(self) -> Signature:
        parts = self.src.mapping(self.node, "signature", KEYS)
        for missing in {"inputs", "outputs"} - parts.keys():
            self.src.error(self.node, "S102", f"signature lacks '{missing}'")
        sections: dict[str, dict[str, Node]] = {}
        for role in ("inputs", "outputs"):
            sections[role] = self._section(parts, role)
            self.tensors |= dict.fromkeys(sections[role], role)
        for name, node in self._section(parts, "forall").items():
            self._index(name, node)
        for name, node in self._section(parts, "params").items():
            self._param(name, node)
        for head, key, node in self.src.items(parts["types"], "types") if "types" in parts else ():
            self._type(head, key, node)
        for name, node in self._section(parts, "let").items():
            text = self._text(node, f"let {name}")
            self.kinds[name] = "any" if text is None else self._scope().infer(text.expr)
            if text is not None:
                self.let[name] = text
        for name, node in sections["inputs"].items():
            self._tensor(name, node, "input", self.inputs)
        for name, node in sections["outputs"].items():
            self._tensor(name, node, "output", self.outputs)
        where = tuple(rule for node in self._list(parts, "where") if (rule := self._rule(node)))
        symbolic = tuple(s for node in self._list(parts, "symbolic") if (s := self._symbolic(node)))
        return Signature(self.indices, self.params, self.types, self.let, self.inputs, self.outputs, where, symbolic)

    @property
    def faulty(self) -> list[str]:
        """Names whose declaration is at fault, so that nothing is known of their values."""
        return [n for n in self.kinds if n not in self.indices and n not in self.params and n not in self.let]

    def _section(self, parts: dict[str, Node], key: str) -> dict[str, Node]:
        out: dict[str, Node] = {}
        if key not in parts:
            return out
        for name, key_node, node in self.src.items(parts[key], key):
            if not _WORD.fullmatch(name):
                self.src.error(key_node, "S106", f"'{name}' is no name: letters, digits and '_', a letter first")
            elif name in _RESERVED:
                self.src.error(key_node, "S105", f"'{name}' is a word of the language and can't name anything")
            elif name in self.kinds or name in self.tensors:
                self.src.error(key_node, "S105", f"'{name}' is declared twice in this signature")
            else:
                out[name] = node
        return out

    def _list(self, parts: dict[str, Node], key: str) -> list[Node]:
        return self.src.sequence(parts[key], key) if key in parts else []

    @property
    def _inputs(self) -> list[str]:
        return [name for name, role in self.tensors.items() if role == "inputs"]

    def _scope(self) -> Scope:
        return Scope(self.kinds, self._inputs, self.choices)

    def _text(self, node: Node, what: str, kind: Kind | None = None) -> Text | None:
        """An expression over the names declared so far, of the given kind."""
        text = self.src.text(node, what)
        if text is None:
            return None
        try:
            expr = self._expand(text.expr)
            if kind is None:
                self._scope().infer(expr)
            else:
                self._scope().need(expr, kind, "it")
        except ExprError as e:
            self.src.fault(node, e, what)
            return None
        return attrs.evolve(text, expr=expr)

    def _index(self, name: str, node: Node) -> None:
        what = f"the type of index '{name}'"
        self.kinds[name] = "any"
        text = self.src.string(node, what)
        match self.src.expr(node, text, what) if text else None:
            case None:
                return
            case Name(id="Dim" | "Shape" as kind):
                index = Index(name, cast(Any, kind), place=self.src.place(node))
            case Item(value=Name(id="DType"), args=(choices,)) if (dtypes := _dtype_union(choices)) is not None:
                index = Index(name, "DType", dtypes, place=self.src.place(node))
                self.choices[name] = dtypes
            case _:
                self.src.error(node, "S107", f"{what} must be Dim, Shape or DType[a | b] with dtypes' names")
                return
        self.indices[name] = index
        self.kinds[name] = _INDEX_KIND[index.kind]

    def _param(self, name: str, node: Node) -> None:
        what = f"param '{name}'"
        self.kinds[name] = "any"
        parts = self.src.mapping(node, what, ("type", "default"))
        if "type" not in parts:
            self.src.error(node, "S102", f"{what} lacks 'type'")
            return
        text = self.src.string(parts["type"], f"the type of {what}")
        expr = self.src.expr(parts["type"], text, f"the type of {what}") if text else None
        type_ = _param_type(expr) if expr else None
        if type_ is None:
            if expr:
                hint = "bool, int, float, list[int], quoted words, dtypes; '| None' where None is a value"
                self.src.error(parts["type"], "S107", f"the type of {what} is none of the language's", hint)
            return
        default: Any = attrs.NOTHING
        if "default" in parts:
            try:
                default = canonical(type_, self.src.value(parts["default"]))
            except ValueError as e:
                self.src.error(parts["default"], "S108", f"the default of {what} must be {e}")
        else:
            before = next((p.name for p in self.params.values() if p.default is not attrs.NOTHING), None)
            if before:
                self.src.error(node, "S102", f"{what} needs a default, since '{before}' before it has one")
        self.params[name] = Param(name, type_, default, place=self.src.place(node))
        self.kinds[name] = of_param(type_)
        if type_.choices:
            self.choices[name] = type_.choices

    def _type(self, head: str, key: Node, node: Node) -> None:
        expr = self.src.expr(key, head, "a type's head")
        body = self.src.text(node, f"type {head}")
        match expr:
            case Item(value=Name(id=name), args=args) if all(isinstance(a, Name) for a in args):
                params = tuple(cast(Name, a).id for a in args)
            case Expr():
                self.src.error(key, "S107", f"'{head}' is no type's head", "write it as Name[a, b]")
                return
            case None:
                return
        if name in self.kinds or name in _RESERVED or len(set(params)) < len(params):
            self.src.error(key, "S105", f"'{head}' needs a name of its own, and one for each of its parameters")
        elif body is not None:
            stray = names(body.expr) - {*params}
            for part in walk(body.expr):
                if isinstance(part, Name) and part.id in stray:
                    hint = did_you_mean(part.id, params)
                    self.src.error(node, "S104", f"unknown name '{part.id}' in type {name}", hint, offset=part.at)
                if isinstance(part, Comp) and part.var in params:
                    message = f"'{part.var}' is a parameter of type {name} and can't run over a list"
                    self.src.error(node, "S105", message, offset=part.at)
            self.types[name] = NamedType(name, params, body.expr)

    def _tensor(self, name: str, node: Node, role: str, into: dict[str, TensorDecl]) -> None:
        what = f"{role} {name}"
        parts = self.src.mapping(node, what, _TENSOR_KEYS[role])
        missing = [key for key in ("dtype", "shape") if key not in parts]
        for key in missing:
            self.src.error(node, "S102", f"{what} lacks '{key}'")
        dtype = self._dtype(parts["dtype"], f"the dtype of {what}", role) if "dtype" in parts else None
        shape = self._shape(parts["shape"], what) if "shape" in parts else None
        if dtype is None or shape is None:
            self.broken.append(name)
            return
        optional = "optional" in parts and self.src.flag(parts["optional"], f"'optional' of {what}")
        if optional and "when" in parts:
            self.src.error(parts["when"], "S109", f"{what} is either optional or there under a condition, not both")
        layout = self._layout(parts["layout"], what) if "layout" in parts else None
        if layout in self.inputs and self.inputs[layout].shape.expr != shape.expr:
            self.src.error(
                parts["layout"], "S107", f"{what} has another shape than {layout}, so it can't be laid out so"
            )
        mutated = self._text(parts["mutated"], f"'mutated' of {what}", "bool") if "mutated" in parts else None
        into[name] = TensorDecl(
            name,
            dtype,
            shape,
            optional=optional,
            when=self._text(parts["when"], f"'when' of {what}", "bool") if "when" in parts else None,
            mutated=None if mutated is None or mutated.expr == Const(False) else mutated,
            contiguous="contiguous" in parts and self.src.flag(parts["contiguous"], f"'contiguous' of {what}"),
            layout=layout,
            requires=self._predicate(parts["requires"], f"'requires' of {what}", name) if "requires" in parts else None,
            values=self.values(parts["values"], f"'values' of {what}", name) if "values" in parts else None,
            place=self.src.place(node),
        )

    def _shape(self, node: Node, what: str) -> Text | None:
        text = self.src.text(node, f"the shape of {what}")
        if text is None:
            return None
        try:
            expr = self._expand(text.expr)
            match expr:
                case Item(value=Name(id=id, at=at)) if id not in self.kinds:
                    raise ExprError(f"unknown type '{id}'", at, did_you_mean(id, self.types), "S104")
            self._check_shape(expr, what)
        except ExprError as e:
            self.src.fault(
                node, e, what if e.message.startswith(("unknown axis", "an axis")) else f"the shape of {what}"
            )
            return None
        return attrs.evolve(text, expr=expr)

    def _expand(self, expr: Expr) -> Expr:
        """An expression with the applications of named types spelled out."""

        def apply(n: Expr) -> Expr | None:
            match n:
                case Item(value=Name(id=name), args=args) if name in self.types:
                    declared = self.types[name]
                    if len(args) != len(declared.params):
                        head, count = f"{name}[{', '.join(declared.params)}]", len(declared.params)
                        raise ExprError(f"{head} takes {count} argument{'s' * (count != 1)}, not {len(args)}", n.at)
                    return substitute(anchored(declared.body, n.at), dict(zip(declared.params, args, strict=True)))
            return None

        return rewrite(expr, apply)

    def _check_shape(self, expr: Expr, what: str) -> None:
        match expr:
            case Seq(items=items):
                for axis in items:
                    match axis:
                        case Star(value=value):
                            self._scope().need(value, "shape", "a splice")
                        case Name(id=id) if id not in self.kinds:
                            known = [n for n, k in self.kinds.items() if k in ("int", "any")]
                            raise ExprError(f"unknown axis '{id}'", axis.at, did_you_mean(id, known), "S104")
                        case _:
                            self._scope().need(axis, "int", "an axis")
            case IfElse(test=test, then=then, other=other):
                self._scope().need(test, "bool", "a condition")
                self._check_shape(then, what)
                self._check_shape(other, what)
            case _:
                raise ExprError("not a shape", expr.at, "write [axis, ...], Type[...] or a conditional of shapes")

    def _dtype(self, node: Node, what: str, role: str) -> Text | None:
        text = self.src.text(node, what)
        if text is None:
            return None
        try:
            self._check_dtype(text.expr)
            if role == "output" and any(isinstance(n, Binary) and n.op == "|" for n in walk(text.expr)):
                raise ExprError("an output has one dtype, not a choice", text.expr.at)
            if isinstance(text.expr, Name) and self._is_param(text.expr.id, optional=True):
                raise ExprError(f"'{text.expr.id}' may be None", text.expr.at, f"write coalesce({text.expr.id}, ...)")
        except ExprError as e:
            self.src.fault(node, e, what)
            return None
        return text

    def _is_param(self, name: str, optional: bool) -> bool:
        """Whether a name is a dtype param, one that may be None if ``optional``."""
        type_ = self.params[name].type if name in self.params else None
        return type_ is not None and type_.base == "dtype" and type_.optional >= optional

    def _check_dtype(self, expr: Expr) -> None:
        match expr:
            case Name(id=id):
                faulty = self.kinds.get(id) == "any" and id not in self.params
                dtypes = [n for n, k in self.kinds.items() if k == "dtype" or self._is_param(n, optional=False)]
                if id not in BITS and id not in dtypes and not faulty:
                    code, word = ("S202", "is no dtype") if id in self.kinds else ("S104", "is unknown")
                    raise ExprError(f"'{id}' {word}", expr.at, did_you_mean(id, [*dtypes, *BITS]), code)
            case Binary(op="|", left=left, right=right):
                self._check_dtype(left)
                self._check_dtype(right)
            case IfElse(test=test, then=then, other=other):
                self._scope().need(test, "bool", "a condition")
                self._check_dtype(then)
                self._check_dtype(other)
            case Func(name="same_as", args=(Name(id=id, at=at),)):
                if id not in self.inputs and id not in self.broken:
                    message = f"same_as() names an input declared before, not '{id}'"
                    raise ExprError(message, at, did_you_mean(id, self.inputs), "S104")
            case Func(name="coalesce", args=(Name(id=id, at=at), second)):
                if not self._is_param(id, optional=True):
                    raise ExprError(f"'{id}' is no dtype param that may be None", at)
                self._check_dtype(second)
            case _:
                hint = "a name, a | b, same_as(x), coalesce(param, T) or a conditional"
                raise ExprError("not a dtype", expr.at, hint)

    def _layout(self, node: Node, what: str) -> str | None:
        text = self.src.string(node, f"'layout' of {what}")
        match self.src.expr(node, text, f"'layout' of {what}") if text else None:
            case Func(name="like", args=(Name(id=id),)) if id in self.inputs or id in self.broken:
                return id
            case Expr():
                self.src.error(node, "S107", f"'layout' of {what} must be like(x), x an input")
        return None

    def values(self, node: Node, what: str, tensor: str) -> Predicate | None:
        """A generator of an input's content, or ``forward(output)``."""
        text = self.src.string(node, what)
        match self.src.expr(node, text, what) if text else None:
            case Func(name="forward", args=(Name(),) as args):
                return Predicate("forward", args, text, place=self.src.place(node))
            case None:
                return None
        return self._predicate(node, what, tensor, lists=True)

    def _predicate(self, node: Node, what: str, tensor: str, lists: bool = False) -> Predicate | None:
        """A statement about the content of ``tensor``; ``lists`` allows a list of the values that are due."""
        text = self.src.string(node, what)
        match self.src.expr(node, text, what) if text else None:
            case None:
                return None
            case Name(id=name):
                args: tuple[Expr, ...] = ()
            case Func(name=name, args=args):
                pass
            case _:
                name, args = "", ()
        statement = PREDICATES.get(name)
        if statement is None or len(args) != len(statement.params):
            hint = did_you_mean(name, PREDICATES) if statement is None else f"{name}({', '.join(statement.params)})"
            message = f"{what} is no statement about content"
            self.src.error(node, "S110", message, hint or f"one of {', '.join(PREDICATES)}")
            return None
        try:
            for param, arg in zip(statement.params, args, strict=True):
                self._check_argument(f"{name}()", param, arg, tensor, lists and param in statement.lists)
        except ExprError as e:
            self.src.fault(node, e, what)
            return None
        return Predicate(name, args, text, place=self.src.place(node))

    def _check_argument(self, what: str, param: str, arg: Expr, tensor: str, lists: bool) -> None:
        if param in TENSOR_ARGUMENTS:
            others = [n for n in self._inputs if n != tensor]
            if not isinstance(arg, Name) or arg.id not in others:
                close = did_you_mean(arg.id, others) if isinstance(arg, Name) else None
                raise ExprError(f"'{param}' of {what} must name another input", arg.at, close, "S110")
        elif not (lists and self._scope().infer(arg) == "shape"):
            self._scope().need(arg, "int", f"'{param}' of {what}")

    def _rule(self, node: Node) -> Rule | None:
        if not isinstance(node, yaml.MappingNode):
            text = self._text(node, "a rule of 'where'", "bool")
            return Rule(text) if text else None
        parts = self.src.mapping(node, "a rule of 'where'", ("rule", "hint"))
        if "rule" not in parts:
            self.src.error(node, "S102", "a rule of 'where' lacks 'rule'")
            return None
        text = self._text(parts["rule"], "a rule of 'where'", "bool")
        hint = self.src.string(parts["hint"], "a rule's hint") if "hint" in parts else None
        return Rule(text, hint) if text else None

    def _symbolic(self, node: Node) -> Symbolic | None:
        what, key, when = "an item of 'symbolic'", node, None
        if isinstance(node, yaml.MappingNode):
            items = list(self.src.items(node, what))
            if len(items) != 1:
                self.src.error(node, "S103", f"{what} must be an index, or one index with its condition")
                return None
            ((name, key, condition),) = items
            when = self._text(condition, f"the condition of symbolic '{name}'", "bool")
        else:
            name = self.src.string(node, what)
        sizes = [n for n, i in self.indices.items() if i.kind != "DType"]
        if name and name not in sizes and self.kinds.get(name) != "any":
            message = f"'symbolic' names '{name}', which is no index of sizes"
            self.src.error(key, "S104", message, did_you_mean(name, sizes))
            return None
        if when is not None and (stray := names(when.expr) - self.params.keys()):
            self.src.error(
                key, "S203", f"the condition of symbolic '{name}' may ask only params and present()", min(stray)
            )
        return Symbolic(name, when)


def _dtype_union(expr: Expr) -> tuple[str, ...] | None:
    return _alternatives(expr, lambda e: e.id if isinstance(e, Name) and e.id in BITS else None)


def _param_type(expr: Expr) -> ParamType | None:
    match expr:
        case Binary(op="|", left=left, right=Const(value=None)):
            inner = _param_type(left)
            return None if inner is None or inner.optional else attrs.evolve(inner, optional=True)
        case Name(id="bool" | "int" | "float" as base):
            return ParamType(cast(Any, base))
        case Item(value=Name(id="list"), args=(Name(id="int"),)):
            return ParamType("list[int]")
    words = _alternatives(expr, lambda e: e.value if isinstance(e, Const) and isinstance(e.value, str) else None)
    if words and all(words):
        return ParamType("literal", words)
    dtypes = _dtype_union(expr)
    return ParamType("dtype", dtypes) if dtypes else None


def _alternatives(expr: Expr, leaf: Callable[[Expr], str | None]) -> tuple[str, ...] | None:
    """The leaves of ``a | b | c``; None if one is none or comes twice."""
    if isinstance(expr, Binary) and expr.op == "|":
        a, b = _alternatives(expr.left, leaf), _alternatives(expr.right, leaf)
        return None if a is None or b is None or {*a} & {*b} else (*a, *b)
    value = leaf(expr)
    return None if value is None else (value,)
