"""RMSNorm with a gate."""

from __future__ import annotations

import torch
from torch import Tensor

from tileops.norm.reference.common import mean, wide_of


def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, *, eps: float, norm_before_gate: bool, T: torch.dtype
) -> Tensor:
    """``y = norm(x) * silu(gate)``, or ``norm(x * silu(gate))`` where ``norm_before_gate`` is false.

    ``norm(z) = z / sqrt(mean(z**2) + eps) * weight``, the mean over N. ``x`` and ``gate`` are ``[*B, N]`` of any
    strides, ``weight`` ``[N]`` of ``T`` or float32. Returns ``y``, shaped as ``x``, of dtype ``T``.
    """
    wide = wide_of(x)
    z, g = x.to(wide), gate.to(wide).contiguous()
    gated = g / (1 + (-g).exp())  # torch's silu of the same value differs in its last bit from place to place
    if not norm_before_gate:
        z = z * gated
    y = z * (mean(z.square()) + eps).rsqrt() * weight.to(wide)
    if norm_before_gate:
        y = y * gated
    return y.contiguous() if wide == torch.float64 else y.to(T).contiguous()
