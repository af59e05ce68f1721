"""GEMM for SM90 by a persistent, warp-specialised kernel: the one for full tiles.

One CTA an SM walks over output tiles. A producer warp fills a ring of shared-memory stages by TMA; each consumer
warpgroup owns 64 rows of the tile, with an A buffer, accumulators, epilogue buffers and named barriers of its own, so
that consumers never wait for each other, and the next tile is loaded under their epilogues. Tiles are walked in groups
of a few columns of tiles, all rows of a group first, so that both operands stay in L2.

All four layouts: the boxes are transposed, not the data. Tails of M, N and K are the copy engine's: it reads zeros
beyond the end and writes nothing there. Where a row of d is no multiple of 16 bytes, d is written by plain guarded
stores.

Wins wherever there are about as many tiles as SMs. It waits for each wgmma batch before it releases a stage: with one
kept in flight ptxas may read accumulators too early, and it gained nothing.
"""

from collections.abc import Iterator
from typing import Any

import attrs
import tilelang.language as T

from tileops.core.check import Call
from tileops.core.kernel import Device, Kernel, Static
from tileops.core.program import tensors
from tileops.gemm.kernels.common import ANY_WGMMA_WIDTH, ARCHS, CHUNK, UNGUARDED, unaligned_rows

ROWS = 64  # of a tile, a consumer warpgroup
BLOCK_K = 64  # 128 bytes: the widest swizzle
FEED = 48  # bytes a cycle that L2 gives an SM while all of them ask, fitted to 64x64 ... 128x128 tiles on the H200


@attrs.frozen
class Config:
    """``warpgroups`` consumers of 64 rows each; ``group`` columns of tiles are walked together.

    ``cluster`` CTAs, one tile above the other, share each tile of b by multicast.
    """

    warpgroups: int
    block_n: int
    stages: int
    group: int = 8
    cluster: int = 1

    @property
    def block_m(self) -> int:
        return ROWS * self.warpgroups

    @property
    def slice_n(self) -> int:
        """Columns that the epilogue writes at once: 64 where they divide the tile, else half of it."""
        return 64 if self.block_n % 64 == 0 else self.block_n // 2

    @property
    def slices(self) -> int:
        """Epilogue buffers of a warpgroup: one is filled while the copy engine reads the other."""
        return 2 if self.block_n % 64 == 0 else 1

    @property
    def threads(self) -> int:
        return 128 * self.warpgroups + (128 if self.warpgroups > 1 else 32)

    @property
    def shared_bytes(self) -> int:
        ring = self.stages * (self.block_m + self.block_n) * BLOCK_K
        epilogue = self.slices * self.block_m * self.slice_n
        return 2 * (ring + epilogue) + 1024  # barriers, and the alignment of the first buffer


# Warpgroups and columns; of two tiles that cost the same, the one with more warpgroups.
TILES = ((3, 176), (3, 128), (2, 256), (2, 192), (2, 128), (2, 64), (1, 256), (1, 128), (1, 64))


def excluded(config: Config, call: Call, device: Device) -> str | None:
    """Why a config is left out, or None."""
    if config.shared_bytes > device.shared_bytes:
        return "more shared memory than a block can have"
    if config.warpgroups == 3 and config.block_n > 192:
        return "three consumers have 160 registers a thread: no room for accumulators this wide"
    if config.block_n % 64 and not call["trans_b"]:
        return "a tile of b with its columns side by side is copied in boxes of 64"
    if config.block_n & (config.block_n - 1) and not ANY_WGMMA_WIDTH:
        return "this TileLang splits a wgmma whose width is no power of two into narrow ones"
    if config.cluster * config.block_m > max(call["M"], config.block_m):
        return "a cluster taller than d"
    return None


