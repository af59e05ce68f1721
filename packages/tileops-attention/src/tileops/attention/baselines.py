"""The rivals of the attention operators."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tileops.core.bench.rivals import Missing


def sdpa(backend: SDPBackend, call: Any, inputs: Any) -> Callable[[], Any]:
    """One of torch's scaled_dot_product_attention backends, whose causal mask is aligned at the top left."""
    q, k, v = (inputs[n] for n in "qkv")
    causal = call["is_causal"] and call["S_q"] > 1
    if causal and call["S_q"] != call["S_kv"]:
        raise Missing("torch's causal mask is aligned at the top left")
    if call["window_size_left"] >= 0 or call["window_size_right"] >= 0:
        raise Missing("torch's attention has no window")
    if call["softcap"] is not None or any(inputs[n] is not None for n in ("sinks", "alibi_slopes", "q_scale")):
        raise Missing("torch's attention has no softcap, sinks, ALiBi or float8")
    if call["return_lse"]:
        raise Missing("torch's attention returns no lse here")
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    options = {"is_causal": causal, "scale": call["softmax_scale"], "enable_gqa": q.shape[1] != k.shape[1]}

    def run() -> torch.Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)

    return run


def flashinfer_attention(call: Any, inputs: Any) -> Callable[[], Any]:
    """FlashInfer's single-request prefill and decode; a batch is not its form."""
    try:
        import flashinfer
    except ImportError as e:
        raise Missing(f"flashinfer can't be imported: {e}") from None
    if call["B"] != 1:
        raise Missing("flashinfer's dense entry points take one request")
    if any(inputs[n] is not None for n in ("sinks", "alibi_slopes", "q_scale")) or call["window_size_right"] >= 0:
        raise Missing("flashinfer's dense entry points have no sinks, ALiBi slopes, scales or right window")
    if call["D"] != call["D_v"] or call["D"] not in (64, 128, 256) or call["return_lse"]:
        raise Missing("flashinfer's dense entry points take head dims 64, 128 and 256, and no lse here")
    q, k, v = (inputs[n][0] for n in "qkv")
    options = {
        "kv_layout": "NHD",
        "window_left": call["window_size_left"],
        "logits_soft_cap": call["softcap"],
        "sm_scale": call["softmax_scale"],
    }
    if call["S_q"] == 1:
        run = partial(flashinfer.single_decode_with_kv_cache, q[0], k, v, **options)
        return lambda: run()[None, None]
    run = partial(flashinfer.single_prefill_with_kv_cache, q, k, v, causal=call["is_causal"], **options)
    return lambda: run()[None]


RIVALS = {
    "GQADenseFwdOp": {
        "cudnn": partial(sdpa, SDPBackend.CUDNN_ATTENTION),
        "fa2": partial(sdpa, SDPBackend.FLASH_ATTENTION),
        "flashinfer": flashinfer_attention,
    }
}
