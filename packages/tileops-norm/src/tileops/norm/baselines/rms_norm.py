"""The rivals of RMSNorm."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tileops.core.bench.rivals import Missing, Rival, compiled, on_gpu, package
from tileops.norm.baselines.common import LIGER_LONGEST, rows_of


def _eps(call: Any) -> float:
    return 2.0**-23 if call["eps"] is None else float(call["eps"])


def _shaped(call: Any, inputs: Any, run: Callable[[], Any], rstd: int | None) -> Rival:
    """A forward over rows; its result's item ``rstd`` holds the statistics."""
    x = inputs["x"]
    batch = x.shape[: x.dim() - len(call["normalized_shape"])]

    def read(result: Any) -> Any:
        y = (result[0] if isinstance(result, tuple) else result).view(x.shape)
        return (y, result[rstd].view(batch)) if call["return_rstd"] else y

    return Rival(run, read)


def torch_rms_norm(call: Any, inputs: Any) -> Callable[[], Any]:
    """Torch's own kernel, where it means the same: a weight of x's dtype, and no offset."""
    x, weight = inputs["x"], inputs["weight"]
    if call["weight_offset"] or (weight is not None and weight.dtype != x.dtype):
        raise Missing("torch.nn.functional.rms_norm has no weight offset, and one dtype")
    shape, eps = list(call["normalized_shape"]), _eps(call)
    if not call["return_rstd"]:
        return lambda: F.rms_norm(x, shape, weight, eps)
    fused = torch.ops.aten._fused_rms_norm.default
    statistics = x.shape[: x.dim() - len(shape)]
    return Rival(lambda: fused(x, shape, weight, eps), lambda r: (r[0], r[1].view(statistics)))


def compiled_rms_norm(call: Any, inputs: Any) -> Callable[[], Any]:
    """What torch.compile makes of the formula."""
    axes = tuple(range(-len(call["normalized_shape"]), 0))
    eps, offset, with_rstd = _eps(call), call["weight_offset"], call["return_rstd"]

    def formula(x: Tensor, weight: Tensor | None) -> Any:
        wide = x.float()
        rstd = torch.rsqrt(wide.square().mean(axes, keepdim=True) + eps)
        y = wide * rstd
        if weight is not None:
            y = y * (weight.float() + offset)
        return (y.to(x.dtype), rstd.squeeze(axes)) if with_rstd else y.to(x.dtype)

    return compiled(formula, inputs, inputs["x"], inputs["weight"])


def flashinfer_rms_norm(call: Any, inputs: Any) -> Callable[[], Any]:
    """FlashInfer's norm over the last axis of a matrix."""
    on_gpu(inputs, "flashinfer")
    norm = package("flashinfer.norm", "flashinfer-python")
    x, weight = inputs["x"], inputs["weight"]
    if weight is None or weight.dtype != x.dtype or x.dtype == torch.float32 or call["return_rstd"]:
        raise Missing("flashinfer's rmsnorm takes 16-bit x and weight, and returns no rstd")
    if call["weight_offset"] not in (0.0, 1.0):
        raise Missing("flashinfer's rmsnorm has an offset of 0 or 1")
    rows, eps = rows_of(call, inputs), _eps(call)
    run = norm.gemma_rmsnorm if call["weight_offset"] else norm.rmsnorm
    return _shaped(call, inputs, lambda: run(rows["x"], rows["weight"], eps), None)


def _liger(call: Any, inputs: Any) -> Any:
    on_gpu(inputs, "liger")
    if math.prod(call["normalized_shape"]) > LIGER_LONGEST:
        raise Missing(f"liger takes rows of up to {LIGER_LONGEST} elements")
    return package("liger_kernel.ops.rms_norm", "liger-kernel")


def liger_rms_norm(call: Any, inputs: Any) -> Callable[[], Any]:
    """Liger's kernel in the mode that computes all of it in float32."""
    liger, eps, offset = _liger(call, inputs), _eps(call), call["weight_offset"]
    rows = rows_of(call, inputs)
    x, weight = rows["x"], rows["weight"]
    return _shaped(call, inputs, lambda: liger.rms_norm_forward(x, weight, eps, offset, "gemma", None), 2)


def quack_rms_norm(call: Any, inputs: Any) -> Callable[[], Any]:
    """Quack's kernel."""
    on_gpu(inputs, "quack")
    quack, eps = package("quack.rmsnorm", "quack-kernels"), _eps(call)
    rows = rows_of(call, inputs)
    x, weight = rows["x"], rows["weight"]
    options = {"eps": eps, "store_rstd": call["return_rstd"], "weight_offset": call["weight_offset"]}
    return _shaped(call, inputs, lambda: quack.rmsnorm_fwd(x, weight, **options), 2)


def _gradients(inputs: Any, run: Callable[[], Any]) -> Rival:
    """A backward over rows that gives dx and dweight first."""
    x, weight = inputs["x"], inputs["weight"]
    if weight is None:
        return Rival(run, lambda r: r[0].view(x.shape))
    return Rival(run, lambda r: (r[0].view(x.shape), r[1].view(weight.shape)))


def compiled_rms_norm_bwd(call: Any, inputs: Any) -> Callable[[], Any]:
    """What torch.compile makes of the formula."""
    n = len(call["normalized_shape"])
    axes, offset = tuple(range(-n, 0)), call["weight_offset"]

    def formula(dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor) -> Any:
        r = rstd.reshape(*rstd.shape, *[1] * n)
        d = dy.float()
        xhat = x.float() * r
        g = d if weight is None else d * (weight.float() + offset)
        dx = ((g - xhat * (g * xhat).mean(axes, keepdim=True)) * r).to(x.dtype)
        if weight is None:
            return dx
        return dx, (d * xhat).sum(tuple(range(x.dim() - n))).to(weight.dtype)

    return compiled(formula, inputs, *(inputs[name] for name in ("dy", "x", "weight", "rstd")))


def liger_rms_norm_bwd(call: Any, inputs: Any) -> Callable[[], Any]:
    """Liger's backward, which writes dx over dy as it does by default, here over a copy of its own."""
    liger, rows, offset = _liger(call, inputs), rows_of(call, inputs), call["weight_offset"]
    x, dy, weight, rstd = rows["x"], rows["dy"].clone(), rows["weight"], rows["rstd"]
    block, warps = package("liger_kernel.ops.utils", "liger-kernel").calculate_settings(x.shape[-1])
    saved = (x, weight, rstd, offset, 1, block, warps)  # 1 is the mode that computes in float32, as forward has it
    return _gradients(inputs, lambda: liger.rms_norm_backward(dy, *saved, True, None))


def quack_rms_norm_bwd(call: Any, inputs: Any) -> Callable[[], Any]:
    """Quack's backward."""
    on_gpu(inputs, "quack")
    quack = package("quack.rmsnorm", "quack-kernels")
    rows, offset = rows_of(call, inputs), call["weight_offset"]
    x, dy, weight, rstd = rows["x"], rows["dy"], rows["weight"], rows["rstd"]
    return _gradients(inputs, lambda: quack.rmsnorm_bwd(x, weight, dy, rstd, weight_offset=offset))


RIVALS = {
    "RMSNormFwdOp": {
        "torch": torch_rms_norm,
        "compile": compiled_rms_norm,
        "flashinfer": flashinfer_rms_norm,
        "liger": liger_rms_norm,
        "quack": quack_rms_norm,
    },
    "RMSNormBwdOp": {"compile": compiled_rms_norm_bwd, "liger": liger_rms_norm_bwd, "quack": quack_rms_norm_bwd},
}
