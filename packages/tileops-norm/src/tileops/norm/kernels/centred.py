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

CONVERTED = 16  # elements that a thread holds in float32 too
NAN = float("nan")
LARGEST = float.fromhex("0x1.fffffep127")  # of float32


class Centring:
    """How values lose their mean that have a ``dtype``, ``n`` of them together, and an ``eps`` for their deviation.

    Where float32 lies far from 0 its mean has few digits left. So the differences from it are summed beside their
    squares: their mean, the rest, is what the mean lacks, and is taken off, too. The steps of 16 bits are wider, and
    the mean of those that are all the same has all digits if all threads sum as many, where it is not ``fine``.
    """

    n: int
    dtype: str
    eps: float
    fine: bool  # whether there is a rest

    def mean(self, mean: Any, rest: Any) -> Any:
        """As callers get it, in float32."""
        return mean + rest if self.fine else mean

    def without(self, x: Any, mean: Any, rest: Any) -> Any:
        """An element without the mean."""
        left = T.cast(x, "float32") - mean
        return left - rest if self.fine else left

    def variance(self, squares: Any, rest: Any) -> Any:
        """From the sum of squared differences from the mean, and the mean of these differences."""
        variance = squares / T.float32(self.n)
        return less(variance, rest * rest) if self.fine else variance

    def rstd(self, variance: Any) -> Any:
        return inverse_sqrt(variance + T.float32(self.eps))


class Centred(Rows, Centring):
    """Rows without their mean."""

    def __init__(self, static: Static, axes: int = 1) -> None:
        super().__init__(static, axes)
        self.eps = static["eps"]
        self.fine = self.dtype == "float32"


