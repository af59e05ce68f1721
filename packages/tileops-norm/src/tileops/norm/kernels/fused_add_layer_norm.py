"""LayerNorm of a sum with a residual: two reads and two writes an element while a row fits a cluster's registers."""

from typing import Any

import tilelang.language as T

from tileops.core.kernel import Device, Static
from tileops.norm.kernels.centred import Centred, centre, centre_stream
from tileops.norm.kernels.fused_add import Config, FusedAdd, Sum, add, fetch, reload
from tileops.norm.kernels.rows import (
    arguments,
    count,
    flat,
    launch,
    load,
    load_vector,
    touch,
    touched,
    touches,
)


class FusedAddLayerNormRows(FusedAdd):
    """A row is shared by some lanes of a warp, by a block or by a cluster, and stays in registers once it is added up.

    Its mean and variance take one exchange between these threads, or two (``centred.centre``). Where registers allow,
    weight and bias are loaded while the row is on its way.
    """

    def program(self, static: Static, config: Config, device: Device) -> Any:
        t, sizes = arguments(static)
        p, bias_form = Problem(static), static.tensor("bias")
        assert bias_form is not None
        shift_dtype = bias_form.dtype
        deal = config.deal(p.n, p.vec)
        p.fine |= deal.ragged
        rows = count(p.leading, sizes)
        unroll, held, cluster = config.unroll, deal.held, config.cluster
        at_once = config.threads // config.lanes  # rows of a block that are worked on side by side
        exact = unroll * at_once == 1  # no row of a block is beyond the last
        late = not config.early and config.steps == 1

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
            start = T.alloc_local((1,), "int64")
            raw = T.alloc_local((unroll * held,), p.dtype)
            more = T.alloc_local((unroll * held,), p.dtype)
            scale = T.alloc_local((held if config.early else p.vec,), p.weight_dtype)
            shift = T.alloc_local((held if config.early else p.vec,), shift_dtype)
            scale_seen = T.alloc_local((touches(deal, p.weight_dtype),), "int32")
            shift_seen = T.alloc_local((touches(deal, shift_dtype),), "int32")
            out = T.alloc_local((p.vec,), p.dtype)
            middle = T.alloc_local((unroll,), "float32")
            rest = T.alloc_local((unroll,), "float32")
            inverse = T.alloc_local((unroll,), "float32")
            if cluster > 1:
                T.cluster_arrive_relaxed()
            for u in T.unroll(unroll):
                row[u] = ((block // cluster) * unroll + u) * at_once + tx // config.lanes
            for step in T.serial(config.steps):
                fetch(raw, more, row, rows, exact, x, residual, p, deal, config, sizes, lane, rank + step)
                if config.early:
                    load(scale, 0, flat(weight, p.weight_dtype), T.int64(0), p.vec, deal, lane, rank + step)
                    load(shift, 0, flat(bias, shift_dtype), T.int64(0), p.vec, deal, lane, rank + step)
                touch(scale_seen, late, weight, p.weight_dtype, deal, lane, rank)
                touch(shift_seen, late, bias, shift_dtype, deal, lane, rank)
                add(raw, more, row, rows, exact, residual_out, p, deal, config, lane, rank + step)
            if config.steps > 1:
                T.sync_threads()  # the mean counts from the row's first element, which one thread has stored
                start[0] = T.cast(row[0], "int64") * (p.n // p.place.unit)
                centre_stream(middle, rest, inverse, raw, flat(residual_out, p.dtype), start[0], p, deal, tx)
            else:
                centre(middle, rest, inverse, raw, p, deal, config, unroll, tx, lane, rank)
            touched(scale_seen, late)
            touched(shift_seen, late)
            for u in T.unroll(unroll):
                inverse[u] = p.rstd(inverse[u])
                if t.mean is not None:
                    if lane + rank == 0 and (exact or row[u] < rows):
                        flat(mean, "float32")[T.cast(row[u], "int64")] = p.mean(middle[u], rest[u])
                        flat(rstd, "float32")[T.cast(row[u], "int64")] = inverse[u]
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
                                        p.without(raw[u * held + i * p.vec + v], middle[u], rest[u]) * inverse[u],
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
