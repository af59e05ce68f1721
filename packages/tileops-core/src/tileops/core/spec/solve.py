"""How a call's indices follow from its tensors: a signature, folded for one variant, as a straight list of steps.

A *variant* is which inputs are present and how the conditionals over params come out. Its steps are data;
``tileops.core.check`` turns them into code.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from operator import is_
from typing import Any

import attrs

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
    names,
    rewrite,
    walk,
)
from tileops.core.spec.model import Signature, TensorDecl
from tileops.core.spec.steps import (
    CheckAxis,
    CheckDType,
    CheckSplice,
    Derive,
    Folded,
    Position,
    Rank,
    Require,
    Solution,
    SolveAxis,
    SolveDType,
    SolveSplice,
    Step,
)

FAILURES = (ArithmeticError, LookupError, ValueError, TypeError)  # what an expression raises where it has no value


def tests(signature: Signature) -> tuple[Expr, ...]:
    """The conditions over params and presence by which shapes and dtypes are folded, in order of appearance."""
    found: dict[Expr, None] = {}
    tensors = (*signature.inputs.values(), *signature.outputs.values())
    texts = [e for t in tensors for e in (t.shape.expr, plain_dtype(t.dtype.expr))]
    for text in (*texts, *(let.expr for let in signature.let.values())):
        for node in walk(text):
            if isinstance(node, IfElse) and names(node.test) <= signature.params.keys():
                found[node.test] = None
    return tuple(found)


def fold(expr: Expr, present: Mapping[str, bool], truth: Mapping[Expr, bool]) -> Expr:
    """Decide what a variant decides: ``present(x)``, known conditions, and the logic above them."""
    return _Fold(present, truth).go(expr)


@attrs.frozen
class _Fold:
    present: Mapping[str, bool]
    truth: Mapping[Expr, bool]

    def go(self, node: Expr) -> Expr:
        return rewrite(node, self.change) if node.conditional else node

    def change(self, node: Expr) -> Expr | None:
        match node:
            case Func(name="present", args=(Name(id=id),)) if id in self.present:
                return Const(self.present[id])
            case IfElse(test=test, then=then, other=other):
                if isinstance(decided := self.decide(test), Const):
                    return self.go(then if decided.value else other)
            case Unary(op="not", value=value) if isinstance(inner := self.decide(value), Const):
                return Const(not inner.value)
            case Logic(op=op, items=items):
                decided_items = tuple(map(self.decide, items))
                return node if all(map(is_, decided_items, items)) else _logic(op, decided_items)
        return None

    def decide(self, node: Expr) -> Expr:
        """An operand of logic or a test: it may be one of the known conditions, or the reverse of one."""
        if node in self.truth:
            return Const(self.truth[node])
        match node:
            case Compare(left=left, rest=(("!=", right),)) if (same := Compare(left, (("==", right),))) in self.truth:
                return Const(not self.truth[same])
        return self.go(node)


def _logic(op: str, items: Iterable[Expr]) -> Expr:
    """``and`` or ``or`` of items of which some are decided."""
    short = op == "or"
    left: list[Expr] = []
    for item in items:
        if not isinstance(item, Const):
            left.append(item)
        elif bool(item.value) is short:
            left.append(Const(short))
            break
    return Logic(op, tuple(left)) if len(left) > 1 else left[0] if left else Const(not short)


def _axes(shape: Expr) -> tuple[Expr, ...]:
    """The axes of a folded shape; a splice of a list is its items."""
    items = shape.items if isinstance(shape, Seq) else (Star(shape),)
    nested = (_axes(i.value) if isinstance(i, Star) and isinstance(i.value, Seq) else (i,) for i in items)
    return tuple(itertools.chain.from_iterable(nested))


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
    def __init__(self, signature: Signature, inputs: tuple[Folded, ...], lets: Mapping[str, Expr]) -> None:
        self.sig, self.inputs = signature, {t.decl.name: t for t in inputs}
        self.known = {*signature.params}
        self.steps: list[Step] = []
        self.checks: list[Step] = []
        self.pending = [(t, i) for t in inputs for i in range(len(t.axes))]
        self.dtypes = list(inputs)
        self.lets = dict(lets)
        self.open: dict[str, bool] = {}  # ranked tensors; whether the rank of one is a lower bound so far
        self.spliced = {t.decl.name for t in inputs if any(isinstance(a, Star) for a in t.axes)}

    def run(self) -> None:
        for tensor in self.inputs.values():
            if not tensor.axes:
                self._rank(tensor)
        while self._dtypes() or self._lets() or self._axes(lone=True) or self._axes(lone=False):
            pass

    def _is_known(self, expr: Expr) -> bool:
        return names(expr) <= self.known

    def _lets(self) -> bool:
        ready = [n for n, expr in self.lets.items() if self._is_known(expr)]
        for name in ready:
            self.steps.append(Derive(name, self.lets.pop(name)))
            self.known.add(name)
        return bool(ready)

    def _dtypes(self) -> bool:
        before = self.dtypes
        self.dtypes = []
        for tensor in before:
            match tensor.dtype:
                case Name(id=id) if id in self.sig.indices and id not in self.known:
                    self.steps.append(SolveDType(tensor.decl.name, id, self.sig.indices[id].choices))
                    self.known.add(id)
                case expr if self._is_known(expr) and same_as(expr) <= self.inputs.keys():
                    self.checks.append(CheckDType(tensor.decl.name, dtype_options(expr)))
                case _:
                    self.dtypes.append(tensor)
        return len(self.dtypes) < len(before)

    def _position(self, tensor: Folded, index: int) -> Position | None:
        """Where an axis stands: from the front or, behind a splice of unknown length, from the back."""
        if tensor.decl.name not in self.spliced:
            return Position(index)
        before, after = tensor.axes[:index], tensor.axes[index + 1 :]
        for axes, from_end in ((before, False), (after, True)):
            splices = tuple(a.value for a in axes if isinstance(a, Star))
            if all(map(self._is_known, splices)):
                return Position(len(axes) - len(splices) + from_end, splices, from_end)
        return None

    def _rank(self, tensor: Folded) -> None:
        """Emit the rank check of a tensor: once at most one of its splices is unknown, and again when none is."""
        name = tensor.decl.name
        if self.open.get(name) is False:
            return
        splices = [a.value for a in tensor.axes if isinstance(a, Star)]
        known = tuple(s for s in splices if self._is_known(s))
        is_open = len(splices) > len(known)
        if len(splices) - len(known) <= 1 and self.open.get(name) is not is_open:
            self.open[name] = is_open
            self.steps.append(Rank(name, len(tensor.axes) - len(splices), known, is_open))

    def _axes(self, lone: bool) -> bool:
        """Go through the axes once; a name that stands alone somewhere is taken from there, so others wait for it."""
        before = self.pending
        self.pending = []
        for n, (tensor, i) in enumerate(before):
            self._rank(tensor)
            at = self._position(tensor, i)
            ready = at is not None and tensor.decl.name in self.open
            step = self._axis(tensor.decl.name, tensor, i, at, lone) if at is not None and ready else None
            if step is None:
                self.pending.append((tensor, i))
                continue
            (self.checks if isinstance(step, CheckAxis | CheckSplice) else self.steps).append(step)
            if not lone:
                self.pending += before[n + 1 :]
                break
        return len(self.pending) < len(before)

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
                self.open[name] = False
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


def same_as(dtype: Expr) -> set[str]:
    """The inputs whose dtype a dtype takes."""
    calls = (n for n in walk(dtype) if isinstance(n, Func) and n.name == "same_as")
    return {n.args[0].id for n in calls if isinstance(n.args[0], Name)}


def dtype_options(dtype: Expr) -> tuple[Expr, ...]:
    if isinstance(dtype, Binary) and dtype.op == "|":
        return (*dtype_options(dtype.left), *dtype_options(dtype.right))
    return (dtype,)


def solve(signature: Signature, present: Mapping[str, bool], truth: Mapping[Expr, bool]) -> Solution:
    """The steps for the variant with these inputs present and these conditions true."""
    settle = _Fold(present, truth).go

    def folded(decl: TensorDecl) -> Folded:
        when = settle(decl.when.expr) if decl.when else Const(True)
        return Folded(decl, _axes(settle(decl.shape.expr)), settle(plain_dtype(decl.dtype.expr)), when)

    inputs = tuple(folded(d) for n, d in signature.inputs.items() if present[n])
    solver = _Solver(signature, inputs, {n: settle(t.expr) for n, t in signature.let.items()})
    solver.run()
    faults: list[tuple[Any, str]] = []
    for tensor, i in solver.pending:
        unknown = sorted(names(tensor.axes[i]) - solver.known)
        which = f"index '{unknown[0]}'" if unknown else f"axis {i}"
        faults.append((tensor.decl.shape.place, f"{which} of input {tensor.decl.name} can't be determined"))
    for tensor in solver.dtypes:
        unknown = sorted(names(tensor.dtype) - solver.known)
        which = f"index '{unknown[0]}' in the dtype" if unknown else "the dtype"
        faults.append((tensor.decl.dtype.place, f"{which} of input {tensor.decl.name} can't be determined"))
    requires = []
    for rule in signature.where:
        expr = settle(rule.text.expr)
        if expr != Const(True):
            requires.append(Require(rule, expr))
            faults += _unbound(expr, solver.known, rule.text.place, f"the rule '{rule.text}'")
    outputs = tuple(map(folded, signature.outputs.values()))
    for output in outputs:
        if output.when == Const(False):
            continue
        for expr in (*output.axes, output.dtype, output.when):
            faults += _unbound(expr, solver.known, output.decl.place, f"output {output.decl.name}")
        for name in sorted(same_as(output.dtype) - solver.inputs.keys()):
            message = f"output {output.decl.name} takes the dtype of {name}, which is absent"
            faults.append((output.decl.dtype.place, message))
    bound = tuple(n for n in (*signature.indices, *signature.let) if n in solver.known)
    return Solution((*solver.steps, *solver.checks, *requires), inputs, outputs, bound, tuple(faults))


def _unbound(expr: Expr, known: set[str], place: Any, what: str) -> list[tuple[Any, str]]:
    unbound = names(expr) - known
    return [(place, f"{what} uses '{n}', which is unbound") for n in sorted(unbound)] if unbound else []


def plain_dtype(dtype: Expr) -> Expr:
    """``coalesce(p, T)`` as the conditional that it is; ``same_as(x)`` stays: only a call knows x's dtype."""

    def change(node: Expr) -> Expr | None:
        match node:
            case Func(name="coalesce", args=(first, second)):
                return IfElse(Compare(first, (("is", Const(None)),)), plain_dtype(second), first)
        return None

    return rewrite(dtype, change)
