"""BatchNormFwdOp: normalization of each channel over a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from attrs import define
from torch import Tensor

from tileops.core.op import Op


@define(frozen=True)
class BatchNormFwdOp(Op):
    """``y = (x - mean) / sqrt(var + eps) * weight + bias``, the statistics of each channel over batch and positions.

    Args:
        training: take the statistics of ``x``; otherwise the running ones, which must then be given.
        momentum: how far the running statistics move towards those of ``x``.
        eps: added to the variance.
        return_stats: return ``mean`` and ``rstd`` too.

    The call takes ``x``, ``[B, C, *L]`` of float32, float16 or bfloat16 with any strides, and optionally
    ``running_mean`` and ``running_var`` together, ``[C]`` of float32, which training updates in place, the variance
    unbiased; ``weight`` and ``bias``, ``[C]`` of x's dtype or float32. It returns ``y`` like ``x`` and laid out as it
    or, with ``return_stats``, ``(y, mean, rstd)``, the latter ``[C]`` of float32. All of it is computed in float32 and
    rounded once. In training it has a gradient. Raises CheckError for any other call, such as training with a single
    value a channel.

    >>> norm = BatchNormFwdOp(training=True, eps=0.0)
    >>> norm(torch.tensor([[1.0, 4.0], [3.0, 8.0]]))
    tensor([[-1., -1.],
            [ 1.,  1.]])
    """

    kernels = ("batch_norm:BatchNorm",)
    buckets: ClassVar[Mapping[str, tuple[int, ...]]] = {"B": (1, 16, 32, 64, 256, 1024)}  # a channel's size too
    training: bool = False
    momentum: float = 0.1
    eps: float = 1e-5
    return_stats: bool = False

    def __call__(
        self,
        x: Tensor,
        running_mean: Tensor | None = None,
        running_var: Tensor | None = None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        return self.run(x, running_mean, running_var, weight, bias)
