"""Decode: a few query rows a KV head against a long cache, at the speed of memory.

Schedule: the query rows of a KV head (its group's heads, times S_q) fill one 64-row tile. A CTA is a producer warp and
one consumer warpgroup, two CTAs an SM, with K and V in rings. The blocks of all batch elements make one long line,
which is cut into equal shares: every SM reads the same number of bytes, whatever B and S_kv are. A share belongs to a
team of CTAs, one a KV head, that read the same tokens at the same time, so that memory gives whole rows.

A batch element that lies in several shares is merged by a second kernel, which reads what each share left of it, in
order: results don't depend on timing. The scratch has one size for all calls.

Wins for up to 64 query rows a KV head. Where the cache is short and there is plenty of work, whole batch elements are
dealt out instead, and nothing is merged.

Serves heads of 64, 96 and 128 elements: a decode with others is the other kernels', which don't split a long cache.
"""

from collections.abc import Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any

import attrs
import tilelang.language as T

from tileops.attention.kernels.common import (
    ARCHS,
    HALF,
    LOG2E,
    NONE,
    ROLES,
    Scores,
    add_block,
    begin_rows,
    output,
    row_factors,
    row_logs,
    row_state,
    strides_refused,
)
from tileops.core.check import Call
from tileops.core.kernel import Device, Kernel, Scratch, Static
from tileops.core.program import tensors

ROWS = 64  # of a query tile: one warpgroup's
CTAS_PER_SM = 2
BLOCKS = {64: 128, 96: 64, 128: 64}  # keys of a block by head size: 16 KiB at most
STAGES = 3  # blocks of K, and of V, that fit twice on an SM
SEAM = 4  # blocks that a cut costs: queries twice, a part written and read again, the merge


@attrs.frozen
class Config:
    """How the cache is cut.

    ``rows`` bounds the query rows of a KV head, ``width`` is the KV heads of a team, ``teams`` the teams of the device;
    ``split`` allows a batch element to lie in several shares, of which ``merge_warps`` are read side by side.
    """

    block_n: int
    rows: int
    width: int
    teams: int
    split: bool
    merge_warps: int

    def shared_bytes(self, D: int, D_v: int) -> int:
        """Of the rings of 16-bit K and V."""
        return 2 * STAGES * self.block_n * (D + D_v) + 1024


