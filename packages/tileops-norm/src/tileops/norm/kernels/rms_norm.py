"""RMSNorm forward: one read and one write of each element while a row fits in registers, two reads beyond."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import tilelang.language as T

from tileops.core.check import Call
from tileops.core.kernel import Device, Kernel, Static
from tileops.norm.kernels.rows import (
    ACCUMULATORS,
    ARCHS,
    MAX_CLUSTER,
    MAX_THREADS,
    PASSES,
    REGISTERS,
    WARP,
    Deal,
    Rows,
    StreamConfig,
    added,
    arguments,
    clear,
    count,
    crowded,
    evenly,
    flat,
    lanes_for,
    launch,
    load,
    load_vector,
    refuse_rows,
    refuse_served,
    sum_block,
    sum_row,
    vector,
    words,
)

DEFAULT_EPS = 2.0**-23


@attrs.frozen
class Config:
    """``lanes`` threads of each of ``cluster`` blocks hold ``chunks`` vectors each of a row: that is a sum's order.

    The rest has no part in it: a block has ``threads``, takes ``unroll`` rows at once, loads the weight ``early``,
    before a row is summed, and leaves registers for so many ``resident`` blocks a multiprocessor.
    """

    lanes: int
    chunks: int
    cluster: int = 1
    threads: int = 128
    unroll: int = 1
    early: bool = True
    resident: int = 1


# Vectors of a row, and the most threads that share it: the fastest of several on an H200, from one row to 32768.
LADDER = ((64, WARP), (256, 128), (2048, 256), (4096, 512), (8192, 1024))
# The same for rows that are summed twice or have more operands: four vectors a thread, and fewer warps to wait for.
DEEP = ((128, WARP), (256, 64), (512, 128), (2048, 256), (4096, 512), (8192, 1024))
HELD = 32  # registers for a thread's part of a row, where 1024 threads share it


def shared(
    n: int, dtype: str, held: int = 1, ladder: Sequence[tuple[int, int]] = LADDER
) -> tuple[int, int, int, int] | None:
    """How rows of a length are shared: lanes, chunks, cluster and threads of a config, for all of which it is one.

    A thread holds its part of ``held`` of them. None where no cluster's registers do.
    """
    vec = vector(n, dtype)
    vectors, size = n // vec, words(vec, dtype) * held
    most = next((threads for limit, threads in ladder if vectors * held <= limit), MAX_THREADS)
    for cluster in (1, 2, 4, MAX_CLUSTER):
        share = -(-vectors // cluster)
        if -(-share // most) * size <= HELD or most < MAX_THREADS:
            # Of 1024 threads all are needed: fewer would hold more than they can.
            lanes = evenly(share, most) if most < MAX_THREADS else lanes_for(share, most)
            return lanes, -(-share // lanes), cluster, max(lanes, 128) if lanes <= WARP else lanes
    return None


def configs(n: int, dtype: str, ladder: Sequence[tuple[int, int]] = LADDER) -> Iterator[Config]:
    """The configs for rows of a length, the default first; none for rows that no cluster's registers hold.

    All of them sum a row in one order: neither the number of rows nor a tuner has a say in it.
    """
    found = shared(n, dtype, ladder=ladder)
    if found is None:
        return
    deal, size = Config(*found), words(vector(n, dtype), dtype)
    lanes = deal.lanes
    early = 2 * deal.chunks * size + 24 <= REGISTERS // (2 * lanes)  # two blocks a multiprocessor still have room
    default = attrs.evolve(
        deal, unroll=2 if lanes <= WARP else 1, early=early, resident=1 if early or lanes > 512 else 2
    )
    yield default
    seen = {default}
    for threads in (128, 256) if lanes <= WARP else (lanes,):
        for unroll, weight, resident in itertools.product((1, 2, 4), (True, False), (1, 2, 3, 4, 5, 8)):
            config = attrs.evolve(deal, threads=threads, unroll=unroll, early=weight, resident=resident)
            if config not in seen and excluded(config, n, dtype) is None:
                seen.add(config)
                yield config


def excluded(config: Config, n: int, dtype: str) -> str | None:
    """Why a config is left out, or None."""
    held = config.chunks * words(vector(n, dtype), dtype)
    if config.unroll > 1 and config.lanes > WARP:
        return "rows at once that a block would sum one by one"
    return crowded(config, held * (config.unroll + config.early) + 24)


class RMSNormRows(Kernel):
    """Rows in registers, one read and one write of each element: wins wherever a row fits.

    A row is shared by some lanes of a warp (no barrier at all), by a block or, beyond 128 KB, by a cluster of up to 8
    blocks, whose warps write their sums into all blocks' shared memory. Where registers allow, the weight is loaded
    while the row is on its way.
    """

    archs = ARCHS
    pass_configs = PASSES

    def refuse(self, call: Call, device: Device) -> str | None:
        if next(configs(*row_of(call)), None) is None:
            return "a row of {} {} fits in no cluster's registers".format(*row_of(call))
        return refuse_rows(call, len(call.params["normalized_shape"]))

    def configs(self, call: Call, device: Device) -> Iterator[Config]:
        return configs(*row_of(call))

    def program(self, static: Static, config: Config, device: Device) -> Any:
        t, sizes = arguments(static)
        p = Problem(static)
        deal = Deal(p.n, p.vec, config.lanes, config.chunks, config.cluster)
        rows = count(p.leading, sizes)
        unroll, held, cluster, warps = config.unroll, deal.held, config.cluster, config.threads // WARP
        at_once = config.threads // config.lanes  # rows of a block that are worked on side by side
        exact = unroll * at_once == 1  # no row of a block is beyond the last
        early = config.early and p.weighted

        @T.prim_func
        def main(x: t.x, weight: t.weight, y: t.y, rstd: t.rstd):
            with launch(T.ceildiv(rows, unroll * at_once), config.threads, cluster) as block:
                T.annotate_min_blocks_per_sm(config.resident)
                tx = T.get_thread_binding()
                lane = tx % config.lanes
                rank = block % cluster
                row = T.alloc_local((unroll,), "int32")
                start = T.alloc_local((unroll,), "int64")
                raw = T.alloc_local((unroll * held,), p.dtype)
                scale = T.alloc_local((held if early else p.vec,), p.weight_dtype)
                out = T.alloc_local((p.vec,), p.dtype)
                acc = T.alloc_local((ACCUMULATORS,), "float32")
                total = T.alloc_local((unroll,), "float32")
                part = T.alloc_shared((1, warps), "float32")
                parts = T.alloc_shared((1, cluster, warps), "float32")
                if cluster > 1:
                    T.cluster_arrive_relaxed()
                if deal.ragged or not exact:
                    clear(raw, unroll * held)
                for u in T.unroll(unroll):
                    row[u] = ((block // cluster) * unroll + u) * at_once + tx // config.lanes
                    start[u] = p.place.start(row[u], sizes)
                    if exact or row[u] < rows:
                        load(raw, u * held, flat(x, p.dtype), start[u], p.place.unit, deal, lane, rank)
                if early:
                    load(scale, 0, flat(weight, p.weight_dtype), T.int64(0), p.vec, deal, lane, rank)
                for u in T.unroll(unroll):
                    clear(acc, ACCUMULATORS)
                    for i in T.unroll(held):
                        acc[i % ACCUMULATORS] += square(raw[u * held + i])
                    total[u] = added(acc)
                if cluster > 1:
                    T.cluster_wait()
                sum_row(total, unroll, part, parts, 0, tx, config, rank)
                for u in T.unroll(unroll):
                    total[u] = T.rsqrt(total[u] / T.float32(p.n) + T.float32(p.eps))
                    if exact or row[u] < rows:
                        if t.rstd is not None:
                            if lane + rank == 0:
                                flat(rstd, "float32")[T.cast(row[u], "int64")] = total[u]
                        for i in T.unroll(deal.chunks):
                            chunk = deal.chunk(i, lane, rank)
                            if deal.has(chunk):
                                if p.weighted and not early:
                                    load_vector(scale, weight, p.weight_dtype, p.vec, chunk)
                                for v in T.vectorized(p.vec):
                                    out[v] = p.scaled(
                                        raw[u * held + i * p.vec + v], total[u], scale[(i * p.vec if early else 0) + v]
                                    )
                                for v in T.vectorized(p.vec):
                                    flat(y, p.dtype)[deal.element(row[u], chunk) + v] = out[v]

        return main


class RMSNormStream(Kernel):
    """A block walks its row twice, for the sum and to scale it: the last resort, for rows of any length."""

    archs = ARCHS
    pass_configs = PASSES

    def refuse(self, call: Call, device: Device) -> str | None:
        return refuse_rows(call, len(call.params["normalized_shape"])) or refuse_served(RMSNormRows(), call, device)

    def configs(self, call: Call, device: Device) -> Iterator[StreamConfig]:
        yield StreamConfig(1024, 4)

    def program(self, static: Static, config: StreamConfig, device: Device) -> Any:
        t, sizes = arguments(static)
        p = Problem(static)
        deal = config.deal(p.n, p.vec)
        threads, held, warps = config.threads, deal.held, config.threads // WARP

        @T.prim_func
        def main(x: t.x, weight: t.weight, y: t.y, rstd: t.rstd):
            with T.Kernel(count(p.leading, sizes), threads=threads) as block:
                tx = T.get_thread_binding()
                start = T.alloc_local((1,), "int64")
                raw = T.alloc_local((held,), p.dtype)
                scale = T.alloc_local((held,), p.weight_dtype)
                out = T.alloc_local((p.vec,), p.dtype)
                acc = T.alloc_local((ACCUMULATORS,), "float32")
                total = T.alloc_local((1,), "float32")
                part = T.alloc_shared((1, warps), "float32")
                start[0] = p.place.start(block, sizes)
                clear(acc, ACCUMULATORS)
                for step in T.serial(deal.parts):
                    clear(raw, held)
                    load(raw, 0, flat(x, p.dtype), start[0], p.place.unit, deal, tx, step)
                    for i in T.unroll(held):
                        acc[i % ACCUMULATORS] += square(raw[i])
                total[0] = added(acc)
                sum_block(total, part, 0, tx, warps)
                total[0] = T.rsqrt(total[0] / T.float32(p.n) + T.float32(p.eps))
                if t.rstd is not None:
                    if tx == 0:
                        flat(rstd, "float32")[T.cast(block, "int64")] = total[0]
                for step in T.serial(deal.parts):
                    load(raw, 0, flat(x, p.dtype), start[0], p.place.unit, deal, tx, step)
                    if p.weighted:
                        load(scale, 0, flat(weight, p.weight_dtype), T.int64(0), p.vec, deal, tx, step)
                    for i in T.unroll(deal.chunks):
                        chunk = deal.chunk(i, tx, step)
                        if deal.has(chunk):
                            for v in T.vectorized(p.vec):
                                out[v] = p.scaled(raw[i * p.vec + v], total[0], scale[i * p.vec + v])
                            for v in T.vectorized(p.vec):
                                flat(y, p.dtype)[deal.element(block, chunk) + v] = out[v]

        return main


class Problem(Rows):
    """What the programs take from a call."""

    def __init__(self, static: Static) -> None:
        super().__init__(static, len(static["normalized_shape"]))
        self.eps = DEFAULT_EPS if static["eps"] is None else static["eps"]
        self.offset = static["weight_offset"]

    def scaled(self, x: Any, rstd: Any, weight: Any) -> Any:
        """One element of y: all in float32, rounded once."""
        y = T.cast(x, "float32") * rstd
        if self.weighted:
            w = T.cast(weight, "float32")
            y = y * (w + T.float32(self.offset) if self.offset else w)
        return T.cast(y, self.dtype)


def square(x: Any) -> Any:
    return T.cast(x, "float32") * T.cast(x, "float32")


def row_of(call: Call) -> tuple[int, str]:
    """The length of a call's rows, and their dtype."""
    return math.prod(call.params["normalized_shape"]), call["T"]
