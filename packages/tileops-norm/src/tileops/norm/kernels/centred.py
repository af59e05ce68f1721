"""What kernels share that take off a row's mean."""

from typing import Any

import tilelang.language as T

from tileops.core.kernel import Static
from tileops.core.spec.dtypes import itemsize
from tileops.norm.kernels.rows import (
    ACCUMULATORS,
    WARP,
    Rows,
    added,
    clear,
    give_block,
    give_row,
    inverse_sqrt,
    load,
    meet,
    sum_block,
    sum_row,
    take_block,
    take_row,
    words,
)

FEW = 16  # elements that a thread holds in float32 too
LARGEST = float.fromhex("0x1.fffffep127")  # of float32


class Centred(Rows):
    """Rows without their mean.

    Where a float32 row lies far from 0 its mean has few digits left. So the differences from it are summed beside their
    squares: their mean, the rest, is what the mean lacks, and is taken off, too. The steps of 16 bits are wider.
    """

    def __init__(self, static: Static, axes: int = 1) -> None:
        super().__init__(static, axes)
        self.fine = self.dtype == "float32"
        self.eps = static["eps"]

    def mean(self, mean: Any, rest: Any) -> Any:
        """As callers get it, in float32."""
        return mean + rest if self.fine else mean

    def without(self, x: Any, mean: Any, rest: Any) -> Any:
        """An element without its row's mean."""
        left = T.cast(x, "float32") - mean
        return left - rest if self.fine else left

    def rstd(self, squares: Any, rest: Any) -> Any:
        """From the sum of squared differences from the mean, and the mean of these differences."""
        variance = squares / T.float32(self.n)
        if self.fine:
            variance = variance - T.min(rest * rest, T.float32(LARGEST))  # infinite squares leave infinity, and no NaN
            variance = T.if_then_else(variance < T.float32(0), T.float32(0), variance)  # a maximum would lose a NaN
        return inverse_sqrt(variance + T.float32(self.eps))


@T.macro
def centre(mean, rest, rstd, raw, p, deal, config, unroll, tx, lane, rank):
    """Mean, rest and one over the deviation of ``unroll`` rows, one float32 number a row, in each of its threads.

    ``raw`` has a thread's elements of them, zeros where a row has none. The blocks of a cluster must have arrived at
    its barrier.
    """
    acc = T.alloc_local((ACCUMULATORS,), "float32")
    acc_rest = T.alloc_local((ACCUMULATORS,), "float32")
    difference = T.alloc_local((1,), "float32")
    part = T.alloc_shared((2 + p.fine, config.threads // WARP), "float32")
    parts = T.alloc_shared((2 + p.fine, config.cluster, config.threads // WARP), "float32")
    for u in T.unroll(unroll):
        clear(acc, ACCUMULATORS)
        for i in T.unroll(deal.held):
            acc[i % ACCUMULATORS] += T.cast(raw[u * deal.held + i], "float32")
        mean[u] = added(acc)
    if config.cluster > 1:
        T.cluster_wait()
    sum_row(mean, unroll, part, parts, 0, tx, config, rank)
    anew(raw, p, deal, unroll)
    for u in T.unroll(unroll):
        mean[u] = mean[u] / T.float32(p.n)
        clear(acc, ACCUMULATORS)
        clear(acc_rest, ACCUMULATORS)
        for i in T.unroll(deal.chunks):
            if deal.has(deal.chunk(i, lane, rank)):  # what is not there differs from the mean, too
                for v in T.unroll(p.vec):
                    difference[0] = T.cast(raw[u * deal.held + i * p.vec + v], "float32") - mean[u]
                    acc[v % ACCUMULATORS] += difference[0] * difference[0]
                    if p.fine:
                        acc_rest[v % ACCUMULATORS] += difference[0]
        rstd[u] = added(acc)
        rest[u] = added(acc_rest)
    give_row(rstd, unroll, part, parts, 1, tx, config, rank)
    if p.fine:
        give_row(rest, unroll, part, parts, 2, tx, config, rank)
    meet(config)
    take_row(rstd, part, parts, 1, tx, config)
    if p.fine:
        take_row(rest, part, parts, 2, tx, config)
    anew(raw, p, deal, unroll)
    for u in T.unroll(unroll):
        rest[u] = rest[u] / T.float32(p.n)
        rstd[u] = p.rstd(rstd[u], rest[u])


@T.macro
def centre_stream(mean, rest, rstd, raw, tensor, start, p, deal, tx):
    """The same of one row that a block reads twice; ``raw`` has room for a thread's part of a step."""
    acc = T.alloc_local((ACCUMULATORS,), "float32")
    acc_rest = T.alloc_local((ACCUMULATORS,), "float32")
    difference = T.alloc_local((1,), "float32")
    warps = deal.lanes // WARP
    part = T.alloc_shared((2 + p.fine, warps), "float32")
    clear(acc, ACCUMULATORS)
    for step in T.serial(deal.parts):
        clear(raw, deal.held)
        load(raw, 0, tensor, start, p.place.unit, deal, tx, step)
        for i in T.unroll(deal.held):
            acc[i % ACCUMULATORS] += T.cast(raw[i], "float32")
    mean[0] = added(acc)
    sum_block(mean, part, 0, tx, warps)
    mean[0] = mean[0] / T.float32(p.n)
    clear(acc, ACCUMULATORS)
    clear(acc_rest, ACCUMULATORS)
    for step in T.serial(deal.parts):
        load(raw, 0, tensor, start, p.place.unit, deal, tx, step)
        for i in T.unroll(deal.chunks):
            if deal.has(deal.chunk(i, tx, step)):
                for v in T.unroll(p.vec):
                    difference[0] = T.cast(raw[i * p.vec + v], "float32") - mean[0]
                    acc[v % ACCUMULATORS] += difference[0] * difference[0]
                    if p.fine:
                        acc_rest[v % ACCUMULATORS] += difference[0]
    rstd[0] = added(acc)
    rest[0] = added(acc_rest)
    give_block(rstd, part, 1, tx)
    if p.fine:
        give_block(rest, part, 2, tx)
    T.sync_threads()
    take_block(rstd, part, 1, tx, warps)
    if p.fine:
        take_block(rest, part, 2, tx, warps)
    rest[0] = rest[0] / T.float32(p.n)
    rstd[0] = p.rstd(rstd[0], rest[0])


@T.macro
def anew(raw, p, deal, unroll):
    """Make the compiler convert a longer row again: it would hold it in float32, beyond the registers there are."""
    if p.vec * itemsize(p.dtype) >= 4 and unroll * deal.held > FEW:
        T.warpgroup_fence_operand(raw, num_regs=unroll * deal.chunks * words(p.vec, p.dtype))
