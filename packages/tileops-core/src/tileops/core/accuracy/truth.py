"""What a call should give, from the entry's own functions: the oracle, the yardstick and the absolute product.

Each runs on the tensors' device, under ``no_grad`` and without reduced precision. A reference whose temporaries outgrow
memory (attention scores in float64) chunks over heads or rows itself: only it knows which of them are independent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tileops.core.check.call import Call
from tileops.core.dtypes import torch_dtype
from tileops.core.reference import arguments, without_autocast
from tileops.core.spec.expr import compile_expr
from tileops.core.spec.model import FuncRef

Tensors = Mapping[str, Tensor | None]

_ON_CPU = {"musa"}  # float64 is incomplete there, and some float32 operators were seen wrong

_REDUCED = (
    (torch.backends.cuda.matmul, "fp32_precision", "ieee"),
    (torch.backends.cudnn.conv, "fp32_precision", "ieee"),
    (torch.backends.mkldnn.matmul, "fp32_precision", "ieee"),
    (torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", False),
    (torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False),
    (torch.backends.cuda.matmul, "allow_fp16_accumulation", False),
)


@contextmanager
def full_precision() -> Iterator[None]:
    """No TF32, no reduced-precision reduction, no float16 accumulation; in the whole process, other threads too."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in _REDUCED]
    try:
        for owner, name, wanted in _REDUCED:
            setattr(owner, name, wanted)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def oracle(call: Call, inputs: Tensors) -> Tensors:
    """The reference on float64 copies of the floating inputs: outputs in order, then the inputs that the call mutates.

    ``inputs`` holds the tensors as they were before the call; they stay untouched. Absent tensors are None. Raises
    ValueError where the entry has no reference or the reference returns something else than the entry declares.
    """
    return _run(call, call.entry.reference, inputs, lambda x: x.to(torch.float64))


def yardstick(call: Call, inputs: Tensors) -> Tensors:
    """The entry's ``model`` on the given inputs, else its reference on float32 copies; rounded to the call's dtypes."""
    if call.entry.model:
        values = _run(call, call.entry.model, inputs, lambda x: x)
    else:
        values = _run(call, call.entry.reference, inputs, lambda x: x.to(torch.float32))
    metas = {**call.inputs, **call.outputs}
    return {n: None if x is None or (m := metas[n]) is None else x.to(torch_dtype(m.dtype)) for n, x in values.items()}


def absolute(call: Call, inputs: Tensors) -> Tensors:
    """For a contraction the sum of ``|a * b|``: the entry's ``absolute``, else its reference, on absolute values.

    The values are float64 copies of the floating inputs, for ``absolute`` with their signs. Where the sum is no number
    it is 0, and allows nothing.
    """
    if call.entry.absolute:
        values = _run(call, call.entry.absolute, inputs, lambda x: x.to(torch.float64))
    else:
        values = _run(call, call.entry.reference, inputs, lambda x: x.to(torch.float64).abs())
    return {name: None if x is None else x.to(torch.float64).abs().nan_to_num(0, 0, 0) for name, x in values.items()}


def collect(call: Call, returned: Any, inputs: Tensors) -> Tensors:
    """Name what an operator returned, and add the inputs that it mutates as they are after the call.

    ``returned`` is None, a tensor or a sequence in output order, with None for absent outputs or without them. Raises
    ValueError where their number fits neither.
    """
    values = () if returned is None else (returned,) if isinstance(returned, Tensor) else tuple(returned)
    present = [name for name, meta in call.outputs.items() if meta is not None]
    slots = present if len(values) == len(present) else list(call.outputs)
    if len(values) != len(slots):
        raise ValueError(f"{call.entry.name}: got {len(values)} outputs, expected {', '.join(present) or 'none'}")
    named = dict.fromkeys(call.outputs) | dict(zip(slots, values, strict=True))
    return named | {name: inputs.get(name) for name in mutated(call)}


def mutated(call: Call) -> tuple[str, ...]:
    """The present inputs that this call writes to."""
    decls = call.entry.signature.inputs
    return tuple(
        name
        for name, meta in call.inputs.items()
        if meta is not None and (when := decls[name].mutated) is not None and compile_expr(when.expr)(call.env)
    )


def _run(call: Call, function: FuncRef | None, inputs: Tensors, convert: Callable[[Tensor], Tensor]) -> Tensors:
    if function is None:
        raise ValueError(f"{call.entry.name} has no reference")
    written = mutated(call)
    given: dict[str, Tensor | None] = {}
    for name in call.inputs:
        x = inputs.get(name)
        if x is not None:
            x = x.detach().cpu() if x.device.type in _ON_CPU else x.detach()
            x = convert(x) if x.is_floating_point() else x
            x = x.clone() if name in written else x
        given[name] = x
    device = next((x.device.type for x in given.values() if x is not None), "cpu")
    with torch.no_grad(), without_autocast(device), full_precision():
        returned = function.load()(**given, **arguments(call))
    values = collect(call, returned, given)
    for name, meta in call.outputs.items():
        value = values[name]
        got, declared = None if value is None else tuple(value.shape), None if meta is None else meta.shape
        if got != declared:
            raise ValueError(f"{function.target}: {name} has shape {got}, {call.entry.name} declares {declared}")
    return values
