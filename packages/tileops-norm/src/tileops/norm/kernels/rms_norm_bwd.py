"""RMSNorm backward: dx a row at a time, dweight summed over rows in two steps whose order is fixed."""

import itertools
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import attrs
import tilelang.language as T

from tileops.core.check import Call
from tileops.core.kernel import Device, Kernel, Scratch, Static
from tileops.core.program import tensors
from tileops.core.spec.dtypes import itemsize
from tileops.norm.kernels.rms_norm import row_of
from tileops.norm.kernels.rows import (
    ACCUMULATORS,
    ARCHS,
    COLUMN_WARPS,
    MAX_CLUSTER,
    MAX_RESIDENT,
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
    stage,
    sum_columns,
    sum_lanes,
    take_block,
    take_cluster,
    vector,
)

STAGES = 3  # rows of a worker in shared memory: one gets its dx, the next is summed, the next but one is on its way


@attrs.frozen
class Config:
    """``lanes`` threads of each of ``cluster`` blocks take ``chunks`` vectors each of a row: that is a row's order.

    The rest has no part in it: a block has ``threads``, takes ``unroll`` rows at once, and ``resident`` blocks share a
    multiprocessor; so many ``workers``, blocks or clusters, walk all rows.
    """

    lanes: int
    chunks: int
    cluster: int
    threads: int
    workers: int
    unroll: int = 1
    resident: int = 1


# Vectors of a row, and the most threads that share it: the fastest of several on an H200.
LADDER = ((32, WARP), (128, 64), (768, 256), (2048, 512))
# A row beyond one block: the cluster that shares it, what each of its blocks holds of x, and of dy, and its threads.
# Two of the smaller blocks share a multiprocessor.
SHARES = (
    (1, 32 << 10, 512),
    (2, 16 << 10, 256),
    (4, 16 << 10, 256),
    (MAX_CLUSTER, 16 << 10, 256),
    (MAX_CLUSTER, 32 << 10, 512),
)
VECTORS = 1024  # of a step on a multiprocessor: they keep memory busy


