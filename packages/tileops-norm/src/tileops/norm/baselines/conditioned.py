"""The rivals of the normalizations with a scale and shift, a gate or a rotation behind them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tileops.core.bench.rivals import Missing, compiled, on_gpu, package

FLA_LONGEST = 65536  # bytes of a row


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
    "AdaLayerNormFwdOp": {"compile": compiled_ada_layer_norm},
    "AdaLayerNormZeroFwdOp": {"compile": compiled_ada_layer_norm},
    "GatedRMSNormFwdOp": {"compile": compiled_gated_rms_norm, "fla": fla_gated_rms_norm},
    "FusedQKNormRoPEFwdOp": {"compile": compiled_fused_qk_norm_rope},
}
