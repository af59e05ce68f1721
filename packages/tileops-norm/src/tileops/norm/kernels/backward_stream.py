"""The backward of RMSNorm and of LayerNorm for long rows: their sums first, then dx and the weights' gradients."""

import math
from collections.abc import Iterator
from typing import Any, ClassVar

import attrs
import tilelang.language as T

from tileops.core.check import Call
from tileops.core.kernel import Device, Kernel, Scratch, Static
from tileops.norm.kernels import layer_norm_bwd, rms_norm_bwd
from tileops.norm.kernels.backward import load_both
from tileops.norm.kernels.rms_norm import row_of
from tileops.norm.kernels.rows import (
    ACCUMULATORS,
    ARCHS,
    COLUMN_WARPS,
    PASSES,
    WARP,
    Deal,
    StreamConfig,
    added,
    arguments,
    clear,
    column_blocks,
    count,
    flat,
    give_block,
    load,
    refuse_rows,
    refuse_served,
    sum_columns,
    take_block,
    vector,
)

ROW = StreamConfig(512, 2)  # how a block walks a row for its sums
STRIP = 256  # threads that walk rows side by side, a vector each


@attrs.frozen
class Config:
    """The rows are walked in ``slabs``, ``unroll`` at once, by so many ``resident`` blocks a multiprocessor.

    The order of dweight's and dbias's sums is that of the slabs.
    """

    slabs: int
    unroll: int
    resident: int


