"""FusedAddRMSNormFwdOp: a residual added, and RMSNorm of the sum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from attrs import define
from torch import Tensor

from tileops.core.op import Op


@define(frozen=True)
class FusedAddRMSNormFwdOp(Op):
    """``residual_out = x + residual`` and ``y = residual_out / sqrt(mean(residual_out**2) + eps) * weight``.

    Args:
        eps: added to the mean, which is taken over the last axis.
        weight_offset: added to the weight; 1.0 for Gemma, which stores ``w - 1``.
        return_rstd: return ``rstd`` too.

    The call takes ``x`` and ``residual``, ``[*B, N]`` of float32, float16 or bfloat16 with any strides, and ``weight``,
    ``[N]`` of x's dtype or float32. It returns ``(y, residual_out)`` like ``x``, new tensors both, and, with
    ``return_rstd``, ``rstd``, ``[*B]`` of float32. The sum is rounded to x's dtype before it is normalized; all else is
    computed in float32 and rounded once. Raises CheckError for any other call.

    >>> norm = FusedAddRMSNormFwdOp(eps=0.0)
    >>> norm(torch.tensor([[1.0, 3.0]]), torch.tensor([[1.0, -1.0]]), torch.ones(2))
    (tensor([[1., 1.]]), tensor([[2., 2.]]))
    """

    kernels = ("fused_add_rms_norm:FusedAddRMSNormRows",)
    buckets: ClassVar[Mapping[str, tuple[int, ...]]] = {"B": (1, 64, 2**31 - 1)}  # few rows, and all others
    eps: float = 1e-6
    weight_offset: float = 0.0
    return_rstd: bool = False

    def __call__(self, x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        outputs: tuple[Tensor, ...] = self.run(x, residual, weight)
        return outputs
