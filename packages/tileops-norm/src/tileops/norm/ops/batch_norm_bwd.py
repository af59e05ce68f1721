"""BatchNormBwdOp: the gradients of BatchNormFwdOp in training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from attrs import define
from torch import Tensor

from tileops.core.op import Op


@define(frozen=True)
class BatchNormBwdOp(Op):
    """The gradients of ``BatchNormFwdOp`` in training by x, weight and bias; autograd calls it.

    The call takes ``dy`` and ``x``, ``[B, C, *L]`` of float32, float16 or bfloat16 with any strides, ``weight``,
    ``[C]`` of x's dtype or float32, or None, the forward's ``mean`` and ``rstd``, ``[C]`` of float32, and optionally
    its ``bias``, like the weight; only whether it is there and its dtype matter. It returns ``dx`` like ``x`` and laid
    out as it, or a tuple of that, ``dweight`` like the weight where that is given, and ``dbias`` like the bias where
    that is. All of it is computed in float32 and rounded once. Raises CheckError for any other call.

    >>> backward = BatchNormBwdOp()
    >>> x, one = torch.tensor([[1.0], [-1.0]]), torch.tensor([1.0])
    >>> backward(torch.tensor([[1.0], [0.0]]), x, one, 0 * one, one, one)
    (tensor([[0.],
            [0.]]), tensor([1.]), tensor([1.]))
    """

    kernels = ("batch_norm_bwd:BatchNormBwd",)
    buckets: ClassVar[Mapping[str, tuple[int, ...]]] = {"B": (1, 16, 32, 64, 256, 1024)}  # a channel's size too

    def __call__(
        self, dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, bias: Tensor | None = None
    ) -> Tensor | tuple[Tensor, ...]:
        return self.run(dy, x, weight, mean, rstd, bias)
