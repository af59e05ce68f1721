"""GroupNormFwdOp: normalization over groups of channels."""

from __future__ import annotations

from attrs import define
from torch import Tensor

from tileops.core.op import Op


@define(frozen=True)
class GroupNormFwdOp(Op):
    """``y = (x - mean) / sqrt(var + eps) * weight + bias``, the statistics over groups of channels and all positions.

    Args:
        num_groups: into how many groups of adjacent channels an instance is divided.
        eps: added to the variance.

    The call takes ``x``, ``[B, C, *L]`` of float32, float16 or bfloat16 with any strides, and optionally ``weight`` and
    ``bias``, ``[C]`` of x's dtype or float32. It returns ``y`` like ``x`` and laid out as it: channels-last stays so.
    All of it is computed in float32 and rounded once. Raises CheckError for any other call.

    >>> norm = GroupNormFwdOp(1, eps=0.0)
    >>> norm(torch.tensor([[1.0, 3.0]]))
    tensor([[-1.,  1.]])
    """

    kernels = ("group_norm:GroupNormHeld", "group_norm:GroupNormWalk")
    num_groups: int
    eps: float = 1e-5

    def __call__(self, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        return self.run(x, weight, bias)
