"""The rivals of the operators that add a residual."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tileops.core.bench.rivals import Missing, Rival, compiled, on_gpu, package
from tileops.core.dtypes import torch_dtype
from tileops.norm.baselines.common import LIGER_LONGEST


def _rms(total: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """Y and rstd in float32."""
    wide = total.float()
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return wide * rstd * (weight.float() + offset), rstd


def compiled_fused_add_rms_norm(call: Any, inputs: Any) -> Callable[[], Any]:
    """What torch.compile makes of the formula."""
    eps, offset, with_rstd = call["eps"], call["weight_offset"], call["return_rstd"]

    def formula(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
        total = x + residual
        y, rstd = _rms(total, weight, eps, offset)
        return (y.to(x.dtype), total, rstd.squeeze(-1)) if with_rstd else (y.to(x.dtype), total)

    return compiled(formula, inputs, inputs["x"], inputs["residual"], inputs["weight"])


def _copies(inputs: Any) -> tuple[Tensor, ...]:
    """X and the residual as matrices of a rival's own, for one that writes over them."""
    return tuple(inputs[name].reshape(-1, inputs[name].shape[-1]).clone() for name in ("x", "residual"))


def flashinfer_fused_add_rms_norm(call: Any, inputs: Any) -> Callable[[], Any]:
    """FlashInfer's kernel, which writes y over x and the sum over the residual, here over copies of its own."""
    on_gpu(inputs, "flashinfer")
    norm = package("flashinfer.norm", "flashinfer-python")
    shape, weight, eps = inputs["x"].shape, inputs["weight"], call["eps"]
    if weight.dtype != inputs["x"].dtype or weight.dtype == torch.float32 or call["return_rstd"]:
        raise Missing("flashinfer's fused_add_rmsnorm takes 16-bit x and weight, and returns no rstd")
    if call["weight_offset"] not in (0.0, 1.0):
        raise Missing("flashinfer's fused_add_rmsnorm has an offset of 0 or 1")
    run = norm.gemma_fused_add_rmsnorm if call["weight_offset"] else norm.fused_add_rmsnorm
    x, residual = _copies(inputs)
    return Rival(lambda: run(x, residual, weight, eps), lambda _: (x.view(shape), residual.view(shape)))


def liger_fused_add_rms_norm(call: Any, inputs: Any) -> Callable[[], Any]:
    """Liger's kernel in the mode that computes all of it in float32."""
    on_gpu(inputs, "liger")
    x, residual, weight = (inputs[name].contiguous() for name in ("x", "residual", "weight"))
    if x.shape[-1] > LIGER_LONGEST:
        raise Missing(f"liger takes rows of up to {LIGER_LONGEST} elements")
    liger = package("liger_kernel.ops.fused_add_rms_norm", "liger-kernel")
    eps, offset, with_rstd = call["eps"], call["weight_offset"], call["return_rstd"]

    def read(result: Any) -> Any:
        return (*result[:2], result[2].view(x.shape[:-1])) if with_rstd else result[:2]

    return Rival(lambda: liger.fused_add_rms_norm_forward(x, residual, weight, eps, offset, "gemma"), read)


def compiled_fused_add_layer_norm(call: Any, inputs: Any) -> Callable[[], Any]:
    """What torch.compile makes of the formula."""
    eps, with_stats = call["eps"], call["return_stats"]

    def formula(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
        total = x + residual
        wide = total.float()
        variance, mean = torch.var_mean(wide, -1, keepdim=True, correction=0)
        rstd = torch.rsqrt(variance + eps)
        y = ((wide - mean) * rstd * weight.float() + bias.float()).to(x.dtype)
        return (y, total, mean.squeeze(-1), rstd.squeeze(-1)) if with_stats else (y, total)

    return compiled(formula, inputs, *(inputs[name] for name in ("x", "residual", "weight", "bias")))


def compiled_fused_add_rms_norm_quant(call: Any, inputs: Any) -> Callable[[], Any]:
    """What torch.compile makes of the formula."""
    eps, ub, dtype, quant, N = call["eps"], call["scale_ub"], torch_dtype(call["quant_dtype"]), call["quant"], call["N"]
    least, largest = 2.0**-126, 127.0 if dtype == torch.int8 else 448.0

    def formula(x: Tensor, residual: Tensor | None, weight: Tensor, scale_in: Tensor | None) -> Any:
        total = x if residual is None else x + residual
        y, _ = _rms(total, weight, eps)
        if scale_in is None:
            block = N if quant == "per_token" else 128
            blocks = F.pad(y, (0, -N % block)).unflatten(-1, (-1, block))
            amax = blocks.abs().amax(-1)
            scale = ((amax if ub is None else amax.clamp(max=ub)) / largest).clamp(min=least)
            quotient = (blocks / scale[..., None]).flatten(-2)[..., :N]
        else:
            quotient = y / scale_in.clamp(min=least)
        if dtype == torch.int8:
            quotient = quotient.round().clamp(-128, 127)
        q = quotient.clamp(-448, 448).to(dtype)
        outputs = (q, None if scale_in is not None else scale, None if residual is None else total)
        return tuple(t for t in outputs if t is not None)

    return compiled(formula, inputs, *(inputs[name] for name in ("x", "residual", "weight", "scale_in")))


def flashinfer_fused_add_rms_norm_quant(call: Any, inputs: Any) -> Callable[[], Any]:
    """FlashInfer's Triton kernel, which writes the sum over the residual, here over a copy of its own."""
    on_gpu(inputs, "flashinfer")
    norm = package("flashinfer.triton.norm", "flashinfer-python")
    if call["quant"] != "per_tensor" or call["quant_dtype"] != "float8_e4m3fn":
        raise Missing("flashinfer's quantizing norm has float8 codes and a scale that is given")
    shape, weight, eps = inputs["x"].shape, inputs["weight"], call["eps"]
    inverse = 1 / inputs["scale_in"]
    q = torch.empty(shape, dtype=torch.float8_e4m3fn, device=weight.device).view(-1, shape[-1])
    if inputs["residual"] is None:
        x = inputs["x"].reshape(q.shape)
        return Rival(lambda: norm.rms_norm(x, weight, q, eps, None, inverse), lambda _: q.view(shape))
    x, residual = _copies(inputs)

    def run() -> None:
        norm.rms_norm_add_residual(x, residual, weight, eps, q, None, inverse)

    return Rival(run, lambda _: (q.view(shape), residual.view(shape)))


RIVALS = {
    "FusedAddRMSNormFwdOp": {
        "compile": compiled_fused_add_rms_norm,
        "flashinfer": flashinfer_fused_add_rms_norm,
        "liger": liger_fused_add_rms_norm,
    },
    "FusedAddLayerNormFwdOp": {"compile": compiled_fused_add_layer_norm},
    "FusedAddRMSNormQuantFwdOp": {
        "compile": compiled_fused_add_rms_norm_quant,
        "flashinfer": flashinfer_fused_add_rms_norm_quant,
    },
}
