"""GQADenseFwdOp: softmax attention over dense queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from attrs import define
from torch import Tensor

from tileops.core.op import Op


@define(frozen=True)
class GQADenseFwdOp(Op):
    """Softmax attention with grouped heads, for prefill and decode: query head h uses KV head ``h // (H // H_kv)``.

    Args:
        is_causal: query i, at position ``i + S_kv - S_q``, sees no key behind its position.
        window_size_left, window_size_right: keys that a query sees to either side of its position; -1 for all of them.
        softmax_scale: factor of the scores, 1e-10 to 1e6; None means ``1 / sqrt(D)``.
        softcap: bound of the scores, ``softcap * tanh(s / softcap)``, 1e-10 to 1e10; None for no bound.
        return_lse: return ``lse`` too.
        out_dtype: dtype of ``o`` for float8 inputs, float16 or bfloat16; None means bfloat16.

    The call takes ``q`` ``[B, S_q, H, D]``, ``k`` ``[B, S_kv, H_kv, D]`` and ``v`` ``[B, S_kv, H_kv, D_v]``, all
    float16, bfloat16 or float8_e4m3fn, with any strides; optionally ``sinks`` and ``alibi_slopes``, ``[H]`` of float32;
    and with float8 inputs ``q_scale``, ``k_scale`` and ``v_scale``, ``[B, H_kv]`` of float32. It returns ``o``,
    ``[B, S_q, H, D_v]``, or, with ``return_lse``, ``(o, lse)``, where ``lse`` is ``[B, H, S_q]`` of float32. A query
    that sees no key gives o = 0. Raises CheckError for any other call.
    """

    is_causal: bool = False
    window_size_left: int = -1
    window_size_right: int = -1
    softmax_scale: float | None = None
    softcap: float | None = None
    return_lse: bool = False
    out_dtype: torch.dtype | None = None

    kernels = ("gqa_decode:GQADecode", "gqa_prefill:GQAPrefill", "gqa_general:GQAGeneral")
    # Decode deals out whole batch elements where they fill the SMs, so B counts in small steps, and S_q up to the 64
    # rows of its query tile.
    buckets: ClassVar[Mapping[str, tuple[int, ...]]] = {
        "B": (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128),
        "S_q": (*range(1, 17), 24, 32, 48, 64),
        "S_kv": (256,),
    }

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        q_scale: Tensor | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        return self.run(q, k, v, sinks, alibi_slopes, q_scale, k_scale, v_scale)
