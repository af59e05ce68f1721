"""GEMM for operands that the copy engine can't read: odd pitches, fewer than 8 products, any layout and size.

A CTA makes one tile of d. Its threads load the next block of K element by element into registers, each element guarded,
while the tensor cores work on the last one, which they then replace in shared memory. Neighbouring threads load
neighbouring elements, so that memory sees whole sectors however rows are aligned.

Takes what the others refuse and is the slower by far where they don't: its loads are two bytes wide.
"""

from collections.abc import Iterator
from typing import Any

import attrs
import tilelang.language as T

from tileops.core.check import Call
from tileops.core.kernel import Device, Kernel, Static
from tileops.core.program import tensors
from tileops.gemm.kernels.common import ARCHS, CHUNK, UNGUARDED, pitch, strided_columns

COPY_PAYS = 64  # rows beyond which packing an operand should cost less than reading it by elements; an estimate


@attrs.frozen
class Config:
    """A tile of d and a block of K."""

    block_m: int
    block_n: int
    block_k: int
    threads: int

    @property
    def shared_bytes(self) -> int:
        ring = (self.block_m + self.block_n) * self.block_k
        return 2 * (ring + self.block_m * self.block_n) + 1024


CONFIGS = (
    Config(128, 128, 64, 256),
    Config(128, 128, 32, 256),
    Config(64, 128, 64, 128),
    Config(64, 64, 64, 128),
    Config(64, 32, 64, 128),
)


def excluded(config: Config, call: Call, device: Device) -> str | None:
    """Why a config is left out, or None."""
    if config.shared_bytes > device.shared_bytes:
        return "more shared memory than a block can have"
    return None


class GEMMGeneral(Kernel):
    """Plain loads, any alignment: see the module."""

    archs = ARCHS
    pass_configs = UNGUARDED

    def refuse(self, call: Call, device: Device) -> str | None:
        reason = strided_columns(call)
        if reason or call["M"] <= COPY_PAYS:
            return reason
        for name, meta in call.inputs.items():
            if meta is not None and pitch(meta) != meta.shape[1] and meta.shape[1] % CHUNK == 0:
                return f"{name} has a pitch of its own, and a packed copy would serve a faster kernel"
        return None

    def configs(self, call: Call, device: Device) -> Iterator[Config]:
        """The widest tile that still gives every SM one first, then the others by their number of tiles."""

        def waves(c: Config) -> float:
            tiles = -(-call["M"] // c.block_m) * -(-call["N"] // c.block_n)
            return -(-tiles // device.sm_count) * (c.block_m * c.block_n + 4096)

        yield from sorted((c for c in CONFIGS if not excluded(c, call, device)), key=waves)

    def program(self, static: Static, config: Config, device: Device) -> Any:
        t, size = tensors(static)
        A, B, D = t["a"], t["b"], t["d"]
        trans_a, trans_b, N, dtype = static["trans_a"], static["trans_b"], static["N"], static["T"]
        M = size["M"]
        K = size["K"] if trans_a else static["K"]
        BM, BN, BK = config.block_m, config.block_n, config.block_k
        a_tile = (BK, BM) if trans_a else (BM, BK)
        b_tile = (BN, BK) if trans_b else (BK, BN)
        columns = -(-N // BN)

        @T.macro
        def load(x, into, tile, row, column, rows, width):
            for i, j in T.Parallel(tile[0], tile[1]):
                inside = row + i < rows and column + j < width
                into[i, j] = T.if_then_else(inside, x[row + i, column + j], T.cast(0, dtype))

        @T.macro
        def fetch(a, b, next_a, next_b, row, column, k):
            if trans_a:
                load(a, next_a, a_tile, k, row, K, M)
            else:
                load(a, next_a, a_tile, row, k, M, K)
            if trans_b:
                load(b, next_b, b_tile, column, k, N, K)
            else:
                load(b, next_b, b_tile, k, column, K, N)

        @T.prim_func
        def main(a: A, b: B, d: D):
            with T.Kernel(T.ceildiv(M, BM) * columns, threads=config.threads) as tile:
                As = T.alloc_shared(a_tile, dtype)
                Bs = T.alloc_shared(b_tile, dtype)
                Ds = T.alloc_shared((BM, BN), dtype)
                next_a = T.alloc_fragment(a_tile, dtype)
                next_b = T.alloc_fragment(b_tile, dtype)
                acc = T.alloc_fragment((BM, BN), "float32")
                row = tile // columns * BM
                column = tile % columns * BN
                T.clear(acc)
                fetch(a, b, next_a, next_b, row, column, 0)
                for k in T.serial(T.ceildiv(K, BK)):
                    T.copy(next_a, As)
                    T.copy(next_b, Bs)
                    fetch(a, b, next_a, next_b, row, column, (k + 1) * BK)
                    T.gemm(As, Bs, acc, transpose_A=trans_a, transpose_B=trans_b)
                T.copy(acc, Ds)
                for i, j in T.Parallel(BM, BN):
                    if row + i < M and column + j < N:
                        d[row + i, column + j] = Ds[i, j]

        return main
