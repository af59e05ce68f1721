"""What kind of value an expression gives: catches at load what would otherwise fail in the middle of a call."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal

import attrs

from tileops.core.spec.diagnostics import did_you_mean
from tileops.core.spec.dtypes import BITS
from tileops.core.spec.expr import (
    FUNCTIONS,
    Binary,
    Comp,
    Compare,
    Const,
    Expr,
    ExprError,
    Func,
    IfElse,
    Item,
    Logic,
    Name,
    Seq,
    Star,
    Unary,
)
from tileops.core.spec.model import ParamType

Kind = Literal["int", "number", "bool", "text", "dtype", "shape", "list", "none", "any"]

_CONST: dict[type, Kind] = {bool: "bool", int: "int", float: "number", str: "text", type(None): "none"}
_PARAM: dict[str, Kind] = {
    "bool": "bool", "int": "int", "float": "number", "literal": "text", "dtype": "dtype", "list[int]": "shape",
}  # fmt: skip
_SHOWN = {"int": "whole number", "none": "None"}
_ADMITS: dict[Kind, tuple[Kind, ...]] = {"number": ("int",), "list": ("shape",)}
_ARITY = {"ceil_div": 2, "visible": 5, "len": 1, "prod": 1, "sum": 1, "all": 1, "any": 1}


def of_param(type_: ParamType) -> Kind:
    """The kind of a param; an optional one may be None, which only a call can tell."""
    return "any" if type_.optional else _PARAM[type_.base]


@attrs.frozen
class Scope:
    """The names that an expression may use, with their kinds, and the tensors that ``present()`` may ask for.

    ``choices`` holds all values of a name that has few: comparing it with another one is a slip.
    """

    names: Mapping[str, Kind]
    tensors: Collection[str] = ()
    choices: Mapping[str, Collection[str]] = attrs.field(factory=dict)

    def need(self, node: Expr, wanted: Kind, what: str) -> Kind:
        """The kind of an expression; raises ExprError unless it can give a ``wanted`` value."""
        return _admit(node, self.infer(node), wanted, what)

    def infer(self, node: Expr) -> Kind:
        match node:
            case Const(value=value):
                return _CONST[type(value)]
            case Name(id=id):
                return self._name(node, id)
            case Seq(items=items):
                kinds = [
                    self.need(i.value, "shape", "a splice") if isinstance(i, Star) else self.infer(i) for i in items
                ]
                return "shape" if all(k in ("int", "shape", "any") for k in kinds) else "list"
            case Star():
                raise ExprError("a splice belongs inside a list", node.at)
            case Unary(op=op, value=value):
                kind = self.need(value, "bool" if op == "not" else "number", f"the operand of '{op}'")
                return "bool" if op == "not" else _numeric(kind)
            case Binary(op="|"):
                raise ExprError("'|' joins dtypes in a dtype and means nothing elsewhere; say 'or'", node.at)
            case Binary(op=op, left=left, right=right):
                kinds = [self.infer(left), self.infer(right)]
                wanted: Kind = "shape" if op == "+" and "shape" in kinds else "number"
                for side, kind in zip((left, right), kinds, strict=True):
                    _admit(side, kind, wanted, f"the operand of '{op}'")
                return "shape" if wanted == "shape" else _numeric(*kinds)
            case Compare(left=left, rest=rest):
                a = self.infer(left)
                for op, right in rest:
                    b = self.infer(right)
                    self._compare(op, left, a, right, b)
                    left, a = right, b
                return "bool"
            case Logic(op=op, items=items):
                for item in items:
                    self.need(item, "bool", f"the operand of '{op}'")
                return "bool"
            case IfElse(test=test, then=then, other=other):
                self.need(test, "bool", "a condition")
                a, b = self.infer(then), self.infer(other)
                return a if a == b else "number" if {a, b} == {"int", "number"} else "any"
            case Func(name=name, args=args):
                return self._function(node, name, args)
            case Item(value=value, args=args):
                if len(args) != 1:
                    raise ExprError("indexing takes one number", node.at)
                self.need(args[0], "int", "an index")
                return "int" if self.need(value, "shape", "what is indexed") == "shape" else "any"
            case Comp():
                raise ExprError("a comprehension belongs inside all, any, sum, min or max", node.at)
        raise AssertionError(node)

    def _name(self, node: Expr, id: str) -> Kind:
        if id in self.names:
            return self.names[id]
        if id in BITS:
            return "dtype"
        if id in self.tensors:
            raise ExprError(f"'{id}' is a tensor, not a value", node.at, f"ask for present({id}), or name its indices")
        raise ExprError(f"unknown name '{id}'", node.at, did_you_mean(id, [*self.names, *BITS]), "S104")

    def _compare(self, op: str, left: Expr, a: Kind, right: Expr, b: Kind) -> None:
        if op in ("is", "is not"):
            if b != "none":
                raise ExprError(f"'{op}' compares with None only", right.at)
            if a != "any":
                raise ExprError(f"'{op} None' asks for a param that may be None, not a {_shown(a)}", left.at)
        elif op in ("in", "not in"):
            _admit(right, b, "list", f"the right side of '{op}'")
            for item in right.items if isinstance(right, Seq) else ():
                self._known_value(left, item)
        elif op in ("==", "!="):
            if "any" not in (a, b) and a != b and {a, b} - {"int", "number"} and {a, b} - {"shape", "list"}:
                raise ExprError(f"'{op}' compares a {_shown(a)} with a {_shown(b)}", left.at)
            self._known_value(left, right)
            self._known_value(right, left)
        else:
            _admit(left, a, "number", f"the left side of '{op}'")
            _admit(right, b, "number", f"the right side of '{op}'")

    def _known_value(self, name: Expr, value: Expr) -> None:
        """Refuse the comparison of a name with a value that it never has."""
        if isinstance(name, Name) and (choices := self.choices.get(name.id)):
            word = value.value if isinstance(value, Const) else value.id if isinstance(value, Name) else None
            if isinstance(word, str) and word not in choices and (isinstance(value, Const) or word in BITS):
                raise ExprError(f"'{name.id}' is never '{word}'", value.at, did_you_mean(word, choices))

    def _function(self, node: Expr, name: str, args: tuple[Expr, ...]) -> Kind:
        if name == "present":
            if len(args) == 1 and isinstance(args[0], Name) and args[0].id in self.tensors:
                return "bool"
            close = did_you_mean(args[0].id, self.tensors) if args and isinstance(args[0], Name) else None
            raise ExprError("present() takes the name of a tensor", node.at, close)
        if name not in FUNCTIONS:
            raise ExprError(f"unknown function '{name}'", node.at, did_you_mean(name, [*FUNCTIONS, "present"]), "S104")
        arity = _ARITY.get(name)
        if not args or arity not in (None, len(args)):
            raise ExprError(
                f"{name}() takes {arity or 'some'} argument{'' if arity == 1 else 's'}, not {len(args)}", node.at
            )
        if isinstance(args[0], Comp) and len(args) == 1 and name in ("all", "any", "sum", "min", "max"):
            return self._comprehension(name, args[0])
        if name in ("ceil_div", "visible") or (name in ("min", "max") and len(args) > 1):
            kinds = [
                "int" if kind == "bool" else _admit(arg, kind, "number", f"an argument of {name}()")
                for arg, kind in zip(args, map(self.infer, args), strict=True)
            ]
            return _numeric(*kinds)
        for arg in args:
            self.need(arg, "list" if name in ("all", "any", "len") else "shape", f"an argument of {name}()")
        return "bool" if name in ("all", "any") else "shape" if name == "broadcast" else "int"

    def _comprehension(self, name: str, comp: Comp) -> Kind:
        over = self.need(comp.over, "shape", "what a comprehension runs over")
        if comp.var in (*self.names, *self.tensors, *BITS, *FUNCTIONS, "present"):
            raise ExprError(f"'{comp.var}' is taken already", comp.at)
        inner = attrs.evolve(self, names={**self.names, comp.var: "int" if over == "shape" else "any"})
        if comp.test:
            inner.need(comp.test, "bool", "a condition")
        if name in ("all", "any"):
            inner.need(comp.body, "bool", "a comprehension's value")
            return "bool"
        return _numeric(inner.need(comp.body, "number", "a comprehension's value"))


def _admit(node: Expr, kind: Kind, wanted: Kind, what: str) -> Kind:
    if kind not in (wanted, "any", *_ADMITS.get(wanted, ())):
        raise ExprError(f"{what} must give a {_shown(wanted)}, not a {_shown(kind)}", node.at)
    return kind


def _numeric(*kinds: Kind) -> Kind:
    """The kind that arithmetic on these gives."""
    return "number" if "number" in kinds else "int"


def _shown(kind: Kind) -> str:
    return _SHOWN.get(kind, kind)
