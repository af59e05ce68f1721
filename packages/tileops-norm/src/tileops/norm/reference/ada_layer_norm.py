"""Layer normalization that is scaled, shifted and gated by tensors of x's leading axes."""

from __future__ import annotations

import torch
from torch import Tensor

from tileops.norm.reference.common import moments, wide_of


def ada_layer_norm(x: Tensor, scale: Tensor, shift: Tensor, *, eps: float, T: torch.dtype) -> Tensor:
    """``y = (x - mean) * rstd * (1 + scale) + shift``, ``rstd = 1 / sqrt(mean((x - mean)**2) + eps)``.

    ``x`` is ``[*B, N]`` of any strides, ``scale`` and ``shift`` are ``[*S, N]`` and broadcast to it; the means are over
    N. Returns ``y``, shaped as ``x``, of dtype ``T``.
    """
    return _rounded(_modulated(x, scale, shift, eps), T)


def ada_layer_norm_zero(x: Tensor, scale: Tensor, shift: Tensor, gate: Tensor, *, eps: float, T: torch.dtype) -> Tensor:
    """``ada_layer_norm`` times ``gate``, ``[*S, N]``, before anything is rounded."""
    return _rounded(_modulated(x, scale, shift, eps) * gate.to(wide_of(x)), T)


def _modulated(x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
    wide = wide_of(x)
    rows, _, var = moments(x.to(wide))
    return rows * (var + eps).rsqrt() * (1 + scale.to(wide)) + shift.to(wide)


def _rounded(y: Tensor, T: torch.dtype) -> Tensor:
    return y.contiguous() if y.dtype == torch.float64 else y.to(T).contiguous()
