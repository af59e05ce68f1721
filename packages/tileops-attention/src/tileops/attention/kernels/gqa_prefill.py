"""Prefill: long blocks of queries, tensor cores busy all the time.

Schedule: a CTA is one producer warp and ``block_m / 64`` consumer warpgroups of 64 query rows each. The producer fills
rings of K and V blocks by TMA. A consumer issues Q K^T of the next block together with P V of this one and runs the
softmax of the one while the other is in flight; P stays in registers. Blocks go from right to left; those that the mask
cuts are in loops of their own. The next tile's first Q K^T runs under this tile's epilogue.

Tiles: a CTA an SM walks over blocks of queries. Under a mask the longest come first, over all heads, and are dealt out
back and forth, which is balanced to a percent; tiles in flight still read the same keys within some microseconds.
Without one, head follows head, so that its keys and values stay in L2.

Wins for more than 64 query rows a KV head; decode is for fewer.

Hazards: every wait counts phases, so producer and consumers must agree on each tile's blocks: ``locate`` alone says
them. A tile that sees no key still takes one block, behind the last key, where TMA gives zeros. Blocks start at the
first key that any query sees, so that a NaN before it is never loaded.
"""

from collections.abc import Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any

import attrs
import tilelang.language as T
from tilelang.layout import make_swizzled_layout

from tileops.attention.kernels.common import (
    ARCHS,
    LOG2E,
    NONE,
    ROLES,
    Scores,
    decay,
    heads_refused,
    output,
    row_factors,
    row_logs,
    strides_refused,
)
from tileops.core.check import Call
from tileops.core.kernel import Device, Kernel, Scratch, Static
from tileops.core.program import tensors

STAGES = 2  # blocks of K, and of V: one is read, one is on its way; a third of 128 x 128 elements has no room
REGISTERS = {2: (240, 24), 3: (160, 32)}  # of a consumer and of the producer, by consumer warpgroups
BARRIER = 8  # the first of our named barriers; TileLang takes its own from 3 upward


@attrs.frozen
class Config:
    """The shape of a CTA's work.

    ``q_stages`` is the ring of Q, 0 where Q stays in registers. ``schedule`` says how a CTA gets its tiles: ``static``
    by turns, ``counter`` whoever is free. ``by_head``: head follows head.
    """

    block_m: int = 128
    block_n: int = 128
    q_stages: int = 0
    lazy_rescale: bool = True
    staged_store: bool = True
    schedule: str = "static"
    by_head: bool = False

    def shared_bytes(self, D: int, D_v: int) -> int:
        """Of Q, O and the rings of 16-bit K and V."""
        q, o = max(1, self.q_stages) * self.block_m * D, self.staged_store * self.block_m * D_v
        return 2 * (q + o + STAGES * self.block_n * (D + D_v)) + 1024

    def registers(self, D: int, D_v: int) -> int:
        """Of a consumer thread, for S, P, O and, where it is held there, Q."""
        return self.block_n // 2 + self.block_n // 4 + D_v // 2 + (D // 4 if self.q_stages == 0 else 0)


DEFAULTS = {  # by head sizes of keys and values
    (64, 64): Config(block_m=192, q_stages=2, lazy_rescale=False, staged_store=False),
    (96, 96): Config(lazy_rescale=False),
    (128, 128): Config(),
    (192, 128): Config(q_stages=1, lazy_rescale=False, staged_store=False),
    (256, 256): Config(block_n=64, q_stages=1, staged_store=False),
}
BLOCKS = ((192, 144), (192, 128), (128, 176), (128, 128), (128, 112), (128, 80), (128, 64))  # block_m and block_n
FREE = {2: 200, 3: 136}  # registers for these, by consumer warpgroups


