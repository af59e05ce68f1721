"""RMSNorm of a sum with a residual, in 8-bit codes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from tileops.norm.reference.common import wide_of
from tileops.norm.reference.fused_add_rms_norm import add
from tileops.norm.reference.rms_norm import rms_norm

LEAST_SCALE = 2.0**-126  # the smallest normal float32, whose inverse is finite
BLOCK = 128
LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}


def fused_add_rms_norm_quant(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    scale_in: Tensor | None,
    *,
    quant: str,
    quant_dtype: torch.dtype,
    eps: float,
    scale_ub: float | None,
    T: torch.dtype,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """``q = y / scale`` in ``quant_dtype``, where ``y`` is ``rms_norm`` of ``x + residual``, rounded to ``T``.

    ``x`` and ``residual`` are ``[*B, N]`` of any strides, ``weight`` is ``[N]`` of ``T`` or float32, ``scale_in``, for
    ``per_tensor`` only, ``[1]`` float32. Returns ``q``, ``[*B, N]``; ``scale``, ``[*B, 1]`` for ``per_token`` or
    ``[*B, ceil(N / 128)]`` for ``block128``, float32; and, with a residual, ``residual_out``, ``[*B, N]`` of ``T``.
    """
    wide, N = wide_of(x), x.shape[-1]
    residual_out = None if residual is None else add(x, residual, T)
    rows = (x if residual_out is None else residual_out).to(wide)
    y, _ = rms_norm(rows, weight, normalized_shape=(N,), eps=eps, weight_offset=0.0, return_rstd=False, T=wide)
    if scale_in is not None:
        return _codes(y / scale_in.to(wide).clamp(min=LEAST_SCALE), quant_dtype), None, residual_out
    block = N if quant == "per_token" else BLOCK
    amax = F.pad(y.abs(), (0, -N % block)).unflatten(-1, (-1, block)).amax(-1)
    scale = (amax.clamp(max=scale_ub) if scale_ub else amax) / LARGEST[quant_dtype]
    scale = scale.clamp(min=LEAST_SCALE)
    return _codes(y / scale.repeat_interleave(block, -1)[..., :N], quant_dtype), scale, residual_out


def _codes(quotient: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype == torch.int8:
        return quotient.round().clamp(-128, 127).nan_to_num(0.0).to(dtype)
    return quotient.clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype)
