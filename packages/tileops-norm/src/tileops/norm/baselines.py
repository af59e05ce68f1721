"""The rivals of the normalization operators."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tileops.core.bench.rivals import Missing, Rival, compiled, on_gpu, package
from tileops.norm import baselines_channels, baselines_fused_add

LIGER_LONGEST = 65536  # elements of a row, one block of Triton's
FLA_LONGEST = 65536  # bytes of a row


def _eps(call: Any) -> float:
    return 2.0**-23 if call["eps"] is None else float(call["eps"])


def _rows(call: Any, inputs: Any) -> dict[str, Any]:
    """The inputs as matrices and vectors, for a library that normalizes the last axis: one row of all that are."""
    n = math.prod(call["normalized_shape"])
    return {name: t if t is None else t.reshape(-1, n) for name, t in inputs.items() if name in ("x", "dy")} | {
        name: t if t is None else t.flatten() for name, t in inputs.items() if name in ("weight", "rstd")
    }


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
    rows, eps = _rows(call, inputs), _eps(call)
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
    rows = _rows(call, inputs)
    x, weight = rows["x"], rows["weight"]
    return _shaped(call, inputs, lambda: liger.rms_norm_forward(x, weight, eps, offset, "gemma", None), 2)


def quack_rms_norm(call: Any, inputs: Any) -> Callable[[], Any]:
    """Quack's kernel."""
    on_gpu(inputs, "quack")
    quack, eps = package("quack.rmsnorm", "quack-kernels"), _eps(call)
    rows = _rows(call, inputs)
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
    liger, rows, offset = _liger(call, inputs), _rows(call, inputs), call["weight_offset"]
    x, dy, weight, rstd = rows["x"], rows["dy"].clone(), rows["weight"], rows["rstd"]
    block, warps = package("liger_kernel.ops.utils", "liger-kernel").calculate_settings(x.shape[-1])
    saved = (x, weight, rstd, offset, 1, block, warps)  # 1 is the mode that computes in float32, as forward has it
    return _gradients(inputs, lambda: liger.rms_norm_backward(dy, *saved, True, None))


def quack_rms_norm_bwd(call: Any, inputs: Any) -> Callable[[], Any]:
    """Quack's backward."""
    on_gpu(inputs, "quack")
    quack = package("quack.rmsnorm", "quack-kernels")
    rows, offset = _rows(call, inputs), call["weight_offset"]
    x, dy, weight, rstd = rows["x"], rows["dy"], rows["weight"], rows["rstd"]
    return _gradients(inputs, lambda: quack.rmsnorm_bwd(x, weight, dy, rstd, weight_offset=offset))


def torch_layer_norm(call: Any, inputs: Any) -> Callable[[], Any]:
    """Torch's own kernel, which takes x, weight and bias of one dtype."""
    x, weight, bias = inputs["x"], inputs["weight"], inputs["bias"]
    shape, eps, with_stats = list(call["normalized_shape"]), call["eps"], call["return_stats"]
    _torch_takes(x, weight, bias, with_stats)
    if not with_stats:
        return lambda: F.layer_norm(x, shape, weight, bias, eps)
    batch = x.shape[: x.dim() - len(shape)]
    run = torch.native_layer_norm
    return Rival(lambda: run(x, shape, weight, bias, eps), lambda r: (r[0], r[1].view(batch), r[2].view(batch)))


def _torch_takes(x: Tensor, weight: Tensor | None, bias: Tensor | None, with_stats: bool) -> None:
    if any(t is not None and t.dtype != x.dtype for t in (weight, bias)):
        raise Missing("torch's layer norm takes x, weight and bias of one dtype")
    if with_stats and not x.is_cuda and x.dtype != torch.float32:
        raise Missing("torch's layer norm has statistics of one dtype with x on a CPU")


