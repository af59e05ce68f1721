"""Bytes that an attention call can't avoid moving, where its mask may hide whole queries or keys."""

from __future__ import annotations

import attrs

from tileops.core.check.call import Call
from tileops.core.roofline import distinct_bytes


def gqa_dense_bytes(call: Call) -> int:
    """Each query that sees a key, and each key and value that is seen, read once; outputs written once."""
    S_q, S_kv = call["S_q"], call["S_kv"]
    left, right = call["window_size_left"], 0 if call["is_causal"] else call["window_size_right"]
    queries = S_q if right < 0 else min(S_q, S_kv + right)  # the first ones may stand before every key
    keys = S_kv if left < 0 else min(S_kv, S_q + left)  # the last key is always seen
    if 0 in (S_q, S_kv):
        queries = keys = 0
    seen = {"q": queries, "k": keys, "v": keys}
    read = 0
    for name, x in call.inputs.items():
        if x is not None:
            shape = (x.shape[0], seen[name], *x.shape[2:]) if name in seen else x.shape
            read += distinct_bytes(attrs.evolve(x, shape=shape))
    return read + sum(x.nbytes for x in call.outputs.values() if x is not None)
