"""GroupNorm and InstanceNorm."""

from __future__ import annotations

import torch
from torch import Tensor

from tileops.norm.reference.common import moments, wide_of


def per_channel(values: Tensor, x: Tensor) -> Tensor:
    """``[C]`` as a tensor that broadcasts to ``x``, ``[B, C, *L]``, in the dtype of the arithmetic."""
    return values.to(wide_of(x)).reshape(-1, *[1] * (x.dim() - 2))


def affine(xhat: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, T: torch.dtype) -> Tensor:
    """``xhat * weight + bias``, both ``[C]``, rounded once to ``T`` and laid out like ``x``."""
    y = xhat.reshape(x.shape)
    if weight is not None:
        y = y * per_channel(weight, x)
    if bias is not None:
        y = y + per_channel(bias, x)
    return torch.empty_like(x, dtype=torch.float64 if x.dtype == torch.float64 else T).copy_(y)


def blend(running: Tensor, new: Tensor, momentum: float) -> None:
    """Move a running statistic towards the new one, in place."""
    running.copy_((1 - momentum) * running + momentum * new)


def group_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    num_groups: int,
    eps: float,
    T: torch.dtype,
) -> Tensor:
    """``y = (x - mean) * rstd * weight + bias``, the statistics over each group of channels and all positions.

    ``x`` is ``[B, C, *L]`` of any strides, ``weight`` and ``bias`` ``[C]`` of ``T`` or float32. Returns ``y``, shaped
    and laid out as ``x``, of dtype ``T``.
    """
    if x.numel() == 0:
        return torch.empty_like(x)
    rows, _, var = moments(x.to(wide_of(x)).reshape(x.shape[0], num_groups, -1))
    return affine(rows * (var + eps).rsqrt(), x, weight, bias, T)


def instance_norm(
    x: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    T: torch.dtype,
) -> Tensor:
    """``y = (x - mean) * rstd * weight + bias``, the statistics of each channel of an instance, or the running ones.

    ``x`` is ``[B, C, *L]`` of any strides, the running statistics ``[C]`` float32, moved in place where
    ``use_input_stats``, ``weight`` and ``bias`` ``[C]`` of ``T`` or float32. Returns ``y``, shaped and laid out as
    ``x``, of dtype ``T``.
    """
    if x.numel() == 0:
        return torch.empty_like(x)
    rows = x.to(wide_of(x)).reshape(*x.shape[:2], -1)
    if use_input_stats:
        rows, center, var = moments(rows)
        if running_mean is not None and running_var is not None:
            n = rows.shape[-1]
            blend(running_mean, center.mean(0).squeeze(-1), momentum)
            blend(running_var, (var * (n / (n - 1))).mean(0).squeeze(-1), momentum)
    else:
        assert running_mean is not None
        assert running_var is not None
        rows, var = rows - per_channel(running_mean, rows), per_channel(running_var, rows)
    return affine(rows * (var + eps).rsqrt(), x, weight, bias, T)
