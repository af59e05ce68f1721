"""Where a tensor of some shape may lie in memory, and inputs whose values are out of the ordinary."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import attrs
import torch
from torch import Tensor

from tileops.core.check import Call, TensorMeta, contiguous_strides, ordered_strides
from tileops.core.dtypes import torch_dtype
from tileops.core.spec import TensorDecl

Shape = tuple[int, ...]

_WITHOUT_INF = ("float8_e4m3fn",)


@attrs.frozen
class Placement:
    """Strides and storage offset, both in elements."""

    strides: Shape
    offset: int = 0


def _swapped(shape: Shape, i: int, j: int) -> Placement | None:
    """Contiguous once the axes i and j, counted from the end, are swapped."""
    if len(shape) < max(-i, -j):
        return None
    order = list(range(len(shape)))
    order[i], order[j] = order[j], order[i]
    return Placement(ordered_strides(shape, order))


def _pitched(shape: Shape, pitch: Callable[[int], int], offset: int = 0) -> Placement | None:
    """Rows further apart than they are long, as in a slice of something larger."""
    if len(shape) < 2:
        return None
    return Placement((*contiguous_strides((*shape[:-1], pitch(shape[-1])))[:-1], 1), offset)


def _every_other(shape: Shape) -> Placement | None:
    return Placement(tuple(2 * s for s in contiguous_strides(shape))) if shape else None


def _expanded(axis: int, shape: Shape) -> Placement | None:
    """One slice that stands for all along an axis."""
    if len(shape) <= axis:
        return None
    strides = list(contiguous_strides(tuple(1 if i == axis else n for i, n in enumerate(shape))))
    strides[axis] = 0
    return Placement(tuple(strides))


LAYOUTS: Mapping[str, Callable[[Shape], Placement | None]] = {
    "contiguous": lambda shape: Placement(contiguous_strides(shape)),
    "transposed": lambda shape: _swapped(shape, -1, -2),
    "permuted": lambda shape: _swapped(shape, -2, -3),
    "sliced": lambda shape: _pitched(shape, lambda n: 16 * (math.ceil(n / 16) + 2), offset=16),
    "odd-pitch": lambda shape: _pitched(shape, lambda n: n + 1 + n % 2),
    "every-other": _every_other,
    "misaligned": lambda shape: Placement(contiguous_strides(shape), offset=1),
    **{f"expanded{axis}": partial(_expanded, axis) for axis in range(5)},
}


def layouts_of(decl: TensorDecl, shape: Shape) -> list[str]:
    """The layouts, other than contiguous, that an input of this shape can have.

    One slice can't stand for several where a call writes to it, nor where its content is metadata.
    """
    single = decl.mutated is not None or decl.requires is not None or decl.values is not None
    plain = Placement(contiguous_strides(shape))
    found = []
    for name, layout in LAYOUTS.items():
        placement = layout(shape)
        if placement is None or placement == plain or 0 in shape:
            continue
        if not (single and 0 in placement.strides):
            found.append(name)
    return found


def placement(layout: str, shape: Shape) -> Placement:
    """The place of a tensor that has the layout."""
    found = LAYOUTS[layout](shape)
    assert found is not None
    return found


def expanded_once(tensor: Tensor) -> Tensor:
    """The elements of a tensor without those that an expanded axis repeats."""
    for axis, (n, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and n > 1:
            tensor = tensor.narrow(axis, 0, 1)
    return tensor


def _planted(value: float) -> Callable[[Tensor], Tensor]:
    """One element in the middle replaced."""

    def plant(x: Tensor) -> Tensor:
        flat = x.flatten().clone()
        flat[flat.numel() // 2] = value
        return flat.reshape(x.shape)

    return plant


def _constant_rows(x: Tensor) -> Tensor:
    """Every other row: were all of them constant, differences over a batch of two would leave nothing but roundings."""
    rows = (x.reshape(-1, x.shape[-1]) if x.dim() else x.reshape(1, 1)).clone()
    rows[::2] = rows[::2, :1]
    return rows.view(x.shape)


def _large(x: Tensor) -> Tensor:
    """Far from 1, but such that squares stay in float32's range."""
    exponent = min(50, int(math.log2(torch.finfo(x.dtype).max)) - 3)
    return (x.double() * 2.0**exponent).to(x.dtype)


VALUES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "nan": _planted(math.nan),
    "inf": _planted(math.inf),
    "large": _large,
    "zeros": torch.zeros_like,
    "constant-rows": _constant_rows,
}
PLANTED = ("nan", "inf")


def values_of(call: Call) -> Iterator[tuple[str, str | None]]:
    """The values that a call's inputs may have besides normal ones: a key of ``VALUES``, and in which input or all."""
    free = free_inputs(call)
    for values in VALUES:
        if values not in PLANTED and free:
            yield values, None
    for name, meta in free.items():
        for values in PLANTED:
            if values == "nan" or meta.dtype not in _WITHOUT_INF:
                yield values, name


def free_inputs(call: Call) -> dict[str, TensorMeta]:
    """The floating inputs that may hold any value."""
    decls = call.entry.signature.inputs
    return {
        name: meta
        for name, meta in call.inputs.items()
        if meta is not None
        and meta.numel
        and torch_dtype(meta.dtype).is_floating_point
        and decls[name].requires is decls[name].values is None
    }
