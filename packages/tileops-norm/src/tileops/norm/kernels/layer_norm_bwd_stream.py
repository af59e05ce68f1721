"""LayerNorm backward for rows of any length: three reads and one write of each element."""

from collections.abc import Iterator
from typing import Any

import tilelang.language as T

from tileops.core.check import Call
from tileops.core.kernel import Device, Kernel, Static
from tileops.norm.kernels.backward import load_both, sum_warps
from tileops.norm.kernels.layer_norm_bwd import Problem
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
    give_block,
    load,
    refuse_rows,
    take_block,
)


class LayerNormBwdStream(Kernel):
    """A block walks its row twice, for the sums and for dx; a second launch walks strips of columns for the rest.

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
        def backward(block, dy, x, weight, mean, rstd, dx):
            tx = T.get_thread_binding()
            mu = T.alloc_local((1,), "float32")
            r = T.alloc_local((1,), "float32")
            x_raw = T.alloc_local((held,), p.dtype)
            dy_raw = T.alloc_local((held,), p.dtype)
            out = T.alloc_local((p.vec,), p.dtype)
            scale = T.alloc_local((held,), p.weight_dtype)
            acc = T.alloc_local((ACCUMULATORS,), "float32")
            acc_dot = T.alloc_local((ACCUMULATORS,), "float32")
            total = T.alloc_local((1,), "float32")
            dots = T.alloc_local((1,), "float32")
            part = T.alloc_shared((2, warps), "float32")
            mu[0] = flat(mean, "float32")[T.cast(block, "int64")]
            r[0] = flat(rstd, "float32")[T.cast(block, "int64")]
            clear(acc, ACCUMULATORS)
            clear(acc_dot, ACCUMULATORS)
            clear(scale, held)
            for step in T.serial(deal.parts):
                load_both(p, sizes, x_raw, dy_raw, x, dy, block, deal, tx, step)
                if p.weighted:
                    load(scale, 0, flat(weight, p.weight_dtype), T.int64(0), p.vec, deal, tx, step)
                for i in T.unroll(held):
                    acc[i % ACCUMULATORS] += p.scaled(dy_raw[i], scale[i])
                    acc_dot[i % ACCUMULATORS] += (T.cast(x_raw[i], "float32") - mu[0]) * p.scaled(dy_raw[i], scale[i])
            total[0] = added(acc)
            dots[0] = added(acc_dot)
            give_block(total, part, 0, tx)
            give_block(dots, part, 1, tx)
            T.sync_threads()
            take_block(total, part, 0, tx, warps)
            take_block(dots, part, 1, tx, warps)
            total[0] = total[0] / T.float32(p.n)
            dots[0] = dots[0] * r[0] / T.float32(p.n) * r[0] * r[0]
            for step in T.serial(deal.parts):
                load_both(p, sizes, x_raw, dy_raw, x, dy, block, deal, tx, step)
                if p.weighted:
                    load(scale, 0, flat(weight, p.weight_dtype), T.int64(0), p.vec, deal, tx, step)
                for i in T.unroll(deal.chunks):
                    chunk = deal.chunk(i, tx, step)
                    if deal.has(chunk):
                        for v in T.vectorized(p.vec):
                            out[v] = T.cast(
                                (p.scaled(dy_raw[i * p.vec + v], scale[i * p.vec + v]) - total[0]) * r[0]
                                - (T.cast(x_raw[i * p.vec + v], "float32") - mu[0]) * dots[0],
                                p.dtype,
                            )
                        for v in T.vectorized(p.vec):
                            flat(dx, p.dtype)[deal.element(block, chunk) + v] = out[v]

        @T.macro
        def sum_rows(block, dy, x, mean, rstd, dweight, dbias):
            tx = T.get_thread_binding()
            row = T.alloc_local((1,), "int32")
            mu = T.alloc_local((1,), "float32")
            r = T.alloc_local((1,), "float32")
            x_raw = T.alloc_local((p.vec,), p.dtype)
            dy_raw = T.alloc_local((p.vec,), p.dtype)
            dw = T.alloc_local((p.vec,), "float32")
            db = T.alloc_local((p.vec,), "float32")
            part = T.alloc_shared((warps, WARP * p.vec), "float32")
            clear(dw, p.vec)
            clear(db, p.vec)
            for step in T.serial(T.ceildiv(rows, warps)):
                row[0] = step * warps + tx // WARP
                if row[0] < rows:
                    mu[0] = flat(mean, "float32")[T.cast(row[0], "int64")]
                    r[0] = flat(rstd, "float32")[T.cast(row[0], "int64")]
                    load_both(p, sizes, x_raw, dy_raw, x, dy, row[0], strip, tx % WARP, block)
                    for v in T.unroll(p.vec):
                        dw[v] += (T.cast(x_raw[v], "float32") - mu[0]) * (T.cast(dy_raw[v], "float32") * r[0])
                        db[v] += T.cast(dy_raw[v], "float32")
            column = block * (WARP * p.vec) + tx
            if p.weighted:
                sum_warps(p, warps, part, dw, r, column, dweight, p.weight_dtype)
                T.sync_threads()
            if p.biased:
                sum_warps(p, warps, part, db, r, column, dbias, p.bias_dtype)
                T.sync_threads()

        @T.prim_func
        def main(
            dy: t.dy, x: t.x, weight: t.weight, mean: t.mean, rstd: t.rstd, bias: t.bias,
            dx: t.dx, dweight: t.dweight, dbias: t.dbias,
        ):  # fmt: skip
            with T.Kernel(rows, threads=threads) as block:
                backward(block, dy, x, weight, mean, rstd, dx)
            if p.weighted or p.biased:
                with T.Kernel(strip.parts, threads=threads) as block:
                    sum_rows(block, dy, x, mean, rstd, dweight, dbias)

        return main
