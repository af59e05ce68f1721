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

Kind = Literal["number", "bool", "text", "dtype", "shape", "none", "any"]

_CONST: dict[type, Kind] = {bool: "bool", int: "number", float: "number", str: "text", type(None): "none"}
_PARAM: dict[str, Kind] = {
    "bool": "bool", "int": "number", "float": "number", "literal": "text", "dtype": "dtype", "list[int]": "shape",
}  # fmt: skip
_ARITY = {"ceil_div": 2, "visible": 5, "len": 1, "prod": 1, "sum": 1, "all": 1, "any": 1}


def of_param(type_: ParamType) -> Kind:
    """The kind of a param; an optional one may be None, which only a call can tell."""
    return "any" if type_.optional else _PARAM[type_.base]


@attrs.frozen
class Scope:
    """The names that an expression may use, with their kinds, and the tensors that ``present()`` may ask for."""

    names: Mapping[str, Kind]
    tensors: Collection[str] = ()

    def need(self, node: Expr, wanted: Kind, what: str) -> None:
        """Raise ExprError unless the expression can give a ``wanted`` value."""
        kind = self.infer(node)
        if kind not in (wanted, "any"):
            raise ExprError(f"{what} must give a {wanted}, not a {kind}", node.at)

    def infer(self, node: Expr) -> Kind:
        match node:
            case Const(value=value):
                return _CONST[type(value)]
            case Name(id=id):
                return self._name(node, id)
            case Seq(items=items):
                for item in items:
                    if isinstance(item, Star):
                        self.need(item.value, "shape", "a splice")
                    else:
                        self.infer(item)
                return "shape"
            case Star():
                raise ExprError("a splice belongs inside a list", node.at)
            case Unary(op=op, value=value):
                kind: Kind = "bool" if op == "not" else "number"
                self.need(value, kind, f"the operand of '{op}'")
                return kind
            case Binary(op="|"):
                raise ExprError("'|' joins dtypes in a dtype and means nothing elsewhere; say 'or'", node.at)
            case Binary(op=op, left=left, right=right):
                joins = op == "+" and "shape" in (self.infer(left), self.infer(right))
                for side in (left, right):
                    self.need(side, "shape" if joins else "number", f"the operand of '{op}'")
                return "shape" if joins else "number"
            case Compare(left=left, rest=rest):
                for op, right in rest:
                    self._compare(op, left, right)
                    left = right
                return "bool"
            case Logic(op=op, items=items):
                for item in items:
                    self.need(item, "bool", f"the operand of '{op}'")
                return "bool"
            case IfElse(test=test, then=then, other=other):
                self.need(test, "bool", "a condition")
                a, b = self.infer(then), self.infer(other)
                return a if a == b else "any"
            case Func(name=name, args=args):
                return self._function(node, name, args)
            case Item(value=value, args=args):
                if len(args) != 1:
                    raise ExprError("indexing takes one number", node.at)
                self.need(value, "shape", "what is indexed")
                self.need(args[0], "number", "an index")
                return "any" if isinstance(value, Name) else "number"
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

    def _compare(self, op: str, left: Expr, right: Expr) -> None:
        a, b = self.infer(left), self.infer(right)
        if op in ("is", "is not"):
            if b != "none":
                raise ExprError(f"'{op}' compares with None only", right.at)
        elif op in ("in", "not in"):
            if b not in ("shape", "any"):
                raise ExprError(f"the right side of '{op}' must be a list", right.at)
        elif op in ("==", "!="):
            if "any" not in (a, b) and a != b:
                raise ExprError(f"'{op}' compares a {a} with a {b}", left.at)
        else:
            self.need(left, "number", f"the left side of '{op}'")
            self.need(right, "number", f"the right side of '{op}'")

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
            self._comprehension(name, args[0])
        elif name in ("ceil_div", "visible") or (name in ("min", "max") and len(args) > 1):
            for arg in args:
                if self.infer(arg) != "bool":
                    self.need(arg, "number", f"an argument of {name}()")
        else:
            for arg in args:
                self.need(arg, "shape", f"an argument of {name}()")
        return "bool" if name in ("all", "any") else "shape" if name == "broadcast" else "number"

    def _comprehension(self, name: str, comp: Comp) -> None:
        self.need(comp.over, "shape", "what a comprehension runs over")
        if comp.var in self.names:
            raise ExprError(f"'{comp.var}' is taken already", comp.at)
        inner = Scope({**self.names, comp.var: "number"}, self.tensors)
        if comp.test:
            inner.need(comp.test, "bool", "a condition")
        inner.need(comp.body, "bool" if name in ("all", "any") else "number", "a comprehension's value")
