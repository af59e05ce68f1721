"""GEMM for SM90 with few rows of a: the operands are swapped and K is split inside a cluster.

b's columns fill the 64 rows of a wgmma and the tokens (rows of a) its width, so that 16 tokens waste nothing. K is
split over the CTAs of one cluster, as many as make about one CTA an SM; each leaves its partial sums in a float32
workspace, which stays in L2, and after a cluster barrier each sums its share of the columns over all splits, always in
the same order: one launch, the same bits every time.

Wins up to about 128 rows, where reading b is most of the time and the tiles of other designs are too few to ask for all
of the memory's bandwidth. Sharing the tile of tokens between clusters by multicast was never the fastest.
"""

from collections.abc import Iterator
from typing import Any

import attrs
import tilelang.language as T

from tileops.core.check import Call
from tileops.core.kernel import Device, Kernel, Scratch, Static
from tileops.core.program import tensors
from tileops.gemm.kernels.common import ANY_WGMMA_WIDTH, ARCHS, CHUNK, UNGUARDED, unaligned_rows

BLOCK_K = 64
LARGEST_M = 128
LARGEST_N = 65535 * 64  # of the narrowest blocks
GPC_SMS = 16  # a cluster stays within so many, where the device was cut down most


@attrs.frozen
class Config:
    """A CTA makes ``block_w`` columns of d for ``block_t`` rows from one of ``splits`` parts of K."""

    block_w: int
    block_t: int
    stages: int
    splits: int

    @property
    def threads(self) -> int:
        return 2 * self.block_w + 32

    @property
    def shared_bytes(self) -> int:
        ring = self.stages * (self.block_w + self.block_t) * BLOCK_K
        return 2 * (ring + (self.block_w * self.block_t if self.splits == 1 else 0)) + 1024


WIDTHS = (64, 128)
TOKENS = (16, 32, 64, 96, 128)
STAGES = (8, 6, 5, 4, 12)
SPLITS = (1, 2, 4, 8)


