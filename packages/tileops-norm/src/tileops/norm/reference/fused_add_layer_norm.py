"""LayerNorm of a sum with a residual."""

from __future__ import annotations

import torch
from torch import Tensor

from tileops.norm.reference.common import moments, wide_of
from tileops.norm.reference.fused_add_rms_norm import add


def fused_add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    eps: float,
    return_stats: bool,
    T: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """``residual_out = x + residual``, rounded to ``T``, and ``y = (residual_out - mean) * rstd * weight + bias``.

    ``x`` and ``residual`` are ``[*B, N]`` of any strides, ``weight`` and ``bias`` ``[N]`` of ``T`` or float32. Returns
    ``y`` and ``residual_out``, ``[*B, N]`` of ``T``, and, with ``return_stats``, ``mean`` and ``rstd``, ``[*B]``
    float32.
    """
    residual_out = add(x, residual, T)
    wide = wide_of(x)
    rows, mean, var = moments(residual_out.to(wide))
    rstd = (var + eps).rsqrt()
    y = rows * rstd * weight.to(wide) + bias.to(wide)
    y = y if wide == torch.float64 else y.to(T)
    return y, residual_out, *((mean.squeeze(-1), rstd.squeeze(-1)) if return_stats else (None, None))
