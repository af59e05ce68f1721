"""Any head size, float8 inputs, any strides: what the kernels built on TMA refuse and no copy makes theirs.

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
    PLAIN,
    Scores,
    add_block,
    begin_rows,
    heads_refused,
    lengths_refused,
    output,
    row_factors,
    row_logs,
    row_state,
    strides_refused,
)
from tileops.core.check import Call
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
        if heads_refused(call) is None and strides_refused(call):
            return "a packed copy serves a faster kernel"
        return lengths_refused(call)

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
        left, right = scores.left, scores.right  # of whole blocks; ``scores.masked`` is of keys
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

        @T.prim_func
        def main(
            q: Q, k: K, v: V, sinks: Sinks, slopes: Slopes, q_scale: ScaleQ, k_scale: ScaleK, v_scale: ScaleV,
            o: O, lse: Lse,
        ):  # fmt: skip
            with T.Kernel(T.ceildiv(S_q * G, ROWS) * H_kv * B, parts_v, threads=128) as (bid, part):
                Qs = T.alloc_shared((ROWS, DP), dtype)
                Ks = T.alloc_shared((BN, DP), dtype)
                Vs = T.alloc_shared((BN, DP_v), dtype)
                f = row_state(ROWS, BN, DP_v, dtype)
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
                        f.slope[i] = slopes[hk * G + (row + i) % G] * LOG2E
                begin_rows(f)
                for n in T.serial(lo, hi):
                    load(Vs, v, b, hk, base + n * BN, S_kv, part * DP_v, D_v)
                    T.clear(f.S)
                    for p in T.serial(parts):
                        if parts > 1:
                            load_rows(Qs, q, b, hk, row, rows, p * DP)
                        load(Ks, k, b, hk, base + n * BN, S_kv, p * DP, D)
                        T.gemm(Qs, Ks, f.S, transpose_B=True, policy=ALL_ROWS)
                    if quantized:
                        for i, j in T.Parallel(ROWS, BN):
                            f.S[i, j] *= q_scale[b, hk] * k_scale[b, hk]
                    if scores.bent:
                        for i, j in T.Parallel(ROWS, BN):
                            distance = T.cast(off + (row + i) // G - n * BN - j, f32)
                            f.S[i, j] = scores.bend(f.S[i, j], f.slope[i], distance)
                    for i, j in T.Parallel(ROWS, BN):
                        f.S[i, j] = scores.masked(f.S[i, j], off + (row + i) // G, n * BN + j, keys)
                    add_block(f, scores.factor)
                    T.gemm(f.P, Vs, f.O, policy=ALL_ROWS)

                if has_sinks:
                    for i in T.Parallel(ROWS):
                        f.sink[i] = sinks[hk * G + (row + i) % G] * LOG2E
                row_factors(f.alpha, f.top, f.l, f.sink, has_sinks, ROWS)
                if quantized:
                    for i in T.Parallel(ROWS):
                        f.alpha[i] *= v_scale[b, hk]
                for i, j in T.Parallel(ROWS, DP_v):
                    if row + i < rows and part * DP_v + j < D_v:
                        head = hk * G + (row + i) % G
                        o[b, (row + i) // G, head, part * DP_v + j] = output(f.O[i, j], f.alpha[i], f.l[i])
                if has_lse:
                    row_logs(f.log, f.top, f.l, f.sink, has_sinks, ROWS)
                    for i in T.Parallel(ROWS):
                        if row + i < rows and part == 0:
                            lse[b, hk * G + (row + i) % G, (row + i) // G] = f.log[i]

        return main