class GQADecode(Kernel):
    """Packed query heads, equal shares of all keys, a merge in order."""

    archs = ARCHS
    pass_configs = ROLES

    def refuse(self, call: Call, device: Device) -> str | None:
        if call["T"] not in HALF:
            return "serves 16-bit inputs only"
        if call["D"] != call["D_v"] or call["D"] not in BLOCKS:
            return "serves heads of 64, 96 or 128 elements, the same for keys and values"
        rows = call["S_q"] * (call["H"] // call["H_kv"])
        if rows > ROWS:
            return f"{rows} query rows a KV head are more than the {ROWS} of a tile"
        return strides_refused(call, ("k", "v"))

    def configs(self, call: Call, device: Device) -> Iterator[Config]:
        block_n, group = BLOCKS[call["D"]], call["H"] // call["H_kv"]
        slots = CTAS_PER_SM * device.sm_count
        # wide teams, if they leave few slots idle
        width = max(w for w in range(1, 17) if call["H_kv"] % w == 0 and slots % w <= slots // 25)
        teams, items = slots // width, call["B"] * call["H_kv"] // width
        keys = 0.75 * call["S_kv"]  # of an item: the lengths of a bucket differ by a factor of two
        if call["window_size_left"] >= 0:
            keys = min(keys, call["S_q"] + call["window_size_left"])
        depth = keys / block_n  # blocks
        split = items / teams * depth + SEAM < -(-items // teams) * depth
        rows = group if call["S_q"] == 1 else ROWS
        best = Config(block_n, rows, width, teams, split, 16 if split and teams > 8 * items else 4)
        shared = (  # fewer teams leave less to merge of a short cache
            attrs.evolve(best, teams=teams // part, split=True, merge_warps=warps)
            for part, warps in product((1, 2, 4), (16, 4))
        )
        yield from dict.fromkeys((best, attrs.evolve(best, split=False, merge_warps=4), *shared))

    def workspace(self, call: Call, config: Config) -> list[Scratch]:
        if not config.split:
            return []
        parts = (2 * config.teams * config.width, config.rows)  # a share has two cut batch elements at most
        return [Scratch((*parts, call["D_v"]), "float32"), Scratch((*parts, 2), "float32")]

    def program(self, static: Static, config: Config, device: Device) -> Any:
        t, size = tensors(static)
        Q, K, V, Sinks, Slopes, O, Lse = (t.get(n) for n in ("q", "k", "v", "sinks", "alibi_slopes", "o", "lse"))
        B, S_q, S_kv = size["B"], size["S_q"], size["S_kv"]
        H, H_kv, D, D_v, dtype = static["H"], static["H_kv"], static["D"], static["D_v"], static["T"]
        scores = Scores.of(static)
        left, right = scores.left, scores.right
        has_sinks, has_lse = Sinks is not None, Lse is not None

        BN, ST, WIDTH, TEAMS, split = config.block_n, STAGES, config.width, config.teams, config.split
        G = H // H_kv
        CHUNKS = H_kv // WIDTH  # a batch element is one item for each
        WARPS = config.merge_warps
        f32 = "float32"
        ALL_ROWS = T.GemmWarpPolicy.FullRow
        PartO = T.Tensor((2 * TEAMS * WIDTH, config.rows, D_v), f32) if split else None
        PartL = T.Tensor((2 * TEAMS * WIDTH, config.rows, 2), f32) if split else None

        DEPTH = T.ceildiv(S_kv - scores.first_key(S_q, S_kv), BN)  # blocks of an item
        LINE = B * CHUNKS * DEPTH
        SHARE = T.ceildiv(LINE, TEAMS) if split else T.ceildiv(B * CHUNKS, TEAMS) * DEPTH
        SHARES = T.ceildiv(LINE, SHARE)

        # Sizes go into variables: written out in every index and mask, they make TileLang reason for minutes.
        @T.macro
        def measure(c):
            c.base[0] = scores.first_key(S_q, S_kv)
            c.keys[0] = S_kv - c.base[0]  # that any query sees
            c.off[0] = c.keys[0] - S_q  # where the first query is, from ``base`` on
            c.rows[0] = S_q * G
            c.blocks[0] = T.truncdiv(c.keys[0] + BN - 1, BN)
            c.line[0] = B * CHUNKS * c.blocks[0]
            c.share[0] = SHARE
            c.shares[0] = SHARES

        @T.macro
        def locate(c, place, stop, bid):
            """The batch element and KV head at a place of the line, and its blocks in this share."""
            item = T.alloc_var("int32")
            lo = T.alloc_var("int32")
            item = T.truncdiv(place, c.blocks[0])
            lo = place - item * c.blocks[0]
            hk = T.truncmod(item, CHUNKS) * WIDTH + T.truncmod(bid, WIDTH)
            return T.truncdiv(item, CHUNKS), hk, lo, T.min(c.blocks[0], lo + stop - place)

        def part_of(share, opens, head):
            """Where a share leaves a part of an item: it may end with one that it opens, and begin with another."""
            return (share * 2 + T.if_then_else(opens, 1, 0)) * WIDTH + head

        @T.macro
        def wait(f):
            """For all products in flight; no read of the accumulators may move above it."""
            T.wait_wgmma(0)
            T.warpgroup_fence_operand(f.S, num_regs=ROWS * BN // 128)
            T.warpgroup_fence_operand(f.O, num_regs=ROWS * D_v // 128)

        @T.macro
        def take_query(c, f, b, hk, q, slopes):
            for i, j in T.Parallel(ROWS, D):
                f.Q[i, j] = T.if_then_else(i < c.rows[0], q[b, i // G, hk * G + i % G, j], T.cast(0, dtype))
            if scores.alibi:
                for i in T.Parallel(ROWS):
                    f.slope[i] = slopes[hk * G + i % G] * LOG2E

        def cut(c, n):
            """Whether a row doesn't see all of a block: the first sees least on the right, the last on the left."""
            end = T.min(c.off[0] + right + 1, c.keys[0]) if right >= 0 else c.keys[0]
            beyond = (n + 1) * BN > end
            return T.Or(beyond, n * BN < c.keys[0] - 1 - left) if left >= 0 else beyond

        @T.macro
        def to_logits(c, f, n):
            if scores.bent:
                for i, j in T.Parallel(ROWS, BN):
                    f.S[i, j] = scores.bend(f.S[i, j], f.slope[i], T.cast(c.off[0] + i // G - n * BN - j, f32))
            if cut(c, n):
                for i, j in T.Parallel(ROWS, BN):
                    f.S[i, j] = scores.masked(f.S[i, j], c.off[0] + i // G, n * BN + j, c.keys[0])

        @T.macro
        def finish(c, f, b, hk, sinks, o, lse):
            """An item that lies in this share alone."""
            if has_sinks:
                for i in T.Parallel(ROWS):
                    f.sink[i] = sinks[hk * G + i % G] * LOG2E
            row_factors(f.alpha, f.top, f.l, f.sink, has_sinks, ROWS)
            for i, j in T.Parallel(ROWS, D_v):
                if i < c.rows[0]:
                    o[b, i // G, hk * G + i % G, j] = output(f.O[i, j], f.alpha[i], f.l[i])
            if has_lse:
                row_logs(f.log, f.top, f.l, f.sink, has_sinks, ROWS)
                for i in T.Parallel(ROWS):
                    if i < c.rows[0]:
                        lse[b, hk * G + i % G, i // G] = f.log[i]

        @T.macro
        def leave(c, f, part, part_o, part_l):
            """What this share has of an item that other shares have too."""
            for i, j in T.Parallel(ROWS, D_v):
                if i < c.rows[0]:
                    part_o[part, i, j] = f.O[i, j]
            for i in T.Parallel(ROWS):
                if i < c.rows[0]:
                    part_l[part, i, 0] = T.if_then_else(f.m[i] == NONE, NONE, f.top[i])
                    part_l[part, i, 1] = f.l[i]

        @T.macro
        def consume(c, s, f, bid, lane, q, slopes, sinks, o, lse, part_o, part_l):
            place = T.alloc_var("int32")
            stop = T.alloc_var("int32")
            g = T.alloc_var("int32")  # blocks done
            b = T.alloc_var("int32")
            hk = T.alloc_var("int32")
            lo = T.alloc_var("int32")
            hi = T.alloc_var("int32")
            place = bid // WIDTH * c.share[0]
            stop = T.min(place + c.share[0], c.line[0])
            g = 0
            while place < stop:
                b, hk, lo, hi = locate(c, place, stop, bid)
                take_query(c, f, b, hk, q, slopes)
                begin_rows(f)
                for n in T.serial(lo, hi):
                    T.mbarrier_wait_parity(s.k_full[g % ST], (g // ST) & 1)
                    T.wgmma_gemm(f.Q, s.K[g % ST, :, :], f.S, transpose_B=True, clear_accum=True, policy=ALL_ROWS)
                    wait(f)
                    if lane == 0:
                        T.barrier_arrive(s.k_empty[g % ST])
                        if n > lo:
                            T.barrier_arrive(s.v_empty[(g + ST - 1) % ST])
                    to_logits(c, f, n)
                    add_block(f, scores.factor)
                    T.mbarrier_wait_parity(s.v_full[g % ST], (g // ST) & 1)
                    T.wgmma_gemm(f.P, s.V[g % ST, :, :], f.O, policy=ALL_ROWS)
                    g += 1
                wait(f)
                if lane == 0:
                    T.barrier_arrive(s.v_empty[(g + ST - 1) % ST])
                if not split or hi - lo == c.blocks[0]:
                    finish(c, f, b, hk, sinks, o, lse)
                else:
                    leave(c, f, part_of(bid // WIDTH, lo == 0, bid % WIDTH), part_o, part_l)
                place += hi - lo

        @T.macro
        def produce(c, s, bid, k, v):
            place = T.alloc_var("int32")
            stop = T.alloc_var("int32")
            g = T.alloc_var("int32")
            b = T.alloc_var("int32")
            hk = T.alloc_var("int32")
            lo = T.alloc_var("int32")
            hi = T.alloc_var("int32")
            place = bid // WIDTH * c.share[0]
            stop = T.min(place + c.share[0], c.line[0])
            g = 0
            while place < stop:
                b, hk, lo, hi = locate(c, place, stop, bid)
                for n in T.serial(lo, hi):
                    key = c.base[0] + n * BN
                    T.mbarrier_wait_parity(s.k_empty[g % ST], ((g // ST) & 1) ^ 1)
                    T.tma_copy(k[b, key : key + BN, hk, :], s.K[g % ST, :, :], barrier=s.k_full[g % ST])
                    T.barrier_arrive(s.k_full[g % ST])
                    T.mbarrier_wait_parity(s.v_empty[g % ST], ((g // ST) & 1) ^ 1)
                    T.tma_copy(v[b, key : key + BN, hk, :], s.V[g % ST, :, :], barrier=s.v_full[g % ST])
                    T.barrier_arrive(s.v_full[g % ST])
                    g += 1
                place += hi - lo

        @T.macro
        def merge(c, s, cut, head, row, sinks, o, lse, part_o, part_l):
            """A row of the item that a cut goes through, if it is its first: each warp merges parts, then all."""
            tx = T.get_thread_binding()
            warp = tx // 32
            lane = tx % 32
            item = T.alloc_var("int32")
            first = T.alloc_var("int32")
            count = T.alloc_var("int32")
            h = T.alloc_var("int32")
            part = T.alloc_var("int32")
            weight = T.alloc_var(f32)
            top = T.alloc_local((1,), f32)
            before = T.alloc_local((1,), f32)
            total = T.alloc_local((1,), f32)
            factor = T.alloc_local((1,), f32)
            sink = T.alloc_local((1,), f32)
            log = T.alloc_local((1,), f32)
            acc = T.alloc_local((D_v // 32,), f32)
            item = T.truncdiv(cut * c.share[0], c.blocks[0])
            first = T.truncdiv(item * c.blocks[0], c.share[0])
            count = T.truncdiv((item + 1) * c.blocks[0] - 1, c.share[0]) - first + 1
            h = (T.truncmod(item, CHUNKS) * WIDTH + head) * G + row % G
            if cut < c.shares[0] and first == cut - 1 and cut * c.share[0] > item * c.blocks[0]:
                top[0] = NONE
                total[0] = 0.0
                for u in T.unroll(D_v // 32):
                    acc[u] = 0.0
                for n in T.serial(T.truncdiv(count - warp + WARPS - 1, WARPS)):
                    part = part_of(first + n * WARPS + warp, n * WARPS + warp == 0, head)
                    before[0] = top[0]
                    top[0] = T.max(top[0], part_l[part, row, 0])
                    factor[0] = T.if_then_else(before[0] == NONE, 0.0, T.exp2(before[0] - top[0]))
                    weight = T.if_then_else(top[0] == NONE, 0.0, T.exp2(part_l[part, row, 0] - top[0]))
                    total[0] = total[0] * factor[0] + part_l[part, row, 1] * weight
                    for u in T.unroll(D_v // 32):
                        acc[u] = acc[u] * factor[0] + part_o[part, row, lane + 32 * u] * weight
                if lane == 0:
                    s.top[warp] = top[0]
                    s.total[warp] = total[0]
                for u in T.unroll(D_v // 32):
                    s.O[warp, lane + 32 * u] = acc[u]
                T.sync_threads()
                top[0] = NONE
                for i in T.unroll(WARPS):
                    top[0] = T.max(top[0], s.top[i])
                top[0] = T.if_then_else(top[0] == NONE, 0.0, top[0])
                total[0] = 0.0
                for i in T.unroll(WARPS):
                    total[0] += s.total[i] * T.exp2(s.top[i] - top[0])
                if has_sinks:
                    sink[0] = sinks[h] * LOG2E
                row_factors(factor, top, total, sink, has_sinks, 1, T.serial)
                for n in T.unroll(-(-D_v // (32 * WARPS))):
                    if n * 32 * WARPS + tx < D_v:
                        weight = 0.0
                        for i in T.unroll(WARPS):
                            weight += s.O[i, n * 32 * WARPS + tx] * T.exp2(s.top[i] - top[0])
                        weight = output(weight, factor[0], total[0])
                        o[T.truncdiv(item, CHUNKS), row // G, h, n * 32 * WARPS + tx] = weight
                if has_lse and tx == 0:
                    row_logs(log, top, total, sink, has_sinks, 1, T.serial)
                    lse[T.truncdiv(item, CHUNKS), h, row // G] = log[0]

        def counts():
            names = ("base", "keys", "off", "rows", "blocks", "line", "share", "shares")
            return SimpleNamespace(**{name: T.alloc_local((1,), "int32") for name in names})

        @T.prim_func
        def main(q: Q, k: K, v: V, sinks: Sinks, slopes: Slopes, o: O, lse: Lse, part_o: PartO, part_l: PartL):
            with T.Kernel(SHARES * WIDTH, threads=160) as bid:
                T.annotate_min_blocks_per_sm(CTAS_PER_SM)
                tx = T.get_thread_binding()
                s = SimpleNamespace(
                    K=T.alloc_shared((ST, BN, D), dtype),
                    V=T.alloc_shared((ST, BN, D_v), dtype),
                    k_full=T.alloc_barrier([32] * ST),
                    k_empty=T.alloc_barrier([4] * ST),
                    v_full=T.alloc_barrier([32] * ST),
                    v_empty=T.alloc_barrier([4] * ST),
                )
                f = SimpleNamespace(Q=T.alloc_fragment((ROWS, D), dtype), **vars(row_state(ROWS, BN, D_v, dtype)))
                c = counts()
                measure(c)
                if tx < 128:
                    consume(c, s, f, bid, tx % 32, q, slopes, sinks, o, lse, part_o, part_l)
                else:
                    produce(c, s, bid, k, v)
            if split:
                with T.Kernel(T.max(SHARES - 1, 1) * WIDTH, S_q * G, threads=32 * WARPS) as (cut, row):
                    s = SimpleNamespace(
                        O=T.alloc_shared((WARPS, D_v), f32),
                        top=T.alloc_shared((WARPS,), f32),
                        total=T.alloc_shared((WARPS,), f32),
                    )
                    c = counts()
                    measure(c)
                    merge(c, s, cut // WIDTH + 1, cut % WIDTH, row, sinks, o, lse, part_o, part_l)

        return main
