"""The rivals of the operators that normalize over channels' positions: group, instance and batch normalization."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tileops.core.bench.rivals import Missing, Rival, compiled


def _affine(inputs: Any, wide: bool) -> tuple[Tensor | None, Tensor | None]:
    """Weight and bias; in float32 where torch's kernel wants them as wide as the running statistics."""
    return tuple(t.float() if wide and t is not None else t for t in (inputs["weight"], inputs["bias"]))


def torch_group_norm(call: Any, inputs: Any) -> Callable[[], Any]:
    """Torch's own kernel, where weight and bias have x's dtype."""
    x, (weight, bias) = inputs["x"], _affine(inputs, wide=False)
    if any(t is not None and t.dtype != x.dtype for t in (weight, bias)):
        raise Missing("torch.nn.functional.group_norm has one dtype")
    return lambda: F.group_norm(x, call["num_groups"], weight, bias, call["eps"])


def torch_instance_norm(call: Any, inputs: Any) -> Callable[[], Any]:
    """Torch's own, which is its batch normalization of ``[1, B * C, *L]``."""
    x, running, affine = inputs["x"], (inputs["running_mean"], inputs["running_var"]), _affine(inputs, wide=True)
    params = call["use_input_stats"], call["momentum"], call["eps"]
    return lambda: F.instance_norm(x, *running, *affine, *params)


def torch_batch_norm(call: Any, inputs: Any) -> Callable[[], Any]:
    """Torch's native kernel."""
    x, running, affine = inputs["x"], (inputs["running_mean"], inputs["running_var"]), _affine(inputs, wide=True)
    params = call["training"], call["momentum"], call["eps"]
    if not call["return_stats"]:
        return lambda: F.batch_norm(x, *running, *affine, *params)
    if not call["training"]:
        raise Missing("torch.native_batch_norm returns no statistics where it takes the running ones")
    return lambda: torch.native_batch_norm(x, *affine, *running, *params)


def torch_batch_norm_bwd(call: Any, inputs: Any) -> Callable[[], Any]:
    """Torch's native kernel, with the weight in float32."""
    dy, x, mean, rstd, given = *(inputs[n] for n in ("dy", "x", "mean", "rstd")), (inputs["weight"], inputs["bias"])
    weight, _ = _affine(inputs, wide=True)
    backward = torch.ops.aten.native_batch_norm_backward.default
    wanted = [True, *(t is not None for t in given)]

    def read(gradients: Any) -> Any:
        asked = [g.to(like.dtype) for g, like in zip(gradients[1:], given, strict=True) if like is not None]
        return (gradients[0], *asked) if asked else gradients[0]

    return Rival(lambda: backward(dy, x, weight, None, None, mean, rstd, True, 0.0, wanted), read)


def _finish(x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None, like: Tensor) -> Tensor:
    """The affine map of ``x``, in float32 of any view, as a tensor shaped as ``like``."""
    y = ((x - mean) * rstd).view(like.shape)
    shape = (-1, *[1] * (like.dim() - 2))
    if weight is not None:
        y = y * weight.float().view(shape)
    if bias is not None:
        y = y + bias.float().view(shape)
    return y.to(like.dtype)


def compiled_group_norm(call: Any, inputs: Any) -> Callable[[], Any]:
    """What torch.compile makes of the formula."""
    groups, eps = call["num_groups"], call["eps"]

    def formula(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        rows = x.float().view(x.shape[0], groups, -1)
        var, mean = torch.var_mean(rows, -1, correction=0, keepdim=True)
        return _finish(rows, mean, torch.rsqrt(var + eps), weight, bias, x)

    return compiled(formula, inputs, *(inputs[n] for n in ("x", "weight", "bias")))


def _blend(running: Tensor, new: Tensor, momentum: float) -> None:
    running.mul_(1 - momentum).add_(new, alpha=momentum)


def compiled_instance_norm(call: Any, inputs: Any) -> Callable[[], Any]:
    """What torch.compile makes of the formula."""
    own, momentum, eps = call["use_input_stats"], call["momentum"], call["eps"]

    def formula(x: Tensor, running_mean: Any, running_var: Any, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        rows = x.float().flatten(2)
        if not own:
            mean, var = running_mean.view(-1, 1), running_var.view(-1, 1)
        else:
            var, mean = torch.var_mean(rows, -1, correction=0, keepdim=True)
            if running_mean is not None:
                n = rows.shape[-1]
                _blend(running_mean, mean.mean(0).squeeze(-1), momentum)
                _blend(running_var, var.mean(0).squeeze(-1) * (n / (n - 1)), momentum)
        return _finish(rows, mean, torch.rsqrt(var + eps), weight, bias, x)

    return compiled(formula, inputs, *(inputs[n] for n in ("x", "running_mean", "running_var", "weight", "bias")))


def compiled_batch_norm(call: Any, inputs: Any) -> Callable[[], Any]:
    """What torch.compile makes of the formula."""
    training, momentum, eps, asked = (call[n] for n in ("training", "momentum", "eps", "return_stats"))

    def formula(x: Tensor, running_mean: Any, running_var: Any, weight: Tensor | None, bias: Tensor | None) -> Any:
        wide, shape = x.float(), (-1, *[1] * (x.dim() - 2))
        if not training:
            mean, var = running_mean, running_var
        else:
            var, mean = torch.var_mean(wide, [d for d in range(x.dim()) if d != 1], correction=0)
            if running_mean is not None:
                n = x.numel() // x.shape[1]
                _blend(running_mean, mean, momentum)
                _blend(running_var, var * (n / (n - 1)), momentum)
        rstd = torch.rsqrt(var + eps)
        y = _finish(wide, mean.view(shape), rstd.view(shape), weight, bias, x)
        return (y, mean, rstd) if asked else y

    return compiled(formula, inputs, *(inputs[n] for n in ("x", "running_mean", "running_var", "weight", "bias")))


RIVALS = {
    "GroupNormFwdOp": {"torch": torch_group_norm, "compile": compiled_group_norm},
    "BatchNormFwdOp": {"torch": torch_batch_norm, "compile": compiled_batch_norm},
    "BatchNormBwdOp": {"torch": torch_batch_norm_bwd},
    "InstanceNormFwdOp": {"torch": torch_instance_norm, "compile": compiled_instance_norm},
}
