"""One tensor against its truth, piece by piece: float64 copies of a whole output may not fit beside the oracle."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from operator import attrgetter
from typing import Any

import attrs
import torch
from torch import Tensor

from tileops.core.accuracy.rules import Tolerance, ulp

_PIECE = 1 << 24  # elements
STRAY, ELEMENTS_A_STRAY = 1.5, 10_000
_SLICE = 64  # elements that tell how large errors are
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@attrs.frozen
class Finding:
    """What was found about one tensor.

    ``metric`` names the check that came out worst: ``presence``, ``device``, ``dtype``, ``shape``, ``untouched``,
    ``non-finite``, ``slice``, ``element``, ``frobenius``, ``codes`` or ``exact``. ``error`` is ``got / limit``, both in
    the metric's own unit; the tensor is right where it is at most 1, and it is infinite where nothing can be measured.
    ``index`` is where it is worst, ``expected`` and ``actual`` are the oracle's and the result's value there.
    ``message`` has one line, or two where the tensor is wrong.
    """

    name: str
    metric: str
    error: float
    message: str
    got: float | None = None
    limit: float | None = None
    index: tuple[int, ...] | None = None
    expected: Any = None
    actual: Any = None

    @property
    def ok(self) -> bool:
        return self.error <= 1


@attrs.frozen(slots=False)
class Piece:
    """Some rows of a case; ``start`` is the offset of their first element in the flat tensor."""

    start: int
    oracle: Tensor
    yardstick: Tensor
    result: Tensor
    original: Tensor | None
    absolute: Tensor | None

    @cached_property
    def touched(self) -> Tensor:
        """Where the oracle wrote: all of an output."""
        if self.original is None:
            return torch.ones_like(self.oracle, dtype=torch.bool)
        return _bits(self.oracle) != _bits(self.original.to(self.oracle.dtype))

    @cached_property
    def compared(self) -> Tensor:
        """Where oracle and yardstick both are finite."""
        return self.touched & _wide(self.oracle).isfinite() & _wide(self.yardstick).isfinite()


@attrs.frozen
class Case:
    """A result of the right dtype and shape, not empty. ``original`` is a mutated input as it was before the call."""

    name: str
    rule: Tolerance
    result: Tensor
    oracle: Tensor
    yardstick: Tensor
    original: Tensor | None = None
    absolute: Tensor | None = None

    def find(self) -> Finding:
        """The first check that fails, else the worst measure."""
        measure = {"slices": _distances, "statistic": _distances, "codes": _codes, "exact": _exact}[self.rule.kind]
        return _untouched(self) or _non_finite(self) or measure(self)

    @property
    def columns(self) -> int:
        """Elements of a row: of a slice along the last axis, or one under the other rules."""
        return self.result.shape[-1] if self.result.dim() and self.rule.kind == "slices" else 1

    @property
    def rows(self) -> int:
        """Rows that are held to one bound: short ones side by side, since the largest of a few elements says little."""
        return -(-_SLICE // self.columns) if self.rule.kind == "slices" else 1

    def pieces(self) -> Iterator[Piece]:
        """All of the case, in whole bounds."""
        home, columns = self.oracle.device, self.columns
        tensors = (self.oracle, self.yardstick, self.result, self.original, self.absolute)
        rows = [None if t is None else t.detach().reshape(-1, columns) for t in tensors]
        step = max(1, _PIECE // columns // self.rows) * self.rows
        for first in range(0, self.result.numel() // columns, step):
            yield Piece(first * columns, *(None if t is None else t[first : first + step].to(home) for t in rows))

    def finding(self, metric: str, got: float, limit: float, at: int, why: str) -> Finding:
        """``at`` is a flat index; a limit of 0 is one that allows nothing."""
        index = []
        for n in reversed(self.result.shape):
            at, i = divmod(at, n)
            index.append(i)
        place = tuple(reversed(index))
        want, have = (_wide(t[place]).item() for t in (self.oracle, self.result))
        error = got / limit if limit else math.inf if got else 0.0
        message = (
            f"{self.name}: {metric}" if math.isinf(error) else f"{self.name}: {metric} error {error:.3g} x its bound"
        )
        if error > 1:
            message = f"{message} at {list(place)}: expected {_show(want)}, got {_show(have)}\n  {why}"
        return Finding(self.name, metric, error, message, got, limit, place, want, have)


def _untouched(case: Case) -> Finding | None:
    """A mutated input's elements that the reference leaves, changed."""
    if case.original is None:
        return None
    for p in case.pieces():
        assert p.original is not None
        same = _bits(p.result) == _bits(p.original)
        if p.original.is_floating_point():  # a kernel that reads and writes a NaN back may change its payload
            same |= p.original.isnan() & p.result.isnan()
        wrong = ~p.touched & ~same
        if count := int(wrong.sum()):
            why = f"{count} elements are written that the reference leaves as they were"
            return case.finding("untouched", count, 0, p.start + _first(wrong), why)
    return None


def _non_finite(case: Case) -> Finding | None:
    """NaN or Inf where a number must be, or the other way round."""
    if not case.result.is_floating_point():
        return None
    for p in case.pieces():
        o, y, r = _wide(p.oracle), _wide(p.yardstick), _wide(p.result)
        unlike = torch.where(_same(o, y), ~_same(o, r), r.isfinite())
        wrong = p.touched & torch.where(o.isfinite(), y.isfinite() & ~r.isfinite(), unlike)
        if count := int(wrong.sum()):
            why = f"{count} elements are NaN or Inf where the oracle is not, or the other way round"
            return case.finding("non-finite", count, 0, p.start + _first(wrong), why)
    return None


