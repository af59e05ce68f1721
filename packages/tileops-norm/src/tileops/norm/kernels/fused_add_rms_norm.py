"""RMSNorm of a sum with a residual: two reads and two writes an element while a row fits a cluster's registers."""

from typing import Any

import tilelang.language as T

from tileops.core.kernel import Device, Static
from tileops.norm.kernels.fused_add import Config, FusedAdd, Sum, add, fetch, reload
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
    sum_row,
    touch,
    touched,
    touches,
)


class FusedAddRMSNormRows(FusedAdd):
    """A row is shared by some lanes of a warp, by a block or by a cluster, and stays in registers once it is added up.

    Where registers allow, the weight is loaded while the row is on its way.
    """

    def program(self, static: Static, config: Config, device: Device) -> Any:
        t, sizes = arguments(static)
        p = Sum(static)
        eps, offset = static["eps"], static["weight_offset"]
        deal = config.deal(p.n, p.vec)
        rows = count(p.leading, sizes)
        unroll, held, cluster, warps = config.unroll, deal.held, config.cluster, config.threads // WARP
        at_once = config.threads // config.lanes  # rows of a block that are worked on side by side
        exact = unroll * at_once == 1  # no row of a block is beyond the last
        late = not config.early and config.steps == 1

        def scaled(value: Any, rstd: Any, weight: Any) -> Any:
            """One element of y: all in float32, rounded once."""
            w = T.cast(weight, "float32")
            return T.cast(T.cast(value, "float32") * rstd * (w + T.float32(offset) if offset else w), p.dtype)

        @T.macro
        def norm(block, x, residual, weight, y, residual_out, rstd):
            T.annotate_min_blocks_per_sm(config.resident)
            tx = T.get_thread_binding()
            lane = tx % config.lanes
            rank = block % cluster
            row = T.alloc_local((unroll,), "int32")
            raw = T.alloc_local((unroll * held,), p.dtype)
            more = T.alloc_local((unroll * held,), p.dtype)
            scale = T.alloc_local((held if config.early else p.vec,), p.weight_dtype)
            seen = T.alloc_local((touches(deal, p.weight_dtype),), "int32")
            out = T.alloc_local((p.vec,), p.dtype)
            acc = T.alloc_local((unroll * ACCUMULATORS,), "float32")
            total = T.alloc_local((unroll,), "float32")
            part = T.alloc_shared((1, warps), "float32")
            parts = T.alloc_shared((1, cluster, warps), "float32")
            if cluster > 1:
                T.cluster_arrive_relaxed()
            for u in T.unroll(unroll):
                row[u] = ((block // cluster) * unroll + u) * at_once + tx // config.lanes
            clear(acc, unroll * ACCUMULATORS)
            for step in T.serial(config.steps):
                fetch(raw, more, row, rows, exact, x, residual, p, deal, config, sizes, lane, rank + step)
                if config.early:
                    load(scale, 0, flat(weight, p.weight_dtype), T.int64(0), p.vec, deal, lane, rank + step)
                touch(seen, late, weight, p.weight_dtype, deal, lane, rank)
                add(raw, more, row, rows, exact, residual_out, p, deal, config, lane, rank + step)
                for u in T.unroll(unroll):
                    for i in T.unroll(held):
                        acc[u * ACCUMULATORS + i % ACCUMULATORS] += T.cast(raw[u * held + i], "float32") * T.cast(
                            raw[u * held + i], "float32"
                        )
            for u in T.unroll(unroll):
                total[u] = added(acc, u * ACCUMULATORS)
            if cluster > 1:
                T.cluster_wait()
            sum_row(total, unroll, part, parts, 0, tx, config, rank)
            touched(seen, late)
            for u in T.unroll(unroll):
                total[u] = T.rsqrt(total[u] / T.float32(p.n) + T.float32(eps))
                if t.rstd is not None:
                    if lane + rank == 0 and (exact or row[u] < rows):
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
                                for v in T.vectorized(p.vec):
                                    out[v] = scaled(
                                        raw[u * held + i * p.vec + v],
                                        total[u],
                                        scale[(i * p.vec if config.early else 0) + v],
                                    )
                                for v in T.vectorized(p.vec):
                                    flat(y, p.dtype)[deal.element(row[u], chunk) + v] = out[v]

        @T.prim_func
        def main(x: t.x, residual: t.residual, weight: t.weight, y: t.y, residual_out: t.residual_out, rstd: t.rstd):
            with launch(T.ceildiv(rows, unroll * at_once), config.threads, cluster) as block:
                norm(block, x, residual, weight, y, residual_out, rstd)

        return main
