"""BatchNorm and its backward."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tileops.norm.reference.common import moments, wide_of
from tileops.norm.reference.group_norm import affine, blend, per_channel


def _channels(x: Tensor) -> Tensor:
    """``[B, C, *L]`` as one row for each channel, in the dtype of the arithmetic."""
    return x.to(wide_of(x)).transpose(0, 1).flatten(1)


def batch_norm(
    x: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    training: bool,
    momentum: float,
    eps: float,
    return_stats: bool,
    T: torch.dtype,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """``y = (x - mean) * rstd * weight + bias``, the statistics of each channel of ``x``, or the running ones.

    ``x`` is ``[B, C, *L]`` of any strides, the running statistics ``[C]`` float32, moved in place in training,
    ``weight`` and ``bias`` ``[C]`` of ``T`` or float32. Returns ``y``, shaped and laid out as ``x``, of dtype ``T``,
    and, with ``return_stats``, the ``mean`` and ``rstd`` that it was computed with, ``[C]`` float32.
    """
    if training and x.numel():
        rows, *statistics = moments(_channels(x))
        n = rows.shape[-1]
        mean, var = (m.squeeze(-1) for m in statistics)
        centred = rows.reshape(x.shape[1], x.shape[0], *x.shape[2:]).transpose(0, 1)
        if running_mean is not None and running_var is not None:
            blend(running_mean, mean, momentum)
            blend(running_var, var * (n / (n - 1)), momentum)
    else:
        if running_mean is not None and running_var is not None:
            mean, var = running_mean.to(wide_of(x), copy=True), running_var.to(wide_of(x))
        else:  # no channels, so no statistics either
            mean = var = x.new_empty(x.shape[1], dtype=wide_of(x))
        centred = x.to(wide_of(x)) - per_channel(mean, x)
    rstd = (var + eps).rsqrt()
    y = affine(centred * per_channel(rstd, x), x, weight, bias, T)
    return y, mean if return_stats else None, rstd if return_stats else None


def batch_norm_bwd(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    bias: Tensor | None = None,
    *,
    T: torch.dtype,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The gradients of ``batch_norm`` in training by x, weight and bias, from that of y and the saved statistics.

    With ``xhat = (x - mean) * rstd``: ``dbias`` and ``dweight`` are the sums of ``dy`` and ``dy * xhat`` over B and L,
    ``dx = (dy - dbias / n - xhat * dweight / n) * rstd * weight`` for n values a channel. ``dy`` and ``x`` are
    ``[B, C, *L]`` of any strides, ``weight``, ``mean`` and ``rstd`` ``[C]``. Returns ``dx``, shaped and laid out as
    ``x``, of dtype ``T``, and the gradients of those of ``weight`` and ``bias`` that are given, like them.
    """
    wide = wide_of(x)
    d, r = dy.to(wide), per_channel(rstd, x)
    xhat = (x.to(wide) - per_channel(mean, x)) * r
    dbias, dweight = _channels(d).sum(-1), _channels(d * xhat).sum(-1)
    n = math.prod(x.shape) // max(x.shape[1], 1)
    dx = (d - per_channel(dbias / n, x) - xhat * per_channel(dweight / n, x)) * r
    return affine(dx, x, weight, None, T), _like(dweight, weight), _like(dbias, bias)


def batch_norm_bwd_terms(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    bias: Tensor | None = None,
    *,
    T: torch.dtype,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The sums of the absolute terms of ``batch_norm_bwd``'s results: its tensors, in the dtype of its arithmetic."""
    wide = wide_of(x)
    d, r = dy.to(wide).abs(), per_channel(rstd, x)
    xhat = ((x.to(wide) - per_channel(mean, x)) * r).abs()
    dbias, dweight = _channels(d).sum(-1), _channels(d * xhat).sum(-1)
    n = math.prod(x.shape) // max(x.shape[1], 1)
    dx = (d + per_channel(dbias / n, x) + xhat * per_channel(dweight / n, x)) * r
    dx = dx if weight is None else dx * per_channel(weight, x).abs()
    return dx, None if weight is None else dweight, None if bias is None else dbias


def _like(gradient: Tensor, given: Tensor | None) -> Tensor | None:
    """As the gradient of what was given, if it was."""
    if given is None:
        return None
    return gradient if gradient.dtype == torch.float64 else gradient.to(given.dtype)
