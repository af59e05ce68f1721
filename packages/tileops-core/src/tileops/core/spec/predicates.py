"""The closed list of statements about a metadata tensor's content, each with its check and its generator, on host values."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import attrs

Values = tuple[Any, ...]  # nested as the tensor's shape


@attrs.frozen
class Statement:
    """``params`` names the arguments; ``holds(content, *args)`` checks; ``make(rng, shape, *args)`` generates.

    A generator takes a list in place of its first argument: the values that are due (lengths of the groups for offsets).
    """

    params: tuple[str, ...]
    holds: Callable[..., bool]
    make: Callable[..., Values]


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


def _sizes(rng: random.Random, shape: tuple[int, ...], total: int | Sequence[int]) -> Values:
    return tuple(_parts(rng, shape[0], total) if isinstance(total, int) else total)


def _offsets(rng: random.Random, shape: tuple[int, ...], total: int | Sequence[int]) -> Values:
    return (0, *accumulate(_sizes(rng, (shape[0] - 1,), total)))


def _lengths(rng: random.Random, shape: tuple[int, ...], most: int | Sequence[int]) -> Values:
    return tuple(rng.randint(min(1, most), most) for _ in range(shape[0])) if isinstance(most, int) else tuple(most)


def _pages_of(length: int, page_size: int) -> int:
    return -(-length // page_size)


def _page_ids(rng: random.Random, shape: tuple[int, ...], pages: int, lengths: Values, page_size: int) -> Values:
    free = rng.sample(range(pages), pages)
    rows = []
    for length in lengths:
        used = [free.pop() for _ in range(_pages_of(length, page_size))]
        rows.append((*used, *([-1] * (shape[1] - len(used)))))
    return tuple(rows)


def _page_ids_hold(content: Values, pages: int, lengths: Values, page_size: int) -> bool:
    return all(0 <= p < pages for row, n in zip(content, lengths, strict=True) for p in row[: _pages_of(n, page_size)])


PREDICATES: Mapping[str, Statement] = {
    "offsets": Statement(
        ("total",),
        lambda c, total: c[0] == 0 and c[-1] == total and all(a <= b for a, b in pairwise(c)),
        _offsets,
    ),
    "lengths": Statement(("max",), lambda c, most: all(0 <= n <= most for n in c), _lengths),
    "sizes": Statement(("total",), lambda c, total: all(n >= 0 for n in c) and sum(c) == total, _sizes),
    "page_ids": Statement(("pages", "lengths", "page_size"), _page_ids_hold, _page_ids),
    "index": Statement(
        ("hi",),
        lambda c, hi: all(0 <= i < hi for i in _flat(c)),
        lambda rng, shape, hi: _nest([rng.randrange(hi) for _ in range(_numel(shape))], shape),
    ),
    "positive": Statement(
        (),
        lambda c: all(x > 0 for x in _flat(c)),
        lambda rng, shape: _nest([0.5 + rng.random() for _ in range(_numel(shape))], shape),
    ),
}


def _numel(shape: tuple[int, ...]) -> int:
    n = 1
    for size in shape:
        n *= size
    return n
