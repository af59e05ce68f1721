"""The rivals of LayerNorm."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tileops.core.bench.rivals import Missing, Rival, compiled, on_gpu, package
from tileops.norm.baselines.common import LIGER_LONGEST, rows_of


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
    liger, rows, eps = _liger_layer_norm(call, inputs), rows_of(call, inputs), call["eps"]
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
    liger, rows = _liger_layer_norm(call, inputs), rows_of(call, inputs)
    x, weight, bias = inputs["x"], inputs["weight"], inputs["bias"]
    given = rows["dy"], rows["x"], rows["weight"], bias.flatten(), inputs["mean"].flatten(), rows["rstd"]

    def read(gradients: Any) -> Any:
        return tuple(g.view(like.shape) for g, like in zip(gradients, (x, weight, bias), strict=True))

    return Rival(lambda: liger.layer_norm_backward(*given), read)


RIVALS = {
    "LayerNormFwdOp": {"torch": torch_layer_norm, "compile": compiled_layer_norm, "liger": liger_layer_norm},
    "LayerNormBwdOp": {"torch": torch_layer_norm_bwd, "liger": liger_layer_norm_bwd},
}
