"""The closed list of statements about a metadata tensor's content, each with check and generator, on host values."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, islice, pairwise
from typing import Any

import attrs

Values = tuple[Any, ...]  # nested as the tensor's shape


@attrs.frozen
class Statement:
    """``params`` names the arguments, ``meaning`` says it in words.

    ``holds(content, *args)`` checks; ``make(rng, shape, *args)`` generates, and raises ValueError where nothing of that
    shape can hold. For a parameter in ``lists`` it also takes a list: the values that are due (for offsets, the lengths
    between them).
    """

    params: tuple[str, ...]
    meaning: str
    holds: Callable[..., bool]
    make: Callable[..., Values]
    lists: tuple[str, ...] = ()


TENSOR_ARGUMENTS = ("lengths",)  # the parameters that take another tensor's content


def _flat(content: Values) -> list[Any]:
    return [x for item in content for x in (_flat(item) if isinstance(item, tuple) else [item])]


def _nest(flat: list[Any], shape: tuple[int, ...]) -> Values:
    if len(shape) <= 1:
        return tuple(flat)
    step = len(flat) // shape[0] if shape[0] else 0
    return tuple(_nest(flat[i * step : (i + 1) * step], shape[1:]) for i in range(shape[0]))


def _parts(rng: random.Random, count: int, total: int) -> list[int]:
    cuts = [0, *sorted(rng.randint(0, total) for _ in range(count - 1)), total] if count else [0]
    return [b - a for a, b in pairwise(cuts)]


def _given(values: Sequence[int], count: int) -> Values:
    if len(values) != count:
        raise ValueError(f"{len(values)} values are given, where there are {count}")
    return tuple(values)


def _sizes(rng: random.Random, shape: tuple[int, ...], total: int | Sequence[int]) -> Values:
    (count,) = shape
    if not isinstance(total, int):
        return _given(total, count)
    if total and not count:
        raise ValueError(f"no sizes can sum to {total}")
    return tuple(_parts(rng, count, total))


def _offsets(rng: random.Random, shape: tuple[int, ...], total: int | Sequence[int]) -> Values:
    if shape == (0,):
        raise ValueError("offsets need at least one element")
    return (0, *accumulate(_sizes(rng, (shape[0] - 1,), total)))


def _lengths(rng: random.Random, shape: tuple[int, ...], most: int | Sequence[int]) -> Values:
    (count,) = shape
    return (
        tuple(rng.randint(min(1, most), most) for _ in range(count)) if isinstance(most, int) else _given(most, count)
    )


def _pages_of(length: int, page_size: int) -> int:
    return -(-length // page_size)


def _page_ids(rng: random.Random, shape: tuple[int, ...], pages: int, lengths: Values, page_size: int) -> Values:
    count, width = shape
    needs = [_pages_of(n, page_size) for n in _given(lengths, count)]
    if sum(needs) > pages or max(needs, default=0) > width:
        raise ValueError(f"lengths {lengths} need {sum(needs)} pages, at most {width} each; there are {pages}")
    free = iter(rng.sample(range(pages), pages))
    return tuple((*islice(free, n), *[-1] * (width - n)) for n in needs)


def _page_ids_hold(content: Values, pages: int, lengths: Values, page_size: int) -> bool:
    return all(
        len(used) == needed and all(0 <= p < pages for p in used)
        for row, needed in zip(content, (_pages_of(n, page_size) for n in lengths), strict=True)
        for used in [row[:needed]]
    )


PREDICATES: Mapping[str, Statement] = {
    "offsets": Statement(
        ("total",),
        "offsets that begin with 0, never decrease and end with total",
        lambda c, total: c[0] == 0 and c[-1] == total and all(a <= b for a, b in pairwise(c)),
        _offsets,
        lists=("total",),
    ),
    "lengths": Statement(
        ("max",), "lengths from 0 to max", lambda c, most: all(0 <= n <= most for n in c), _lengths, lists=("max",)
    ),
    "sizes": Statement(
        ("total",),
        "sizes from 0 up that sum to total",
        lambda c, total: all(n >= 0 for n in c) and sum(c) == total,
        _sizes,
        lists=("total",),
    ),
    "page_ids": Statement(
        ("pages", "lengths", "page_size"),
        "a page from 0 to pages - 1 for each page_size of a row's length",
        _page_ids_hold,
        _page_ids,
    ),
    "index": Statement(
        ("hi",),
        "indices from 0 to hi - 1",
        lambda c, hi: all(0 <= i < hi for i in _flat(c)),
        lambda rng, shape, hi: _nest([rng.randrange(hi) for _ in range(math.prod(shape))], shape),
    ),
    "positive": Statement(
        (),
        "values above 0",
        lambda c: all(x > 0 for x in _flat(c)),
        lambda rng, shape: _nest([0.5 + rng.random() for _ in range(math.prod(shape))], shape),
    ),
}
