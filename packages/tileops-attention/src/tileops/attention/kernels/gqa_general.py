"""Any head size and float8 inputs, packed rows of any size: what the kernels built on TMA refuse.

Schedule: a CTA is one warpgroup with 64 query rows of a KV head, its group's heads packed into them, and walks over the
keys those rows see. Threads load each block into shared memory, padded with zeros to sizes that wgmma takes, so neither
head sizes nor row pitches have to be multiples of anything; float8 becomes bfloat16 there, which holds it exactly.
Heads beyond 256 elements go in parts of 256: the products add them up, and a CTA writes one part of the output. Nothing
overlaps: it is right first.

Never wins where another kernel takes the call.
"""

from collections.abc import Iterator
from typing import Any

import attrs
import tilelang.language as T

from tileops.attention.kernels.common import (
    ARCHS,
    LOG2E,
    NONE,
    PLAIN,
    Scores,
    decay,
    row_factors,
    row_logs,
    strides_refused,
)
from tileops.core.check import Call, contiguous_strides
from tileops.core.kernel import Device, Kernel, Static
from tileops.core.program import tensors

ROWS = 64  # of a query tile: one warpgroup's
PART = 256  # elements of a head at a time, for registers and shared memory hold no more


@attrs.frozen
class Config:
    """``block_n`` keys at a time."""

    block_n: int = 64

    def shared_bytes(self, D: int, D_v: int) -> int:
        """Of 16-bit Q, K and V."""
        return 2 * (ROWS * padded(D) + self.block_n * (padded(D) + padded(D_v)))


def padded(n: int) -> int:
    """A head, or a part of it, as wgmma takes it: other multiples of 16 are wrong or refused in some TileLangs."""
    return min(PART, max(16, 1 << (n - 1).bit_length()))


