"""RMSNorm backward: dx a row at a time, dweight summed over rows in two steps whose order is fixed."""

import itertools
from collections.abc import Iterator
from typing import Any

import attrs
import tilelang.language as T

from tileops.core.check import Call
from tileops.core.kernel import Device, Kernel, Scratch, Static
from tileops.core.spec.dtypes import itemsize
from tileops.norm.kernels.backward import (
    STAGES,
    Gradients,
    Walk,
    add_groups,
    fetch,
    unstage,
    wait_shares,
    write_partial,
)
from tileops.norm.kernels.rms_norm import row_of
from tileops.norm.kernels.rows import (
    ACCUMULATORS,
    ARCHS,
    COLUMN_WARPS,
    MAX_RESIDENT,
    PASSES,
    REGISTERS,
    WARP,
    added,
    arguments,
    clear,
    column_blocks,
    flat,
    give_row,
    lanes_for,
    launch,
    load,
    refuse_rows,
    sum_columns,
    take_row,
    vector,
)


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
    """Two reads and one write of each element: wins wherever a row fits a block, or a cluster of up to 4.

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
        t, sizes = arguments(static)
        p = Problem(static)
        w = Walk(p, config, sizes)
        deal, rows, unroll, groups = w.deal, w.rows, w.unroll, w.groups
        held, cluster, warps = deal.held, config.cluster, config.threads // WARP

        @T.macro
        def dot(step, tx, share, acc, scale, x_staged, dy_staged, x_raw, dy_raw):
            """A thread's share of the sums over a step's rows of x times the gradient by x * rstd."""
            for u in T.unroll(unroll):
                clear(acc, ACCUMULATORS)
                for i in T.unroll(deal.chunks):
                    unstage(w, step, u, i, tx, x_staged, dy_staged, x_raw, dy_raw)
                    for v in T.unroll(p.vec):
                        acc[(i * p.vec + v) % ACCUMULATORS] += T.cast(x_raw[v], "float32") * p.scaled(
                            dy_raw[v], scale[i * p.vec + v]
                        )
                share[u] = added(acc)

        @T.macro
        def load_rstd(step, worker, group, row, r, rstd):
            for u in T.unroll(unroll):
                row[0] = w.row(step, worker, u, group)
                r[u] = 0.0
                if row[0] < rows:
                    r[u] = flat(rstd, "float32")[T.cast(row[0], "int64")]

        @T.macro
        def take(total, share, r, part, parts, buffer, tx):
            """What is to be taken off an element of dx, times x: the mean over the row, by rstd thrice."""
            wait_shares(config)
            take_row(share, part, parts, buffer, tx, config)
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
            x_staged = T.alloc_shared((STAGES * w.depth,), p.dtype)
            dy_staged = T.alloc_shared((STAGES * w.depth,), p.dtype)
            row = T.alloc_local((1,), "int32")
            start = T.alloc_local((1,), "int64")
            r = T.alloc_local((unroll,), "float32")
            r_next = T.alloc_local((unroll,), "float32")
            x_raw = T.alloc_local((p.vec,), p.dtype)
            dy_raw = T.alloc_local((p.vec,), p.dtype)
            out = T.alloc_local((p.vec,), p.dtype)
            scale = T.alloc_local((held,), p.weight_dtype)
            dw = T.alloc_local((held,), "float32")
            acc = T.alloc_local((ACCUMULATORS,), "float32")
            total = T.alloc_local((unroll,), "float32")
            share = T.alloc_local((unroll,), "float32")
            part = T.alloc_shared((2, warps), "float32")
            parts = T.alloc_shared((2, cluster, warps), "float32")
            if cluster > 1:
                T.cluster_arrive()
            for ahead in T.unroll(STAGES - 1):
                fetch(w, ahead, worker, tx, rank, row, start, x, dy, x_staged, dy_staged)
            if p.weighted:
                clear(scale, held)
                clear(dw, held)
                load(scale, 0, flat(weight, p.weight_dtype), T.int64(0), p.vec, deal, lane, rank)
            load_rstd(0, worker, group, row, r, rstd)
            # The compiler knows of no copy and no wait: a warp's barrier keeps its own reads on their side of them.
            T.ptx_wait_group(STAGES - 2)
            T.sync_warp()
            dot(0, tx, share, acc, scale, x_staged, dy_staged, x_raw, dy_raw)
            if cluster > 1:
                T.cluster_wait()
            give_row(share, unroll, part, parts, 0, tx, config, rank)
            if cluster > 1:
                T.cluster_arrive()
            take(total, share, r, part, parts, 0, tx)
            for step in T.serial(T.ceildiv(rows, config.workers * groups * unroll)):
                T.sync_warp()
                fetch(w, step + STAGES - 1, worker, tx, rank, row, start, x, dy, x_staged, dy_staged)
                load_rstd(step + 1, worker, group, row, r_next, rstd)
                T.ptx_wait_group(STAGES - 2)
                T.sync_warp()
                # The next rows are summed first: their sums cross the block or the cluster while these get their dx.
                dot(step + 1, tx, share, acc, scale, x_staged, dy_staged, x_raw, dy_raw)
                give_row(share, unroll, part, parts, (step + 1) % 2, tx, config, rank)
                if cluster > 1:
                    T.cluster_arrive()
                for u in T.unroll(unroll):
                    row[0] = w.row(step, worker, u, group)
                    for i in T.unroll(deal.chunks):
                        unstage(w, step, u, i, tx, x_staged, dy_staged, x_raw, dy_raw)
                        for v in T.vectorized(p.vec):
                            out[v] = T.cast(
                                p.scaled(dy_raw[v], scale[i * p.vec + v]) * r[u]
                                - T.cast(x_raw[v], "float32") * total[u],
                                p.dtype,
                            )
                        chunk = deal.chunk(i, lane, rank)
                        if T.And(row[0] < rows, deal.has(chunk)):
                            for v in T.vectorized(p.vec):
                                flat(dx, p.dtype)[deal.element(row[0], chunk) + v] = out[v]
                        if p.weighted:
                            for v in T.unroll(p.vec):
                                dw[i * p.vec + v] += T.cast(x_raw[v], "float32") * (T.cast(dy_raw[v], "float32") * r[u])
                    r[u] = r_next[u]
                take(total, share, r, part, parts, (step + 1) % 2, tx)
            if p.weighted:
                if groups > 1:
                    # It may lie where the stages do: nothing may still arrive or be read there.
                    sums = T.alloc_shared((p.n,), "float32")
                    T.ptx_wait_group(0)
                    T.sync_threads()
                    add_groups(w, dw, sums, group, lane)
                if group == groups - 1:
                    write_partial(w, partial, dw, worker, lane, rank)

        t.partial = T.Tensor((config.workers, p.n), "float32") if p.weighted else None

        @T.prim_func
        def main(dy: t.dy, x: t.x, weight: t.weight, rstd: t.rstd, dx: t.dx, dweight: t.dweight, partial: t.partial):
            with launch(w.workers, config.threads, cluster) as block:
                backward(block, dy, x, weight, rstd, dx, partial)
            if p.weighted:
                with T.Kernel(column_blocks(p.n, cluster), threads=COLUMN_WARPS * WARP) as block:
                    sum_columns(block, dweight, partial, p.n, p.weight_dtype, w.workers)

        return main


class Problem(Gradients):
    """What the programs take from a call."""

    def __init__(self, static: Static) -> None:
        super().__init__(static)
        self.offset = static["weight_offset"]

    def scaled(self, dy: Any, weight: Any) -> Any:
        """The gradient by an element of x * rstd."""
        dy = T.cast(dy, "float32")
        if not self.weighted:
            return dy
        w = T.cast(weight, "float32")
        return dy * (w + T.float32(self.offset) if self.offset else w)
