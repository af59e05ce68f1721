"""LayerNorm and its backward."""

from __future__ import annotations

import torch
from torch import Tensor

from tileops.norm.reference.common import mean as average
from tileops.norm.reference.common import moments, wide_of


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    normalized_shape: tuple[int, ...],
    eps: float,
    return_stats: bool,
    T: torch.dtype,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """``y = (x - mean) * rstd * weight + bias``, ``rstd = 1 / sqrt(mean((x - mean)**2) + eps)``; means over last axes.

    ``x`` is ``[*B, *normalized_shape]`` of any strides, ``weight`` and ``bias`` ``[*normalized_shape]`` of ``T`` or
    float32. Returns ``y``, shaped as ``x``, of dtype ``T``, and, with ``return_stats``, ``mean`` and ``rstd``, ``[*B]``
    float32.
    """
    wide = wide_of(x)
    rows, mean, var = moments(x.to(wide).flatten(-len(normalized_shape)).contiguous())
    rstd = (var + eps).rsqrt()
    y = rows * rstd
    if weight is not None:
        y = y * weight.to(wide).flatten()
    if bias is not None:
        y = y + bias.to(wide).flatten()
    y = y.reshape(x.shape)
    y = y if wide == torch.float64 else y.to(T)
    return (y, mean.squeeze(-1), rstd.squeeze(-1)) if return_stats else (y, None, None)


def layer_norm_bwd(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    bias: Tensor | None = None,
    *,
    normalized_shape: tuple[int, ...],
    T: torch.dtype,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The gradients of ``layer_norm`` by x, weight and bias, from that of y, ``dy``, and the forward's statistics.

    With ``xhat = (x - mean) * rstd`` and ``g = dy * weight``: ``dx = (g - avg(g) - xhat * avg(g * xhat)) * rstd``,
    where avg is the mean over a row; ``dweight`` is the sum of ``dy * xhat`` over all rows, ``dbias`` that of ``dy``.
    ``dy`` and ``x`` are ``[*B, *normalized_shape]`` of any strides, ``mean`` and ``rstd`` ``[*B]``. Returns ``dx``,
    shaped as ``x``, of dtype ``T``, and the gradients of those of ``weight`` and ``bias`` that are given, like them.
    """
    wide = wide_of(x)
    d, g, xhat, r = _factors(dy, x, weight, mean, rstd, len(normalized_shape))
    dx = ((g - average(g) - xhat * average(g * xhat)) * r).reshape(x.shape)
    return dx if wide == torch.float64 else dx.to(T), _over_rows(d * xhat, weight), _over_rows(d, bias)


def layer_norm_bwd_terms(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    bias: Tensor | None = None,
    *,
    normalized_shape: tuple[int, ...],
    T: torch.dtype,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The sums of the absolute terms of ``layer_norm_bwd``'s results: its tensors, in the dtype of its arithmetic."""
    d, g, xhat, r = (t.abs() for t in _factors(dy, x, weight, mean, rstd, len(normalized_shape)))
    dx = ((g + average(g) + xhat * average(g * xhat)) * r).reshape(x.shape)
    return dx, _over_rows(d * xhat, weight), _over_rows(d, bias)


def _factors(
    dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, axes: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``dy``, g and xhat as rows, and rstd to go with them, in the dtype of the arithmetic."""
    wide = wide_of(x)
    r = rstd.to(wide).unsqueeze(-1)
    xhat = (x.to(wide).flatten(-axes).contiguous() - mean.to(wide).unsqueeze(-1)) * r
    d = dy.to(wide).flatten(-axes).contiguous()
    return d, d if weight is None else d * weight.to(wide).flatten(), xhat, r


def _over_rows(terms: Tensor, like: Tensor | None) -> Tensor | None:
    """The sum over all rows, as the gradient of ``like``."""
    if like is None:
        return None
    total = terms.reshape(-1, terms.shape[-1]).sum(0).reshape(like.shape)
    return total if terms.dtype == torch.float64 else total.to(like.dtype)
