"""LayerNorm of a sum with a residual: two reads and two writes an element while a row fits a cluster's registers."""

from typing import Any

import tilelang.language as T

from tileops.core.kernel import Device, Static
from tileops.norm.kernels.centred import Centred
from tileops.norm.kernels.fused_add import Config, FusedAdd, Sum, add, fetch, fold_row, plus, reload
from tileops.norm.kernels.rows import (
    ACCUMULATORS,
    WARP,
    added,
    arguments,
    clear,
    count,
    flat,
    launch,
    load,
    load_vector,
    touch,
    touches,
)


class FusedAddLayerNormRows(FusedAdd):
    """A row is shared by some lanes of a warp, by a block or by a cluster, and stays in registers once it is added up.

    It is summed twice: for its mean, and for the squares of the differences from that. Where registers allow, weight
    and bias are loaded while the row is on its way.
    """

    def program(self, static: Static, config: Config, device: Device) -> Any:
        t, sizes = arguments(static)
        p, bias_form = Problem(static), static.tensor("bias")
        assert bias_form is not None
        shift_dtype = bias_form.dtype
        deal = config.deal(p.n, p.vec)
        p.fine |= deal.ragged
        rows = count(p.leading, sizes)
        unroll, held, cluster, warps = config.unroll, deal.held, config.cluster, config.threads // WARP
        at_once = config.threads // config.lanes  # rows of a block that are worked on side by side
        exact = unroll * at_once == 1  # no row of a block is beyond the last

        def scaled(xhat: Any, weight: Any, bias: Any) -> Any:
            """One element of y: all in float32, rounded once."""
            return T.cast(xhat * T.cast(weight, "float32") + T.cast(bias, "float32"), p.dtype)

        @T.macro
        def norm(block, x, residual, weight, bias, y, residual_out, mean, rstd):
            T.annotate_min_blocks_per_sm(config.resident)
            tx = T.get_thread_binding()
            lane = tx % config.lanes
            rank = block % cluster
            row = T.alloc_local((unroll,), "int32")
            raw = T.alloc_local((unroll * held,), p.dtype)
            more = T.alloc_local((unroll * held,), p.dtype)
            scale = T.alloc_local((held if config.early else p.vec,), p.weight_dtype)
            shift = T.alloc_local((held if config.early else p.vec,), shift_dtype)
            scale_seen = T.alloc_local((touches(deal, p.weight_dtype),), "int32")
            shift_seen = T.alloc_local((touches(deal, shift_dtype),), "int32")
            out = T.alloc_local((p.vec,), p.dtype)
            acc = T.alloc_local((unroll * ACCUMULATORS,), "float32")
            acc_rest = T.alloc_local((unroll * ACCUMULATORS,), "float32")
            centre = T.alloc_local((unroll,), "float32")
            rest = T.alloc_local((unroll,), "float32")
            total = T.alloc_local((unroll,), "float32")
            off = T.alloc_local((1,), "float32")
            part = T.alloc_shared((2 + p.fine, warps), "float32")
            parts = T.alloc_shared((2 + p.fine, cluster, warps), "float32")
            if cluster > 1:
                T.cluster_arrive_relaxed()
            for u in T.unroll(unroll):
                row[u] = ((block // cluster) * unroll + u) * at_once + tx // config.lanes
            clear(acc, unroll * ACCUMULATORS)
            for step in T.serial(config.steps):
                fetch(raw, more, row, rows, exact, x, residual, p, deal, config, sizes, lane, rank + step)
                if config.early:
                    load(scale, 0, flat(weight, p.weight_dtype), T.int64(0), p.vec, deal, lane, rank + step)
                    load(shift, 0, flat(bias, shift_dtype), T.int64(0), p.vec, deal, lane, rank + step)
                elif config.steps == 1:
                    touch(scale_seen, weight, p.weight_dtype, deal, lane, rank)
                    touch(shift_seen, bias, shift_dtype, deal, lane, rank)
                add(raw, more, row, rows, exact, residual_out, p, deal, config, lane, rank + step)
                for u in T.unroll(unroll):
                    for i in T.unroll(held):
                        acc[u * ACCUMULATORS + i % ACCUMULATORS] += T.cast(raw[u * held + i], "float32")
            for u in T.unroll(unroll):
                centre[u] = added(acc, u * ACCUMULATORS)
            fold_row(centre, plus, part, parts, 0, tx, rank, config)
            for u in T.unroll(unroll):
                centre[u] = centre[u] / T.float32(p.n)
            clear(acc, unroll * ACCUMULATORS)
            clear(acc_rest, unroll * ACCUMULATORS)
            for step in T.serial(config.steps):
                if config.steps > 1:
                    reload(raw, row, x, residual_out, p, deal, sizes, lane, step)
                for u in T.unroll(unroll):
                    for i in T.unroll(deal.chunks):
                        if deal.has(deal.chunk(i, lane, rank + step)):  # what is not there differs from the mean, too
                            for v in T.unroll(p.vec):
                                off[0] = T.cast(raw[u * held + i * p.vec + v], "float32") - centre[u]
                                acc[u * ACCUMULATORS + (i * p.vec + v) % ACCUMULATORS] += off[0] * off[0]
                                if p.fine:
                                    acc_rest[u * ACCUMULATORS + (i * p.vec + v) % ACCUMULATORS] += off[0]
            for u in T.unroll(unroll):
                total[u] = added(acc, u * ACCUMULATORS)
                rest[u] = added(acc_rest, u * ACCUMULATORS)
            fold_row(total, plus, part, parts, 1, tx, rank, config)
            if p.fine:
                fold_row(rest, plus, part, parts, 2, tx, rank, config)
            if not config.early and config.steps == 1:
                T.warpgroup_fence_operand(scale_seen, num_regs=touches(deal, p.weight_dtype))
                T.warpgroup_fence_operand(shift_seen, num_regs=touches(deal, shift_dtype))
            for u in T.unroll(unroll):
                rest[u] = rest[u] / T.float32(p.n)
                total[u] = p.rstd(p.variance(total[u], rest[u]))
                if t.mean is not None:
                    if lane + rank == 0 and (exact or row[u] < rows):
                        flat(mean, "float32")[T.cast(row[u], "int64")] = p.mean(centre[u], rest[u])
                        flat(rstd, "float32")[T.cast(row[u], "int64")] = total[u]
            for step in T.serial(config.steps):
                if config.steps > 1:
                    reload(raw, row, x, residual_out, p, deal, sizes, lane, step)
                for u in T.unroll(unroll):
                    if exact or row[u] < rows:
                        for i in T.unroll(deal.chunks):
                            chunk = deal.chunk(i, lane, rank + step)
                            if deal.has(chunk):
                                if not config.early:
                                    load_vector(scale, weight, p.weight_dtype, p.vec, chunk)
                                    load_vector(shift, bias, shift_dtype, p.vec, chunk)
                                at = i * p.vec if config.early else 0
                                for v in T.vectorized(p.vec):
                                    out[v] = scaled(
                                        p.without(raw[u * held + i * p.vec + v], centre[u], rest[u]) * total[u],
                                        scale[at + v],
                                        shift[at + v],
                                    )
                                for v in T.vectorized(p.vec):
                                    flat(y, p.dtype)[deal.element(row[u], chunk) + v] = out[v]

        @T.prim_func
        def main(
            x: t.x, residual: t.residual, weight: t.weight, bias: t.bias,
            y: t.y, residual_out: t.residual_out, mean: t.mean, rstd: t.rstd,
        ):  # fmt: skip
            with launch(T.ceildiv(rows, unroll * at_once), config.threads, cluster) as block:
                norm(block, x, residual, weight, bias, y, residual_out, mean, rstd)

        return main


class Problem(Sum, Centred):
    """What the program takes from a call."""
