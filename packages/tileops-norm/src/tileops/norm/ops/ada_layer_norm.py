"""AdaLayerNormFwdOp and AdaLayerNormZeroFwdOp: layer normalization with a condition's scale, shift and gate."""

from __future__ import annotations

from attrs import define
from torch import Tensor

from tileops.core.op import Op

_KERNELS = ("ada_layer_norm:AdaLayerNormRows", "ada_layer_norm:AdaLayerNormStream")


@define(frozen=True)
class AdaLayerNormFwdOp(Op):
    """``y = (x - mean) / sqrt(var + eps) * (1 + scale) + shift``, mean and variance taken over the last axis.

    Args:
        eps: added to the variance.

    The call takes ``x``, ``[*B, N]`` of float32, float16 or bfloat16 with any strides, and ``scale`` and ``shift``,
    ``[*S, N]`` of x's dtype, whose leading axes broadcast to x's by torch's rules: ``[batch, 1, N]`` for one a
    sequence. It returns ``y`` like ``x``. All of it is computed in float32 and rounded once. Raises CheckError for any
    other call.

    >>> norm = AdaLayerNormFwdOp(eps=0.0)
    >>> norm(torch.tensor([[1.0, 3.0]]), torch.tensor([1.0, 0.0]), torch.tensor([0.0, 5.0]))
    tensor([[-2.,  6.]])
    """

    kernels = _KERNELS
    eps: float = 1e-5

    def __call__(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return self.run(x, scale, shift)


@define(frozen=True)
class AdaLayerNormZeroFwdOp(Op):
    """``y = ((x - mean) / sqrt(var + eps) * (1 + scale) + shift) * gate``: AdaLayerNormFwdOp times a gate.

    Args:
        eps: added to the variance.

    The call takes ``x``, ``[*B, N]`` of float32, float16 or bfloat16 with any strides, and ``scale``, ``shift`` and
    ``gate``, ``[*S, N]`` of x's dtype, whose leading axes broadcast to x's by torch's rules. It returns ``y`` like
    ``x``. All of it is computed in float32 and rounded once. Raises CheckError for any other call.

    >>> norm = AdaLayerNormZeroFwdOp(eps=0.0)
    >>> norm(torch.tensor([[1.0, 3.0]]), torch.zeros(2), torch.ones(2), torch.tensor([1.0, 0.5]))
    tensor([[0., 1.]])
    """

    kernels = _KERNELS
    eps: float = 1e-5

    def __call__(self, x: Tensor, scale: Tensor, shift: Tensor, gate: Tensor) -> Tensor:
        return self.run(x, scale, shift, gate)
