"""What the attention operators mean, in plain PyTorch.

A reference is both the oracle and the cpu backend. Given a float64 ``q`` it computes and returns float64; given any
other it computes in float32 and rounds each output to its dtype once. The model beside it is the yardstick of accuracy:
the same function with the roundings that any good kernel makes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_INF = float("inf")
_BUDGET = 2**24  # scores that are held at a time


def gqa_dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    *,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softmax_scale: float | None,
    softcap: float | None,
    return_lse: bool,
    out_dtype: torch.dtype | None,
    T: torch.dtype,
    p_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Softmax attention of grouped heads: query head ``h`` uses KV head ``h // (H / H_kv)``.

    ``q`` is ``[B, S_q, H, D]``, ``k`` ``[B, S_kv, H_kv, D]``, ``v`` ``[B, S_kv, H_kv, D_v]``, all of ``T`` and of any
    strides. ``sinks`` and ``alibi_slopes`` are ``[H]``, the scales that dequantize float8 ``[B, H_kv]``; all float32.

    Query ``i`` sits at position ``i' = i + S_kv - S_q`` and sees the keys ``j`` with
    ``i' - window_size_left <= j <= i' + window_size_right``, where -1 is unbounded and ``is_causal`` makes the right
    side 0. Scores are scaled, then capped (``softcap * tanh(s / softcap)``), then lowered by ``slope * |i' - j|``, then
    masked. A sink is one more logit in the denominator. A query that sees no key has o = 0 and lse = -inf or its sink.

    Returns ``o``, ``[B, S_q, H, D_v]`` of ``out_dtype`` (None: ``T``, or bfloat16 where that is float8), and ``lse``,
    ``[B, H, S_q]`` float32, where ``return_lse`` asks for it. ``p_dtype`` is the model's: what P is rounded to.
    """
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    B, S_q, H, D = q.shape
    S_kv, H_kv, D_v = v.shape[1:]
    groups, G = B * H_kv, H // H_kv  # a group: one KV head of one batch element, with the G query heads that use it
    scale = D**-0.5 if softmax_scale is None else softmax_scale
    left, right = window_size_left, 0 if is_causal else window_size_right

    def grouped(x: Tensor, x_scale: Tensor | None) -> Tensor:
        x = x.to(wide).transpose(1, 2).reshape(groups, x.shape[2] // H_kv, x.shape[1], x.shape[3])
        return x if x_scale is None else x * x_scale.to(wide).reshape(groups, 1, 1, 1)

    def per_head(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.to(wide).expand(B, H).reshape(groups, G, 1, 1)

    q, k, v = grouped(q, q_scale), grouped(k, k_scale)[:, 0], grouped(v, v_scale)[:, 0]
    sink, slope = per_head(sinks), per_head(alibi_slopes)

    # What a query that sees no key has.
    o = q.new_zeros(groups, G, S_q, D_v)
    lse = q.new_full((groups, G, S_q, 1), -_INF) if sink is None else sink.repeat(1, 1, S_q, 1)

    rows = max(1, min(S_q, _BUDGET // max(1, G * S_kv)))
    step = max(1, _BUDGET // max(1, G * S_kv * rows))
    for start in range(0, S_q, rows):
        stop = min(start + rows, S_q)
        first, end = start + S_kv - S_q, stop + S_kv - S_q
        # Only the keys that some query of the tile sees: nothing that the others hold, NaN included, takes part.
        low = 0 if left < 0 else max(0, first - left)
        high = S_kv if right < 0 else min(S_kv, end + right)
        if low >= high:
            continue
        distance = torch.arange(low, high, device=q.device) - torch.arange(first, end, device=q.device)[:, None]
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if left >= 0:
            hidden |= distance < -left
        if right >= 0:
            hidden |= distance > right
        for g in (slice(n, n + step) for n in range(0, groups, step)):
            s = torch.einsum("ngid,njd->ngij", q[g, :, start:stop], k[g, low:high]) * scale
            if softcap is not None:
                s = softcap * torch.tanh(s / softcap)
            if slope is not None:
                s = s - slope[g] * distance.abs()
            s = s.masked_fill(hidden, -_INF)
            tile = _softmax(s, v[g, low:high], None if sink is None else sink[g], p_dtype)
            o[g, :, start:stop], lse[g, :, start:stop] = tile

    o = o.view(B, H, S_q, D_v).transpose(1, 2).contiguous()
    lse = lse.view(B, H, S_q)
    if wide == torch.float32:
        o = o.to(out_dtype or (torch.bfloat16 if T is torch.float8_e4m3fn else T))
    return o, lse if return_lse else None


def _softmax(s: Tensor, v: Tensor, sink: Tensor | None, p_dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """Values ``[n, keys, D_v]`` under the softmax of scores ``[n, G, rows, keys]``, and the log of its denominator.

    A score of -inf is hidden. The maximum is over the scores alone: a sink far above them makes the denominator
    infinite and the output 0, as it should be.
    """
    top = s.amax(-1, keepdim=True)
    unseeing = top == -_INF
    top = top.masked_fill(unseeing, 0)
    p = (s - top).exp()
    total = p.sum(-1, keepdim=True)
    lse = top + total.log()
    if sink is not None:
        total, lse = total + (sink - top).exp(), lse.logaddexp(sink)
    if p_dtype is not None:
        p = p.to(p_dtype).to(s.dtype)
    o = torch.einsum("ngij,njd->ngid", p, v) / total.masked_fill(total == 0, 1)
    return o.masked_fill(unseeing, 0), lse  # 0 times a NaN of V would be NaN


def gqa_dense_model(*inputs: Tensor | None, T: torch.dtype, **call: Any) -> tuple[Tensor, Tensor | None]:
    """:func:`gqa_dense` with P = exp(s - row max), not yet normalized, rounded to ``T`` before it meets V."""
    return gqa_dense(*inputs, T=T, p_dtype=T, **call)