class GQAGeneral(Kernel):
    """Plain loads and plain loops."""

    archs = ARCHS
    pass_configs = PLAIN

    def refuse(self, call: Call, device: Device) -> str | None:
        packed = all(m is None or m.strides == contiguous_strides(m.shape) for m in call.inputs.values())
        return None if packed else strides_refused(call)  # rather a copy, and a program for all lengths

    def configs(self, call: Call, device: Device) -> Iterator[Config]:
        yield Config()

    def program(self, static: Static, config: Config, device: Device) -> Any:
        t, size = tensors(static)
        Q, K, V, Sinks, Slopes, O, Lse = (t.get(n) for n in ("q", "k", "v", "sinks", "alibi_slopes", "o", "lse"))
        ScaleQ, ScaleK, ScaleV = (t.get(n) for n in ("q_scale", "k_scale", "v_scale"))
        B, S_q, S_kv = size["B"], size["S_q"], size["S_kv"]
        H, H_kv, D, D_v = static["H"], static["H_kv"], static["D"], static["D_v"]
        quantized = ScaleQ is not None
        dtype = "bfloat16" if quantized else static["T"]
        scores = Scores.of(static)
        left, right = scores.left, scores.right
        has_sinks, has_lse = Sinks is not None, Lse is not None

        BN, DP, DP_v = config.block_n, padded(D), padded(D_v)
        parts, parts_v = -(-D // DP), -(-D_v // DP_v)
        G = H // H_kv
        f32 = "float32"
        ALL_ROWS = T.GemmWarpPolicy.FullRow

        @T.macro
        def load(to, source, b, hk, first, end, column, dim):
            """Rows ``first`` on and columns ``column`` on of a KV head; zeros from ``end`` on and beside the head."""
            for i, j in T.Parallel(to.shape[0], to.shape[1]):
                to[i, j] = T.if_then_else(
                    T.And(first + i < end, column + j < dim),
                    T.cast(source[b, first + i, hk, column + j], dtype),
                    T.cast(0, dtype),
                )

        @T.macro
        def load_rows(to, source, b, hk, row, rows, column):
            """Query rows ``row`` on of a KV head's ``rows``, the group's heads side by side."""
            for i, j in T.Parallel(ROWS, DP):
                to[i, j] = T.if_then_else(
                    T.And(row + i < rows, column + j < D),
                    T.cast(source[b, (row + i) // G, hk * G + (row + i) % G, column + j], dtype),
                    T.cast(0, dtype),
                )

        def visible(at, key, keys):
            """Whether a query at ``at`` sees ``key``, both from ``base`` on."""
            seen = key < keys if right < 0 else key <= T.min(at + right, keys - 1)
            return T.And(seen, key >= at - left) if left >= 0 else seen

        @T.prim_func
        def main(
            q: Q, k: K, v: V, sinks: Sinks, slopes: Slopes, q_scale: ScaleQ, k_scale: ScaleK, v_scale: ScaleV,
            o: O, lse: Lse,
        ):  # fmt: skip
            with T.Kernel(T.ceildiv(S_q * G, ROWS) * H_kv * B, parts_v, threads=128) as (bid, part):
                Qs = T.alloc_shared((ROWS, DP), dtype)
                Ks = T.alloc_shared((BN, DP), dtype)
                Vs = T.alloc_shared((BN, DP_v), dtype)
                S = T.alloc_fragment((ROWS, BN), f32)
                P = T.alloc_fragment((ROWS, BN), dtype)
                acc = T.alloc_fragment((ROWS, DP_v), f32)
                m = T.alloc_fragment((ROWS,), f32)
                top = T.alloc_fragment((ROWS,), f32)  # the maximum in base 2, 0 where no key is seen
                top_before = T.alloc_fragment((ROWS,), f32)
                alpha = T.alloc_fragment((ROWS,), f32)
                l = T.alloc_fragment((ROWS,), f32)
                total = T.alloc_fragment((ROWS,), f32)
                sink = T.alloc_fragment((ROWS,), f32)
                log = T.alloc_fragment((ROWS,), f32)
                slope = T.alloc_fragment((ROWS,), f32)
                rows = T.alloc_var("int32")  # of a KV head
                tile = T.alloc_var("int32")
                row = T.alloc_var("int32")
                hk = T.alloc_var("int32")
                b = T.alloc_var("int32")
                base = T.alloc_var("int32")
                keys = T.alloc_var("int32")  # that any query sees
                off = T.alloc_var("int32")  # where the first query is, from ``base`` on
                lo = T.alloc_var("int32")
                hi = T.alloc_var("int32")
                rows = S_q * G
                hk = T.truncmod(bid, H_kv)
                tile = T.truncdiv(bid, H_kv)
                b = T.truncdiv(tile, T.truncdiv(rows + ROWS - 1, ROWS))
                tile = T.truncdiv(rows + ROWS - 1, ROWS) * (b + 1) - 1 - tile  # the longest first
                row = tile * ROWS
                base = scores.first_key(S_q, S_kv)
                keys = S_kv - base
                off = keys - S_q
                lo = T.truncdiv(T.max(T.truncdiv(row, G) + off - left, 0), BN) if left >= 0 else 0
                hi = T.min(T.truncdiv(row + ROWS - 1, G) + off + right + 1, keys) if right >= 0 else keys
                hi = T.truncdiv(T.max(hi, 0) + BN - 1, BN)

                if parts == 1:
                    load_rows(Qs, q, b, hk, row, rows, 0)
                if scores.alibi:
                    for i in T.Parallel(ROWS):
                        slope[i] = slopes[hk * G + (row + i) % G] * LOG2E
                T.fill(m, NONE)
                T.fill(top, 0.0)
                T.fill(l, 0.0)
                T.clear(acc)
                for n in T.serial(lo, hi):
                    load(Vs, v, b, hk, base + n * BN, S_kv, part * DP_v, D_v)
                    T.clear(S)
                    for p in T.serial(parts):
                        if parts > 1:
                            load_rows(Qs, q, b, hk, row, rows, p * DP)
                        load(Ks, k, b, hk, base + n * BN, S_kv, p * DP, D)
                        T.gemm(Qs, Ks, S, transpose_B=True, policy=ALL_ROWS)
                    if quantized:
                        for i, j in T.Parallel(ROWS, BN):
                            S[i, j] *= q_scale[b, hk] * k_scale[b, hk]
                    if scores.bent:
                        for i, j in T.Parallel(ROWS, BN):
                            S[i, j] = scores.bend(S[i, j], slope[i], T.cast(off + (row + i) // G - n * BN - j, f32))
                    for i, j in T.Parallel(ROWS, BN):
                        S[i, j] = T.if_then_else(visible(off + (row + i) // G, n * BN + j, keys), S[i, j], NONE)
                    T.copy(top, top_before)
                    T.reduce_max(S, m, dim=1, clear=False)
                    for i in T.Parallel(ROWS):
                        top[i] = T.if_then_else(m[i] == NONE, 0.0, m[i] * scores.factor)
                        alpha[i] = decay(top_before[i], top[i])
                    for i, j in T.Parallel(ROWS, BN):
                        S[i, j] = T.exp2(S[i, j] * scores.factor - top[i])
                    T.reduce_sum(S, total, dim=1)
                    for i in T.Parallel(ROWS):
                        l[i] = l[i] * alpha[i] + total[i]
                    for i, j in T.Parallel(ROWS, DP_v):
                        acc[i, j] *= alpha[i]
                    T.copy(S, P)
                    T.gemm(P, Vs, acc, policy=ALL_ROWS)

                if has_sinks:
                    for i in T.Parallel(ROWS):
                        sink[i] = sinks[hk * G + (row + i) % G] * LOG2E
                row_factors(alpha, top, l, sink, has_sinks, ROWS)
                if quantized:
                    for i in T.Parallel(ROWS):
                        alpha[i] *= v_scale[b, hk]
                for i, j in T.Parallel(ROWS, DP_v):
                    if row + i < rows and part * DP_v + j < D_v:
                        o[b, (row + i) // G, hk * G + (row + i) % G, part * DP_v + j] = acc[i, j] * alpha[i]
                if has_lse:
                    row_logs(log, top, l, sink, has_sinks, ROWS)
                    for i in T.Parallel(ROWS):
                        if row + i < rows and part == 0:
                            lse[b, hk * G + (row + i) % G, (row + i) // G] = log[i]

        return main
