"""Memory traffic of normalization calls that touch part of a tensor."""

from __future__ import annotations

from tileops.core.check import Call
from tileops.core.spec.dtypes import itemsize


def fused_qk_norm_rope_bytes(call: Call) -> int:
    """Reads and writes of q and k; reads of the weights, the positions and a row of the cache a token, or all rows."""
    tokens, R, D = call["tokens"], call["R"], call["D"]
    size = {name: itemsize(meta.dtype) for name, meta in call.inputs.items() if meta is not None}
    heads = call["heads"] + call["heads_kv"]
    read = 2 * D * size["q_weight"] + tokens * size["positions"] + min(tokens, call["P"]) * R * size["cos_sin_cache"]
    return int(2 * tokens * heads * D * size["qkv"] + read)
