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
    ``[C]`` of x's dtype or float32, or None, and the forward's ``mean`` and ``rstd``, ``[C]`` of float32. It returns
    ``(dx, dweight, dbias)``, ``dx`` like ``x`` and laid out as it, the others of the weight's dtype, or float32 where
    there is none. All of it is computed in float32 and rounded once. Raises CheckError for any other call.

    >>> backward = BatchNormBwdOp()
    >>> x, one = torch.tensor([[1.0], [-1.0]]), torch.tensor([1.0])
    >>> backward(torch.tensor([[1.0], [0.0]]), x, None, 0 * one, one)
    (tensor([[0.],
            [0.]]), tensor([1.]), tensor([1.]))
    """

    kernels = ("batch_norm_bwd:BatchNormBwd",)
    buckets: ClassVar[Mapping[str, tuple[int, ...]]] = {"B": (1, 16, 64, 256, 1024)}  # a channel's size goes with it

    def __call__(
        self, dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        gradients: tuple[Tensor, Tensor, Tensor] = self.run(dy, x, weight, mean, rstd)
        return gradients