def cycles(config: Config, call: Call, device: Device) -> float:
    """An estimate: waves of tiles, times blocks of K, times what one takes to read or to multiply.

    Orders the tiles as measured on the H200 at M 256 ... 4096. A cluster's barriers cost time, a block and a launch.
    """
    rows, columns = -(-call["M"] // config.block_m), -(-call["N"] // config.block_n)
    waves = -(-(-(-rows // config.cluster) * config.cluster) * columns // device.sm_count)
    multiply = 1.06 * config.block_m * config.block_n * BLOCK_K * 2 / 4096
    read = (config.block_m + config.block_n / config.cluster) * BLOCK_K * 2 / FEED
    block, launch = (140, 2500) if config.cluster > 1 else (0, 0)
    return waves * -(-call["K"] // BLOCK_K) * (max(multiply, read) + block) + launch


class GEMMPersistent(Kernel):
    """Persistent TMA and wgmma: see the module."""

    archs = ARCHS
    pass_configs = UNGUARDED

    def refuse(self, call: Call, device: Device) -> str | None:
        return unaligned_rows(call)

    def configs(self, call: Call, device: Device) -> Iterator[Config]:
        """The fastest by estimate first, each with as many stages as fit: from 4, which paid over 3, to 8."""
        found = []
        for warpgroups, block_n in TILES:
            for group in (8, 4):
                for cluster in (1, 2):
                    fits = [Config(warpgroups, block_n, stages, group, cluster) for stages in (8, 7, 6, 5, 4)]
                    found += [c for c in fits if not excluded(c, call, device)][:1]
        yield from sorted(found, key=lambda c: cycles(c, call, device))

    def program(self, static: Static, config: Config, device: Device) -> Any:
        t, size = tensors(static)
        A, B, D = t["a"], t["b"], t["d"]
        trans_a, trans_b, N, dtype = static["trans_a"], static["trans_b"], static["N"], static["T"]
        M = size["M"]
        K = size["K"] if trans_a else static["K"]
        NC, BN, BK, ST, CL, G = config.warpgroups, config.block_n, BLOCK_K, config.stages, config.cluster, config.group
        ES, EB = config.slice_n, config.slices
        BM, CT = config.block_m, 128 * NC
        W = device.sm_count // CL
        columns = -(-N // BN)
        whole_rows = N % CHUNK == 0  # of d: the copy engine writes them
        split_registers = NC > 1
        RC = 240 if NC == 2 else 160
        policy = T.GemmWarpPolicy.FullRow
        multicast = {"cluster_mask": (1 << CL) - 1} if CL > 1 else {}
        a_tile = (ST, BK, ROWS) if trans_a else (ST, ROWS, BK)
        b_tile = (ST, BN, BK) if trans_b else (ST, BK, BN)

        @T.macro
        def locate(tile, rows, rank, bm, bn):
            """The tile's place, kept in registers: as an expression it would be recomputed in the K loop."""
            span = G * rows
            first = T.truncdiv(tile, span) * G
            place = T.truncmod(tile, span)
            width = T.min(G, columns - first)
            bm[0] = (T.truncdiv(place, width) * CL + rank) * BM
            bn[0] = (first + T.truncmod(place, width)) * BN

        @T.macro
        def load_a(a, As, full, s, row, k):
            if trans_a:
                T.tma_copy(a[k : k + BK, row : row + ROWS], As[s, :, :], barrier=full[s])
            else:
                T.tma_copy(a[row : row + ROWS, k : k + BK], As[s, :, :], barrier=full[s])

        @T.macro
        def produce(a, b, A0, A1, A2, Bs, full, empty, tx, first, tiles, rows, rank):
            bm = T.alloc_local((1,), "int32")
            bn = T.alloc_local((1,), "int32")
            blocks = T.ceildiv(K, BK)
            for w in T.serial(tiles):
                locate(first + w * W, rows, rank, bm, bn)
                for k in T.serial(blocks):
                    it = w * blocks + k
                    s = it % ST
                    T.mbarrier_wait_parity(empty[s], ((it // ST) & 1) ^ 1)
                    load_a(a, A0, full, s, bm[0], k * BK)
                    if NC > 1:
                        load_a(a, A1, full, s, bm[0] + ROWS, k * BK)
                    if NC > 2:
                        load_a(a, A2, full, s, bm[0] + 2 * ROWS, k * BK)
                    if trans_b:
                        T.tma_copy(
                            b[bn[0] : bn[0] + BN, k * BK : k * BK + BK],
                            Bs[s, :, :],
                            barrier=full[s],
                            annotations=multicast,
                        )
                    else:
                        T.tma_copy(
                            b[k * BK : k * BK + BK, bn[0] : bn[0] + BN],
                            Bs[s, :, :],
                            barrier=full[s],
                            annotations=multicast,
                        )
                    if tx == CT:
                        T.mbarrier_arrive(full[s])

        @T.macro
        def release(empty, s, tx):
            """One lane a warp tells the producer, or each producer that writes into this ring."""
            if CL > 1:
                if tx % 32 < CL:
                    T.mbarrier_arrive(empty[s], tx % 32)
            else:
                if tx % 32 == 0:
                    T.mbarrier_arrive(empty[s])

        @T.macro
        def store(d, Ds, acc, tx, row, column, e, wg):
            """Slice e of the accumulators: to shared memory, and from there to d."""
            if whole_rows and tx % 128 < 32:
                T.tma_store_wait(EB - 1)
            T.sync_threads(8 + wg, 128)
            T.copy(acc[:, e * ES : (e + 1) * ES], Ds[e % EB, :, :])
            if whole_rows:
                T.fence_proxy_async()
                T.sync_threads(12 + wg, 128)
                if tx % 128 < 32:
                    T.tma_copy(Ds[e % EB, :, :], d[row : row + ROWS, column + e * ES : column + (e + 1) * ES])
            else:
                T.sync_threads(12 + wg, 128)
                for i, j in T.Parallel(ROWS, ES):
                    if row + i < M and column + e * ES + j < N:
                        d[row + i, column + e * ES + j] = Ds[e % EB, i, j]

        @T.macro
        def consume(d, As, Bs, Ds, full, empty, tx, first, tiles, rows, rank, wg):
            acc = T.alloc_fragment((ROWS, BN), "float32")
            bm = T.alloc_local((1,), "int32")
            bn = T.alloc_local((1,), "int32")
            blocks = T.ceildiv(K, BK)
            for w in T.serial(tiles):
                locate(first + w * W, rows, rank, bm, bn)
                T.clear(acc)
                for k in T.serial(blocks):
                    it = w * blocks + k
                    s = it % ST
                    T.mbarrier_wait_parity(full[s], (it // ST) & 1)
                    T.wgmma_gemm(As[s, :, :], Bs[s, :, :], acc, transpose_A=trans_a, transpose_B=trans_b, policy=policy)
                    T.wait_wgmma(0)
                    release(empty, s, tx)
                T.warpgroup_fence_operand(acc, num_regs=ROWS * BN // 128)
                for e in T.unroll(BN // ES):
                    store(d, Ds, acc, tx, bm[0] + wg * ROWS, bn[0], e, wg)
            if whole_rows and tx % 128 < 32:
                T.tma_store_wait(0)

        @T.macro
        def body(a, b, d, cta):
            A0 = T.alloc_shared(a_tile, dtype)
            A1 = T.alloc_shared(a_tile, dtype) if NC > 1 else A0
            A2 = T.alloc_shared(a_tile, dtype) if NC > 2 else A0
            Bs = T.alloc_shared(b_tile, dtype)
            D0 = T.alloc_shared((EB, ROWS, ES), dtype)
            D1 = T.alloc_shared((EB, ROWS, ES), dtype) if NC > 1 else D0
            D2 = T.alloc_shared((EB, ROWS, ES), dtype) if NC > 2 else D0
            full = T.alloc_barrier([1] * ST)
            empty = T.alloc_cluster_barrier([4 * NC * CL] * ST) if CL > 1 else T.alloc_barrier([4 * NC] * ST)
            tx = T.get_thread_binding()
            rows = T.ceildiv(M, BM * CL)
            first = cta // CL
            rank = cta % CL
            tiles = T.truncdiv(rows * columns - first + W - 1, W)
            if tx >= CT:
                if split_registers:
                    T.set_max_nreg(24, 0)
                if tx < CT + 32:
                    produce(a, b, A0, A1, A2, Bs, full, empty, tx, first, tiles, rows, rank)
            elif tx < 128:
                if split_registers:
                    T.set_max_nreg(RC, 1)
                consume(d, A0, Bs, D0, full, empty, tx, first, tiles, rows, rank, 0)
            elif tx < 256:
                if NC > 1:
                    T.set_max_nreg(RC, 1)
                    consume(d, A1, Bs, D1, full, empty, tx, first, tiles, rows, rank, 1)
            else:
                if NC > 2:
                    T.set_max_nreg(RC, 1)
                    consume(d, A2, Bs, D2, full, empty, tx, first, tiles, rows, rank, 2)
            if CL > 1:
                T.cluster_sync()  # peers still arrive on this CTA's barriers

        # Never a CTA without a tile: a loop whose extent is known to be 0 or 1 runs once.
        if CL > 1:

            @T.prim_func
            def main(a: A, b: B, d: D):
                with T.ClusterKernel(
                    T.min(W, T.ceildiv(M, BM * CL) * columns) * CL, threads=config.threads, cluster_dims=CL
                ) as cta:
                    body(a, b, d, cta)
        else:

            @T.prim_func
            def main(a: A, b: B, d: D):
                with T.Kernel(T.min(W, T.ceildiv(M, BM) * columns), threads=config.threads) as cta:
                    body(a, b, d, cta)

        return main
