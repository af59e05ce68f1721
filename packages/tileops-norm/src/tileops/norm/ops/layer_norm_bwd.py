"""LayerNormBwdOp: the gradients of LayerNormFwdOp."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from attrs import define
from torch import Tensor

from tileops.core.op import Op


@define(frozen=True)
class LayerNormBwdOp(Op):
    """The gradients of ``LayerNormFwdOp`` by x, weight and bias; autograd calls it.

    Args:
        normalized_shape: sizes of the axes that the forward normalized over, or one size.

    The call takes ``dy`` and ``x``, ``[*B, *normalized_shape]`` of float32, float16 or bfloat16 with any strides,
    ``weight``, ``normalized_shape`` of x's dtype or float32, or None, the forward's ``mean`` and ``rstd``, ``[*B]`` of
    float32, and optionally its ``bias``, like the weight; only whether it is there and its dtype matter. It returns
    ``dx`` like ``x``, or a tuple of that, ``dweight`` like the weight where that is given, and ``dbias`` like the bias
    where that is. All of it is computed in float32 and rounded once. Raises CheckError for any other call.

    >>> backward = LayerNormBwdOp(2)
    >>> backward(torch.tensor([[1.0, 0.0]]), torch.tensor([[3.0, 5.0]]), None, torch.tensor([4.0]), torch.tensor([0.5]))
    tensor([[ 0.1875, -0.1875]])
    """

    kernels = ("layer_norm_bwd:LayerNormBwdRows", "backward_stream:LayerNormBwdStream")
    buckets: ClassVar[Mapping[str, tuple[int, ...]]] = {"B": (16,)}  # scratch memory is for the largest
    normalized_shape: tuple[int, ...]

    def __call__(
        self, dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, bias: Tensor | None = None
    ) -> Tensor | tuple[Tensor, ...]:
        return self.run(dy, x, weight, mean, rstd, bias)
