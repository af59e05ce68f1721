"""The rivals of the attention operators."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tileops.core.bench.rivals import Missing, Rival, on_gpu, package

FLASHINFER_HEADS = ((64, 64), (128, 128), (256, 256), (192, 128))  # D and D_v that its SM90 kernels have
PAGE = 64  # tokens, at most


def _causal(call: Any) -> bool:
    """Whether the mask hides anything: a single query is the last, and sees every key."""
    return bool(call["is_causal"]) and call["S_q"] > 1


def _lacks(who: str, call: Any, inputs: Any, *features: str) -> None:
    """Raise Missing where the call uses one of these features, which a rival lacks."""
    used = {
        "window": call["window_size_left"] >= 0 or call["window_size_right"] >= 0,
        "right window": call["window_size_right"] >= 0,
        "softcap": call["softcap"] is not None,
        "sinks": inputs["sinks"] is not None,
        "ALiBi slopes": inputs["alibi_slopes"] is not None,
        "float8": inputs["q_scale"] is not None,
        "mask aligned at the bottom right": _causal(call) and call["S_q"] != call["S_kv"],
    }
    if absent := [f for f in features if used[f]]:
        raise Missing(f"{who} has no {' and no '.join(absent)}")


def _side(size: int) -> int | None:
    return None if size < 0 else size


def cudnn(call: Any, inputs: Any) -> Callable[[], Any]:
    """CuDNN, as torch calls it."""
    on_gpu(inputs, "cudnn")
    features = "window", "softcap", "sinks", "ALiBi slopes", "float8", "mask aligned at the bottom right"
    _lacks("torch's cuDNN attention", call, inputs, *features)
    q, k, v = (inputs[n].transpose(1, 2) for n in "qkv")
    causal, scale = _causal(call), call["softmax_scale"]
    if call["return_lse"]:
        attend = torch.ops.aten._scaled_dot_product_cudnn_attention.default
        return Rival(
            lambda: attend(q, k, v, None, True, 0.0, causal, False, scale=scale),
            lambda r: (r[0].transpose(1, 2), r[1].view(q.shape[:3])),
        )

    def run() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
            ).transpose(1, 2)

    return run


def fa2(call: Any, inputs: Any) -> Callable[[], Any]:
    """FlashAttention-2, which torch carries, by torch's own entry to all of its masks."""
    on_gpu(inputs, "fa2")
    _lacks("torch's FlashAttention-2", call, inputs, "softcap", "sinks", "float8")
    if call["D"] != call["D_v"]:
        raise Missing("torch's FlashAttention-2 has one head size")
    q, k, v = (inputs[n] for n in "qkv")
    attend = torch.ops.aten._flash_attention_forward.default
    causal, scale, lse = _causal(call), call["softmax_scale"], call["return_lse"]
    options: dict[str, Any] = {"scale": scale, "alibi_slopes": inputs["alibi_slopes"]}
    options["window_size_left"] = _side(call["window_size_left"])
    options["window_size_right"] = _side(call["window_size_right"])
    return Rival(
        lambda: attend(q, k, v, None, None, call["S_q"], call["S_kv"], 0.0, causal, False, **options),
        lambda r: (r[0], r[1]) if lse else r[0],
    )


def fa4(call: Any, inputs: Any) -> Callable[[], Any]:
    """FlashAttention-4's SM90 kernels, which split no keys: a decode of few sequences is not what they are for."""
    on_gpu(inputs, "fa4")
    _lacks("flash-attn-4", call, inputs, "ALiBi slopes", "float8")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")  # else each process compiles anew
    attend = package("flash_attn.cute", "flash-attn-4").flash_attn_func
    q, k, v = (inputs[n] for n in "qkv")
    options = {
        "softmax_scale": call["softmax_scale"],
        "causal": _causal(call),
        "window_size": (_side(call["window_size_left"]), _side(call["window_size_right"])),
        "learnable_sink": inputs["sinks"],
        "softcap": call["softcap"] or 0.0,
        "return_lse": call["return_lse"],
    }
    return Rival(lambda: attend(q, k, v, **options), lambda r: r[:2] if call["return_lse"] else r[0])


