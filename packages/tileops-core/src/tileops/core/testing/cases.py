"""The calls that an operator is held to: its entry's rows, and the edges of its signature."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import cycle
from types import MappingProxyType
from typing import Any, Literal

import attrs

from tileops.core import workloads
from tileops.core.check import Call, TensorMeta
from tileops.core.errors import CheckError
from tileops.core.roofline import work
from tileops.core.spec import Entry
from tileops.core.spec.expr import Name
from tileops.core.testing.layouts import layouts_of, placement, values_of
from tileops.core.testing.points import (
    ALIGNED,
    Point,
    Space,
    base_point,
    bind,
    legal,
    pairwise,
    same_sizes,
    space_of,
)
from tileops.core.torch_ops import checker_of

Tier = Literal["smoke", "full", "nightly"]


@attrs.frozen
class Limits:
    """How much work a case may be; bytes stand for memory too, of which the float64 oracle needs several times."""

    flops: float
    bytes: float


ON_CPU, ON_GPU = Limits(5e7, 4e6), Limits(math.inf, 4e9)


@attrs.frozen
class Case:
    """One call with how its inputs lie in memory (by input; the others are contiguous) and what they hold.

    ``values`` is "normal", or a key of ``layouts.VALUES``: of the input that ``where`` names, else of all. The strides
    are the call's too, and its ``id`` is the case's. ``generated`` ones follow from the entry, and are found by it.
    """

    call: Call
    layouts: Mapping[str, str] = attrs.field(factory=dict)
    values: str = "normal"
    where: str | None = None
    tier: Tier = "full"
    generated: bool = True

    @property
    def id(self) -> str:
        """``Op/...``, the same from run to run."""
        assert self.call.id is not None
        return self.call.id

    def __str__(self) -> str:
        notes = [f"{name}={value}" for name, value in self.call.params.items()]
        notes += [f"{name} {layout}" for name, layout in self.layouts.items()]
        if self.values != "normal":
            notes.append(f"{self.values} in {self.where or 'all inputs'}")
        return f"{self.call} {', '.join(notes)}"


def workload_cases(
    entry: Entry, max_flops: float | None = None, max_bytes: float | None = None, device: str = "cpu"
) -> list[Case]:
    """Every row and dtype case, made smaller where it needs more than that.

    By default few on the cpu; elsewhere a row has its true size, as far as the oracle's memory goes.
    """
    limits = ON_CPU if device == "cpu" else ON_GPU
    flops = limits.flops if max_flops is None else max_flops
    moved = limits.bytes if max_bytes is None else max_bytes
    declared = [(row, case) for row in entry.workloads for case in workloads.cases(row)]
    calls = [workloads.scaled(checker_of(entry), row, case, flops, moved) for row, case in declared]
    return [Case(call, tier="full" if i else "smoke") for i, call in enumerate(calls)]


def edge_cases(entry: Entry, device: str = "cpu") -> list[Case]:
    """Pairs of all that a caller chooses; sizes of 0, 1 and beside powers of two; layouts; values out of the ordinary.

    From the signature alone: what it refuses to bind is no case.
    """
    return list(_edge_cases(entry, ON_CPU if device == "cpu" else ON_GPU))


@lru_cache
def _edge_cases(entry: Entry, limits: Limits) -> tuple[Case, ...]:
    space = space_of(entry)
    points = pairwise(space, base_point(space))
    made: dict[Any, Case] = {}
    for make in (_choices, _sizes, _layouts, _values):
        for case in make(space, points, limits):
            made.setdefault((case.call, tuple(case.layouts.items()), case.values, case.where), case)
    return tuple(made.values())


def case_of(
    call: Call, label: str, layouts: Mapping[str, str] = MappingProxyType({}), values: str = "normal", **fields: Any
) -> Case:
    """A case made by hand, of the call that ``Op.bind`` gives; raises CheckError for layouts that it can't have."""
    case = Case(attrs.evolve(call, id=f"{call.entry.name}/{label}"), values=values, generated=False, **fields)
    return _laid_out(case, layouts)


def _case(space: Space, base: Point, point: Point, note: str = "", **fields: Any) -> Case:
    """The case of a legal point, called by the note and by the statics in which the point differs from the base."""
    call = bind(space, point)
    assert call is not None
    differences = ",".join(_shown(n, v) for n, v in point.items() if n in space.statics and v != base[n])
    label = "/".join(filter(None, [note, differences])) or "base"
    return Case(attrs.evolve(call, id=f"{space.entry.name}/{label}"), **fields)