def configs(n: int, dtype: str, device: Device) -> Iterator[Config]:
    """The configs for rows of a length, the default first; none for rows too long for a cluster.

    All of them sum a row in one order. That of dweight, over rows, is a config's own.
    """
    vec = vector(n, dtype)
    vectors, size = n // vec, vec * itemsize(dtype)
    cluster, _, most = next((s for s in SHARES if -(-vectors // s[0]) * size <= s[1]), (0, 0, 0))
    if not cluster:
        return
    share = -(-vectors // cluster)
    lanes = lanes_for(share, next((threads for limit, threads in LADDER if vectors <= limit), most))
    chunks = -(-share // lanes)
    # Clusters find no room in what is left of a group of 16 or 18 multiprocessors, nor perhaps all of these: with four
    # turns each, those that have to wait do not double the time.
    sms, turns = (device.sm_count, (1,)) if cluster == 1 else (device.sm_count // 8 * 8, (1, 4))
    all_threads = (256, 128, 512) if lanes <= WARP else (lanes,)
    busy = round(VECTORS * min(cluster, 2) / (all_threads[0] * chunks))
    seen = set()
    for resident, turn, threads, unroll in itertools.product(
        (min(max(busy, 1), 8), 1, 2, 3, 4, 8), turns, all_threads, (1, 2, 4)
    ):
        config = Config(lanes, chunks, cluster, threads, sms * resident * turn // cluster, unroll, resident)
        if config not in seen and excluded(config, n, dtype, device) is None:
            seen.add(config)
            yield config


def excluded(config: Config, n: int, dtype: str, device: Device) -> str | None:
    """Why a config is left out, or None."""
    vec = vector(n, dtype)
    held = config.chunks * vec
    if config.unroll > 1 and config.lanes > WARP:
        return "rows at once that a block would sum one by one"
    if config.threads * config.resident > MAX_RESIDENT:
        return "more threads than a multiprocessor has"
    shared = 2 * STAGES * config.unroll * config.threads * held * itemsize(dtype) + 4 * n * (config.lanes <= WARP)
    if (shared + 2048) * config.resident > device.shared_bytes:
        return "more shared memory than a multiprocessor has"
    if held * 3 // 2 + 36 > min(255, REGISTERS // (config.threads * config.resident)):
        return "more registers than a thread has"
    return None


class RMSNormBwdRows(Kernel):
    """Two reads and one write of each element: wins wherever a row fits a block, or a cluster of up to 8.

    As many blocks as fit the device walk the rows. The next two rows come into shared memory by asynchronous copies; a
    thread reads only what it copied itself, so that the sum of a row is the only barrier, and a row is summed one step
    before it gets its dx, which hides that. Each thread sums its columns of dweight in registers and writes them once,
    at the end; a second launch adds these up in a fixed order, so that dweight is the same bits each time on the same
    kind of device.
    """

    archs = ARCHS
    pass_configs = PASSES

    def refuse(self, call: Call, device: Device) -> str | None:
        if next(configs(*row_of(call), device), None) is None:
            return "a row of {} {} fits in no cluster's shared memory".format(*row_of(call))
        return refuse_rows(call, len(call.params["normalized_shape"]))

    def configs(self, call: Call, device: Device) -> Iterator[Config]:
        return configs(*row_of(call), device)

    def workspace(self, call: Call, config: Config) -> list[Scratch]:
        n, _ = row_of(call)
        return [] if call.inputs["weight"] is None else [Scratch((config.workers, n), "float32")]

    def program(self, static: Static, config: Config, device: Device) -> Any:
        t, sizes = tensors(static)
        t = SimpleNamespace(**t)
        p = Problem.of(static)
        deal = Deal(p.n, p.vec, config.lanes, config.chunks, config.cluster)
        rows = count(p.leading, sizes)
        unroll, held, cluster, warps = config.unroll, deal.held, config.cluster, config.threads // WARP
        groups = config.threads // config.lanes  # rows of a block that are worked on side by side
        workers = T.min(config.workers, T.ceildiv(rows, groups * unroll))
        slot = config.threads * p.vec  # elements of a vector a thread
        depth = unroll * deal.chunks * slot  # of a stage

        @T.macro
        def fetch(step, worker, tx, rank, row, start, x, dy, x_staged, dy_staged):
            """Start the thread's part of a step's rows on its way."""
            for u in T.unroll(unroll):
                row[0] = ((step * config.workers + worker) * unroll + u) * groups + tx // config.lanes
                at = step % STAGES * depth + u * deal.chunks * slot + tx * p.vec
                lane, there = tx % config.lanes, row[0] < rows
                start[0] = p.place.start(row[0], sizes)
                stage(x_staged, at, slot, flat(x, p.dtype), start[0], p.place.unit, deal, lane, rank, there)
                start[0] = p.dy_place.start(row[0], sizes)
                stage(dy_staged, at, slot, flat(dy, p.dtype), start[0], p.dy_place.unit, deal, lane, rank, there)
            T.ptx_commit_group()

        @T.macro
        def unstage(step, u, i, tx, x_staged, dy_staged, x_raw, dy_raw):
            for v in T.vectorized(p.vec):
                x_raw[v] = x_staged[step % STAGES * depth + (u * deal.chunks + i) * slot + tx * p.vec + v]
            for v in T.vectorized(p.vec):
                dy_raw[v] = dy_staged[step % STAGES * depth + (u * deal.chunks + i) * slot + tx * p.vec + v]

        @T.macro
        def dot(step, tx, share, acc, scale, x_staged, dy_staged, x_raw, dy_raw):
            """A thread's share of the sums over a step's rows of x times the gradient by x * rstd."""
            for u in T.unroll(unroll):
                clear(acc, ACCUMULATORS)
                for i in T.unroll(deal.chunks):
                    unstage(step, u, i, tx, x_staged, dy_staged, x_raw, dy_raw)
                    for v in T.unroll(p.vec):
                        acc[(i * p.vec + v) % ACCUMULATORS] += T.cast(x_raw[v], "float32") * p.scaled(
                            dy_raw[v], scale[i * p.vec + v]
                        )
                share[u] = (acc[0] + acc[1]) + (acc[2] + acc[3])

        @T.macro
        def load_rstd(step, worker, group, row, r, rstd):
            for u in T.unroll(unroll):
                row[0] = ((step * config.workers + worker) * unroll + u) * groups + group
                r[u] = 0.0
                if row[0] < rows:
                    r[u] = flat(rstd, "float32")[T.cast(row[0], "int64")]

        @T.macro
        def give(share, part, parts, buffer, tx, rank):
            if cluster > 1:
                give_cluster(share, part, parts, buffer, tx, warps, rank, cluster)
            elif config.lanes > WARP:
                give_block(share, part, buffer, tx)
            else:
                sum_lanes(share, unroll, config.lanes)

        @T.macro
        def take(total, share, r, part, parts, buffer, tx):
            """What is to be taken off an element of dx, times x: the mean over the row, by rstd thrice."""
            if cluster > 1:
                T.cluster_wait()
                take_cluster(share, parts, buffer, tx, warps, cluster)
            elif config.lanes > WARP:
                T.sync_threads()
                take_block(share, part, buffer, tx, warps)
            for u in T.unroll(unroll):
                total[u] = share[u] * r[u] / T.float32(p.n) * r[u] * r[u]  # in this order nothing overflows

        @T.macro
        def backward(block, dy, x, weight, rstd, dx, partial):
            T.annotate_min_blocks_per_sm(config.resident)
            tx = T.get_thread_binding()
            lane = tx % config.lanes
            group = tx // config.lanes
            rank = block % cluster
            worker = block // cluster
            x_staged = T.alloc_shared((STAGES * depth,), p.dtype)
            dy_staged = T.alloc_shared((STAGES * depth,), p.dtype)
            row = T.alloc_local((1,), "int32")
            start = T.alloc_local((1,), "int64")
            r = T.alloc_local((unroll,), "float32")
            r_next = T.alloc_local((unroll,), "float32")
            x_raw = T.alloc_local((p.vec,), p.dtype)
            dy_raw = T.alloc_local((p.vec,), p.dtype)
            out = T.alloc_local((p.vec,), p.dtype)
            scale = T.alloc_local((held,), p.scale_dtype)
            dw = T.alloc_local((held,), "float32")
            acc = T.alloc_local((ACCUMULATORS,), "float32")
            total = T.alloc_local((unroll,), "float32")
            share = T.alloc_local((unroll,), "float32")
            part = T.alloc_shared((2, warps), "float32")
            parts = T.alloc_shared((2, cluster, warps), "float32")
            if cluster > 1:
                T.cluster_arrive()
            for ahead in T.unroll(STAGES - 1):
                fetch(ahead, worker, tx, rank, row, start, x, dy, x_staged, dy_staged)
            if weight is not None:
                clear(scale, held)
                clear(dw, held)
                load(scale, 0, flat(weight, p.scale_dtype), T.int64(0), p.vec, deal, lane, rank)
            load_rstd(0, worker, group, row, r, rstd)
            # The compiler knows of no copy and no wait: a warp's barrier keeps its own reads on their side of them.
            T.ptx_wait_group(STAGES - 2)
            T.sync_warp()
            dot(0, tx, share, acc, scale, x_staged, dy_staged, x_raw, dy_raw)
            if cluster > 1:
                T.cluster_wait()
            give(share, part, parts, 0, tx, rank)
            if cluster > 1:
                T.cluster_arrive()
            take(total, share, r, part, parts, 0, tx)
            for step in T.serial(T.ceildiv(rows, config.workers * groups * unroll)):
                T.sync_warp()
                fetch(step + STAGES - 1, worker, tx, rank, row, start, x, dy, x_staged, dy_staged)
                load_rstd(step + 1, worker, group, row, r_next, rstd)
                T.ptx_wait_group(STAGES - 2)
                T.sync_warp()
                # The next rows are summed first: their sums cross the block or the cluster while these get their dx.
                dot(step + 1, tx, share, acc, scale, x_staged, dy_staged, x_raw, dy_raw)
                give(share, part, parts, (step + 1) % 2, tx, rank)
                if cluster > 1:
                    T.cluster_arrive()
                for u in T.unroll(unroll):
                    row[0] = ((step * config.workers + worker) * unroll + u) * groups + group
                    for i in T.unroll(deal.chunks):
                        unstage(step, u, i, tx, x_staged, dy_staged, x_raw, dy_raw)
                        for v in T.vectorized(p.vec):
                            out[v] = T.cast(
                                p.scaled(dy_raw[v], scale[i * p.vec + v]) * r[u]
                                - T.cast(x_raw[v], "float32") * total[u],
                                p.dtype,
                            )
                        chunk = deal.chunk(i, lane, rank)
                        if T.And(row[0] < rows, deal.has(chunk)):
                            for v in T.vectorized(p.vec):
                                flat(dx, p.dtype)[(T.cast(row[0], "int64") * deal.vectors + chunk) * p.vec + v] = out[v]
                        if weight is not None:
                            for v in T.unroll(p.vec):
                                dw[i * p.vec + v] += T.cast(x_raw[v], "float32") * (T.cast(dy_raw[v], "float32") * r[u])
                    r[u] = r_next[u]
                take(total, share, r, part, parts, (step + 1) % 2, tx)
            if weight is not None:
                if groups > 1:
                    # It may lie where the stages do: nothing may still arrive or be read there.
                    sums = T.alloc_shared((p.n,), "float32")
                    T.ptx_wait_group(0)
                    T.sync_threads()
                    for g in T.unroll(groups):
                        if group == g:
                            for i in T.unroll(deal.chunks):
                                chunk = deal.chunk(i, lane, 0)
                                if deal.has(chunk):
                                    for v in T.unroll(p.vec):
                                        if g > 0:
                                            dw[i * p.vec + v] += sums[chunk * p.vec + v]
                                        sums[chunk * p.vec + v] = dw[i * p.vec + v]
                        T.sync_threads()
                if group == groups - 1:
                    for i in T.unroll(deal.chunks):
                        chunk = deal.chunk(i, lane, rank)
                        if deal.has(chunk):
                            for v in T.vectorized(p.vec):
                                flat(partial, "float32")[
                                    (T.cast(worker, "int64") * deal.vectors + chunk) * p.vec + v
                                ] = dw[i * p.vec + v]

        if not p.weighted:
            return without_weight(t, backward, workers, config.threads, cluster)
        partial_form = T.Tensor((config.workers, p.n), "float32")

        @T.prim_func
        def main(dy: t.dy, x: t.x, weight: t.weight, rstd: t.rstd, dx: t.dx, dweight: t.dweight, partial: partial_form):
            with launch(workers, config.threads, cluster) as block:
                backward(block, dy, x, weight, rstd, dx, partial)
            with T.Kernel(T.ceildiv(p.n, WARP), threads=COLUMN_WARPS * WARP) as block:
                sum_columns(block, dweight, partial, p.n, p.scale_dtype, workers)

        return main


@attrs.frozen
class Problem:
    """What the programs take from a call."""

    n: int
    vec: int
    leading: tuple[int | str, ...]
    place: Place
    dy_place: Place
    dtype: str
    weighted: bool
    scale_dtype: str  # the weight's
    offset: float

    @classmethod
    def of(cls, static: Static) -> "Problem":
        x, dy, weight = static.tensor("x"), static.tensor("dy"), static.tensor("weight")
        assert x is not None
        assert dy is not None
        axes = len(static["normalized_shape"])
        n = math.prod(static["normalized_shape"])
        vec = vector(n, x.dtype)
        return cls(
            n,
            vec,
            x.shape[: len(x.shape) - axes],
            Place.of(x, axes, vec),
            Place.of(dy, axes, vec),
            x.dtype,
            weight is not None,
            x.dtype if weight is None else weight.dtype,
            static["weight_offset"],
        )

    def scaled(self, dy: Any, weight: Any) -> Any:
        """The gradient by an element of x * rstd."""
        dy = T.cast(dy, "float32")
        if not self.weighted:
            return dy
        w = T.cast(weight, "float32")
        return dy * (w + T.float32(self.offset) if self.offset else w)


def without_weight(t: Any, backward: Any, blocks: Any, threads: int, cluster: int) -> Any:
    @T.prim_func
    def main(dy: t.dy, x: t.x, rstd: t.rstd, dx: t.dx):
        with launch(blocks, threads, cluster) as block:
            backward(block, dy, x, None, rstd, dx, None)

    return main
