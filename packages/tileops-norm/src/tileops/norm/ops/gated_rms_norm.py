"""GatedRMSNormFwdOp: root-mean-square normalization with a gate."""

from __future__ import annotations

from attrs import define
from torch import Tensor

from tileops.core.op import Op


@define(frozen=True)
class GatedRMSNormFwdOp(Op):
    """``y = norm(x) * silu(gate)``, or ``y = norm(x * silu(gate))``; ``norm(z) = z / sqrt(mean(z**2) + eps) * weight``.

    Args:
        eps: added to the mean, which is taken over the last axis.
        norm_before_gate: the first of the two, as in Gated DeltaNet; False for the second, as in Mamba-2.

    The call takes ``x`` and ``gate``, ``[*B, N]`` of float32, float16 or bfloat16 with any strides, and ``weight``,
    ``[N]`` of x's dtype or float32. It returns ``y`` like ``x``. All of it is computed in float32 and rounded once.
    Raises CheckError for any other call.

    >>> norm = GatedRMSNormFwdOp()
    >>> norm(torch.tensor([[2.0, 2.0]]), torch.tensor([[0.0, 100.0]]), torch.ones(2))
    tensor([[  0.0000, 100.0000]])
    """

    kernels = ("gated_rms_norm:GatedRMSNormRows", "gated_rms_norm:GatedRMSNormStream")
    eps: float = 1e-6
    norm_before_gate: bool = True

    def __call__(self, x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        return self.run(x, gate, weight)
