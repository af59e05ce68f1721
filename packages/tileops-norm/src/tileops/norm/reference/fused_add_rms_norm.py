"""RMSNorm of a sum with a residual."""

from __future__ import annotations

import torch
from torch import Tensor

from tileops.norm.reference.common import wide_of
from tileops.norm.reference.rms_norm import rms_norm


def add(x: Tensor, residual: Tensor, T: torch.dtype) -> Tensor:
    """``x + residual`` rounded to ``T``; of float64 operands in float64 again."""
    wide = wide_of(x)
    total = (x.to(wide) + residual.to(wide)).to(T).contiguous()
    return total.to(wide) if wide == torch.float64 else total


def fused_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    *,
    eps: float,
    weight_offset: float,
    return_rstd: bool,
    T: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """``residual_out = x + residual``, rounded to ``T``, and ``rms_norm`` of that over its last axis.

    ``x`` and ``residual`` are ``[*B, N]`` of any strides, ``weight`` is ``[N]`` of ``T`` or float32. Returns ``y`` and
    ``residual_out``, ``[*B, N]`` of ``T``, and, with ``return_rstd``, ``rstd``, ``[*B]`` float32.
    """
    residual_out = add(x, residual, T)
    y, rstd = rms_norm(
        residual_out,
        weight,
        normalized_shape=tuple(x.shape[-1:]),
        eps=eps,
        weight_offset=weight_offset,
        return_rstd=return_rstd,
        T=T,
    )
    return y, residual_out, rstd