def compiled_layer_norm(call: Any, inputs: Any) -> Callable[[], Any]:
    """What torch.compile makes of the formula."""
    axes = tuple(range(-len(call["normalized_shape"]), 0))
    eps, with_stats = call["eps"], call["return_stats"]

    def formula(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Any:
        variance, mean = torch.var_mean(x.float(), axes, correction=0, keepdim=True)
        rstd = torch.rsqrt(variance + eps)
        y = (x.float() - mean) * rstd
        if weight is not None:
            y = y * weight.float()
        if bias is not None:
            y = y + bias.float()
        return (y.to(x.dtype), mean.squeeze(axes), rstd.squeeze(axes)) if with_stats else y.to(x.dtype)

    return compiled(formula, inputs, inputs["x"], inputs["weight"], inputs["bias"])


def _liger_layer_norm(call: Any, inputs: Any) -> Any:
    on_gpu(inputs, "liger")
    if inputs["weight"] is None or inputs["bias"] is None:
        raise Missing("liger's layer norm needs a weight and a bias")
    if math.prod(call["normalized_shape"]) > LIGER_LONGEST:
        raise Missing(f"liger takes rows of up to {LIGER_LONGEST} elements")
    return package("liger_kernel.ops.layer_norm", "liger-kernel")


def liger_layer_norm(call: Any, inputs: Any) -> Callable[[], Any]:
    """Liger's kernel."""
    liger, rows, eps = _liger_layer_norm(call, inputs), _rows(call, inputs), call["eps"]
    x, weight, bias = rows["x"], rows["weight"], inputs["bias"].flatten()
    batch = inputs["x"].shape[: inputs["x"].dim() - len(call["normalized_shape"])]

    def read(result: Any) -> Any:
        y = result[0].view(inputs["x"].shape)
        return (y, result[2].view(batch), result[3].view(batch)) if call["return_stats"] else y

    return Rival(lambda: liger.layer_norm_forward(x, weight, bias, eps), read)


def torch_layer_norm_bwd(call: Any, inputs: Any) -> Callable[[], Any]:
    """Torch's own kernel; its statistics have an axis of 1 for each that was normalized over, as its forward gives."""
    dy, x, weight, mean, rstd, bias = inputs.values()
    _torch_takes(x, weight, bias, True)
    shape = list(call["normalized_shape"])
    statistics = [s.view(*s.shape, *[1] * len(shape)) for s in (mean, rstd)]
    wanted = [True, weight is not None, bias is not None]
    backward = torch.ops.aten.native_layer_norm_backward.default
    return Rival(lambda: backward(dy, x, shape, *statistics, weight, bias, wanted), _those_asked_for)


def _those_asked_for(gradients: Any) -> Any:
    asked = tuple(g for g in gradients if g is not None)
    return asked if len(asked) > 1 else asked[0]


def liger_layer_norm_bwd(call: Any, inputs: Any) -> Callable[[], Any]:
    """Liger's backward."""
    liger, rows = _liger_layer_norm(call, inputs), _rows(call, inputs)
    x, weight, bias = inputs["x"], inputs["weight"], inputs["bias"]
    given = rows["dy"], rows["x"], rows["weight"], bias.flatten(), inputs["mean"].flatten(), rows["rstd"]

    def read(gradients: Any) -> Any:
        return tuple(g.view(like.shape) for g, like in zip(gradients, (x, weight, bias), strict=True))

    return Rival(lambda: liger.layer_norm_backward(*given), read)


def compiled_ada_layer_norm(call: Any, inputs: Any) -> Callable[[], Any]:
    """What torch.compile makes of the formula, with a gate or without."""
    x, eps = inputs["x"], call["eps"]

    def formula(x: Tensor, scale: Tensor, shift: Tensor, gate: Tensor | None) -> Tensor:
        y = F.layer_norm(x.float(), x.shape[-1:], eps=eps) * (1 + scale.float()) + shift.float()
        return (y if gate is None else y * gate.float()).to(x.dtype)

    return compiled(formula, inputs, x, inputs["scale"], inputs["shift"], inputs.get("gate"))


def compiled_gated_rms_norm(call: Any, inputs: Any) -> Callable[[], Any]:
    """What torch.compile makes of the formula."""
    eps, first = call["eps"], call["norm_before_gate"]

    def formula(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        z, gated = x.float(), F.silu(gate.float())
        if not first:
            z = z * gated
        y = z * torch.rsqrt(z.square().mean(-1, keepdim=True) + eps) * weight.float()
        return (y * gated if first else y).to(x.dtype)

    return compiled(formula, inputs, inputs["x"], inputs["gate"], inputs["weight"])


def fla_gated_rms_norm(call: Any, inputs: Any) -> Callable[[], Any]:
    """Flash-linear-attention's kernel, which has both orders."""
    on_gpu(inputs, "fla")
    x, gate, weight = inputs["x"], inputs["gate"], inputs["weight"]
    if x.shape[-1] * x.element_size() > FLA_LONGEST:
        raise Missing(f"fla takes rows of up to {FLA_LONGEST} bytes")
    run = package("fla.modules.layernorm_gated", "flash-linear-attention").rmsnorm_fn
    eps, first = call["eps"], call["norm_before_gate"]
    return lambda: run(x, weight, None, z=gate, eps=eps, norm_before_gate=first)


def compiled_fused_qk_norm_rope(call: Any, inputs: Any) -> Callable[[], Any]:
    """What torch.compile makes of the formula, over q and k alone, so that v is no part of it."""
    heads, heads_kv, D, R, eps = (call[name] for name in ("heads", "heads_kv", "D", "R", "eps"))
    neox = call["rope_layout"] == "neox"
    axis, pairs = (-2, (2, R // 2)) if neox else (-1, (R // 2, 2))

    def formula(qk: Tensor, q_weight: Tensor, k_weight: Tensor, cache: Tensor, positions: Tensor) -> None:
        weight = torch.cat((q_weight.expand(heads, D), k_weight.expand(heads_kv, D))).float()
        x = qk.unflatten(1, (heads + heads_kv, D)).float()
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
        cos, sin = cache[positions].float().unsqueeze(1).chunk(2, -1)
        a, b = x[..., :R].unflatten(-1, pairs).unbind(axis)
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), axis).flatten(-2)
        qk.copy_(torch.cat((turned, x[..., R:]), -1).flatten(1))

    qk = inputs["qkv"][:, : (heads + heads_kv) * D]
    return compiled(formula, inputs, qk, *(inputs[n] for n in ("q_weight", "k_weight", "cos_sin_cache", "positions")))


RIVALS = {
    "LayerNormFwdOp": {"torch": torch_layer_norm, "compile": compiled_layer_norm, "liger": liger_layer_norm},
    "LayerNormBwdOp": {"torch": torch_layer_norm_bwd, "liger": liger_layer_norm_bwd},
    "RMSNormFwdOp": {
        "torch": torch_rms_norm,
        "compile": compiled_rms_norm,
        "flashinfer": flashinfer_rms_norm,
        "liger": liger_rms_norm,
        "quack": quack_rms_norm,
    },
    "RMSNormBwdOp": {"compile": compiled_rms_norm_bwd, "liger": liger_rms_norm_bwd, "quack": quack_rms_norm_bwd},
    **baselines_fused_add.RIVALS,
    **baselines_channels.RIVALS,
    "AdaLayerNormFwdOp": {"compile": compiled_ada_layer_norm},
    "AdaLayerNormZeroFwdOp": {"compile": compiled_ada_layer_norm},
    "GatedRMSNormFwdOp": {"compile": compiled_gated_rms_norm, "fla": fla_gated_rms_norm},
    "FusedQKNormRoPEFwdOp": {"compile": compiled_fused_qk_norm_rope},
}
