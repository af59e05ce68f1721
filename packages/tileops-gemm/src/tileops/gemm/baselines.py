"""The rivals of the GEMM operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tileops.core.bench.rivals import on_gpu, package


def _operands(call: Any, inputs: Any) -> tuple[Tensor, Tensor]:
    a, b = inputs["a"], inputs["b"]
    return a.mT if call["trans_a"] else a, b.mT if call["trans_b"] else b


def torch_mm(call: Any, inputs: Any) -> Callable[[], Any]:
    """CuBLAS as torch calls it."""
    a, b = _operands(call, inputs)
    return lambda: torch.mm(a, b)


_quickest: dict[Any, Any] = {}  # by the operands' layouts


def cublaslt(call: Any, inputs: Any) -> Callable[[], Any]:
    """The quickest of the algorithms that cuBLASLt's heuristics propose, measured beforehand, once for a layout.

    It writes to one output, given as C with factor 0, since its own would take the layout of ``a``.
    """
    on_gpu(inputs, "cublaslt")
    advanced = package("nvmath.linalg.advanced", "nvmath-python[cu13]")
    a, b = _operands(call, inputs)
    d = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
    product = advanced.Matmul(a, b, d, beta=0.0, options={"inplace": True})
    layout = tuple((t.shape, t.stride(), t.dtype) for t in (a, b))
    if layout in _quickest:
        product.plan(algorithms=[_quickest[layout]])
    else:
        product.plan()
        product.autotune(iterations=20)
        _quickest[layout] = product.algorithms[0]
    run: Callable[[], Any] = product.execute
    return run


RIVALS = {"GEMMFwdOp": {"torch": torch_mm, "cublaslt": cublaslt}}