def _distances(case: Case) -> Finding:
    """Each element against its slice's bound, and all of them in Frobenius norm."""
    rule, dtype = case.rule, case.result.dtype
    worst, coarsest, outside = (-1.0, 0.0, 0.0, 0), 0.0, 0
    squares = torch.zeros(4, dtype=torch.float64)
    for p in case.pieces():
        o, y, r = _wide(p.oracle), _wide(p.yardstick), _wide(p.result)
        product = torch.zeros_like(o) if p.absolute is None else p.absolute
        terms = ((r - o).abs(), (y - o).abs(), ulp(o, dtype), product, o.abs())
        error, model, unit, product, size = (torch.where(p.compared, x, 0.0) for x in terms)
        floor = rule.floor * ulp(_largest(size, case.rows), dtype)
        bound = torch.maximum(rule.factor * _largest(model, case.rows), floor) + rule.terms * 2.0**-24 * product
        ratio = (error / bound).flatten()
        i = int(ratio.argmax())
        worst = max(worst, (ratio[i].item(), error.flatten()[i].item(), bound.flatten()[i].item(), p.start + i))
        coarsest = max(coarsest, floor.max().item())
        outside += int((ratio > 1).sum())
        # Roundings add like a walk over the partial sums. These are as large as the sum, or as products of either sign
        # make them; 4 times that leaves room for sums of one half that the other cancels.
        walk = 2.0**-22 * (math.sqrt(rule.terms) * size + product) if rule.terms else product
        squares += torch.stack([x.square().sum() for x in (error, model, unit, walk)]).cpu()
    total, model_total, unit_total, walk_total = squares.sqrt().tolist()
    allowed = max(rule.factor * model_total, (rule.floor - 0.5) * unit_total, coarsest) + walk_total

    _, got, limit, at = worst
    if rule.strays and 0 < outside <= max(1, case.result.numel() // ELEMENTS_A_STRAY):
        limit *= STRAY
    within = f"{rule.factor:g} x the yardstick's or {rule.floor:g} ulp{', and contraction' if rule.terms else ''}"
    metric = "slice" if rule.kind == "slices" else "element"
    single = f"off by {got:.3g}, allowed {limit:.3g} ({within}); {outside} of {case.result.numel()} are outside"
    whole = f"off by {total:.3g} in all, allowed {allowed:.3g} ({within}); the yardstick by {model_total:.3g}"
    findings = case.finding(metric, got, limit, at, single), case.finding("frobenius", total, allowed, at, whole)
    return max(findings, key=attrgetter("error"))


def _largest(values: Tensor, rows: int) -> Tensor:
    """Of each row, and of so many side by side."""
    each = values.amax(-1)
    padded = torch.nn.functional.pad(each, (0, -len(each) % rows))
    return padded.view(-1, rows).amax(-1).repeat_interleave(rows)[: len(each), None]


def _codes(case: Case) -> Finding:
    """How far codes are from the oracle's, and how many differ."""
    dtype = case.result.dtype
    furthest, differing, n = (-1, 0), 0, 0
    for p in case.pieces():
        distance = (_order(p.oracle, dtype) - _order(p.result, dtype)).abs()
        distance = torch.where(p.compared, distance, 0).flatten()
        i = int(distance.argmax())
        furthest = max(furthest, (int(distance[i]), p.start + i))
        differing += int((distance > 0).sum())
        n += int(p.compared.sum())
    steps, at = furthest
    many = max(2.0, n / 1000)
    why = f"off by at most {steps} codes, allowed 1; {differing} of {n} differ, allowed {many:g}"
    findings = case.finding("codes", steps, 1, at, why), case.finding("codes", differing, many, at, why)
    return max(findings, key=attrgetter("error"))


def _exact(case: Case) -> Finding:
    """Equal; a signed zero equals the other."""
    dtype, differing, at = case.result.dtype, 0, 0
    for p in case.pieces():
        wrong = p.touched & ~_same(_wide(p.oracle.to(dtype)), _wide(p.result))
        if count := int(wrong.sum()):
            at = at if differing else p.start + _first(wrong)
            differing += count
    return case.finding("exact", differing, 0, at, f"{differing} of {case.result.numel()} differ, allowed none")


def _wide(x: Tensor) -> Tensor:
    """Floating values as float64: torch has no arithmetic on float8."""
    return x.to(torch.float64) if x.is_floating_point() else x


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(_BITS[x.element_size()])


def _same(x: Tensor, y: Tensor) -> Tensor:
    return (x == y) | (x.isnan() & y.isnan())


def _first(mask: Tensor) -> int:
    return int(mask.flatten().nonzero()[0])


def _order(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Codes as integers in the order of their values, both zeros alike."""
    if not dtype.is_floating_point:
        return x.to(torch.float64).round().to(torch.int32)
    bits = x.to(dtype).view(torch.uint8).to(torch.int32)  # a sign and a magnitude
    return torch.where(bits < 0x80, bits, 0x80 - bits)


def _show(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
