"""What the references share: the dtype of the arithmetic, and a mean whose order follows a row's length only."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

_CHUNK = 4096


def wide_of(x: Tensor) -> torch.dtype:
    """The dtype of the arithmetic: float64 for a float64 ``x``, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def mean(x: Tensor) -> Tensor:
    """Mean over the last axis, kept as an axis of size 1, summed in an order that depends on its length only.

    In chunks, because torch spreads the sum of one long row over its threads, but not that of the same row in a batch.
    """
    n = x.shape[-1]
    chunk = min(n, _CHUNK)
    chunks = F.pad(x.contiguous(), (0, -n % chunk)).unflatten(-1, (-1, chunk))
    return chunks.sum(-1).sum(-1, keepdim=True) / n
