"""LayerNormFwdOp: layer normalization."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from attrs import define
from torch import Tensor

from tileops.core.op import Op


@define(frozen=True)
class LayerNormFwdOp(Op):
    """``y = (x - mean) / sqrt(mean((x - mean)**2) + eps) * weight + bias``, the means taken over the trailing axes.

    Args:
        normalized_shape: sizes of the axes to normalize over, or one size.
        eps: added to the variance.
        return_stats: return ``mean`` and ``rstd`` too.

    The call takes ``x``, ``[*B, *normalized_shape]`` of float32, float16 or bfloat16 with any strides, and optionally
    ``weight`` and ``bias``, each ``normalized_shape`` of x's dtype or float32. It returns ``y`` like ``x`` or, with
    ``return_stats``, ``(y, mean, rstd)``, the last two ``[*B]`` of float32. All of it is computed in float32 and
    rounded once. Raises CheckError for any other call.

    >>> norm = LayerNormFwdOp(4)
    >>> norm(torch.tensor([[1.0, 1.0, 3.0, 3.0]]), None, torch.ones(4))
    tensor([[5.0068e-06, 5.0068e-06, 2.0000e+00, 2.0000e+00]])
    """

    kernels = ("layer_norm:LayerNormRows", "layer_norm:LayerNormStream")
    buckets: ClassVar[Mapping[str, tuple[int, ...]]] = {"B": (1, 64, 2**31 - 1)}  # few rows, and all others
    normalized_shape: tuple[int, ...]
    eps: float = 1e-5
    return_stats: bool = False

    def __call__(
        self, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        return self.run(x, weight, bias)