@T.macro
def centre(mean, rest, variance, raw, p, deal, config, unroll, tx, lane, rank):
    """Mean, rest and variance of ``unroll`` rows, one float32 number a row, in each of its threads.

    ``raw`` has a thread's elements of them, zeros where a row has none. The blocks of a cluster must have arrived at
    its barrier.
    """
    shares = unroll * (config.threads // WARP)
    part = T.alloc_shared((2 + p.fine, shares), "float32")
    parts = T.alloc_shared((2 + p.fine, config.cluster, shares), "float32")
    if p.fine:
        centre_in_turn(mean, rest, variance, raw, part, parts, p, deal, config, unroll, tx, lane, rank)
    else:
        centre_at_once(mean, variance, raw, part, parts, p, deal, config, unroll, tx, rank)
        clear(rest, unroll)


@T.macro
def centre_at_once(mean, variance, raw, part, parts, p, deal, config, unroll, tx, rank):
    """By one exchange: each thread has the mean of its elements and the squares around that, and all have as many.

    A thread's count from the first of them. That is one of the values, so that the squares around it are at most
    ``held`` times as large as what is left of them around the mean, which thus loses few digits. Of two means the
    middle is one, and its squares have more than theirs by half of their distance's for each of the elements of one.
    """
    acc = T.alloc_local((ACCUMULATORS,), "float32")
    acc_squares = T.alloc_local((ACCUMULATORS,), "float32")
    first = T.alloc_local((1,), "float32")
    difference = T.alloc_local((1,), "float32")
    other = T.alloc_local((1,), "float32")
    lanes, warps = min(config.lanes, WARP), config.threads // WARP
    count = warps * config.cluster if config.lanes > WARP else 1
    for u in T.unroll(unroll):
        first[0] = T.cast(raw[u * deal.held], "float32")
        clear(acc, ACCUMULATORS)
        clear(acc_squares, ACCUMULATORS)
        for i in T.unroll(deal.held):
            difference[0] = T.cast(raw[u * deal.held + i], "float32") - first[0]
            acc[i % ACCUMULATORS] += difference[0]
            acc_squares[i % ACCUMULATORS] += difference[0] * difference[0]
        difference[0] = added(acc) / T.float32(deal.held)
        variance[u] = less(added(acc_squares), difference[0] * difference[0] * T.float32(deal.held))
        mean[u] = first[0] + difference[0]
        for k in T.unroll(lanes.bit_length() - 1):
            other[0] = T.shfl_xor(mean[u], lanes >> (k + 1))
            difference[0] = other[0] - mean[u]
            variance[u] += T.shfl_xor(variance[u], lanes >> (k + 1))
            variance[u] += difference[0] * difference[0] * T.float32(deal.held / 2) * T.float32(1 << k)
            mean[u] = (mean[u] + other[0]) * T.float32(0.5)
    if count > 1:
        if tx % WARP == 0:
            for u in T.unroll(unroll):
                part[0, u * warps + tx // WARP] = mean[u]
                part[1, u * warps + tx // WARP] = variance[u]
        T.sync_threads()
        if config.cluster > 1:
            T.cluster_wait()
            for block in T.unroll(config.cluster):
                for buffer in T.unroll(2):
                    T.copy_cluster(
                        part[buffer, 0 : unroll * warps], parts[buffer, rank, 0 : unroll * warps], dst_block=block
                    )
            T.cluster_sync()
        for u in T.unroll(unroll):
            mean[u] = 0.0
            variance[u] = 0.0
            if count <= 8:
                for i in T.unroll(count):
                    mean[u] += given(part, parts, config, 0, u, i)
                mean[u] = mean[u] / T.float32(count)
                for i in T.unroll(count):
                    difference[0] = given(part, parts, config, 0, u, i) - mean[u]
                    variance[u] += given(part, parts, config, 1, u, i)
                    variance[u] += difference[0] * difference[0] * T.float32(deal.held * WARP)
            else:
                for i in T.unroll(-(-count // WARP)):
                    if i * WARP + tx % WARP < count:
                        mean[u] += given(part, parts, config, 0, u, i * WARP + tx % WARP)
                mean[u] = T.warp_reduce_sum(mean[u]) / T.float32(count)
                for i in T.unroll(-(-count // WARP)):
                    if i * WARP + tx % WARP < count:
                        difference[0] = given(part, parts, config, 0, u, i * WARP + tx % WARP) - mean[u]
                        variance[u] += given(part, parts, config, 1, u, i * WARP + tx % WARP)
                        variance[u] += difference[0] * difference[0] * T.float32(deal.held * WARP)
                variance[u] = T.warp_reduce_sum(variance[u])
    anew(raw, p, deal, unroll)
    for u in T.unroll(unroll):  # an infinite mean is none: infinity less itself
        variance[u] = T.if_then_else(T.abs(mean[u]) <= T.float32(LARGEST), variance[u] / T.float32(p.n), T.float32(NAN))


def less(squares: Any, part: Any) -> Any:
    """What squares are without a part of them: infinity of infinite ones, and no NaN; a maximum would lose a NaN."""
    left = squares - T.min(part, T.float32(LARGEST))
    return T.if_then_else(left < T.float32(0), T.float32(0), left)


def given(part: Any, parts: Any, config: Any, buffer: int, u: Any, i: Any) -> Any:
    """What the i-th warp of a row gave."""
    warps = config.threads // WARP
    return parts[buffer, i // warps, u * warps + i % warps] if config.cluster > 1 else part[buffer, u * warps + i]


@T.macro
def centre_in_turn(mean, rest, variance, raw, part, parts, p, deal, config, unroll, tx, lane, rank):
    """By two exchanges: first the mean, then the squares around it and the rest."""
    acc = T.alloc_local((ACCUMULATORS,), "float32")
    acc_rest = T.alloc_local((ACCUMULATORS,), "float32")
    difference = T.alloc_local((1,), "float32")
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
        variance[u] = added(acc)
        rest[u] = added(acc_rest)
    give_row(variance, unroll, part, parts, 1, tx, config, rank)
    if p.fine:
        give_row(rest, unroll, part, parts, 2, tx, config, rank)
    meet(config)
    take_row(variance, part, parts, 1, tx, config)
    if p.fine:
        take_row(rest, part, parts, 2, tx, config)
    anew(raw, p, deal, unroll)
    for u in T.unroll(unroll):
        rest[u] = rest[u] / T.float32(p.n)
        variance[u] = p.variance(variance[u], rest[u])


@T.macro
def centre_stream(mean, rest, variance, raw, tensor, start, p, deal, tx):
    """The same of one row that a block reads twice; ``raw`` has room for a thread's part of a step.

    The mean counts from the row's first element, so that of elements that are all the same it has all digits.
    """
    first = T.alloc_local((1,), "float32")
    acc = T.alloc_local((ACCUMULATORS,), "float32")
    acc_rest = T.alloc_local((ACCUMULATORS,), "float32")
    difference = T.alloc_local((1,), "float32")
    warps = deal.lanes // WARP
    part = T.alloc_shared((2 + p.fine, warps), "float32")
    first[0] = T.cast(tensor[start * p.place.unit], "float32")
    clear(acc, ACCUMULATORS)
    for step in T.serial(deal.parts):
        load(raw, 0, tensor, start, p.place.unit, deal, tx, step)
        for i in T.unroll(deal.chunks):
            if deal.has(deal.chunk(i, tx, step)):
                for v in T.unroll(p.vec):
                    acc[v % ACCUMULATORS] += T.cast(raw[i * p.vec + v], "float32") - first[0]
    mean[0] = added(acc)
    sum_block(mean, part, 0, tx, warps)
    mean[0] = first[0] + mean[0] / T.float32(p.n)
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
    variance[0] = added(acc)
    rest[0] = added(acc_rest)
    give_block(variance, part, 1, tx)
    if p.fine:
        give_block(rest, part, 2, tx)
    T.sync_threads()
    take_block(variance, part, 1, tx, warps)
    if p.fine:
        take_block(rest, part, 2, tx, warps)
    rest[0] = rest[0] / T.float32(p.n)
    variance[0] = p.variance(variance[0], rest[0])


@T.macro
def anew(raw, p, deal, unroll):
    """Make the compiler convert a longer row again: it would hold it in float32, beyond the registers there are."""
    if p.vec * itemsize(p.dtype) >= 4 and unroll * deal.held > CONVERTED:
        T.warpgroup_fence_operand(raw, num_regs=unroll * deal.chunks * words(p.vec, p.dtype))
