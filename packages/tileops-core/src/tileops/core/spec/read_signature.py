"""The ``signature`` of an entry: its names, and its shapes, dtypes and rules as checked expressions."""

from __future__ import annotations

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
    Const,
    Expr,
    ExprError,
    Func,
    IfElse,
    Item,
    Name,
    Seq,
    Star,
    names,
    parse,
    rewrite,
    substitute,
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
from tileops.core.spec.predicates import PREDICATES
from tileops.core.spec.source import Node, Source
from tileops.core.spec.values import canonical

KEYS = ("forall", "types", "params", "let", "inputs", "outputs", "where", "symbolic")
_TENSOR_KEYS = {
    "input": ("dtype", "shape", "optional", "when", "mutated", "contiguous", "values", "requires"),
    "output": ("dtype", "shape", "when", "layout"),
}
_WORD = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_RESERVED = {*BITS, *FUNCTIONS, "present", "true", "false", "none", "True", "False", "None"}
_INDEX_KIND: dict[str, Kind] = {"Dim": "number", "Shape": "shape", "DType": "dtype"}
PREDECLARED = {"Mat": NamedType("Mat", ("t", "R", "C"), parse("[R, C] if not t else [C, R]"))}


@attrs.define
class SignatureReader:
    """Reads one signature; the scope grows as names are declared."""

    src: Source
    node: Node
    indices: dict[str, Index] = attrs.field(factory=dict)
    params: dict[str, Param] = attrs.field(factory=dict)
    types: dict[str, NamedType] = attrs.field(factory=lambda: dict(PREDECLARED))
    let: dict[str, Text] = attrs.field(factory=dict)
    inputs: dict[str, TensorDecl] = attrs.field(factory=dict)
    outputs: dict[str, TensorDecl] = attrs.field(factory=dict)
    kinds: dict[str, Kind] = attrs.field(factory=dict)
    tensors: list[str] = attrs.field(factory=list)

    def read(self) -> Signature:
        parts = self.src.mapping(self.node, "signature", KEYS)
        for missing in {"inputs", "outputs"} - parts.keys():
            self.src.error(self.node, "S102", f"signature lacks '{missing}'")
        sections = {role: self._section(parts, role) for role in ("inputs", "outputs")}
        self.tensors = [name for section in sections.values() for name in section]
        for name, node in self._section(parts, "forall").items():
            self._index(name, node)
        for name, node in self._section(parts, "params").items():
            self._param(name, node)
        for head, node in self._section(parts, "types", names=False).items():
            self._type(head, node)
        for name, node in self._section(parts, "let").items():
            if (text := self._text(node, f"let {name}")) is not None:
                self.let[name] = text
                self.kinds[name] = self._scope().infer(text.expr)
        for name, node in sections["inputs"].items():
            self._tensor(name, node, "input", self.inputs)
        for name, node in sections["outputs"].items():
            self._tensor(name, node, "output", self.outputs)
        where = tuple(rule for node in self._list(parts, "where") if (rule := self._rule(node)))
        symbolic = tuple(s for node in self._list(parts, "symbolic") if (s := self._symbolic(node)))
        return Signature(self.indices, self.params, self.types, self.let, self.inputs, self.outputs, where, symbolic)

    # -- names --

    def _section(self, parts: dict[str, Node], key: str, names: bool = True) -> dict[str, Node]:
        out: dict[str, Node] = {}
        if key not in parts:
            return out
        for name, key_node, node in self.src.items(parts[key], key):
            if names and not _WORD.fullmatch(name):
                self.src.error(key_node, "S106", f"'{name}' is no name: letters, digits and '_', a letter first")
            elif names and name in _RESERVED:
                self.src.error(key_node, "S105", f"'{name}' is a word of the language and can't name anything")
            elif names and self._taken(name, key):
                self.src.error(key_node, "S105", f"'{name}' is declared twice in this signature")
            else:
                out[name] = node
        return out

    def _taken(self, name: str, key: str) -> bool:
        if key == "outputs":
            return name in self.inputs
        return name in self.indices or name in self.params or name in self.let or name in self.tensors

    def _list(self, parts: dict[str, Node], key: str) -> list[Node]:
        return self.src.sequence(parts[key], key) if key in parts else []

    def _scope(self) -> Scope:
        return Scope(self.kinds, self.tensors)

    def _text(self, node: Node, what: str, kind: Kind | None = None) -> Text | None:
        """An expression over the names declared so far, of the given kind."""
        text = self.src.text(node, what)
        if text is None:
            return None
        try:
            if kind is None:
                self._scope().infer(text.expr)
            else:
                self._scope().need(text.expr, kind, "it")
        except ExprError as e:
            self.src.fault(node, e, what)
            return None
        return text

    def _index(self, name: str, node: Node) -> None:
        what = f"the type of index '{name}'"
        expr = self.src.expr(node, self.src.string(node, what) or "Dim", what)
        match expr:
            case None:
                return
            case Name(id="Dim" | "Shape" as kind):
                index = Index(name, cast(Any, kind), place=self.src.place(node))
            case Item(value=Name(id="DType"), args=(choices,)) if (dtypes := _dtype_union(choices)) is not None:
                index = Index(name, "DType", dtypes, place=self.src.place(node))
            case _:
                self.src.error(node, "S107", f"{what} must be Dim, Shape or DType[a | b] with dtypes' names")
                return
        self.indices[name] = index
        self.kinds[name] = _INDEX_KIND[index.kind]

    def _param(self, name: str, node: Node) -> None:
        what = f"param '{name}'"
        parts = self.src.mapping(node, what, ("type", "default"))
        if "type" not in parts:
            self.src.error(node, "S102", f"{what} lacks 'type'")
            return
        type_node = parts["type"]
        expr = self.src.expr(
            type_node, self.src.string(type_node, f"the type of {what}") or "bool", f"the type of {what}"
        )
        type_ = _param_type(expr) if expr else None
        if type_ is None:
            if expr:
                hint = "bool, int, float, list[int], quoted words, dtypes; '| None' where None is a value"
                self.src.error(type_node, "S107", f"the type of {what} is none of the language's", hint)
            return
        default: Any = attrs.NOTHING
        if "default" in parts:
            try:
                default = canonical(type_, self.src.value(parts["default"]))
            except ValueError as e:
                self.src.error(parts["default"], "S108", f"the default of {what} must be {e}")
        self.params[name] = Param(name, type_, default, place=self.src.place(node))
        self.kinds[name] = of_param(type_)

    def _type(self, head: str, node: Node) -> None:
        expr = self.src.expr(node, head, "a type's head")
        body = self.src.text(node, f"type {head}")
        match expr:
            case Item(value=Name(id=name), args=args) if all(isinstance(a, Name) for a in args):
                if body is not None:
                    params = tuple(cast(Name, a).id for a in args)
                    stray = names(body.expr) - {*params}
                    if stray:
                        self.src.error(
                            node,
                            "S104",
                            f"unknown name '{min(stray)}' in type {name}",
                            did_you_mean(min(stray), params),
                        )
                    self.types[name] = NamedType(name, params, body.expr)
            case Expr():
                self.src.error(node, "S107", f"'{head}' is no type's head", "write it as Name[a, b]")

    # -- tensors --

    def _tensor(self, name: str, node: Node, role: str, into: dict[str, TensorDecl]) -> None:
        what = f"{role} {name}"
        parts = self.src.mapping(node, what, _TENSOR_KEYS[role])
        missing = [key for key in ("dtype", "shape") if key not in parts]
        for key in missing:
            self.src.error(node, "S102", f"{what} lacks '{key}'")
        dtype = self._dtype(parts["dtype"], f"the dtype of {what}") if "dtype" in parts else None
        shape = self._shape(parts["shape"], what) if "shape" in parts else None
        if dtype is None or shape is None:
            return
        flag = self.src.flag
        if "optional" in parts and "when" in parts:
            self.src.error(parts["when"], "S109", f"{what} is either optional or there under a condition, not both")
        into[name] = TensorDecl(
            name,
            dtype,
            shape,
            optional="optional" in parts and flag(parts["optional"], f"'optional' of {what}"),
            when=self._text(parts["when"], f"'when' of {what}", "bool") if "when" in parts else None,
            mutated=self._text(parts["mutated"], f"'mutated' of {what}", "bool") if "mutated" in parts else None,
            contiguous="contiguous" in parts and flag(parts["contiguous"], f"'contiguous' of {what}"),
            layout=self._layout(parts["layout"], what) if "layout" in parts else None,
            requires=self._predicate(parts["requires"], f"'requires' of {what}") if "requires" in parts else None,
            values=self.values(parts["values"], f"'values' of {what}") if "values" in parts else None,
            place=self.src.place(node),
        )

    def _shape(self, node: Node, what: str) -> Text | None:
        text = self.src.text(node, f"the shape of {what}")
        if text is None:
            return None
        try:
            expr = self._expand(text.expr)
            self._check_shape(expr, what)
        except ExprError as e:
            self.src.fault(node, e, f"the shape of {what}" if "axis" not in e.message else what)
            return None
        return attrs.evolve(text, expr=expr)

    def _expand(self, expr: Expr) -> Expr:
        def apply(n: Expr) -> Expr | None:
            match n:
                case Item(value=Name(id=name), args=args) if name not in self.kinds:
                    if name not in self.types:
                        raise ExprError(f"unknown type '{name}'", n.at, did_you_mean(name, self.types), "S104")
                    declared = self.types[name]
                    if len(args) != len(declared.params):
                        wanted = ", ".join(declared.params)
                        raise ExprError(
                            f"{name}[{wanted}] takes {len(declared.params)} arguments, not {len(args)}", n.at
                        )
                    return substitute(declared.body, dict(zip(declared.params, args, strict=True)))
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
                            known = [n for n, k in self.kinds.items() if k == "number"]
                            raise ExprError(f"unknown axis '{id}'", axis.at, did_you_mean(id, known), "S104")
                        case _:
                            self._scope().need(axis, "number", "an axis")
            case IfElse(test=test, then=then, other=other):
                self._scope().need(test, "bool", "a condition")
                self._check_shape(then, what)
                self._check_shape(other, what)
            case _:
                raise ExprError("not a shape", expr.at, "write [axis, ...], Type[...] or a conditional of shapes")

    def _dtype(self, node: Node, what: str) -> Text | None:
        text = self.src.text(node, what)
        if text is None:
            return None
        try:
            self._check_dtype(text.expr, what)
        except ExprError as e:
            self.src.fault(node, e, what)
            return None
        return text

    def _check_dtype(self, expr: Expr, what: str) -> None:
        match expr:
            case Name(id=id):
                dtypes = [n for n, k in self.kinds.items() if k in ("dtype", "any")]
                if id not in BITS and id not in dtypes:
                    code, word = ("S202", "is no dtype") if id in self.kinds else ("S104", "is unknown")
                    raise ExprError(f"'{id}' {word}", expr.at, did_you_mean(id, [*dtypes, *BITS]), code)
            case Binary(op="|", left=left, right=right):
                self._check_dtype(left, what)
                self._check_dtype(right, what)
            case IfElse(test=test, then=then, other=other):
                self._scope().need(test, "bool", "a condition")
                self._check_dtype(then, what)
                self._check_dtype(other, what)
            case Func(name="same_as", args=(Name(id=id),)):
                if id not in self.inputs:
                    raise ExprError(
                        f"same_as() names an input declared before, not '{id}'",
                        expr.at,
                        did_you_mean(id, self.inputs),
                        "S104",
                    )
            case Func(name="coalesce", args=(Name() as first, second)):
                self._check_dtype(first, what)
                self._check_dtype(second, what)
            case _:
                raise ExprError(
                    "not a dtype", expr.at, "a name, a | b, same_as(x), coalesce(param, T) or a conditional"
                )

    def _layout(self, node: Node, what: str) -> str | None:
        expr = self.src.expr(node, self.src.string(node, f"'layout' of {what}"), f"'layout' of {what}")
        match expr:
            case Func(name="like", args=(Name(id=id),)) if id in self.inputs:
                return id
            case Expr():
                self.src.error(node, "S107", f"'layout' of {what} must be like(x), x an input")
        return None

    # -- content --

    def values(self, node: Node, what: str) -> Predicate | None:
        """A generator of content, or ``forward(output)``."""
        text = self.src.string(node, what)
        match self.src.expr(node, text, what) if text else None:
            case Func(name="forward", args=(Name(),) as args):
                return Predicate("forward", args, text, place=self.src.place(node))
        return self._predicate(node, what)

    def _predicate(self, node: Node, what: str) -> Predicate | None:
        text = self.src.string(node, what)
        expr = self.src.expr(node, text, what) if text else None
        match expr:
            case None:
                return None
            case Name(id=name):
                args: tuple[Expr, ...] = ()
            case Func(name=name, args=args):
                pass
            case _:
                name = ""
        statement = PREDICATES.get(name)
        if statement is None or len(args) != len(statement.params):
            hint = did_you_mean(name, PREDICATES) if statement is None else f"{name}({', '.join(statement.params)})"
            self.src.error(
                node, "S110", f"{what} is no statement about content", hint or f"one of {', '.join(PREDICATES)}"
            )
            return None
        tensors: dict[str, Kind] = dict.fromkeys(self.tensors, "any")
        try:
            for arg in args:
                Scope({**tensors, **self.kinds}, self.tensors).infer(arg)
        except ExprError as e:
            self.src.fault(node, e, what)
            return None
        return Predicate(name, args, text, place=self.src.place(node))

    # -- rules --

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
        if isinstance(node, yaml.MappingNode) and len(node.value) == 1:
            ((name, key, when),) = tuple(self.src.items(node, "an item of 'symbolic'")) or (("", node, node),)
            condition = self._text(when, f"the condition of symbolic '{name}'", "bool")
        else:
            name, key, condition = self.src.string(node, "an item of 'symbolic'"), node, None
        if name not in self.indices:
            self.src.error(
                key, "S104", f"'symbolic' names the unknown index '{name}'", did_you_mean(name, self.indices)
            )
            return None
        return Symbolic(name, condition)


