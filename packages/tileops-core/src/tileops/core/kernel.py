"""The contract of a kernel: what it serves, its configs, and the TileLang program for one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, ClassVar

import attrs

from tileops.core.check import Call, Checker, TensorMeta
from tileops.core.spec.expr import Star, compile_expr, names, unparse
from tileops.core.spec.steps import Solution


@attrs.frozen
class Device:
    """What a kernel may ask of the device it is to run on. ``shared_bytes`` is the most that one block can have."""

    backend: str
    arch: str
    sm_count: int
    shared_bytes: int
    l2_bytes: int


ALIGNMENT = 16  # bytes: each tensor of a program starts at a multiple, which the program itself tests
H200 = Device("cuda", "sm90", 132, 227 * 1024, 60 << 20)


@attrs.frozen
class Scratch:
    """Workspace that core allocates for each call; ``zeroed`` memory is cleared before the launch."""

    shape: tuple[int, ...]
    dtype: str
    zeroed: bool = False


@attrs.frozen
class Form:
    """A tensor as a program sees it.

    An axis is a size, or the name of one that changes from call to call (``"M"``, ``"B[0]"``). A stride is in elements,
    or None where the axis is packed against the one to its right (the last: where it is 1).
    """

    dtype: str
    shape: tuple[int | str, ...]
    strides: tuple[int | None, ...]

    @property
    def packed(self) -> bool:
        """Whether the tensor is contiguous."""
        return all(s is None for s in self.strides)

    def meta(self, sizes: Mapping[str, int]) -> TensorMeta:
        """A tensor of this form whose moving axes have these sizes."""
        shape = tuple(sizes[axis] if isinstance(axis, str) else axis for axis in self.shape)
        strides: list[int] = []
        for i in reversed(range(len(shape))):
            packed = strides[0] * shape[i + 1] if strides else 1
            given = self.strides[i]
            strides.insert(0, packed if given is None else given)
        return TensorMeta(shape, self.dtype, tuple(strides))


@attrs.frozen
class Static:
    """All of a call that a program may depend on, and nothing that changes from call to call.

    ``values`` holds the params, the dtype indices and the sizes that are fixed, ``tensors`` the form of each present
    input and output. Equal values make equal programs.
    """

    op: str
    values: tuple[tuple[str, Any], ...]
    tensors: tuple[tuple[str, Form], ...]

    def __getitem__(self, name: str) -> Any:
        """A param, a dtype's name or a fixed size; KeyError for what changes from call to call."""
        return dict(self.values)[name]

    def tensor(self, name: str) -> Form | None:
        """The form of an input or output; None where it is absent."""
        return dict(self.tensors).get(name)


class Kernel:
    """One design of a kernel. Holds no state; an op lists its kernels' names in ``kernels``.

    ``pass_configs`` are TileLang's, by their names. Kernels validate nothing about the user's call: the checker has.
    """

    archs: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    pass_configs: ClassVar[Mapping[str, Any]] = {}

    def refuse(self, call: Call, device: Device) -> str | None:
        """Why this kernel doesn't serve a call, or None.

        Strides that it can't take are a reason; the caller then copies. Symbolic sizes are the largest of the call's
        bucket; base addresses are 16-byte aligned; no size is 0.
        """
        raise NotImplementedError

    def configs(self, call: Call, device: Device) -> Iterator[Any]:
        """Legal configs (frozen attrs values) for a call that isn't refused, the default first."""
        raise NotImplementedError

    def workspace(self, call: Call, config: Any) -> list[Scratch]:
        """Scratch tensors, passed behind the outputs; enough for every call of the bucket."""
        return []

    def program(self, static: Static, config: Any, device: Device) -> Any:
        """The TileLang prim_func ``main(present inputs, present outputs, scratch)``; see ``program.tensors``."""
        raise NotImplementedError


def static_of(checker: Checker, call: Call) -> Static:
    """The static part of a call."""
    solution, _ = checker.variant(call.params, [m is not None for m in call.inputs.values()])
    free = call.symbolic
    indices = ((n, v) for n, v in call.indices.items() if n not in free)
    tensors = []
    for name, axes in _axes_of(_ById(solution), free):
        meta = call.inputs.get(name) or call.outputs.get(name)
        if meta is not None:
            tensors.append((name, Form(meta.dtype, _shape(call, meta.shape, axes), _strides(meta))))
    return Static(call.entry.name, (*call.params.items(), *indices), tuple(tensors))


@attrs.frozen(eq=False)
class _ById:
    """Hashed by its identity, for a value whose equality is dear."""

    value: Solution

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ById) and self.value is other.value


# An axis: the name of a moving size, or None for a fixed one; of a splice that, and a function that gives its sizes.
_Axis = str | tuple[str | None, Callable[[Mapping[str, Any]], Any]] | None


@lru_cache(maxsize=1024)
def _axes_of(solution: _ById, free: frozenset[str]) -> tuple[tuple[str, tuple[_Axis, ...]], ...]:
    found = []
    for folded in (*solution.value.inputs, *solution.value.outputs):
        axes: list[_Axis] = []
        for axis in folded.axes:
            expr = axis.value if isinstance(axis, Star) else axis
            moving = unparse(expr) if names(expr) & free else None
            axes.append((moving, compile_expr(expr)) if isinstance(axis, Star) else moving)
        found.append((folded.decl.name, tuple(axes)))
    return tuple(found)


def _shape(call: Call, shape: tuple[int, ...], axes: tuple[_Axis, ...]) -> tuple[int | str, ...]:
    out: list[int | str] = []
    for axis in axes:
        if isinstance(axis, tuple):
            moving, splice = axis
            fixed = splice(call.env)
            out += fixed if moving is None else [f"{moving}[{i}]" for i in range(len(fixed))]
        else:
            out.append(shape[len(out)] if axis is None else axis)
    return tuple(out)


def _strides(meta: TensorMeta) -> tuple[int | None, ...]:
    """Packed axes as None; an axis of size 1 is packed whatever its stride."""
    out: list[int | None] = []
    step = 1
    for n, stride in zip(reversed(meta.shape), reversed(meta.strides), strict=True):
        out.append(None if stride == step or n == 1 else stride)
        step = (step if n == 1 else stride) * n
    return tuple(reversed(out))
