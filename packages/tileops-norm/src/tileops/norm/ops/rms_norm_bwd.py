"""RMSNormBwdOp: the gradients of RMSNormFwdOp."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from attrs import define
from torch import Tensor

from tileops.core.op import Op


@define(frozen=True)
class RMSNormBwdOp(Op):
    """The gradients of ``RMSNormFwdOp`` by x and weight; autograd calls it.

    Args:
        normalized_shape: sizes of the axes that the forward normalized over, or one size.
        weight_offset: what the forward added to the weight. Needs a weight.

    The call takes ``dy`` and ``x``, ``[*B, *normalized_shape]`` of float32, float16 or bfloat16 with any strides,
    ``weight``, ``normalized_shape`` of x's dtype or float32, or None, and the forward's ``rstd``, ``[*B]`` of float32.
    It returns ``dx`` like ``x`` or, with a weight, ``(dx, dweight)``, ``dweight`` like the weight. All of it is
    computed in float32 and rounded once. Raises CheckError for any other call.

    >>> backward = RMSNormBwdOp(2)
    >>> backward(torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 1.0]]), None, torch.tensor([1.0]))
    tensor([[ 0.5000, -0.5000]])
    """

    kernels = ("rms_norm_bwd:RMSNormBwdRows", "backward_stream:RMSNormBwdStream")
    buckets: ClassVar[Mapping[str, tuple[int, ...]]] = {"B": (16,)}  # scratch memory is for the largest
    normalized_shape: tuple[int, ...]
    weight_offset: float = 0.0

    def __call__(self, dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        return self.run(dy, x, weight, rstd)