class BackwardStream(Kernel):
    """Four reads and one write of each element: for rows of any length, beyond 64 KB.

    A block a row sums it. Then each thread walks down a strip of columns: it has what it needs of each row, writes dx,
    and sums its columns of dweight and dbias, for a slab of the rows; a last launch adds up the slabs.
    """

    archs = ARCHS
    pass_configs = PASSES
    first: ClassVar[Kernel]  # which serves rows that fit a cluster

    def refuse(self, call: Call, device: Device) -> str | None:
        axes = len(call.params["normalized_shape"])
        return refuse_rows(call, axes) or refuse_served(self.first, call, device)

    def configs(self, call: Call, device: Device) -> Iterator[Config]:
        n, dtype = row_of(call)
        strips = -(-n // (vector(n, dtype) * STRIP))
        for unroll, resident in ((2, 4), (4, 2), (1, 4), (2, 2), (1, 8)):
            yield Config(max(resident * device.sm_count // strips, 1), unroll, resident)

    def workspace(self, call: Call, config: Config) -> list[Scratch]:
        n, _ = row_of(call)
        rows = math.prod(call["B"])
        partial = [Scratch((config.slabs, n), "float32") for x in ("weight", "bias") if call.inputs.get(x) is not None]
        return [Scratch((kept("mean" in call.inputs) * rows,), "float32"), *partial]


class RMSNormBwdStream(BackwardStream):
    """RMSNorm's."""

    first = rms_norm_bwd.RMSNormBwdRows()

    def program(self, static: Static, config: Config, device: Device) -> Any:
        return program(static, config, rms_norm_bwd.Problem(static))


class LayerNormBwdStream(BackwardStream):
    """LayerNorm's."""

    first = layer_norm_bwd.LayerNormBwdRows()

    def program(self, static: Static, config: Config, device: Device) -> Any:
        return program(static, config, layer_norm_bwd.Problem(static))


def kept(centred: bool) -> int:
    """Numbers of a row in scratch memory: rstd, what dx loses of x - mean and, if it is centred, mean and g's own."""
    return 4 if centred else 2


def program(static: Static, config: Config, p: Any) -> Any:
    """The prim_func of three launches."""
    t, sizes = arguments(static)
    rows = count(p.leading, sizes)
    deal = ROW.deal(p.n, p.vec)
    strip = Deal(p.n, p.vec, STRIP, 1, -(-p.n // (p.vec * STRIP)))
    centred, biased = t.mean is not None, t.bias is not None
    n_kept = kept(centred)
    slabs, unroll = config.slabs, config.unroll
    warps = ROW.threads // WARP

    def centre(x: Any, mean: Any) -> Any:
        x = T.cast(x, "float32")
        return x - mean if centred else x

    def middle(of_row: Any, u: int) -> Any:
        return of_row[u * n_kept + 2] if centred else None

    def taken_off(g: Any, of_row: Any, u: int) -> Any:
        return g - of_row[u * n_kept + 3] if centred else g

    @T.macro
    def sum_row(row, dy, x, weight, mean, rstd, numbers):
        tx = T.get_thread_binding()
        x_raw = T.alloc_local((deal.held,), p.dtype)
        dy_raw = T.alloc_local((deal.held,), p.dtype)
        scale = T.alloc_local((deal.held,), p.weight_dtype)
        acc = T.alloc_local((ACCUMULATORS,), "float32")
        acc_dot = T.alloc_local((ACCUMULATORS,), "float32")
        mu = T.alloc_local((1,), "float32")
        r = T.alloc_local((1,), "float32")
        total = T.alloc_local((1,), "float32")
        dots = T.alloc_local((1,), "float32")
        part = T.alloc_shared((2, warps), "float32")
        r[0] = flat(rstd, "float32")[T.cast(row, "int64")]
        if centred:
            mu[0] = flat(mean, "float32")[T.cast(row, "int64")]
        clear(acc, ACCUMULATORS)
        clear(acc_dot, ACCUMULATORS)
        clear(scale, deal.held)
        for step in T.serial(deal.parts):
            load_both(p, sizes, x_raw, dy_raw, x, dy, row, deal, tx, step)
            if p.weighted:
                load(scale, 0, flat(weight, p.weight_dtype), T.int64(0), p.vec, deal, tx, step)
            for i in T.unroll(deal.held):
                if centred:
                    acc[i % ACCUMULATORS] += p.scaled(dy_raw[i], scale[i])
                acc_dot[i % ACCUMULATORS] += centre(x_raw[i], mu[0]) * p.scaled(dy_raw[i], scale[i])
        total[0] = added(acc)
        dots[0] = added(acc_dot)
        if centred:
            give_block(total, part, 0, tx)
        give_block(dots, part, 1, tx)
        T.sync_threads()
        if centred:
            take_block(total, part, 0, tx, warps)
        take_block(dots, part, 1, tx, warps)
        if tx == 0:
            at = T.cast(row, "int64") * n_kept
            flat(numbers, "float32")[at] = r[0]
            flat(numbers, "float32")[at + 1] = dots[0] * r[0] / T.float32(p.n) * r[0] * r[0]  # so nothing overflows
            if centred:
                flat(numbers, "float32")[at + 2] = mu[0]
                flat(numbers, "float32")[at + 3] = total[0] / T.float32(p.n)

    @T.macro
    def walk(block, slab, dy, x, weight, numbers, dx, dw_partial, db_partial):
        T.annotate_min_blocks_per_sm(config.resident)
        tx = T.get_thread_binding()
        row = T.alloc_local((unroll,), "int32")
        x_raw = T.alloc_local((unroll * p.vec,), p.dtype)
        dy_raw = T.alloc_local((unroll * p.vec,), p.dtype)
        of_row = T.alloc_local((unroll * n_kept,), "float32")
        out = T.alloc_local((p.vec,), p.dtype)
        scale = T.alloc_local((p.vec,), p.weight_dtype)
        dw = T.alloc_local((p.vec,), "float32")
        db = T.alloc_local((p.vec,), "float32")
        chunk = strip.chunk(0, tx, block)
        clear(dw, p.vec)
        clear(db, p.vec)
        clear(x_raw, unroll * p.vec)
        clear(dy_raw, unroll * p.vec)
        clear(of_row, unroll * n_kept)
        if p.weighted:
            clear(scale, p.vec)
            load(scale, 0, flat(weight, p.weight_dtype), T.int64(0), p.vec, strip, tx, block)
        for step in T.serial(T.ceildiv(rows, slabs * unroll)):
            for u in T.unroll(unroll):
                row[u] = (step * unroll + u) * slabs + slab
                if row[u] < rows:
                    x_at = p.place.start(row[u], sizes)
                    dy_at = p.dy_place.start(row[u], sizes)
                    load(x_raw, u * p.vec, flat(x, p.dtype), x_at, p.place.unit, strip, tx, block)
                    load(dy_raw, u * p.vec, flat(dy, p.dtype), dy_at, p.dy_place.unit, strip, tx, block)
                    for i in T.vectorized(n_kept):
                        of_row[u * n_kept + i] = flat(numbers, "float32")[T.cast(row[u], "int64") * n_kept + i]
            for u in T.unroll(unroll):
                if T.And(row[u] < rows, strip.has(chunk)):
                    for v in T.vectorized(p.vec):
                        out[v] = T.cast(
                            taken_off(p.scaled(dy_raw[u * p.vec + v], scale[v]), of_row, u) * of_row[u * n_kept]
                            - centre(x_raw[u * p.vec + v], middle(of_row, u)) * of_row[u * n_kept + 1],
                            p.dtype,
                        )
                    for v in T.vectorized(p.vec):
                        flat(dx, p.dtype)[strip.element(row[u], chunk) + v] = out[v]
                    if p.weighted:
                        for v in T.unroll(p.vec):
                            dw[v] += centre(x_raw[u * p.vec + v], middle(of_row, u)) * (
                                T.cast(dy_raw[u * p.vec + v], "float32") * of_row[u * n_kept]
                            )
                    if biased:
                        for v in T.unroll(p.vec):
                            db[v] += T.cast(dy_raw[u * p.vec + v], "float32")
        if strip.has(chunk):
            for v in T.vectorized(p.vec):
                if p.weighted:
                    flat(dw_partial, "float32")[strip.element(slab, chunk) + v] = dw[v]
            for v in T.vectorized(p.vec):
                if biased:
                    flat(db_partial, "float32")[strip.element(slab, chunk) + v] = db[v]

    t.numbers = T.Tensor((T.dynamic("scratch_size"),), "float32")
    # One declaration for both would make them one argument.
    t.dw_partial, t.db_partial = (
        T.Tensor((slabs, p.n), "float32") if there else None for there in (p.weighted, biased)
    )

    @T.prim_func
    def main(
        dy: t.dy, x: t.x, weight: t.weight, mean: t.mean, rstd: t.rstd, bias: t.bias, dx: t.dx, dweight: t.dweight,
        dbias: t.dbias, numbers: t.numbers, dw_partial: t.dw_partial, db_partial: t.db_partial,
    ):  # fmt: skip
        with T.Kernel(rows, threads=ROW.threads) as row:
            sum_row(row, dy, x, weight, mean, rstd, numbers)
        with T.Kernel(strip.parts, slabs, threads=STRIP) as (block, slab):
            walk(block, slab, dy, x, weight, numbers, dx, dw_partial, db_partial)
        if p.weighted or biased:
            with T.Kernel(column_blocks(p.n, 1), p.weighted + biased, threads=COLUMN_WARPS * WARP) as (block, which):
                if p.weighted:
                    if which == 0:
                        sum_columns(block, dweight, dw_partial, p.n, p.weight_dtype, slabs)
                if biased:
                    if which == int(p.weighted):
                        sum_columns(block, dbias, db_partial, p.n, p.bias_dtype, slabs)

    return main
