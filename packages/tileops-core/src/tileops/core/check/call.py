"""One checked call of an operator, as a frozen value: it needs no tensor and no device."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from typing import Any

import attrs

from tileops.core.spec.dtypes import itemsize
from tileops.core.spec.expr import compile_expr
from tileops.core.spec.model import Entry


@cache
def _symbolic(entry: Entry) -> tuple[tuple[str, Callable[[Mapping[str, Any]], Any] | None], ...]:
    return tuple((s.index, compile_expr(s.when.expr) if s.when else None) for s in entry.signature.symbolic)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides, in elements, spelled as torch spells them for empty shapes."""
    strides: list[int] = []
    step = 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


def ordered_strides(shape: tuple[int, ...], order: Sequence[int]) -> tuple[int, ...]:
    """The strides of a tensor without gaps whose axes lie in this order, the outermost first."""
    strides = dict(zip(order, contiguous_strides(tuple(shape[axis] for axis in order)), strict=True))
    return tuple(strides[axis] for axis in range(len(shape)))


def is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether elements lie row by row without gaps; the stride of an axis of size 1 says nothing."""
    wanted = contiguous_strides(shape)
    return 0 in shape or all(n == 1 or s == w for n, s, w in zip(shape, strides, wanted, strict=True))


@attrs.frozen
class TensorMeta:
    """Shape, dtype (torch's name) and strides (in elements) of a tensor."""

    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...] = attrs.field()

    @strides.default
    def _contiguous(self) -> tuple[int, ...]:
        return contiguous_strides(self.shape)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * itemsize(self.dtype)

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


@attrs.frozen(eq=False, slots=False)
class Call:
    """A call that its entry's signature admits.

    ``params`` and ``indices`` are by name (dtypes as torch's names, lists as tuples; ``indices`` holds the values of
    ``let`` too). An absent tensor is None. ``content`` holds host values of metadata tensors (nested tuples) where a
    workload row gives them; a live call has None. ``id`` is ``Op/label-...`` for a row's call. Two calls are equal if
    op, params, inputs, device and content are.
    """

    entry: Entry
    params: Mapping[str, Any]
    indices: Mapping[str, Any]
    inputs: Mapping[str, TensorMeta | None]
    outputs: Mapping[str, TensorMeta | None]
    device: str = "meta"
    content: Mapping[str, Any] | None = None
    id: str | None = None

    @cached_property
    def env(self) -> Mapping[str, Any]:
        """What expressions see: params, indices, content, and ``present(x)`` for each tensor."""
        present = {f"present({n})": m is not None for n, m in (*self.inputs.items(), *self.outputs.items())}
        return {**(self.content or {}), **self.params, **self.indices, **present}

    def __getitem__(self, name: str) -> Any:
        """The value of an index, ``let`` name or param."""
        return self.env[name]

    @cached_property
    def symbolic(self) -> frozenset[str]:
        """The indices that change from call to call, as this call's params decide."""
        return frozenset(name for name, when in _symbolic(self.entry) if when is None or when(self.env))

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """The identity that caches use; content takes no part."""
        return self.entry.name, tuple(self.params.items()), tuple(self.inputs.items()), self.device

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Call):
            return NotImplemented
        return self.key == other.key and (self.content or {}) == (other.content or {})

    def __hash__(self) -> int:
        return hash(self.key)

    def __str__(self) -> str:
        tensors = ", ".join(f"{n}={m}" for n, m in self.inputs.items() if m is not None)
        return f"{self.entry.name}({tensors})"
