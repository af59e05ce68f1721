"""RMSNorm forward: one read and one write of each element while a row fits in registers, two reads beyond."""

import itertools
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import attrs
import tilelang.language as T

from tileops.core.check import Call
from tileops.core.kernel import Device, Kernel, Static
from tileops.core.program import tensors
from tileops.norm.kernels.rows import (
    ACCUMULATORS,
    ARCHS,
    MAX_CLUSTER,
    MAX_RESIDENT,
    MAX_THREADS,
    PASSES,
    REGISTERS,
    WARP,
    Deal,
    Place,
    clear,
    count,
    flat,
    give_block,
    give_cluster,
    lanes_for,
    launch,
    load,
    refuse_rows,
    sum_lanes,
    take_block,
    take_cluster,
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
HELD = 32  # registers for a thread's part of a row, where 1024 threads share it


def configs(n: int, dtype: str) -> Iterator[Config]:
    """The configs for rows of a length, the default first; none for rows that no cluster's registers hold.

    All of them sum a row in one order: neither the number of rows nor a tuner has a say in it.
    """
    vec = vector(n, dtype)
    vectors, size = n // vec, words(vec, dtype)
    most = next((threads for limit, threads in LADDER if vectors <= limit), MAX_THREADS)
    for cluster in (1, 2, 4, MAX_CLUSTER):
        share = -(-vectors // cluster)
        if -(-share // most) * size <= HELD or most < MAX_THREADS:
            break
    else:
        return
    lanes = lanes_for(share, most)
    deal = Config(lanes, -(-share // lanes), cluster, max(lanes, 128) if lanes <= WARP else lanes)
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
    if config.threads * config.resident > MAX_RESIDENT:
        return "more threads than a multiprocessor has"
    registers = min(255, REGISTERS // (config.threads * config.resident))
    if held * (config.unroll + config.early) + 24 > registers:
        return "more registers than a thread has"
    return None


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
        t, sizes = tensors(static)
        p = Problem.of(static)
        deal = Deal(p.n, p.vec, config.lanes, config.chunks, config.cluster)
        rows = count(p.leading, sizes)
        unroll, held, cluster, warps = config.unroll, deal.held, config.cluster, config.threads // WARP
        at_once = config.threads // config.lanes  # rows of a block that are worked on side by side
        exact = unroll * at_once == 1  # no row of a block is beyond the last
        early = config.early and p.weighted

        @T.macro
        def norm(block, x, weight, y, rstd):
            T.annotate_min_blocks_per_sm(config.resident)
            tx = T.get_thread_binding()
            lane = tx % config.lanes
            rank = block % cluster
            row = T.alloc_local((unroll,), "int32")
            start = T.alloc_local((unroll,), "int64")
            raw = T.alloc_local((unroll * held,), p.dtype)
            scale = T.alloc_local((held if early else p.vec,), p.scale_dtype)
            out = T.alloc_local((p.vec,), p.dtype)
            acc = T.alloc_local((ACCUMULATORS,), "float32")
            total = T.alloc_local((unroll,), "float32")
            part = T.alloc_shared((1, warps), "float32")
            if cluster > 1:
                parts = T.alloc_shared((1, cluster, warps), "float32")
                T.cluster_arrive_relaxed()
            if deal.ragged or not exact:
                clear(raw, unroll * held)
            for u in T.unroll(unroll):
                row[u] = ((block // cluster) * unroll + u) * at_once + tx // config.lanes
                start[u] = p.place.start(row[u], sizes)
                if exact or row[u] < rows:
                    load(raw, u * held, flat(x, p.dtype), start[u], p.place.unit, deal, lane, rank)
            if early:
                load(scale, 0, flat(weight, p.scale_dtype), T.int64(0), p.vec, deal, lane, rank)
            for u in T.unroll(unroll):
                clear(acc, ACCUMULATORS)
                for i in T.unroll(held):
                    acc[i % ACCUMULATORS] += T.cast(raw[u * held + i], "float32") * T.cast(raw[u * held + i], "float32")
                total[u] = (acc[0] + acc[1]) + (acc[2] + acc[3])
            if cluster > 1:
                T.cluster_wait()
                give_cluster(total, part, parts, 0, tx, warps, rank, cluster)
                T.cluster_sync()
                take_cluster(total, parts, 0, tx, warps, cluster)
            elif config.lanes > WARP:
                give_block(total, part, 0, tx)
                T.sync_threads()
                take_block(total, part, 0, tx, warps)
            else:
                sum_lanes(total, unroll, config.lanes)
            for u in T.unroll(unroll):
                total[u] = T.rsqrt(total[u] / T.float32(p.n) + T.float32(p.eps))
                if exact or row[u] < rows:
                    if rstd is not None:
                        if lane + rank == 0:
                            flat(rstd, "float32")[T.cast(row[u], "int64")] = total[u]
                    for i in T.unroll(deal.chunks):
                        chunk = deal.chunk(i, lane, rank)
                        if deal.has(chunk):
                            if weight is not None and not early:
                                for v in T.vectorized(p.vec):
                                    scale[v] = flat(weight, p.scale_dtype)[T.cast(chunk, "int64") * p.vec + v]
                            for v in T.vectorized(p.vec):
                                out[v] = p.scaled(
                                    raw[u * held + i * p.vec + v], total[u], scale[(i * p.vec if early else 0) + v]
                                )
                            for v in T.vectorized(p.vec):
                                flat(y, p.dtype)[(T.cast(row[u], "int64") * deal.vectors + chunk) * p.vec + v] = out[v]

        return program(t, norm, T.ceildiv(rows, unroll * at_once), config.threads, cluster)


@attrs.frozen
class StreamConfig:
    """A block of ``threads`` takes ``chunks`` vectors a thread at once."""

    threads: int = 1024
    chunks: int = 4


class RMSNormStream(Kernel):
    """A block walks its row twice, for the sum and to scale it: the last resort, for rows of any length."""

    archs = ARCHS
    pass_configs = PASSES

    def refuse(self, call: Call, device: Device) -> str | None:
        return refuse_rows(call, len(call.params["normalized_shape"]))

    def configs(self, call: Call, device: Device) -> Iterator[StreamConfig]:
        yield StreamConfig()

    def program(self, static: Static, config: StreamConfig, device: Device) -> Any:
        t, sizes = tensors(static)
        p = Problem.of(static)
        threads, held = config.threads, config.chunks * p.vec
        steps = -(-p.n // (threads * held))
        deal = Deal(p.n, p.vec, threads, config.chunks, steps)

        @T.macro
        def norm(block, x, weight, y, rstd):
            tx = T.get_thread_binding()
            start = T.alloc_local((1,), "int64")
            raw = T.alloc_local((held,), p.dtype)
            scale = T.alloc_local((held,), p.scale_dtype)
            out = T.alloc_local((p.vec,), p.dtype)
            acc = T.alloc_local((ACCUMULATORS,), "float32")
            total = T.alloc_local((1,), "float32")
            part = T.alloc_shared((1, threads // WARP), "float32")
            start[0] = p.place.start(block, sizes)
            clear(acc, ACCUMULATORS)
            for step in T.serial(steps):
                clear(raw, held)
                load(raw, 0, flat(x, p.dtype), start[0], p.place.unit, deal, tx, step)
                for i in T.unroll(held):
                    acc[i % ACCUMULATORS] += T.cast(raw[i], "float32") * T.cast(raw[i], "float32")
            total[0] = (acc[0] + acc[1]) + (acc[2] + acc[3])
            give_block(total, part, 0, tx)
            T.sync_threads()
            take_block(total, part, 0, tx, threads // WARP)
            total[0] = T.rsqrt(total[0] / T.float32(p.n) + T.float32(p.eps))
            if rstd is not None:
                if tx == 0:
                    flat(rstd, "float32")[T.cast(block, "int64")] = total[0]
            for step in T.serial(steps):
                load(raw, 0, flat(x, p.dtype), start[0], p.place.unit, deal, tx, step)
                if weight is not None:
                    load(scale, 0, flat(weight, p.scale_dtype), T.int64(0), p.vec, deal, tx, step)
                for i in T.unroll(config.chunks):
                    chunk = deal.chunk(i, tx, step)
                    if deal.has(chunk):
                        for v in T.vectorized(p.vec):
                            out[v] = p.scaled(raw[i * p.vec + v], total[0], scale[i * p.vec + v])
                        for v in T.vectorized(p.vec):
                            flat(y, p.dtype)[(T.cast(block, "int64") * deal.vectors + chunk) * p.vec + v] = out[v]

        return program(t, norm, count(p.leading, sizes), threads, 1)


@attrs.frozen
class Problem:
    """What the programs take from a call."""

    n: int
    vec: int
    leading: tuple[int | str, ...]
    place: Place
    dtype: str
    weighted: bool
    scale_dtype: str  # the weight's
    eps: float
    offset: float

    @classmethod
    def of(cls, static: Static) -> "Problem":
        x, weight = static.tensor("x"), static.tensor("weight")
        assert x is not None
        axes = len(static["normalized_shape"])
        n = math.prod(static["normalized_shape"])
        vec = vector(n, x.dtype)
        return cls(
            n,
            vec,
            x.shape[: len(x.shape) - axes],
            Place.of(x, axes, vec),
            x.dtype,
            weight is not None,
            x.dtype if weight is None else weight.dtype,
            DEFAULT_EPS if static["eps"] is None else static["eps"],
            static["weight_offset"],
        )

    def scaled(self, x: Any, rstd: Any, weight: Any) -> Any:
        """One element of y: all in float32, rounded once."""
        y = T.cast(x, "float32") * rstd
        if self.weighted:
            w = T.cast(weight, "float32")
            y = y * (w + T.float32(self.offset) if self.offset else w)
        return T.cast(y, self.dtype)


def row_of(call: Call) -> tuple[int, str]:
    """The length of a call's rows, and their dtype."""
    return math.prod(call.params["normalized_shape"]), call["T"]


def program(tensors: Any, norm: Any, blocks: Any, threads: int, cluster: int) -> Any:
    """The prim_func of a body, with the tensors that the call has."""
    t = SimpleNamespace(**tensors)
    if "weight" in tensors and "rstd" in tensors:

        @T.prim_func
        def main(x: t.x, weight: t.weight, y: t.y, rstd: t.rstd):
            with launch(blocks, threads, cluster) as block:
                norm(block, x, weight, y, rstd)

    elif "weight" in tensors:

        @T.prim_func
        def main(x: t.x, weight: t.weight, y: t.y):
            with launch(blocks, threads, cluster) as block:
                norm(block, x, weight, y, None)

    elif "rstd" in tensors:

        @T.prim_func
        def main(x: t.x, y: t.y, rstd: t.rstd):
            with launch(blocks, threads, cluster) as block:
                norm(block, x, None, y, rstd)

    else:

        @T.prim_func
        def main(x: t.x, y: t.y):
            with launch(blocks, threads, cluster) as block:
                norm(block, x, None, y, None)

    return main