def _shown(name: str, value: Any) -> str:
    if name.startswith("present("):
        return ("+" if value else "-") + name[8:-1]
    if isinstance(value, tuple):
        value = "x".join(map(str, value)) or "()"
    return f"{name}={value.id if isinstance(value, Name) else value}"


def _choices(space: Space, points: Sequence[Point], limits: Limits) -> Iterator[Case]:
    base, *others = points
    yield _case(space, base, base, tier="smoke")
    for point in others:
        yield _case(space, base, point)


def _sizes(space: Space, points: Sequence[Point], limits: Limits) -> Iterator[Case]:
    """One size at a time, the others aligned where it is large, else small; then all alike."""
    base, turns = points[0], cycle(points)
    ones, aligned = same_sizes(space, 1), same_sizes(space, ALIGNED)
    for name, values in space.sizes.items():
        for value in values:
            point, empty = next(turns), value in (0, (0,))
            seeds: dict[str, Point] = {"": point, ",base": base}
            if value not in (0, 1) and 0 not in _lengths(value):
                seeds = {f",others={ALIGNED}": {**point, **aligned}, **seeds}
            seeds |= {f",{_shown(n, one)}": {**base, n: one} for n, one in ones.items() if n != name}
            for note, seed in seeds.items():
                if found := legal(space, {name: value}, [seed]):
                    yield _case(space, base, found, _shown(name, value) + note, tier="smoke" if empty else "full")
                    break
    for n in (1, ALIGNED, 33, 129):
        found = legal(space, same_sizes(space, n), [base])
        if found and (call := bind(space, found)) and work(call).flops <= limits.flops:
            yield _case(space, base, found, f"all={n}")


def _lengths(size: Any) -> tuple[int, ...]:
    return size if isinstance(size, tuple) else (size,)


def _layouts(space: Space, points: Sequence[Point], limits: Limits) -> Iterator[Case]:
    """Every layout of each input that all calls have; then all inputs at once, each in a layout of its own."""
    base, turns = points[0], cycle(points)
    tier: Tier = "smoke"
    for name, layouts in _ways(space, base).items():
        for layout in layouts:
            seeds = [next(turns), base]
            for seed in seeds:
                with suppress(CheckError):
                    yield _laid_out(_case(space, base, seed, f"{name}-{layout}", tier=tier), {name: layout})
                    tier = "full"
                    break
    richest = sorted(points, key=lambda p: -len(_ways(space, p)))[:2]
    for turn, point in zip(range(max(map(len, _ways(space, base).values()), default=0)), cycle(richest)):
        chosen = {n: ways[(turn + i) % len(ways)] for i, (n, ways) in enumerate(_ways(space, point).items())}
        with suppress(CheckError):
            yield _laid_out(_case(space, base, point, f"mixed{turn}"), chosen)


def _ways(space: Space, point: Point) -> dict[str, list[str]]:
    """The layouts of each present input that has any."""
    call, decls = bind(space, point), space.entry.signature.inputs
    assert call is not None
    ways = {n: layouts_of(decls[n], meta.shape) for n, meta in call.inputs.items() if meta is not None}
    return {n: layouts for n, layouts in ways.items() if layouts}


def _laid_out(case: Case, layouts: Mapping[str, str]) -> Case:
    """The case with these layouts; raises CheckError where the signature refuses their strides."""
    call = case.call
    metas = {
        n: m and TensorMeta(m.shape, m.dtype, placement(layouts.get(n, "contiguous"), m.shape).strides)
        for n, m in call.inputs.items()
    }
    call = checker_of(call.entry).bind(call.params, metas, call.device, call.content, call.id)
    return attrs.evolve(case, call=call, layouts=layouts)


def _values(space: Space, points: Sequence[Point], limits: Limits) -> Iterator[Case]:
    """For each choice of dtypes and each input once: what is out of the ordinary."""
    seen: set[Any] = set()
    for point in points:
        call = bind(space, point)
        assert call is not None
        dtypes = tuple(call.indices[n] for n in space.dtypes if n in call.indices)
        for values, where in values_of(call):
            key = (values, where or dtypes)
            if key not in seen:
                seen.add(key)
                note = f"{where}-{values}" if where else values
                yield _case(space, points[0], point, note, values=values, where=where)
