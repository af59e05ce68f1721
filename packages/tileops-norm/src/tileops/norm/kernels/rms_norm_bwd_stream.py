"""RMSNorm backward for rows of any length: three reads and one write of each element."""

from collections.abc import Iterator
from typing import Any

import tilelang.language as T

from tileops.core.check import Call
from tileops.core.kernel import Device, Kernel, Static
from tileops.norm.kernels.backward import load_both, sum_warps
from tileops.norm.kernels.rms_norm_bwd import Problem
from tileops.norm.kernels.rows import (
    ACCUMULATORS,
    ARCHS,
    PASSES,
    WARP,
    Deal,
    StreamConfig,
    added,
    arguments,
    clear,
    count,
    flat,
    load,
    refuse_rows,
    sum_block,
)


class RMSNormBwdStream(Kernel):
    """A block walks its row twice, for the sum and for dx; a second launch walks strips of columns for dweight.

    Three reads and one write of each element: the last resort, for rows of any length.
    """

    archs = ARCHS
    pass_configs = PASSES

    def refuse(self, call: Call, device: Device) -> str | None:
        return refuse_rows(call, len(call.params["normalized_shape"]))

    def configs(self, call: Call, device: Device) -> Iterator[StreamConfig]:
        yield StreamConfig(512, 2)

    def program(self, static: Static, config: StreamConfig, device: Device) -> Any:
        t, sizes = arguments(static)
        p = Problem(static)
        rows = count(p.leading, sizes)
        deal = config.deal(p.n, p.vec)
        threads, held, warps = config.threads, deal.held, config.threads // WARP
        strip = Deal(p.n, p.vec, WARP, 1, -(-p.n // (WARP * p.vec)))

        @T.macro
        def backward(block, dy, x, weight, rstd, dx):
            tx = T.get_thread_binding()
            r = T.alloc_local((1,), "float32")
            x_raw = T.alloc_local((held,), p.dtype)
            dy_raw = T.alloc_local((held,), p.dtype)
            out = T.alloc_local((p.vec,), p.dtype)
            scale = T.alloc_local((held,), p.weight_dtype)
            acc = T.alloc_local((ACCUMULATORS,), "float32")
            total = T.alloc_local((1,), "float32")
            part = T.alloc_shared((1, warps), "float32")
            r[0] = flat(rstd, "float32")[T.cast(block, "int64")]
            clear(acc, ACCUMULATORS)
            clear(scale, held)
            for step in T.serial(deal.parts):
                load_both(p, sizes, x_raw, dy_raw, x, dy, block, deal, tx, step)
                if p.weighted:
                    load(scale, 0, flat(weight, p.weight_dtype), T.int64(0), p.vec, deal, tx, step)
                for i in T.unroll(held):
                    acc[i % ACCUMULATORS] += T.cast(x_raw[i], "float32") * p.scaled(dy_raw[i], scale[i])
            total[0] = added(acc)
            sum_block(total, part, 0, tx, warps)
            total[0] = total[0] * r[0] / T.float32(p.n) * r[0] * r[0]
            for step in T.serial(deal.parts):
                load_both(p, sizes, x_raw, dy_raw, x, dy, block, deal, tx, step)
                if p.weighted:
                    load(scale, 0, flat(weight, p.weight_dtype), T.int64(0), p.vec, deal, tx, step)
                for i in T.unroll(deal.chunks):
                    chunk = deal.chunk(i, tx, step)
                    if deal.has(chunk):
                        for v in T.vectorized(p.vec):
                            out[v] = T.cast(
                                p.scaled(dy_raw[i * p.vec + v], scale[i * p.vec + v]) * r[0]
                                - T.cast(x_raw[i * p.vec + v], "float32") * total[0],
                                p.dtype,
                            )
                        for v in T.vectorized(p.vec):
                            flat(dx, p.dtype)[deal.element(block, chunk) + v] = out[v]

        @T.macro
        def weigh(block, dy, x, rstd, dweight):
            tx = T.get_thread_binding()
            row = T.alloc_local((1,), "int32")
            r = T.alloc_local((1,), "float32")
            x_raw = T.alloc_local((p.vec,), p.dtype)
            dy_raw = T.alloc_local((p.vec,), p.dtype)
            dw = T.alloc_local((p.vec,), "float32")
            part = T.alloc_shared((warps, WARP * p.vec), "float32")
            clear(dw, p.vec)
            for step in T.serial(T.ceildiv(rows, warps)):
                row[0] = step * warps + tx // WARP
                if row[0] < rows:
                    r[0] = flat(rstd, "float32")[T.cast(row[0], "int64")]
                    load_both(p, sizes, x_raw, dy_raw, x, dy, row[0], strip, tx % WARP, block)
                    for v in T.unroll(p.vec):
                        dw[v] += T.cast(x_raw[v], "float32") * (T.cast(dy_raw[v], "float32") * r[0])
            column = block * (WARP * p.vec) + tx
            sum_warps(p, warps, part, dw, r, column, dweight, p.weight_dtype)

        @T.prim_func
        def main(dy: t.dy, x: t.x, weight: t.weight, rstd: t.rstd, dx: t.dx, dweight: t.dweight):
            with T.Kernel(rows, threads=threads) as block:
                backward(block, dy, x, weight, rstd, dx)
            if p.weighted:
                with T.Kernel(strip.parts, threads=threads) as block:
                    weigh(block, dy, x, rstd, dweight)

        return main