def excluded(config: Config, call: Call, device: Device) -> str | None:
    """Why a config is left out, or None."""
    D, D_v = call["D"], call["D_v"]
    if config.shared_bytes(D, D_v) > device.shared_bytes:
        return "more shared memory than a block can have"
    if config.registers(D, D_v) > FREE[config.block_m // 64]:
        return "more registers than a consumer has: the loop would spill"
    return None


def differing(config: Config, other: Config) -> int:
    """In how many of its fields: a search starts near the default."""
    return sum(a != b for a, b in zip(attrs.astuple(config), attrs.astuple(other), strict=True))


class GQAPrefill(Kernel):
    """Explicit roles, rings of K and V, Q K^T of a block beside P V of the one before it."""

    archs = ARCHS
    pass_configs = ROLES

    def refuse(self, call: Call, device: Device) -> str | None:
        return heads_refused(call) or strides_refused(call)

    def configs(self, call: Call, device: Device) -> Iterator[Config]:
        best = DEFAULTS[call["D"], call["D_v"]]
        if not call["is_causal"] and call["window_size_right"] < 0:
            best = attrs.evolve(best, by_head=True)  # all tiles are equal
        space = (
            attrs.evolve(
                best,
                block_m=m,
                block_n=n,
                q_stages=q,
                lazy_rescale=lazy,
                staged_store=staged,
                schedule=schedule,
                by_head=by_head,
            )
            for (m, n), q, lazy, staged, (schedule, by_head) in product(
                BLOCKS,
                (0, 1, 2),
                (True, False),
                (True, False),
                (("static", False), ("static", True), ("counter", False)),
            )
        )
        near = sorted((best, *space), key=lambda c: differing(c, best))
        yield from (c for c in dict.fromkeys(near) if not excluded(c, call, device))

    def workspace(self, call: Call, config: Config) -> list[Scratch]:
        return [Scratch((1,), "int32", zeroed=True)] if config.schedule == "counter" else []

    def program(self, static: Static, config: Config, device: Device) -> Any:
        t, size = tensors(static)
        Q, K, V, Sinks, Slopes, O, Lse = (t.get(n) for n in ("q", "k", "v", "sinks", "alibi_slopes", "o", "lse"))
        B, S_q, S_kv = size["B"], size["S_q"], size["S_kv"]
        H, H_kv, D, D_v, dtype = static["H"], static["H_kv"], static["D"], static["D_v"], static["T"]
        scores = Scores.of(static)
        left, right = scores.left, scores.right
        has_sinks, has_lse = Sinks is not None, Lse is not None

        BM, BN, ST, QST = config.block_m, config.block_n, STAGES, max(1, config.q_stages)
        G = H // H_kv
        WG = BM // 64  # consumer warpgroups
        NC = 128 * WG  # consumer threads
        counter = config.schedule == "counter"
        Tickets = T.Tensor((1,), "int32") if counter else None
        ROWS = T.GemmWarpPolicy.FullRow
        f32 = "float32"

        # Sizes go into variables: written out in every index and mask, they make TileLang reason for minutes.
        @T.macro
        def measure(c, ctas):
            c.ctas[0] = ctas
            c.rows[0] = T.ceildiv(S_q, BM)  # tiles of a head
            c.tiles[0] = c.rows[0] * B * H
            c.base[0] = scores.first_key(S_q, S_kv)
            c.keys[0] = S_kv - c.base[0]  # that any query sees
            c.off[0] = c.keys[0] - S_q  # where the first query is, from ``base`` on

        @T.macro
        def locate(c, tile):
            """A tile's batch element, head, first row and where that is, and the blocks it sees, from ``base`` on."""
            row = T.alloc_var("int32")
            head = T.alloc_var("int32")
            first = T.alloc_var("int32")
            end = T.alloc_var("int32")
            lo = T.alloc_var("int32")
            hi = T.alloc_var("int32")
            if config.by_head:  # of a group, whose heads share keys
                head = T.truncdiv(tile, c.rows[0] * G)
                row = T.truncdiv(tile - head * c.rows[0] * G, G)
                head = head * G + T.truncmod(tile, G)
            else:
                row = T.truncdiv(tile, B * H)
                head = tile - row * (B * H)
            row = (c.rows[0] - 1 - row if right >= 0 else row) * BM
            first = T.max(row + c.off[0] - left, 0) if left >= 0 else 0
            end = T.min(T.min(row + BM, S_q) + c.off[0] + right, c.keys[0]) if right >= 0 else c.keys[0]
            lo = T.truncdiv(first, BN)
            hi = T.truncdiv(end + BN - 1, BN)
            if end <= first:
                lo = T.truncdiv(c.keys[0] + BN - 1, BN)
                hi = lo + 1
            return T.truncdiv(head, H), T.truncmod(head, H), row, row + c.off[0], lo, hi

        def next_tile(c, bid, turn):
            """Back and forth over the CTAs, as tiles become shorter."""
            return turn * c.ctas[0] + T.if_then_else(turn % 2 == 0, bid, c.ctas[0] - 1 - bid)

        @T.macro
        def to_logits(c, f, n, at, cut):
            if scores.bent:
                for u in T.unroll(BN // 8):
                    for i, j in T.Parallel(BM, 8):
                        f.S[i, u * 8 + j] = scores.bend(
                            f.S[i, u * 8 + j], f.slope[0], f.ahead[i, j] - T.cast(n * BN + u * 8, f32)
                        )
            if cut:
                for i, j in T.Parallel(BM, BN):
                    f.S[i, j] = scores.masked(f.S[i, j], at + i, n * BN + j, c.keys[0])

        @T.macro
        def exponentials(f):
            for i, j in T.Parallel(BM, BN):
                f.S[i, j] = T.exp2(f.S[i, j] * scores.factor - f.top[i])
            for u in T.unroll(BN // 8):
                for i, j in T.Parallel(BM, 8):
                    f.l[i, j] += f.S[i, u * 8 + j]

        @T.macro
        def first_softmax(c, f, n, at):
            to_logits(c, f, n, at, True)
            T.reduce_max(f.S, f.m, dim=1, clear=True)
            for i in T.Parallel(BM):
                f.top[i] = T.if_then_else(f.m[i] == NONE, 0.0, f.m[i] * scores.factor)
            T.fill(f.l, 0.0)
            exponentials(f)

        @T.macro
        def next_softmax(c, f, n, at, cut):
            to_logits(c, f, n, at, cut)
            T.copy(f.top, f.top_before)
            if config.lazy_rescale:
                T.copy(f.m, f.m_before)
            T.reduce_max(f.S, f.m, dim=1, clear=False)
            if config.lazy_rescale:  # a maximum that is 8 bits too low is no harm to P
                for i in T.Parallel(BM):
                    f.m[i] = T.if_then_else((f.m[i] - f.m_before[i]) * scores.factor > 8.0, f.m[i], f.m_before[i])
            for i in T.Parallel(BM):
                f.top[i] = T.if_then_else(f.m[i] == NONE, 0.0, f.m[i] * scores.factor)
                f.alpha[i] = decay(f.top_before[i], f.top[i])
            for i, j in T.Parallel(BM, 8):
                f.l[i, j] *= f.alpha[i]
            exponentials(f)

        @T.macro
        def rescale(f):
            if config.lazy_rescale:
                moved = T.alloc_var("int32")
                moved = 0
                for i in T.Parallel(BM):
                    moved = T.if_then_else(f.m_before[i] != f.m[i], 1, moved)
                if T.any_sync(moved) != 0:
                    for i, j in T.Parallel(BM, D_v):
                        f.O[i, j] *= f.alpha[i]
            else:
                for i, j in T.Parallel(BM, D_v):
                    f.O[i, j] *= f.alpha[i]

        @T.macro
        def release(barriers, i, lane):
            if lane == 0:
                T.barrier_arrive(barriers[i])

        @T.macro
        def wait(x, columns, pending):
            """Until at most ``pending`` products are in flight; no read of this accumulator may move above it."""
            T.wait_wgmma(pending)
            T.warpgroup_fence_operand(x, num_regs=64 * columns // 128)

        @T.macro
        def take_query(s, f, lane, turn, h, at, slopes):
            T.mbarrier_wait_parity(s.q_full[turn % QST], (turn // QST) & 1)
            if config.q_stages == 0:
                T.copy(s.Q[0, :, :], f.Q)
                release(s.q_empty, 0, lane)
            if scores.alibi:
                f.slope[0] = slopes[h] * LOG2E
                for i, j in T.Parallel(BM, 8):
                    f.ahead[i, j] = T.cast(at + i - j, f32)

        @T.macro
        def issue_qk(s, f, turn, g):
            T.mbarrier_wait_parity(s.k_full[g % ST], (g // ST) & 1)
            T.sync_threads(BARRIER + T.get_thread_binding() // 128, 256)
            if config.q_stages == 0:
                T.wgmma_gemm(f.Q, s.K[g % ST, :, :], f.S, transpose_B=True, clear_accum=True, policy=ROWS)
            else:
                T.wgmma_gemm(
                    s.Q[turn % QST, :, :], s.K[g % ST, :, :], f.S, transpose_B=True, clear_accum=True, policy=ROWS
                )

        @T.macro
        def issue_pv(s, f, g):
            T.mbarrier_wait_parity(s.v_full[g % ST], (g // ST) & 1)
            T.wgmma_gemm(f.P, s.V[g % ST, :, :], f.O, policy=ROWS)

        @T.macro
        def pass_on():
            """The tensor cores are the next warpgroup's."""
            T.named_barrier_arrive(BARRIER + (T.get_thread_binding() // 128 + 1) % WG, 256)

        @T.macro
        def steps(c, s, f, lane, turn, g, at, hi, start, stop, cut):
            """Blocks ``start`` to ``stop`` from the right: the scores of each, the values of the one before it."""
            for step in T.serial(start, stop):
                now = g + step
                issue_qk(s, f, turn, now)
                issue_pv(s, f, now - 1)
                pass_on()
                wait(f.S, BN, 1)
                release(s.k_empty, now % ST, lane)
                next_softmax(c, f, hi - 1 - step, at, cut)
                wait(f.O, D_v, 0)
                release(s.v_empty, (now - 1) % ST, lane)
                rescale(f)
                T.copy(f.S, f.P)

        @T.macro
        def all_steps(c, s, f, lane, turn, g, at, lo, hi):
            """Every block but the first: those that the mask cuts on the right, whole ones, those cut on the left."""
            whole = T.alloc_var("int32")
            rest = T.alloc_var("int32")
            whole = 1
            rest = hi - lo
            if right >= 0:
                whole = T.max(T.min(hi - T.truncdiv(T.max(T.min(at + right + 1, c.keys[0]), 0), BN), rest), 1)
            if left >= 0:
                rest = T.max(T.min(hi - T.truncdiv(T.max(at + BM - 1 - left, 0) + BN - 1, BN), rest), whole)
            if right >= 0:
                steps(c, s, f, lane, turn, g, at, hi, 1, whole, True)
            steps(c, s, f, lane, turn, g, at, hi, whole, rest, False)
            if left >= 0:
                steps(c, s, f, lane, turn, g, at, hi, rest, hi - lo, True)

        @T.macro
        def finish(f, h, sinks):
            """What each row of O is multiplied by, and lse."""
            T.reduce_sum(f.l, f.total, dim=1)
            if has_sinks:
                T.fill(f.sink, sinks[h] * LOG2E)
            row_factors(f.alpha, f.top, f.total, f.sink, has_sinks, BM)
            if has_lse:
                row_logs(f.log, f.top, f.total, f.sink, has_sinks, BM)

        @T.macro
        def store(s, f, o, lse, tx, b, h, row):
            for i, j in T.Parallel(BM, D_v):
                f.O[i, j] = output(f.O[i, j], f.alpha[i], f.total[i])
            if config.staged_store:
                wg = tx // 128
                if tx % 128 < 32:
                    T.tma_store_wait(0)  # the tile before has left
                T.sync_threads(BARRIER + 4 + wg, 128)
                for i, j in T.Parallel(BM, D_v):
                    s.O[i // 64, i % 64, j] = f.O[i, j]
                T.fence_proxy_async()
                T.sync_threads(BARRIER + 4 + wg, 128)
                if tx % 128 < 32:
                    T.tma_copy(s.O[wg, :, :], o[b, row + wg * 64 : row + wg * 64 + 64, h, :], leader_scope_threads=32)
            elif row + BM <= S_q:
                for i, j in T.Parallel(BM, D_v):
                    o[b, row + i, h, j] = f.O[i, j]
            else:
                for i, j in T.Parallel(BM, D_v):
                    if row + i < S_q:
                        o[b, row + i, h, j] = f.O[i, j]
            if has_lse:  # behind the fence, which waits for whatever was stored
                for i in T.Parallel(BM):
                    if row + i < S_q:
                        lse[b, h, row + i] = f.log[i]

        @T.macro
        def consume(c, s, f, bid, tx, slopes, sinks, o, lse):
            lane = tx % 32
            tile = T.alloc_var("int32")
            turn = T.alloc_var("int32")  # tiles done
            g = T.alloc_var("int32")  # blocks done
            b = T.alloc_var("int32")
            h = T.alloc_var("int32")
            row = T.alloc_var("int32")
            at = T.alloc_var("int32")
            lo = T.alloc_var("int32")
            hi = T.alloc_var("int32")
            b_done = T.alloc_var("int32")
            h_done = T.alloc_var("int32")
            row_done = T.alloc_var("int32")
            tile = bid
            turn = 0
            g = 0
            if tx >= NC - 128:
                T.named_barrier_arrive(BARRIER, 256)
            b, h, row, at, lo, hi = locate(c, tile)
            take_query(s, f, lane, 0, h, at, slopes)
            issue_qk(s, f, 0, 0)
            pass_on()
            wait(f.S, BN, 0)
            release(s.k_empty, 0, lane)
            first_softmax(c, f, hi - 1, at)
            T.copy(f.S, f.P)
            T.clear(f.O)
            while tile < c.tiles[0]:
                all_steps(c, s, f, lane, turn, g, at, lo, hi)
                if config.q_stages > 0:
                    release(s.q_empty, turn % QST, lane)
                g += hi - lo
                b_done = b
                h_done = h
                row_done = row
                if counter:
                    T.mbarrier_wait_parity(s.t_full[0], turn & 1)
                    tile = s.tile[0]
                    release(s.t_empty, 0, lane)
                turn += 1
                if not counter:
                    tile = next_tile(c, bid, turn)
                if tile < c.tiles[0]:
                    b, h, row, at, lo, hi = locate(c, tile)
                    take_query(s, f, lane, turn, h, at, slopes)
                    issue_qk(s, f, turn, g)
                    issue_pv(s, f, g - 1)
                    pass_on()
                    finish(f, h_done, sinks)
                    wait(f.S, BN, 1)
                    release(s.k_empty, g % ST, lane)
                    first_softmax(c, f, hi - 1, at)
                    wait(f.O, D_v, 0)
                    release(s.v_empty, (g - 1) % ST, lane)
                    store(s, f, o, lse, tx, b_done, h_done, row_done)
                    T.clear(f.O)
                    T.copy(f.S, f.P)
                else:
                    issue_pv(s, f, g - 1)
                    finish(f, h_done, sinks)
                    wait(f.O, D_v, 0)
                    store(s, f, o, lse, tx, b_done, h_done, row_done)
            if config.staged_store and tx % 128 < 32:
                T.tma_store_wait(0)

        @T.macro
        def produce(c, s, bid, lane, q, k, v, tickets):
            tile = T.alloc_var("int32")
            turn = T.alloc_var("int32")
            g = T.alloc_var("int32")
            b = T.alloc_var("int32")
            h = T.alloc_var("int32")
            row = T.alloc_var("int32")
            _ = T.alloc_var("int32")
            lo = T.alloc_var("int32")
            hi = T.alloc_var("int32")
            ticket = T.alloc_var("int32")
            tile = bid
            turn = 0
            g = 0
            while tile < c.tiles[0]:
                if counter:
                    ticket = 0
                    if lane == 0:
                        ticket = c.ctas[0] + T.atomic_add(tickets[0], 1, return_prev=True)
                b, h, row, _, lo, hi = locate(c, tile)
                T.mbarrier_wait_parity(s.q_empty[turn % QST], ((turn // QST) & 1) ^ 1)
                T.tma_copy(q[b, row : row + BM, h, :], s.Q[turn % QST, :, :], barrier=s.q_full[turn % QST])
                T.barrier_arrive(s.q_full[turn % QST])
                for step in T.serial(hi - lo):
                    now = g + step
                    key = c.base[0] + (hi - 1 - step) * BN
                    T.mbarrier_wait_parity(s.k_empty[now % ST], ((now // ST) & 1) ^ 1)
                    T.tma_copy(k[b, key : key + BN, h // G, :], s.K[now % ST, :, :], barrier=s.k_full[now % ST])
                    T.barrier_arrive(s.k_full[now % ST])
                    T.mbarrier_wait_parity(s.v_empty[now % ST], ((now // ST) & 1) ^ 1)
                    T.tma_copy(v[b, key : key + BN, h // G, :], s.V[now % ST, :, :], barrier=s.v_full[now % ST])
                    T.barrier_arrive(s.v_full[now % ST])
                g += hi - lo
                if counter:
                    ticket = T.shfl_sync(ticket, 0)
                    T.mbarrier_wait_parity(s.t_empty[0], (turn & 1) ^ 1)
                    if lane == 0:
                        s.tile[0] = ticket
                    T.barrier_arrive(s.t_full[0])
                    tile = ticket
                turn += 1
                if not counter:
                    tile = next_tile(c, bid, turn)

        TILES = T.ceildiv(S_q, BM) * B * H
        CTAS = T.min(device.sm_count, TILES)

        @T.prim_func
        def main(q: Q, k: K, v: V, sinks: Sinks, slopes: Slopes, o: O, lse: Lse, tickets: Tickets):
            with T.Kernel(CTAS, threads=NC + 128) as bid:
                tx = T.get_thread_binding()
                c = SimpleNamespace(
                    **{name: T.alloc_local((1,), "int32") for name in ("ctas", "rows", "tiles", "base", "keys", "off")}
                )
                s = SimpleNamespace(
                    Q=T.alloc_shared((QST, BM, D), dtype),
                    K=T.alloc_shared((ST, BN, D), dtype),
                    V=T.alloc_shared((ST, BN, D_v), dtype),
                    O=T.alloc_shared((WG, 64, D_v), dtype) if config.staged_store else None,
                    q_full=T.alloc_barrier([32] * QST),
                    q_empty=T.alloc_barrier([NC // 32] * QST),
                    k_full=T.alloc_barrier([32] * ST),
                    k_empty=T.alloc_barrier([NC // 32] * ST),
                    v_full=T.alloc_barrier([32] * ST),
                    v_empty=T.alloc_barrier([NC // 32] * ST),
                    tile=T.alloc_shared((1,), "int32", scope="shared") if counter else None,
                    t_full=T.alloc_barrier([32]) if counter else None,
                    t_empty=T.alloc_barrier([NC // 32]) if counter else None,
                )
                f = SimpleNamespace(
                    Q=T.alloc_fragment((BM, D), dtype),
                    S=T.alloc_fragment((BM, BN), f32),
                    P=T.alloc_fragment((BM, BN), dtype),
                    O=T.alloc_fragment((BM, D_v), f32),
                    m=T.alloc_fragment((BM,), f32),
                    m_before=T.alloc_fragment((BM,), f32),
                    top=T.alloc_fragment((BM,), f32),  # the maximum in base 2, 0 where no key is seen
                    top_before=T.alloc_fragment((BM,), f32),
                    alpha=T.alloc_fragment((BM,), f32),
                    total=T.alloc_fragment((BM,), f32),
                    sink=T.alloc_fragment((BM,), f32),
                    log=T.alloc_fragment((BM,), f32),
                    l=T.alloc_fragment((BM, 8), f32),  # a lane's part of the sums, added up once a tile
                    ahead=T.alloc_fragment((BM, 8), f32),
                    slope=T.alloc_local((1,), f32),
                )
                lanes = T.Fragment(
                    (BM, 8),
                    forward_thread_fn=lambda i, j: i // 16 * 32 + i % 8 * 4 + j // 2,
                    forward_index_fn=lambda i, j: i % 16 // 8 * 2 + j % 2,
                )
                T.annotate_layout({f.l: lanes})
                if scores.alibi:
                    T.annotate_layout({f.ahead: lanes})
                if config.q_stages == 0:  # read by threads alone, it would not be swizzled
                    T.annotate_layout({s.Q: make_swizzled_layout(s.Q)})
                measure(c, CTAS)
                if tx < NC:
                    T.set_max_nreg(REGISTERS[WG][0], 1)
                    consume(c, s, f, bid, tx, slopes, sinks, o, lse)
                else:
                    T.set_max_nreg(REGISTERS[WG][1], 0)
                    if tx < NC + 32:
                        produce(c, s, bid, tx % 32, q, k, v, tickets)

        return main
