"""RMSNormFwdOp: root-mean-square normalization."""

from __future__ import annotations

from attrs import define
from torch import Tensor

from tileops.core.op import Op


@define(frozen=True)
class RMSNormFwdOp(Op):
    """``y = x / sqrt(mean(x**2) + eps) * (weight + weight_offset)``, the mean taken over the trailing axes.

    Args:
        normalized_shape: sizes of the axes to normalize over, or one size.
        eps: added to the mean; None means 2**-23, whatever the dtype.
        weight_offset: added to the weight; 1.0 for Gemma, which stores ``w - 1``. Needs a weight.
        return_rstd: return ``rstd`` too.

    The call takes ``x``, ``[*B, *normalized_shape]`` of float32, float16 or bfloat16 with any strides, and optionally
    ``weight``, ``normalized_shape`` of x's dtype or float32. It returns ``y`` like ``x`` or, with ``return_rstd``,
    ``(y, rstd)``, where ``rstd`` is ``[*B]`` of float32. All of it is computed in float32 and rounded once. Raises
    CheckError for any other call.

    >>> norm = RMSNormFwdOp(4)
    >>> norm(torch.tensor([[2.0, 2.0, 2.0, 2.0]]))
    tensor([[1.0000, 1.0000, 1.0000, 1.0000]])
    """

    kernels = ("rms_norm:RMSNormRows", "rms_norm:RMSNormStream")
    normalized_shape: tuple[int, ...]
    eps: float | None = None
    weight_offset: float = 0.0
    return_rstd: bool = False

    def __call__(self, x: Tensor, weight: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        return self.run(x, weight)
