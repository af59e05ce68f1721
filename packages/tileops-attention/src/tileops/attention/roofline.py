"""Bytes that an attention call can't avoid moving, where its mask may hide whole queries or keys."""

from __future__ import annotations

from tileops.core.check.call import Call


def gqa_dense_bytes(call: Call) -> int:
    """Each query that sees a key, and each key and value that is seen, read once; outputs written once."""
    s_q, s_kv = call["S_q"], call["S_kv"]
    left, right = call["window_size_left"], 0 if call["is_causal"] else call["window_size_right"]
    queries = s_q if right < 0 else min(s_q, s_kv + right)  # the first ones stand before every key
    keys = s_kv if left < 0 else min(s_kv, s_q + left)  # the last ones are always seen
    if s_q == 0 or s_kv == 0:
        queries = keys = 0
    share = {"q": (queries, s_q), "k": (keys, s_kv), "v": (keys, s_kv)}
    total = 0
    for name, tensor in (*call.inputs.items(), *call.outputs.items()):
        if tensor is not None:
            seen, of = share.get(name, (1, 1))
            total += tensor.nbytes // of * seen if of else 0
    return total
