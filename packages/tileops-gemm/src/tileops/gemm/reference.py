"""What the GEMM operators mean, in plain PyTorch.

Each function is both the oracle and the cpu backend. Given float64 operands it computes and returns float64; given any
others it computes in float32 and rounds to the output dtype once.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _wide(x: Tensor) -> torch.dtype:
    """The dtype of the arithmetic."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def gemm(a: Tensor, b: Tensor, *, trans_a: bool, trans_b: bool, T: torch.dtype) -> Tensor:
    """``d = op(a) @ op(b)``, where ``op`` transposes an operand whose flag is set.

    ``a`` is ``[M, K]`` or, with ``trans_a``, ``[K, M]``; ``b`` is ``[K, N]`` or, with ``trans_b``, ``[N, K]``; any
    strides. Returns ``d``, ``[M, N]`` of dtype ``T``: zeros where K = 0.
    """
    wide = _wide(a)
    a, b = a.to(wide), b.to(wide)
    d = (a.mT if trans_a else a) @ (b.mT if trans_b else b)
    return d if wide == torch.float64 else d.to(T)
