"""Whether a call is like an earlier one: one C++ check where torch has it, else the same spelled out in Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tileops.core.kernel import Form
from tileops.core.launch import guard_sizes

try:
    from torch._C._dynamo import guards

    tensor_guards: Any = guards.TensorGuards
except (ImportError, AttributeError):  # it is private
    tensor_guards = None

Guard = Callable[..., bool]
Axes = list[int | None]  # None: any


def guard(inputs: Sequence[Tensor | None], forms: Sequence[Form | None]) -> Guard:
    """Whether a call has these types, dispatch keys, dtypes, devices, sizes and strides, and records no gradient.

    ``forms`` say which sizes and strides may be others; without one an input must have the very same.
    """
    sizes: list[Axes] = []
    strides: list[Axes] = []
    for t, form in zip(inputs, forms, strict=True):
        if t is not None:
            size, stride = (t.shape, t.stride()) if form is None else guard_sizes(form, t.shape, t.stride())
            sizes.append(list(size))
            strides.append(list(stride))
    return _made(inputs, sizes, strides, "not grad_enabled()")


def recording_guard(inputs: Sequence[Tensor | None]) -> Guard:
    """Whether a call has these types, dispatch keys, dtypes, devices and ranks, and records its gradient."""
    free: list[Axes] = [[None] * t.ndim for t in inputs if t is not None]
    return _made(inputs, free, free, "grad_enabled()")


def _made(inputs: Sequence[Tensor | None], sizes: list[Axes], strides: list[Axes], recording: str) -> Guard:
    tensors = [t for t in inputs if t is not None]
    if tensor_guards is None:
        check = _spelled(tensors, sizes, strides)
    else:
        check = tensor_guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    tests = [f"t{i} is None" for i, t in enumerate(inputs) if t is None]
    if any(t.requires_grad for t in tensors):
        tests.append(recording)
    if not tests:
        return check
    present = ", ".join(f"t{i}" for i, t in enumerate(inputs) if t is not None)
    scope = {"check": check, "grad_enabled": torch.is_grad_enabled}
    return _function(len(inputs), [*tests, f"check({present})"], scope)


def _spelled(tensors: Sequence[Tensor], sizes: Sequence[Axes], strides: Sequence[Axes]) -> Guard:
    scope: dict[str, Any] = {"functorch": torch._C._functorch.peek_interpreter_stack}
    tests = ["functorch() is None"]
    for i, (t, size, stride) in enumerate(zip(tensors, sizes, strides, strict=True)):
        scope |= {f"type{i}": type(t), f"dtype{i}": t.dtype, f"device{i}": t.device}
        tests += [f"type(t{i}) is type{i} and t{i}.dtype is dtype{i} and t{i}.device == device{i}"]
        tests += [f"t{i}.requires_grad is {t.requires_grad} and not t{i}.is_neg()"]
        tests += [_same(f"t{i}.shape", size), _same(f"t{i}.stride()", stride)]
    return _function(len(tensors), tests, scope)


def _function(arity: int, tests: Sequence[str], scope: dict[str, Any]) -> Guard:
    made: Guard = eval(f"lambda {', '.join(f't{i}' for i in range(arity))}: {' and '.join(tests)}", scope)
    return made


def _same(numbers: str, wanted: Axes) -> str:
    if None not in wanted:
        return f"{numbers} == {tuple(wanted)}"
    known = [f"n[{i}] == {n}" for i, n in enumerate(wanted) if n is not None]
    return " and ".join([f"len(n := {numbers}) == {len(wanted)}", *known])
