"""The rivals of the normalization operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from tileops.core.bench.rivals import Missing


def torch_rms_norm(call: Any, inputs: Any) -> Callable[[], Any]:
    """Torch's own kernel, where it means the same: a weight of x's dtype, no offset, no statistics."""
    x, weight = inputs["x"], inputs["weight"]
    if call["weight_offset"] or call["return_rstd"] or (weight is not None and weight.dtype != x.dtype):
        raise Missing("torch.nn.functional.rms_norm has no weight offset, no rstd and one dtype")
    shape, eps = call["normalized_shape"], call["eps"]
    eps = 2.0**-23 if eps is None else eps
    return lambda: F.rms_norm(x, shape, weight, eps)


def flashinfer_rms_norm(call: Any, inputs: Any) -> Callable[[], Any]:
    """FlashInfer's norm over the last axis of a matrix."""
    try:
        from flashinfer.norm import gemma_rmsnorm, rmsnorm
    except ImportError as e:
        raise Missing(f"flashinfer can't be imported: {e}") from None
    x, weight = inputs["x"], inputs["weight"]
    if weight is None or weight.dtype != x.dtype or x.dtype == torch.float32 or call["return_rstd"]:
        raise Missing("flashinfer's rmsnorm takes 16-bit x and weight, and returns no rstd")
    if len(call["normalized_shape"]) > 1 or call["weight_offset"] not in (0.0, 1.0):
        raise Missing("flashinfer's rmsnorm is over the last axis, with an offset of 0 or 1")
    rows = x.flatten(0, -2)
    eps = 2.0**-23 if call["eps"] is None else call["eps"]
    norm = gemma_rmsnorm if call["weight_offset"] else rmsnorm
    return lambda: norm(rows, weight, eps).view(x.shape)


RIVALS = {"RMSNormFwdOp": {"torch": torch_rms_norm, "flashinfer": flashinfer_rms_norm}}
