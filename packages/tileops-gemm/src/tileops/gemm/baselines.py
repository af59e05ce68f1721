"""The rivals of the GEMM operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def torch_mm(call: Any, inputs: Any) -> Callable[[], Any]:
    """CuBLAS as torch calls it."""
    a = inputs["a"].mT if call["trans_a"] else inputs["a"]
    b = inputs["b"].mT if call["trans_b"] else inputs["b"]
    return lambda: torch.mm(a, b)


RIVALS = {"GEMMFwdOp": {"torch": torch_mm}}
