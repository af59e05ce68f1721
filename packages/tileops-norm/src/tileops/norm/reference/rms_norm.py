"""RMSNorm and its backward."""

from __future__ import annotations

import torch
from torch import Tensor

from tileops.norm.reference.common import mean, wide_of

DEFAULT_EPS = 2.0**-23  # float32's epsilon, for every dtype


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    normalized_shape: tuple[int, ...],
    eps: float | None,
    weight_offset: float,
    return_rstd: bool,
    T: torch.dtype,
) -> tuple[Tensor, Tensor | None]:
    """``y = x * rstd * (weight + weight_offset)``, ``rstd = 1 / sqrt(mean(x**2) + eps)``; the mean over the last axes.

    ``x`` is ``[*B, *normalized_shape]`` of any strides, ``weight`` ``[*normalized_shape]`` of ``T`` or float32.
    Returns ``y``, shaped as ``x``, of dtype ``T``, and, with ``return_rstd``, ``rstd``, ``[*B]`` float32.
    """
    wide = wide_of(x)
    rows = x.to(wide).flatten(-len(normalized_shape))
    rstd = (mean(rows.square()) + (DEFAULT_EPS if eps is None else eps)).rsqrt()
    y = rows * rstd
    if weight is not None:
        y = y * (weight.to(wide).flatten() + weight_offset)
    y = y.reshape(x.shape).contiguous()
    return y if wide == torch.float64 else y.to(T), rstd.squeeze(-1) if return_rstd else None


def rms_norm_bwd(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    *,
    normalized_shape: tuple[int, ...],
    weight_offset: float,
    T: torch.dtype,
) -> tuple[Tensor, Tensor | None]:
    """The gradients of ``rms_norm`` by x and weight, from the gradient ``dy`` of y and the forward's ``rstd``.

    With ``xhat = x * rstd`` and ``g = dy * (weight + weight_offset)``: ``dx = (g - xhat * mean(g * xhat)) * rstd`` and
    ``dweight`` is the sum of ``dy * xhat`` over all rows. ``dy`` and ``x`` are ``[*B, *normalized_shape]`` of any
    strides, ``rstd`` ``[*B]``. Returns ``dx``, shaped as ``x``, of dtype ``T``, and, with a weight, its ``dweight``.
    """
    wide = wide_of(x)
    axes = len(normalized_shape)
    r = rstd.to(wide).unsqueeze(-1)
    xhat = x.to(wide).flatten(-axes).contiguous() * r
    g = d = dy.to(wide).flatten(-axes).contiguous()
    if weight is not None:
        g = d * (weight.to(wide).flatten() + weight_offset)
    dx = ((g - xhat * mean(g * xhat)) * r).reshape(x.shape).contiguous()
    dx = dx if wide == torch.float64 else dx.to(T)
    if weight is None:
        return dx, None
    dweight = (d * xhat).reshape(-1, xhat.shape[-1]).sum(0).reshape(weight.shape)
    return dx, dweight if wide == torch.float64 else dweight.to(weight.dtype)
