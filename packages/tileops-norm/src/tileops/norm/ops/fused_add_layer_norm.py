"""FusedAddLayerNormFwdOp: a residual added, and LayerNorm of the sum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from attrs import define
from torch import Tensor

from tileops.core.op import Op


@define(frozen=True)
class FusedAddLayerNormFwdOp(Op):
    """``residual_out = x + residual`` and ``y = (residual_out - mean) * rstd * weight + bias``.

    Args:
        eps: added to the variance, which is taken over the last axis.
        return_stats: return ``mean`` and ``rstd`` too.

    The call takes ``x`` and ``residual``, ``[*B, N]`` of float32, float16 or bfloat16 with any strides, and ``weight``
    and ``bias``, ``[N]`` of x's dtype or float32. It returns ``(y, residual_out)`` like ``x``, new tensors both, and,
    with ``return_stats``, ``mean`` and ``rstd``, ``[*B]`` of float32. The sum is rounded to x's dtype before it is
    normalized; all else is computed in float32 and rounded once. Raises CheckError for any other call.

    >>> norm = FusedAddLayerNormFwdOp(eps=0.0)
    >>> norm(torch.tensor([[1.0, 3.0]]), torch.tensor([[1.0, 3.0]]), torch.ones(2), torch.tensor([0.0, 1.0]))
    (tensor([[-1.,  2.]]), tensor([[2., 6.]]))
    """

    kernels = ("fused_add_layer_norm:FusedAddLayerNormRows",)
    buckets: ClassVar[Mapping[str, tuple[int, ...]]] = {"B": (1, 64, 2**31 - 1)}  # few rows, and all others
    eps: float = 1e-5
    return_stats: bool = False

    def __call__(self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        outputs: tuple[Tensor, ...] = self.run(x, residual, weight, bias)
        return outputs
