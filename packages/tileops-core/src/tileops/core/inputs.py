"""Tensors for a call: fresh normal values, and content that its metadata inputs admit."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from tileops.core.check import Call, TensorMeta, contiguous_strides
from tileops.core.dtypes import torch_dtype
from tileops.core.forward import forward_outputs
from tileops.core.spec import TensorDecl
from tileops.core.spec.expr import compile_expr
from tileops.core.spec.predicates import PREDICATES


def make_inputs(call: Call, device: torch.device | str = "cpu", seed: int = 0) -> dict[str, Tensor | None]:
    """A tensor for each present input of a call, the same for equal calls, seeds and devices; absent ones are None.

    Floating values are normal with deviation 1, float8 cast from them; those that must be positive lie around 1.
    Integers take every 8-bit code, booleans are fair coins. Metadata holds the call's ``content``, or values that its
    ``requires`` admits. What a forward gives its backward is computed by its reference; raises TileOpsError where no
    operator names this one as its backward. Strides are the call's.
    """
    generator = torch.Generator(device).manual_seed(seed)
    rng = random.Random(seed)
    scope = dict(call.env)  # content joins it when it is made: a later tensor's may refer to it
    tensors: dict[str, Tensor | None] = {}
    for name, meta in call.inputs.items():
        if meta is None:
            tensors[name] = None
            continue
        decl = call.entry.signature.inputs[name]
        content = _content(call, decl, meta, rng, scope)
        positive = any(p is not None and p.name == "positive" for p in (decl.values, decl.requires))
        tensors[name] = _tensor(meta, generator, positive) if content is None else _holding(content, meta, device)
    for name, value in forward_outputs(call, tensors).items():
        made = tensors[name]
        assert made is not None
        made.copy_(value)
    return tensors


def _content(call: Call, decl: TensorDecl, meta: TensorMeta, rng: random.Random, scope: dict[str, Any]) -> Any:
    """Host values of a metadata tensor; None for any other."""
    if decl.name in (call.content or {}):
        return scope[decl.name]
    rule = decl.values or decl.requires
    if rule is None or rule.name in ("positive", "forward"):
        return None
    scope[decl.name] = PREDICATES[rule.name].make(rng, meta.shape, *(compile_expr(a)(scope) for a in rule.args))
    return scope[decl.name]


def _holding(content: Any, meta: TensorMeta, device: torch.device | str) -> Tensor:
    dtype = torch_dtype(meta.dtype)
    tensor = torch.empty_strided(meta.shape, meta.strides, dtype=dtype, device=device)
    own = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in meta.strides)  # an expanded axis repeats it
    tensor[own] = torch.tensor(content, dtype=dtype).reshape(meta.shape)[own].to(device)
    return tensor


def _tensor(meta: TensorMeta, generator: torch.Generator, positive: bool) -> Tensor:
    dtype = torch_dtype(meta.dtype)
    if meta.strides == contiguous_strides(meta.shape):
        return _values(meta.shape, dtype, generator, positive)
    # A view of a buffer with values all over: gaps between rows hold some too, an expanded axis repeats its own.
    last = sum((n - 1) * step for n, step in zip(meta.shape, meta.strides, strict=True))
    span = last + 1 if meta.numel else 0
    return _values((span,), dtype, generator, positive).as_strided(meta.shape, meta.strides)


def _values(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, positive: bool) -> Tensor:
    device = generator.device
    if not dtype.is_floating_point:
        low, high = {torch.bool: (0, 2), torch.uint8: (0, 256)}.get(dtype, (-128, 128))
        return torch.randint(low, high, shape, dtype=dtype, device=device, generator=generator)
    wide = torch.float32 if dtype.itemsize == 1 else dtype
    normal = torch.randn(shape, dtype=wide, device=device, generator=generator)
    return ((normal / 4).exp() if positive else normal).to(dtype)
