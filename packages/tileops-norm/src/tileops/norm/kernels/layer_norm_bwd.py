"""LayerNorm backward: dx a row at a time, dweight and dbias summed over rows in two steps whose order is fixed."""

from collections.abc import Iterator
from typing import Any

import tilelang.language as T

from tileops.core.check import Call
from tileops.core.kernel import Device, Kernel, Scratch, Static
from tileops.norm.kernels import rms_norm_bwd
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
from tileops.norm.kernels.rms_norm_bwd import Config
from tileops.norm.kernels.rows import (
    ACCUMULATORS,
    ARCHS,
    COLUMN_WARPS,
    PASSES,
    WARP,
    added,
    arguments,
    clear,
    column_blocks,
    crowded,
    flat,
    give_row,
    launch,
    load,
    refuse_rows,
    sum_columns,
    take_row,
    vector,
)


def configs(n: int, dtype: str, device: Device) -> Iterator[Config]:
    """RMSNorm's for rows of a length, the default first, where registers suffice for dbias beside dweight."""
    return (c for c in rms_norm_bwd.configs(n, dtype, device) if excluded(c, n, dtype) is None)


def excluded(config: Config, n: int, dtype: str) -> str | None:
    """Why a config of RMSNorm is left out, or None."""
    return crowded(config, config.chunks * vector(n, dtype) * 5 // 2 + 44)


class LayerNormBwdRows(Kernel):
    """Two reads and one write of each element: wins wherever a row fits a block, or a cluster of up to 4.

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
        t, sizes = arguments(static)
        p = Problem(static)
        w = Walk(p, config, sizes)
        deal, rows, unroll, groups = w.deal, w.rows, w.unroll, w.groups
        held, cluster, warps = deal.held, config.cluster, config.threads // WARP
        strips = column_blocks(p.n, cluster)

        @T.macro
        def dot(step, tx, sums, dots, acc, acc_dot, mu, scale, x_staged, dy_staged, x_raw, dy_raw):
            """A thread's shares of a step's rows: of g, the gradient by xhat, and of g times x - mean."""
            for u in T.unroll(unroll):
                clear(acc, ACCUMULATORS)
                clear(acc_dot, ACCUMULATORS)
                for i in T.unroll(deal.chunks):
                    unstage(w, step, u, i, tx, x_staged, dy_staged, x_raw, dy_raw)
                    for v in T.unroll(p.vec):
                        acc[(i * p.vec + v) % ACCUMULATORS] += p.scaled(dy_raw[v], scale[i * p.vec + v])
                        acc_dot[(i * p.vec + v) % ACCUMULATORS] += (T.cast(x_raw[v], "float32") - mu[u]) * p.scaled(
                            dy_raw[v], scale[i * p.vec + v]
                        )
                sums[u] = added(acc)
                dots[u] = added(acc_dot)

        @T.macro
        def load_statistics(step, worker, group, row, mu, r, mean, rstd):
            """Zeros for rows beyond the last: they add nothing to dweight."""
            for u in T.unroll(unroll):
                row[0] = w.row(step, worker, u, group)
                mu[u] = 0.0
                r[u] = 0.0
                if row[0] < rows:
                    mu[u] = flat(mean, "float32")[T.cast(row[0], "int64")]
                    r[u] = flat(rstd, "float32")[T.cast(row[0], "int64")]

        @T.macro
        def finish(sums, dots, r, part, parts, buffer, tx):
            """What is to be taken off g, and off dx, times x - mean: mean(g), and mean(g * xhat) * rstd**2."""
            wait_shares(config)
            take_row(sums, part, parts, buffer, tx, config)
            take_row(dots, part, parts, buffer + 1, tx, config)
            for u in T.unroll(unroll):
                sums[u] = sums[u] / T.float32(p.n)
                dots[u] = dots[u] * r[u] / T.float32(p.n) * r[u] * r[u]  # in this order nothing overflows

        @T.macro
        def backward(block, dy, x, weight, mean, rstd, dx, dw_partial, db_partial):
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
                fetch(w, ahead, worker, tx, rank, row, start, x, dy, x_staged, dy_staged)
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
            give_row(sums, unroll, part, parts, 0, tx, config, rank)
            give_row(dots, unroll, part, parts, 1, tx, config, rank)
            if cluster > 1:
                T.cluster_arrive()
            finish(sums, dots, r, part, parts, 0, tx)
            for step in T.serial(T.ceildiv(rows, config.workers * groups * unroll)):
                buffer = (step + 1) % 2 * 2
                T.sync_warp()
                fetch(w, step + STAGES - 1, worker, tx, rank, row, start, x, dy, x_staged, dy_staged)
                load_statistics(step + 1, worker, group, row, mu_next, r_next, mean, rstd)
                T.ptx_wait_group(STAGES - 2)
                T.sync_warp()
                # The next rows are summed first: their sums cross the block or the cluster while these get their dx.
                dot(
                    step + 1, tx, sums_next, dots_next, acc, acc_dot, mu_next, scale, x_staged, dy_staged, x_raw, dy_raw
                )
                give_row(sums_next, unroll, part, parts, buffer, tx, config, rank)
                give_row(dots_next, unroll, part, parts, buffer + 1, tx, config, rank)
                if cluster > 1:
                    T.cluster_arrive()
                for u in T.unroll(unroll):
                    row[0] = w.row(step, worker, u, group)
                    for i in T.unroll(deal.chunks):
                        unstage(w, step, u, i, tx, x_staged, dy_staged, x_raw, dy_raw)
                        for v in T.vectorized(p.vec):
                            out[v] = T.cast(
                                (p.scaled(dy_raw[v], scale[i * p.vec + v]) - sums[u]) * r[u]
                                - (T.cast(x_raw[v], "float32") - mu[u]) * dots[u],
                                p.dtype,
                            )
                        chunk = deal.chunk(i, lane, rank)
                        if T.And(row[0] < rows, deal.has(chunk)):
                            for v in T.vectorized(p.vec):
                                flat(dx, p.dtype)[deal.element(row[0], chunk) + v] = out[v]
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
                    add_groups(w, dw, columns, group, lane)
                if p.biased:
                    add_groups(w, db, columns, group, lane)
            if group == groups - 1:
                if p.weighted:
                    write_partial(w, dw_partial, dw, worker, lane, rank)
                if p.biased:
                    write_partial(w, db_partial, db, worker, lane, rank)

        # One declaration for both would make them one argument.
        t.dw_partial, t.db_partial = (
            T.Tensor((config.workers, p.n), "float32") if present else None for present in (p.weighted, p.biased)
        )

        @T.prim_func
        def main(
            dy: t.dy, x: t.x, weight: t.weight, mean: t.mean, rstd: t.rstd, bias: t.bias,
            dx: t.dx, dweight: t.dweight, dbias: t.dbias, dw_partial: t.dw_partial, db_partial: t.db_partial,
        ):  # fmt: skip
            with launch(w.workers, config.threads, cluster) as block:
                backward(block, dy, x, weight, mean, rstd, dx, dw_partial, db_partial)
            if p.weighted or p.biased:
                with T.Kernel(strips, p.weighted + p.biased, threads=COLUMN_WARPS * WARP) as (block, which):
                    if p.weighted:
                        if which == 0:
                            sum_columns(block, dweight, dw_partial, p.n, p.weight_dtype, w.workers)
                    if p.biased:
                        if which == int(p.weighted):
                            sum_columns(block, dbias, db_partial, p.n, p.bias_dtype, w.workers)

        return main


class Problem(Gradients):
    """What the programs take from a call."""

    def __init__(self, static: Static) -> None:
        super().__init__(static)
        bias = static.tensor("bias")
        self.biased = bias is not None
        self.bias_dtype = self.dtype if bias is None else bias.dtype

    def scaled(self, dy: Any, weight: Any) -> Any:
        """The gradient by an element of xhat."""
        dy = T.cast(dy, "float32")
        return dy * T.cast(weight, "float32") if self.weighted else dy
