"""What the references share: the dtype of the arithmetic, a mean whose order follows a row's length only, moments."""

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


def moments(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The last axis without its mean, and its mean and biased variance, kept as an axis of size 1.

    Sums count from the first element: of rows far from 0 that keeps the digits, and equal elements are their own mean.
    """
    first = rows[..., :1]
    rows = rows - first
    shift = mean(rows)
    rows = rows - shift
    return rows, first + shift, mean(rows.square())
