"""InstanceNormFwdOp: normalization of each channel of an instance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from attrs import define
from torch import Tensor

from tileops.core.op import Op


@define(frozen=True)
class InstanceNormFwdOp(Op):
    """``y = (x - mean) / sqrt(var + eps) * weight + bias``, the statistics of each channel of an instance.

    Args:
        use_input_stats: take the statistics of ``x``; otherwise the running ones, which must then be given.
        momentum: how far the running statistics move towards those of ``x``, averaged over the batch.
        eps: added to the variance.

    The call takes ``x``, ``[B, C, *L]`` of float32, float16 or bfloat16 with any strides, and optionally
    ``running_mean`` and ``running_var`` together, ``[C]`` of float32, which ``use_input_stats`` updates in place, the
    variance unbiased; ``weight`` and ``bias``, ``[C]`` of x's dtype or float32. It returns ``y`` like ``x`` and laid
    out as it. All of it is computed in float32 and rounded once. Raises CheckError for any other call, such as one with
    a single position to take statistics of.

    >>> norm = InstanceNormFwdOp(eps=0.0)
    >>> norm(torch.tensor([[[1.0, 3.0], [4.0, 8.0]]]))
    tensor([[[-1.,  1.],
             [-1.,  1.]]])
    """

    kernels = ("group_norm:GroupNormHeld", "group_norm:GroupNormWalk", "batch_norm:BatchNorm")
    buckets: ClassVar[Mapping[str, tuple[int, ...]]] = {
        "B": (1, 16, 64, 256, 1024)
    }  # scratch memory is for the largest
    use_input_stats: bool = True
    momentum: float = 0.1
    eps: float = 1e-5

    def __call__(
        self,
        x: Tensor,
        running_mean: Tensor | None = None,
        running_var: Tensor | None = None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        return self.run(x, running_mean, running_var, weight, bias)
