"""FusedAddRMSNormQuantFwdOp: a residual added, RMSNorm of the sum, and 8-bit codes of that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from attrs import define
from torch import Tensor

from tileops.core.op import Op


@define(frozen=True)
class FusedAddRMSNormQuantFwdOp(Op):
    """``q = y / scale`` in 8 bits, where ``y`` is RMSNorm of ``residual_out = x + residual`` over the last axis.

    Args:
        quant: what has a scale of its own: a row (``"per_token"``), 128 elements of a row (``"block128"``), or all of
            ``y`` (``"per_tensor"``), whose scale is given.
        quant_dtype: float8_e4m3fn or int8.
        eps: added to the mean of squares.
        scale_ub: the magnitude of ``y`` beyond which codes saturate; None for no limit.

    The call takes ``x`` and ``residual``, ``[*B, N]`` of float32, float16 or bfloat16 with any strides, the residual
    perhaps None; ``weight``, ``[N]`` of x's dtype or float32; and, for ``per_tensor``, ``scale_in``, ``[1]`` of float32
    and positive. It returns ``q``, ``[*B, N]``; unless ``per_tensor`` ``scale``, ``[*B, 1]`` or
    ``[*B, ceil(N / 128)]`` of float32, the largest magnitude of ``y`` over the largest code and at least 2**-126; and,
    with a residual, ``residual_out`` like ``x``. Codes are made from the float32 ``y``, half to even. Raises CheckError
    for any other call.

    >>> norm = FusedAddRMSNormQuantFwdOp(quant_dtype=torch.int8, eps=0.0)
    >>> norm(torch.tensor([[1.0, -1.0]]), None, torch.tensor([127.0, 63.0]))
    (tensor([[127, -63]], dtype=torch.int8), tensor([[1.]]))
    """

    kernels = ("fused_add_rms_norm_quant:FusedAddRMSNormQuantRows",)
    buckets: ClassVar[Mapping[str, tuple[int, ...]]] = {"B": (1, 64, 2**31 - 1)}  # few rows, and all others
    quant: str = "per_token"
    quant_dtype: torch.dtype = torch.float8_e4m3fn
    eps: float = 1e-6
    scale_ub: float | None = None

    def __call__(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, scale_in: Tensor | None = None
    ) -> Tensor | tuple[Tensor, ...]:
        return self.run(x, residual, weight, scale_in)
