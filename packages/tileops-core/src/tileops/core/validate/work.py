"""The roofline of an entry: it counts every row, and its masks count as many scores as are really visible."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tileops.core.check import Call, Checker
from tileops.core.errors import SpecError
from tileops.core.roofline import bound
from tileops.core.spec import Row
from tileops.core.spec.expr import FUNCTIONS, Expr, Func, emit, names, walk
from tileops.core.spec.model import FuncRef, Text
from tileops.core.validate.subject import Subject, Tally, metadata
from tileops.core.workloads import cases, row_call

MOST_PAIRS = 1 << 14  # that are counted one by one
LENGTHS = (32, 9, 1)
SETTINGS: Mapping[str, tuple[Any, ...]] = {"bool": (False, True), "int": (-1, 0, 3)}  # of a mask's params
_MASK_ARGS = slice(0, 2), slice(2, None)  # of visible(): the lengths, and what limits the view


def evaluate(subject: Subject, calls: Sequence[Call], functions: bool = True) -> None:
    """Count the work of every call; an entry whose work is a function's only with ``functions``."""
    roofline = subject.entry.roofline
    if roofline is None:
        return
    refs = [(n, r) for n, r in (("flops", roofline.flops), ("bytes", roofline.bytes)) if isinstance(r, FuncRef)]
    if refs and not (functions and all(subject.load(r, f"roofline {n}", "S402") for n, r in refs)):
        return
    tally = Tally(subject)
    for call in calls:
        try:
            bound(call, None)
        except SpecError as e:
            for d in e.diagnostics:
                tally.add(call, d.place, d.code, d.message)
    tally.tell()


def default_bytes(subject: Subject) -> None:
    """Refuse the default, each tensor once, where a call may leave part of a tensor untouched."""
    roofline = subject.entry.roofline
    if roofline is None or roofline.bytes is not None:
        return
    reasons = [f"the content of {name} says what is read" for name in metadata(subject.entry)]
    if masks(subject):
        reasons.append("a mask may hide whole keys")
    if reasons:
        hint = "count 'bytes' by an expression or a module:function"
        subject.error(roofline.place, "S403", f"roofline has no 'bytes', and {reasons[0]}", hint)


def flops_of(subject: Subject) -> Text | None:
    """The flops of an entry where they are an expression."""
    flops = subject.entry.roofline.flops if subject.entry.roofline else None
    return flops if isinstance(flops, Text) else None


def masks(subject: Subject) -> tuple[Func, ...]:
    """The uses of ``visible()`` in the flops."""
    flops = flops_of(subject)
    return tuple(n for n in walk(flops.expr) if isinstance(n, Func) and n.name == "visible") if flops else ()


def pairs(s_q: int, s_kv: int, causal: bool, left: int, right: int) -> int:
    """The scores that a mask leaves, one by one: query i stands at i + s_kv - s_q."""
    if s_q * s_kv > MOST_PAIRS:
        raise ValueError("too many to count")
    count = 0
    for at in range(s_kv - s_q, s_kv):
        for key in range(s_kv):
            hidden = (causal and key > at) or (left >= 0 and key < at - left) or (right >= 0 and key > at + right)
            count += not hidden
    return count


def count_masks(subject: Subject, checker: Checker) -> None:
    """Compare ``visible()`` with a count of pairs, on small calls with every kind of mask that the params allow."""
    flops = flops_of(subject)
    if flops is None or not masks(subject):
        return
    closed, counted = (_counter(flops.expr, v) for v in (FUNCTIONS["visible"], pairs))
    tally = Tally(subject)
    for row in subject.entry.workloads:
        compared = [
            (call, closed(call), n) for call in _masked(subject, checker, row) if (n := counted(call)) is not None
        ]
        for call, got, n in compared:
            if got != n:
                params = ", ".join(f"{name} = {value!r}" for name, value in call.params.items())
                tally.add(
                    call, flops.place, "S404", f"flops are {got} and by a count of pairs {n}, with {params}, for {call}"
                )
        if compared:  # other rows have other values, but the same masks
            break
    tally.tell()


def unmasked(subject: Subject, checker: Checker) -> Iterator[Call]:
    """For each row a small call of its kind whose mask hides nothing, where there is one."""
    flops = flops_of(subject)
    if flops is None:
        return
    closed = _counter(flops.expr, FUNCTIONS["visible"])
    full = _counter(flops.expr, lambda s_q, s_kv, causal, left, right: s_q * s_kv)
    for row in subject.entry.workloads:
        hides_nothing = (c for c in _masked(subject, checker, row) if (n := full(c)) is not None and n == closed(c))
        yield from itertools.islice(hides_nothing, 1)


def _counter(expr: Expr, visible: Callable[..., int]) -> Callable[[Call], Any]:
    """The flops of a call with another ``visible()``; None where they can't be counted."""
    source = f"lambda env: {emit(expr, lambda name: f'env[{name!r}]')}"
    count = eval(source, {**FUNCTIONS, "visible": visible})  # our own spelling of a checked expression

    def flops(call: Call) -> Any:
        try:
            return count(call.env)
        except (LookupError, ValueError, TypeError, ArithmeticError):
            return None

    return flops


def _masked(subject: Subject, checker: Checker, row: Row) -> Iterator[Call]:
    """Calls of a row with small lengths and every kind of mask; those that hide least come first."""
    sig = subject.entry.signature
    lengths, limits = (set().union(*(names(a) for m in masks(subject) for a in m.args[part])) for part in _MASK_ARGS)
    axes: dict[str, Sequence[Any]] = {}
    for name, index in sig.indices.items():
        if name in lengths and index.kind == "Dim" and name in row.values:
            axes[name] = (*LENGTHS, row.values[name])
    for name, param in sig.params.items():
        if name in limits and param.type.base in SETTINGS:
            axes[name] = (*([None] if param.type.optional else []), *SETTINGS[param.type.base])
    for picked in itertools.product(*axes.values()):
        values = {**row.values, **dict(zip(axes, picked, strict=True))}
        with contextlib.suppress(SpecError):  # the rules may not allow it
            yield row_call(checker, row, cases(row)[0], values)