def flashinfer(call: Any, inputs: Any) -> Callable[[], Any]:
    """FlashInfer's batch kernels: prefill over ragged sequences, decode over the cache as pages; planned beforehand."""
    on_gpu(inputs, "flashinfer")
    _lacks("flashinfer", call, inputs, "right window", "ALiBi slopes", "float8")
    if (call["D"], call["D_v"]) not in FLASHINFER_HEADS:
        raise Missing(f"flashinfer has no kernel for D = {call['D']}, D_v = {call['D_v']}")
    library = package("flashinfer", "flashinfer-python")
    make = _with_sinks if inputs["sinks"] is not None else _decode if call["S_q"] == 1 else _prefill
    run = make(library, call, inputs)
    batch, s_q, heads = call["B"], call["S_q"], call["H"]

    def read(result: Any) -> Any:
        if not call["return_lse"]:
            return result.view(batch, s_q, heads, -1)
        o, lse = result
        # Its logarithms are of base 2.
        return o.view(batch, s_q, heads, -1), (lse * math.log(2)).view(batch, s_q, heads).transpose(1, 2)

    return Rival(run, read)


def _prefill(library: Any, call: Any, inputs: Any) -> Callable[[], Any]:
    q, k, v = (inputs[n].flatten(0, 1) for n in "qkv")
    wrapper = library.BatchPrefillWithRaggedKVCacheWrapper(_workspace(q.device), "NHD")
    heads = call["H"], call["H_kv"], call["D"], call["D_v"]
    wrapper.plan(
        _offsets(call, "S_q"),
        _offsets(call, "S_kv"),
        *heads,
        causal=_causal(call),
        **_planned(call),
        q_data_type=q.dtype,
    )
    return lambda: wrapper.run(q, k, v, return_lse=call["return_lse"])


def _decode(library: Any, call: Any, inputs: Any) -> Callable[[], Any]:
    q, (pages, page) = inputs["q"][:, 0], _pages(call, inputs)
    # From 4 heads a group on, its kernel for tensor cores, as servers choose it.
    wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
        _workspace(q.device), "NHD", use_tensor_cores=call["H"] >= 4 * call["H_kv"]
    )
    sizes = call["H"], call["H_kv"], call["D"], page
    wrapper.plan(*_page_table(call, page, q.device), *sizes, **_planned(call), q_data_type=q.dtype)
    return lambda: wrapper.run(q, pages, return_lse=call["return_lse"])


def _with_sinks(library: Any, call: Any, inputs: Any) -> Callable[[], Any]:
    q, (pages, page) = inputs["q"].flatten(0, 1), _pages(call, inputs)
    _lacks("flashinfer's kernel with sinks", call, inputs, "softcap")
    module = package("flashinfer.attention", "flashinfer-python")
    heads = {"head_dim_qk": call["D"], "head_dim_vo": call["D_v"], "window_left": call["window_size_left"]}
    dtypes = {"q_data_type": q.dtype, "kv_data_type": q.dtype}
    wrapper = module.BatchAttentionWithAttentionSinkWrapper(_workspace(q.device), "NHD", **heads, **dtypes)
    sizes = call["H"], call["H_kv"], call["D"], page
    planned = {"causal": _causal(call), "window_left": call["window_size_left"], **dtypes}
    wrapper.plan(_offsets(call, "S_q"), *_page_table(call, page, q.device), *sizes, **planned)
    sinks, scale, lse = inputs["sinks"], call["softmax_scale"] or call["D"] ** -0.5, call["return_lse"]
    return lambda: wrapper.run(q, pages, sinks, scale, return_lse=lse)


def _planned(call: Any) -> dict[str, Any]:
    return {
        "window_left": call["window_size_left"],
        "logits_soft_cap": call["softcap"],
        "sm_scale": call["softmax_scale"],
    }


def _offsets(call: Any, length: str) -> Tensor:
    return torch.arange(call["B"] + 1, dtype=torch.int32) * call[length]


def _pages(call: Any, inputs: Any) -> tuple[tuple[Tensor, Tensor], int]:
    """The dense cache as pages of k and of v, and the tokens in each."""
    page = math.gcd(call["S_kv"], PAGE)
    k, v = (inputs[n].view(-1, page, *inputs[n].shape[2:]) for n in "kv")
    return (k, v), page


def _page_table(call: Any, page: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Offsets into the list of pages, the list, the tokens in each last page: all pages in order, all full."""
    batch, each = call["B"], call["S_kv"] // page
    offsets = torch.arange(batch + 1, dtype=torch.int32) * each
    indices = torch.arange(batch * each, dtype=torch.int32, device=device)
    return offsets, indices, torch.full((batch,), page, dtype=torch.int32)


@cache
def _workspace(device: torch.device) -> Tensor:
    """For all of FlashInfer's calls, which run one after the other."""
    return torch.zeros(256 << 20, dtype=torch.uint8, device=device)


RIVALS = {"GQADenseFwdOp": {"cudnn": cudnn, "fa2": fa2, "flashinfer": flashinfer, "fa4": fa4}}
