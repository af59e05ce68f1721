"""Matrix times a vector or two, for SM90, on the CUDA cores: as fast as memory gives b.

A warp owns a column of d: its lanes walk a row of b (stored [N, K]) 16 bytes each, with ``depth`` loads in flight
before the first is used, multiply by the rows of a, which stay in L1, and sum over the warp in float32, always in the
same order. No shared memory and no barrier: the warps of a CTA only share the launch.

Wins up to two rows: beyond, converting a again for every row costs more than the tensor core's wasted rows.
"""

from collections.abc import Iterator
from typing import Any

import attrs
import tilelang.language as T

from tileops.core.check import Call
from tileops.core.kernel import Device, Kernel, Static
from tileops.core.program import tensors
from tileops.gemm.kernels.common import ARCHS, CHUNK, UNGUARDED, unaligned_rows

SPAN = 32 * CHUNK  # elements of K that a warp takes at once
LARGEST_M = 2


@attrs.frozen
class Config:
    """``rows`` of a at once; ``depth`` loads of b in flight a lane; ``warps`` a CTA, a column of d each."""

    rows: int
    depth: int
    warps: int = 8

    @property
    def threads(self) -> int:
        return 32 * self.warps


DEPTHS = (14, 16, 12, 10, 8, 7, 6, 5, 4, 3, 2, 1)


def excluded(config: Config, call: Call, device: Device) -> str | None:
    """Why a config is left out, or None."""
    if config.rows != min(call["M"], LARGEST_M):
        return "sums for rows that are not there, or b read twice"
    if config.depth > -(-call["K"] // SPAN):
        return "more loads in flight than K has"
    return None


class GEMV(Kernel):
    """A warp a column of d: see the module."""

    archs = ARCHS
    pass_configs = UNGUARDED

    def refuse(self, call: Call, device: Device) -> str | None:
        if call["M"] > LARGEST_M:
            return f"more than {LARGEST_M} rows"
        if call["trans_a"]:
            return "a is stored [K, M]: its elements of one row are M apart"
        if not call["trans_b"]:
            return "b is stored [K, N]: a warp would walk down a column"
        if call["K"] % CHUNK:  # also where the pitch is a multiple: what lies behind a row is another's
            return f"rows of {call['K']} elements don't end with one of the loads of {CHUNK}"
        return unaligned_rows(call)

    def configs(self, call: Call, device: Device) -> Iterator[Config]:
        """The fewest loads beyond K first, then the most in flight."""
        found = (Config(rows, depth, warps) for warps in (8, 4) for depth in DEPTHS for rows in (1, 2))
        legal = (c for c in found if not excluded(c, call, device))
        chunks = -(-call["K"] // SPAN)
        yield from sorted(legal, key=lambda c: -(-chunks // c.depth) * c.depth)

    def program(self, static: Static, config: Config, device: Device) -> Any:
        t, size = tensors(static)
        A, B, D = t["a"], t["b"], t["d"]
        N, K, dtype = static["N"], static["K"], static["T"]
        M = size["M"]
        R, U, WP = config.rows, config.depth, config.warps
        whole = K % (SPAN * U) == 0

        @T.macro
        def take(x, row, k, into, u):
            """16 bytes of a row: zeros beyond K."""
            if whole:
                for v in T.vectorized(CHUNK):
                    into[u, v] = x[row, k + v]
            else:
                if k < K:
                    for v in T.vectorized(CHUNK):
                        into[u, v] = x[row, k + v]
                else:
                    for v in T.vectorized(CHUNK):
                        into[u, v] = T.cast(0, dtype)

        @T.prim_func
        def main(a: A, b: B, d: D):
            with T.Kernel(T.ceildiv(N, WP), T.ceildiv(M, R), threads=config.threads) as (bn, bm):
                tx = T.get_thread_binding()
                lane = tx % 32
                n = bn * WP + tx // 32
                from_b = T.alloc_local((U, CHUNK), dtype)
                from_a = T.alloc_local((1, CHUNK), dtype)
                acc = T.alloc_local((R,), "float32")
                for m in T.unroll(R):
                    acc[m] = 0.0
                if n < N:
                    for c in T.serial(-(-K // (SPAN * U))):
                        for u in T.unroll(U):
                            take(b, n, (c * U + u) * SPAN + lane * CHUNK, from_b, u)
                        for u in T.unroll(U):
                            for m in T.unroll(R):
                                take(a, T.min(bm * R + m, M - 1), (c * U + u) * SPAN + lane * CHUNK, from_a, 0)
                                for v in T.unroll(CHUNK):
                                    acc[m] += T.cast(from_b[u, v], "float32") * T.cast(from_a[0, v], "float32")
                    for m in T.unroll(R):
                        for half in T.unroll(5):
                            acc[m] += T.shfl_xor(acc[m], 16 >> half)
                    if lane == 0:
                        for m in T.unroll(R):
                            if bm * R + m < M:
                                d[bm * R + m, n] = T.cast(acc[m], dtype)

        return main