def _dtype_union(expr: Expr) -> tuple[str, ...] | None:
    return _alternatives(expr, lambda e: e.id if isinstance(e, Name) and e.id in BITS else None)


def _param_type(expr: Expr) -> ParamType | None:
    match expr:
        case Binary(op="|", left=left, right=Const(value=None)):
            inner = _param_type(left)
            return None if inner is None or inner.optional else attrs.evolve(inner, optional=True)
        case Name(id="bool" | "int" | "float" as base):
            return ParamType(base)  # type: ignore[arg-type] # mypy does not narrow captured patterns
        case Item(value=Name(id="list"), args=(Name(id="int"),)):
            return ParamType("list[int]")
    words = _alternatives(expr, lambda e: e.value if isinstance(e, Const) and isinstance(e.value, str) else None)
    if words:
        return ParamType("literal", words)
    dtypes = _dtype_union(expr)
    return ParamType("dtype", dtypes) if dtypes else None


def _alternatives(expr: Expr, leaf: Callable[[Expr], str | None]) -> tuple[str, ...] | None:
    if isinstance(expr, Binary) and expr.op == "|":
        a, b = _alternatives(expr.left, leaf), _alternatives(expr.right, leaf)
        return None if a is None or b is None else (*a, *b)
    value = leaf(expr)
    return None if value is None else (value,)
