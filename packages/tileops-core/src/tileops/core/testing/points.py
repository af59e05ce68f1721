"""The calls that a signature admits, as points of a space: a value for every size, param, dtype and optional input.

No operator is known here. Which combinations are legal is found by binding them; the entry's rows, which are legal,
show what goes together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import combinations
from typing import Any

import attrs

from tileops.core import workloads
from tileops.core.check import Call, Checker
from tileops.core.errors import SpecError
from tileops.core.spec import Diagnostic, Entry, Row
from tileops.core.spec.expr import Name, names
from tileops.core.spec.model import Param
from tileops.core.spec.solve import dtype_options, plain_dtype
from tileops.core.torch_ops import checker_of

Point = Mapping[str, Any]

DIMS = (0, 1, 63, 65, 129, 257)
SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (1,), (65,), (257,), (3, 0), (2, 3), (2, 1, 3, 5))
ALIGNED = 16
_DISTINCT = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41)


@attrs.frozen(eq=False)
class Space:
    """What can be chosen about an entry's calls: ``sizes`` and ``statics`` map a name to the values it is tried with.

    A size is an index of shapes, or a list param that stands in one. A static is any other param, ``T`` for a dtype
    index, ``dtype(x)`` for an input with a choice of its own, ``present(x)`` for an optional one; its default is first.
    """

    checker: Checker
    sizes: Mapping[str, Sequence[Any]]
    statics: Mapping[str, Sequence[Any]]
    rows: tuple[Point, ...]

    @property
    def entry(self) -> Entry:
        return self.checker.entry

    @property
    def dtypes(self) -> list[str]:
        """The names of the dtype indices."""
        return [n for n, index in self.entry.signature.indices.items() if index.kind == "DType"]


def space_of(entry: Entry) -> Space:
    signature = entry.signature
    sizes: dict[str, Sequence[Any]] = {}
    statics: dict[str, Sequence[Any]] = {}
    for index in signature.indices.values():
        if index.kind == "DType":
            statics[index.name] = index.choices
        else:
            sizes[index.name] = DIMS if index.kind == "Dim" else SHAPES
    in_shapes = set().union(*(names(d.shape.expr) for d in signature.inputs.values()))
    for name, param in signature.params.items():
        if param.type.base == "list[int]" and name in in_shapes:
            sizes[name] = SHAPES
        else:
            statics[name] = _options(param)
    for name, decl in signature.inputs.items():
        options = dtype_options(plain_dtype(decl.dtype.expr))
        if len(options) > 1:
            statics[f"dtype({name})"] = options
        if decl.optional:
            statics[f"present({name})"] = (False, True)
    rows = tuple(_row_point(sizes, statics, row, case) for row in entry.workloads for case in workloads.cases(row))
    return Space(checker_of(entry), sizes, statics, rows)


def _options(param: Param) -> tuple[Any, ...]:
    """Values of a param, its default first."""
    default = [] if param.default is attrs.NOTHING else [param.default]
    samples: dict[str, tuple[Any, ...]] = {
        "bool": (False, True), "int": (1, 0), "float": (0.5, 0.0), "literal": param.type.choices,
        "dtype": param.type.choices, "list[int]": ((0,), (0, 1)),
    }  # fmt: skip
    none = [None] if param.type.optional else []
    return tuple(dict.fromkeys([*default, *samples[param.type.base], *none]))


def _row_point(sizes: Mapping[str, Any], statics: Mapping[str, Sequence[Any]], row: Row, case: workloads.Case) -> Point:
    point = {name: values[0] for name, values in statics.items()}
    point |= {n: v for n, v in {**row.values, **case}.items() if n in sizes or n in statics}
    return point | {f"present({n})": True for n in row.some}


def bind(space: Space, point: Point) -> Call | None:
    """The call of a point; None where the signature refuses it."""
    return _bind(space, tuple(point.items()))


@lru_cache(maxsize=4096)
def _bind(space: Space, items: tuple[tuple[str, Any], ...]) -> Call | None:
    point = dict(items)
    case = {n: point[n] for n in space.dtypes}
    for name in space.entry.signature.inputs:
        option = point.get(f"dtype({name})")
        if isinstance(option, Name):
            case[name] = case.get(option.id, option.id)
    chosen = {n: v for n, v in point.items() if n in space.sizes or n in space.entry.signature.params}
    some = tuple(n for n in space.entry.signature.inputs if point.get(f"present({n})"))
    try:
        return workloads.row_call(space.checker, Row("point", chosen, some), case)
    except (SpecError, LookupError):
        return None


def legal(space: Space, change: Point, seeds: Sequence[Point]) -> Point | None:
    """The first seed that is legal with the change."""
    return next((point for seed in seeds if bind(space, point := {**seed, **change})), None)


def base_point(space: Space) -> Point:
    """A small legal point: as near to the defaults, and its sizes as unlike each other, as the rules allow."""
    defaults = {name: values[0] for name, values in space.statics.items()}
    for statics in (defaults, *space.rows):
        found = legal(space, {}, [{**statics, **sizes} for sizes in _small_sizes(space)])
        if found:
            return found
    declared = [(row, case) for row in space.entry.workloads for case in workloads.cases(row)]
    for (row, case), point in zip(declared, space.rows, strict=True):
        call = workloads.scaled(space.checker, row, case, max_flops=1e4, max_bytes=1e5)
        found = legal(space, {n: call.env[n] for n in space.sizes}, [point])
        if found:
            return found
    message = f"{space.entry.name}: no small legal call of it can be found, so it can't be tested at its edges"
    raise SpecError([Diagnostic(space.entry.place, "error", "S304", message)])


def _small_sizes(space: Space) -> Iterator[Point]:
    dims = [n for n, values in space.sizes.items() if values is DIMS]
    shapes = [n for n in space.sizes if n not in dims]
    sizes: dict[str, Any] = dict(zip(dims, _DISTINCT, strict=False))
    sizes |= {name: (_DISTINCT[-1 - i],) for i, name in enumerate(shapes)}
    yield sizes
    for one, other in ((a, b) for a in dims for b in dims if a != b):  # a rule may want a multiple
        yield {**sizes, one: 2 * sizes[other]}
        yield {**sizes, one: sizes[other]}
    for n in (ALIGNED, 4, 1):
        yield same_sizes(space, n)


def same_sizes(space: Space, n: int) -> Point:
    """All sizes n."""
    return {name: n if values is DIMS else (n,) for name, values in space.sizes.items()}


def pairwise(space: Space, base: Point) -> list[Point]:
    """Points of the base's sizes, the base first, in which every legal pair of static values occurs."""
    statics, sizes = space.statics, {n: base[n] for n in space.sizes}
    rows = [{**row, **sizes} for row in space.rows]
    missing: list[Point] = [
        {f: v, g: w} for f, g in combinations(statics, 2) for v in statics[f] for w in statics[g]
    ] or [{f: v} for f in statics for v in statics[f]]
    points = [base]
    missing = _missed(base, missing)
    while missing:
        wanted = missing.pop(0)
        point = legal(space, wanted, [base, *rows, *points])
        if point is not None:
            for name in [n for n in statics if n not in wanted]:
                point = _richest(space, point, name, missing)
            points.append(point)
            missing = _missed(point, missing)
    return points


def _missed(point: Point, pairs: Sequence[Point]) -> list[Point]:
    return [pair for pair in pairs if not pair.items() <= point.items()]


def _richest(space: Space, point: Point, name: str, missing: Sequence[Point]) -> Point:
    """The legal variation of one static in which most of the missing pairs occur; the point itself in a draw."""
    options = [point, *({**point, name: value} for value in space.statics[name])]
    options.sort(key=lambda option: len(_missed(option, missing)))
    return next(option for option in options if bind(space, option))