def excluded(config: Config, call: Call, device: Device) -> str | None:
    """Why a config is left out, or None."""
    if config.shared_bytes > device.shared_bytes:
        return "more shared memory than a block can have"
    if config.block_t & (config.block_t - 1) and not ANY_WGMMA_WIDTH:
        return "this TileLang splits a wgmma whose width is no power of two into narrow ones"
    if config.splits > 1 and -(-call["K"] // BLOCK_K) < 4 * config.splits:
        return "parts of K shorter than the start of a ring"
    if config.splits > 1 and (config.splits - 1) * -(-call["N"] // config.block_w) >= 2 * device.sm_count:
        return "more splits than it takes to fill the device twice"
    return None


def filling(block_w: int, call: Call, device: Device) -> int:
    """The most parts of K that give no SM two CTAs."""
    columns = -(-call["N"] // block_w)
    return max(s for s in SPLITS if s == 1 or (s * columns <= device.sm_count and call["K"] >= 4 * s * BLOCK_K))


def fits(config: Config, call: Call, device: Device) -> bool:
    """Whether all clusters run at once: 33 clusters of 4 don't on 132 SMs with a CTA each, and take twice as long."""
    a_gpc = GPC_SMS * (device.shared_bytes // config.shared_bytes) // config.splits
    return -(-call["N"] // config.block_w) <= device.sm_count // GPC_SMS * a_gpc


class GEMMSkinny(Kernel):
    """Operands swapped, K split in a cluster: see the module."""

    archs = ARCHS
    pass_configs = UNGUARDED

    def refuse(self, call: Call, device: Device) -> str | None:
        if call["M"] > LARGEST_M:
            return f"more than {LARGEST_M} rows"
        if call["trans_a"]:
            return "a is stored [K, M]: its tile of tokens would be cut along rows of M"
        if call["N"] > LARGEST_N:
            return "more blocks of columns than the grid's second axis takes"
        if call["M"] > 96 and filling(64, call, device) == 1:
            return "more than 96 rows, and no gain from splitting K: full tiles are faster"
        return unaligned_rows(call)

    def configs(self, call: Call, device: Device) -> Iterator[Config]:
        """As many parts of K as fill the device first, in blocks of 64 columns, the deepest ring that lets all run.

        Four parts read a tile of 128 tokens so often that blocks of 128 columns are faster (128x2112x7168: 6 %).
        """
        block_t = next(t for t in TOKENS if t >= call["M"] and (ANY_WGMMA_WIDTH or t & (t - 1) == 0))
        wide = block_t == 128 and filling(64, call, device) >= 4
        found = (Config(w, block_t, stages, s) for w in WIDTHS for stages in STAGES for s in SPLITS)

        def rank(c: Config) -> tuple[bool, ...]:
            return (c.block_w == 128) != wide, c.splits != filling(c.block_w, call, device), not fits(c, call, device)

        yield from sorted((c for c in found if not excluded(c, call, device)), key=rank)

    def workspace(self, call: Call, config: Config) -> list[Scratch]:
        if config.splits == 1:
            return []
        tokens = -(-call["M"] // config.block_t) * config.block_t
        columns = -(-call["N"] // config.block_w)
        return [Scratch((config.splits, tokens, columns * config.block_w), "float32")]

    def program(self, static: Static, config: Config, device: Device) -> Any:
        t, size = tensors(static)
        A, B, D = t["a"], t["b"], t["d"]
        trans_b, N, K, dtype = static["trans_b"], static["N"], static["K"], static["T"]
        M = size["M"]
        BW, BT, BK, ST, S = config.block_w, config.block_t, BLOCK_K, config.stages, config.splits
        CT = 2 * BW
        blocks = -(-K // BK)
        columns = -(-N // BW)
        whole_rows = N % CHUNK == 0
        b_tile = (ST, BW, BK) if trans_b else (ST, BK, BW)
        own = BW // S  # columns that a CTA sums over the splits
        units = BT * own // 4
        rounds = -(-units // CT)
        P = T.Tensor((S, T.dynamic("tokens"), columns * BW), "float32")

        @T.macro
        def load(a, b, As, Bs, full, s, k, row, column):
            if trans_b:
                T.tma_copy(b[column : column + BW, k : k + BK], Bs[s, :, :], barrier=full[s])
            else:
                T.tma_copy(b[k : k + BK, column : column + BW], Bs[s, :, :], barrier=full[s])
            T.tma_copy(a[row : row + BT, k : k + BK], As[s, :, :], barrier=full[s])

        @T.macro
        def accumulate(a, b, acc, As, Bs, full, empty, tx, r, row, column):
            """Part r of K: a producer warp and the consumer warpgroups."""
            start = T.alloc_local((1,), "int32")
            start[0] = T.truncdiv(r * blocks, S)
            count = T.truncdiv((r + 1) * blocks, S) - start[0]
            if tx >= CT:
                for k in T.serial(count):
                    s = k % ST
                    T.mbarrier_wait_parity(empty[s], ((k // ST) & 1) ^ 1)
                    load(a, b, As, Bs, full, s, (start[0] + k) * BK, row, column)
                    if tx == CT:
                        T.mbarrier_arrive(full[s])
            else:
                T.clear(acc)
                for k in T.serial(count):
                    s = k % ST
                    T.mbarrier_wait_parity(full[s], (k // ST) & 1)
                    T.wgmma_gemm(
                        Bs[s, :, :],
                        As[s, :, :],
                        acc,
                        transpose_A=not trans_b,
                        transpose_B=True,
                        policy=T.GemmWarpPolicy.FullRow,
                    )
                    T.wait_wgmma(0)
                    if tx % 32 == 0:
                        T.mbarrier_arrive(empty[s])
                T.warpgroup_fence_operand(acc, num_regs=BW * BT // CT)

        @T.macro
        def write(d, Ds, acc, tx, row, column):
            """The whole sums of a K that is not split."""
            for i, j in T.Parallel(BW, BT):
                Ds[j, i] = acc[i, j]
            if whole_rows:
                T.fence_proxy_async()
                T.sync_threads(8, CT)
                if tx < 32:
                    T.tma_copy(Ds, d[row : row + BT, column : column + BW])
                    T.tma_store_wait(0)
            else:
                T.sync_threads(8, CT)
                for j, i in T.Parallel(BT, BW):
                    if row + j < M and column + i < N:
                        d[row + j, column + i] = Ds[j, i]

        @T.macro
        def reduce(d, p, tx, row, column):
            """Own columns, four at a time, over the splits in order."""
            total = T.alloc_local((rounds, 4), "float32")
            for e in T.unroll(rounds):
                for v in T.vectorized(4):
                    total[e, v] = 0.0
            for q in T.unroll(S):
                for e in T.unroll(rounds):
                    u = T.min(e * CT + tx, units - 1)
                    for v in T.vectorized(4):
                        total[e, v] += p[q, row + u // (own // 4), column + u % (own // 4) * 4 + v]
            for e in T.unroll(rounds):
                u = e * CT + tx
                if u < units:
                    m = row + u // (own // 4)
                    n = column + u % (own // 4) * 4
                    if whole_rows:
                        if m < M and n < N:
                            for v in T.vectorized(4):
                                d[m, n + v] = T.cast(total[e, v], dtype)
                    else:
                        for v in T.unroll(4):
                            if m < M and n + v < N:
                                d[m, n + v] = T.cast(total[e, v], dtype)

        @T.macro
        def body(a, b, d, p, r, bn, bm):
            Bs = T.alloc_shared(b_tile, dtype)
            As = T.alloc_shared((ST, BT, BK), dtype)
            Ds = T.alloc_shared((BT, BW) if S == 1 else (1, 8), dtype)
            acc = T.alloc_fragment((BW, BT), "float32")
            full = T.alloc_barrier([1] * ST)
            empty = T.alloc_barrier([CT // 32] * ST)
            tx = T.get_thread_binding()
            row = bm * BT
            column = bn * BW
            accumulate(a, b, acc, As, Bs, full, empty, tx, r, row, column)
            if S == 1:
                if tx < CT:
                    write(d, Ds, acc, tx, row, column)
            else:
                if tx < CT:
                    for i, j in T.Parallel(BW, BT):
                        p[r, row + j, column + i] = acc[i, j]
                T.cluster_sync()
                if tx < CT:
                    reduce(d, p, tx, row, column + r * own)

        grid = (S, columns, T.ceildiv(M, BT))
        if S > 1:

            @T.prim_func
            def main(a: A, b: B, d: D, p: P):
                with T.ClusterKernel(*grid, threads=config.threads, cluster_dims=(S, 1, 1)) as (r, bn, bm):
                    body(a, b, d, p, r, bn, bm)
        else:

            @T.prim_func
            def main(a: A, b: B, d: D):
                with T.Kernel(*grid, threads=config.threads) as (r, bn, bm):
                    body(a, b, d, d, r, bn, bm)

        return main
