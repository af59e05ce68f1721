"""LayerNorm backward: dx a row at a time, dweight and dbias summed over rows in two steps whose order is fixed."""

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import attrs
import tilelang.language as T

from tileops.core.check import Call
from tileops.core.kernel import Device, Kernel, Scratch, Static
from tileops.core.program import tensors
from tileops.norm.kernels import rms_norm_bwd
from tileops.norm.kernels.rms_norm import row_of
from tileops.norm.kernels.rms_norm_bwd import STAGES, Config
from tileops.norm.kernels.rows import (
    ACCUMULATORS,
    ARCHS,
    COLUMN_WARPS,
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


def configs(n: int, dtype: str, device: Device) -> Iterator[Config]:
    """RMSNorm's for rows of a length, the default first, where registers suffice for dbias beside dweight."""
    return (c for c in rms_norm_bwd.configs(n, dtype, device) if excluded(c, n, dtype) is None)


def excluded(config: Config, n: int, dtype: str) -> str | None:
    """Why a config of RMSNorm is left out, or None."""
    held = config.chunks * vector(n, dtype)
    if held * 5 // 2 + 44 > min(255, REGISTERS // (config.threads * config.resident)):
        return "more registers than a thread has"
    return None


class LayerNormBwdRows(Kernel):
    """Two reads and one write of each element: wins wherever a row fits a block, or a cluster of up to 8.

    As many blocks as fit the device walk the rows. The next two rows come into shared memory by asynchronous copies; a
    thread reads only what it copied itself, so that a row's two sums are the only barrier, and a row is summed one step
    before it gets its dx, which hides that. Each thread sums its columns of dweight and dbias in registers and writes
    them once, at the end; a second launch adds these up in a fixed order, so that they are the same bits each time on
    the same kind of device.
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
        return [Scratch((config.workers, n), "float32") for name in ("weight", "bias") if call.inputs[name] is not None]

    def program(self, static: Static, config: Config, device: Device) -> Any:
        t, sizes = tensors(static)
        p = Problem.of(static)
        deal = Deal(p.n, p.vec, config.lanes, config.chunks, config.cluster)
        rows = count(p.leading, sizes)
        unroll, held, cluster, warps = config.unroll, deal.held, config.cluster, config.threads // WARP
        groups = config.threads // config.lanes  # rows of a block that are worked on side by side
        workers = T.min(config.workers, T.ceildiv(rows, groups * unroll))
        strips = -(-p.n // WARP)
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
        def dot(step, tx, sums, dots, acc, acc_dot, mu, scale, x_staged, dy_staged, x_raw, dy_raw):
            """A thread's shares of a step's rows: of g, the gradient by xhat, and of g times x - mean."""
            for u in T.unroll(unroll):
                clear(acc, ACCUMULATORS)
                clear(acc_dot, ACCUMULATORS)
                for i in T.unroll(deal.chunks):
                    unstage(step, u, i, tx, x_staged, dy_staged, x_raw, dy_raw)
                    for v in T.unroll(p.vec):
                        acc[(i * p.vec + v) % ACCUMULATORS] += p.scaled(dy_raw[v], scale[i * p.vec + v])
                        acc_dot[(i * p.vec + v) % ACCUMULATORS] += (T.cast(x_raw[v], "float32") - mu[u]) * p.scaled(
                            dy_raw[v], scale[i * p.vec + v]
                        )
                sums[u] = (acc[0] + acc[1]) + (acc[2] + acc[3])
                dots[u] = (acc_dot[0] + acc_dot[1]) + (acc_dot[2] + acc_dot[3])

        @T.macro
        def load_statistics(step, worker, group, row, mu, r, mean, rstd):
            """Zeros for rows beyond the last: they add nothing to dweight."""
            for u in T.unroll(unroll):
                row[0] = ((step * config.workers + worker) * unroll + u) * groups + group
                mu[u] = 0.0
                r[u] = 0.0
                if row[0] < rows:
                    mu[u] = flat(mean, "float32")[T.cast(row[0], "int64")]
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
        def take(share, part, parts, buffer, tx):
            if cluster > 1:
                take_cluster(share, parts, buffer, tx, warps, cluster)
            elif config.lanes > WARP:
                take_block(share, part, buffer, tx, warps)

        @T.macro
        def finish(sums, dots, r, part, parts, buffer, tx):
            """What is to be taken off g, and off dx, times x - mean: mean(g), and mean(g * xhat) * rstd**2."""
            if cluster > 1:
                T.cluster_wait()
            elif config.lanes > WARP:
                T.sync_threads()
            take(sums, part, parts, buffer, tx)
            take(dots, part, parts, buffer + 1, tx)
            for u in T.unroll(unroll):
                sums[u] = sums[u] / T.float32(p.n)
                dots[u] = dots[u] * r[u] / T.float32(p.n) * r[u] * r[u]  # in this order nothing overflows

        @T.macro
        def add_groups(mine, sums, group, lane):
            """The sums over all groups of a block, in its last group."""
            for g in T.unroll(groups):
                if group == g:
                    for i in T.unroll(deal.chunks):
                        chunk = deal.chunk(i, lane, 0)
                        if deal.has(chunk):
                            for v in T.unroll(p.vec):
                                if g > 0:
                                    mine[i * p.vec + v] += sums[chunk * p.vec + v]
                                sums[chunk * p.vec + v] = mine[i * p.vec + v]
                T.sync_threads()

        @T.macro
        def write_partial(partial, mine, worker, lane, rank):
            for i in T.unroll(deal.chunks):
                chunk = deal.chunk(i, lane, rank)
                if deal.has(chunk):
                    for v in T.vectorized(p.vec):
                        flat(partial, "float32")[(T.cast(worker, "int64") * deal.vectors + chunk) * p.vec + v] = mine[
                            i * p.vec + v
                        ]

        @T.macro
        def backward(block, dy, x, weight, mean, rstd, dx, dw_partial, db_partial):
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
            mu = T.alloc_local((unroll,), "float32")
            mu_next = T.alloc_local((unroll,), "float32")
            r = T.alloc_local((unroll,), "float32")
            r_next = T.alloc_local((unroll,), "float32")
            x_raw = T.alloc_local((p.vec,), p.dtype)
            dy_raw = T.alloc_local((p.vec,), p.dtype)
            out = T.alloc_local((p.vec,), p.dtype)
            scale = T.alloc_local((held,), p.weight_dtype)
            dw = T.alloc_local((held,), "float32")
            db = T.alloc_local((held,), "float32")
            acc = T.alloc_local((ACCUMULATORS,), "float32")
            acc_dot = T.alloc_local((ACCUMULATORS,), "float32")
            sums = T.alloc_local((unroll,), "float32")
            sums_next = T.alloc_local((unroll,), "float32")
            dots = T.alloc_local((unroll,), "float32")
            dots_next = T.alloc_local((unroll,), "float32")
            part = T.alloc_shared((4, warps), "float32")  # two buffers of each of the two sums
            parts = T.alloc_shared((4, cluster, warps), "float32")
            if cluster > 1:
                T.cluster_arrive()
            for ahead in T.unroll(STAGES - 1):
                fetch(ahead, worker, tx, rank, row, start, x, dy, x_staged, dy_staged)
            clear(dw, held)
            clear(db, held)
            if p.weighted:
                clear(scale, held)
                load(scale, 0, flat(weight, p.weight_dtype), T.int64(0), p.vec, deal, lane, rank)
            load_statistics(0, worker, group, row, mu, r, mean, rstd)
            # The compiler knows of no copy and no wait: a warp's barrier keeps its own reads on their side of them.
            T.ptx_wait_group(STAGES - 2)
            T.sync_warp()
            dot(0, tx, sums, dots, acc, acc_dot, mu, scale, x_staged, dy_staged, x_raw, dy_raw)
            if cluster > 1:
                T.cluster_wait()
            give(sums, part, parts, 0, tx, rank)
            give(dots, part, parts, 1, tx, rank)
            if cluster > 1:
                T.cluster_arrive()
            finish(sums, dots, r, part, parts, 0, tx)
            for step in T.serial(T.ceildiv(rows, config.workers * groups * unroll)):
                buffer = (step + 1) % 2 * 2
                T.sync_warp()
                fetch(step + STAGES - 1, worker, tx, rank, row, start, x, dy, x_staged, dy_staged)
                load_statistics(step + 1, worker, group, row, mu_next, r_next, mean, rstd)
                T.ptx_wait_group(STAGES - 2)
                T.sync_warp()
                # The next rows are summed first: their sums cross the block or the cluster while these get their dx.
                dot(
                    step + 1, tx, sums_next, dots_next, acc, acc_dot, mu_next, scale, x_staged, dy_staged, x_raw, dy_raw
                )
                give(sums_next, part, parts, buffer, tx, rank)
                give(dots_next, part, parts, buffer + 1, tx, rank)
                if cluster > 1:
                    T.cluster_arrive()
                for u in T.unroll(unroll):
                    row[0] = ((step * config.workers + worker) * unroll + u) * groups + group
                    for i in T.unroll(deal.chunks):
                        unstage(step, u, i, tx, x_staged, dy_staged, x_raw, dy_raw)
                        for v in T.vectorized(p.vec):
                            out[v] = T.cast(
                                (p.scaled(dy_raw[v], scale[i * p.vec + v]) - sums[u]) * r[u]
                                - (T.cast(x_raw[v], "float32") - mu[u]) * dots[u],
                                p.dtype,
                            )
                        chunk = deal.chunk(i, lane, rank)
                        if T.And(row[0] < rows, deal.has(chunk)):
                            for v in T.vectorized(p.vec):
                                flat(dx, p.dtype)[(T.cast(row[0], "int64") * deal.vectors + chunk) * p.vec + v] = out[v]
                        if p.weighted:
                            for v in T.unroll(p.vec):
                                dw[i * p.vec + v] += (T.cast(x_raw[v], "float32") - mu[u]) * (
                                    T.cast(dy_raw[v], "float32") * r[u]
                                )
                        if p.biased:
                            for v in T.unroll(p.vec):
                                db[i * p.vec + v] += T.cast(dy_raw[v], "float32")
                    mu[u] = mu_next[u]
                    r[u] = r_next[u]
                    sums[u] = sums_next[u]
                    dots[u] = dots_next[u]
                finish(sums, dots, r, part, parts, buffer, tx)
            if groups > 1:
                # It may lie where the stages do: nothing may still arrive or be read there.
                columns = T.alloc_shared((p.n,), "float32")
                T.ptx_wait_group(0)
                T.sync_threads()
                if p.weighted:
                    add_groups(dw, columns, group, lane)
                if p.biased:
                    add_groups(db, columns, group, lane)
            if group == groups - 1:
                if p.weighted:
                    write_partial(dw_partial, dw, worker, lane, rank)
                if p.biased:
                    write_partial(db_partial, db, worker, lane, rank)

        # One tensor for both would make them one argument.
        dw_form, db_form = (T.Tensor((config.workers, p.n), "float32") for _ in range(2))
        t = arguments(t, dw_partial=p.weighted and dw_form, db_partial=p.biased and db_form)

        @T.prim_func
        def main(
            dy: t.dy,
            x: t.x,
            weight: t.weight,
            mean: t.mean,
            rstd: t.rstd,
            bias: t.bias,
            dx: t.dx,
            dweight: t.dweight,
            dbias: t.dbias,
            dw_partial: t.dw_partial,
            db_partial: t.db_partial,
        ):
            with launch(workers, config.threads, cluster) as block:
                backward(block, dy, x, weight, mean, rstd, dx, dw_partial, db_partial)
            if p.weighted or p.biased:
                with T.Kernel(strips, p.weighted + p.biased, threads=COLUMN_WARPS * WARP) as (block, which):
                    if p.weighted:
                        if which == 0:
                            sum_columns(block, dweight, dw_partial, p.n, p.weight_dtype, workers)
                    if p.biased:
                        if which == int(p.weighted):
                            sum_columns(block, dbias, db_partial, p.n, p.bias_dtype, workers)

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
    weight_dtype: str
    biased: bool
    bias_dtype: str

    @classmethod
    def of(cls, static: Static) -> "Problem":
        x, dy, weight, bias = (static.tensor(name) for name in ("x", "dy", "weight", "bias"))
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
            (weight or x).dtype,
            bias is not None,
            (bias or x).dtype,
        )

    def scaled(self, dy: Any, weight: Any) -> Any:
        """The gradient by an element of xhat."""
        dy = T.cast(dy, "float32")
        return dy * T.cast(weight, "float32") if self.weighted else dy


def arguments(tensors: Any, **scratch: Any) -> SimpleNamespace:
    """The arguments' forms by name; what the call lacks is no argument of a program, but False."""
    return SimpleNamespace(**dict.fromkeys(("weight", "bias", "dweight", "dbias"), False) | tensors | scratch)
