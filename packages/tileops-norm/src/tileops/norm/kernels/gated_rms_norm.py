"""RMSNorm with a gate: one read of x and gate and one write while a row fits in registers, two reads beyond."""

from collections.abc import Iterator
from typing import Any

import tilelang.language as T

from tileops.core.check import Call
from tileops.core.kernel import Device, Kernel, Static
from tileops.norm.kernels.operands import Config, configs, read
from tileops.norm.kernels.rows import (
    ACCUMULATORS,
    ARCHS,
    PASSES,
    WARP,
    Deal,
    Place,
    Rows,
    StreamConfig,
    added,
    arguments,
    clear,
    count,
    flat,
    launch,
    load,
    refuse_rows,
    refuse_served,
    sum_block,
    sum_row,
    vector,
    words,
)


class GatedRMSNormRows(Kernel):
    """Rows of x and gate in registers, one read of each and one write of y: wins wherever a row fits.

    A row is shared by some lanes of a warp, by a block, or by a cluster of up to 8 blocks. What is summed is held until
    y is written: x itself, or x * silu(gate) in float32, so that no element's exponential is taken twice. Where
    registers allow, the weight is loaded while the row is on its way.
    """

    archs = ARCHS
    pass_configs = PASSES

    def refuse(self, call: Call, device: Device) -> str | None:
        if next(self.configs(call, device), None) is None:
            return f"two rows of {call['N']} {call['T']} fit in no cluster's registers"
        return refuse_rows(call, 1)

    def configs(self, call: Call, device: Device) -> Iterator[Config]:
        n, dtype, weight = call["N"], call["T"], call.inputs["weight"]
        assert weight is not None
        vec = vector(n, dtype)
        return configs(n, dtype, 2, words(vec, weight.dtype), more=vec)

    def program(self, static: Static, config: Config, device: Device) -> Any:
        t, sizes = arguments(static)
        p = Problem(static)
        deal = Deal(p.n, p.vec, config.lanes, config.chunks, config.cluster)
        rows = count(p.leading, sizes)
        held, cluster, early = deal.held, config.cluster, config.early
        at_once = config.threads // config.lanes  # rows of a block that are worked on side by side
        exact = at_once == 1  # no row of a block is beyond the last

        @T.prim_func
        def main(x: t.x, gate: t.gate, weight: t.weight, y: t.y):
            with launch(T.ceildiv(rows, at_once), config.threads, cluster) as block:
                T.annotate_min_blocks_per_sm(config.resident)
                tx = T.get_thread_binding()
                lane = tx % config.lanes
                rank = block % cluster
                row = T.alloc_local((1,), "int32")
                start = T.alloc_local((2,), "int64")
                raw = T.alloc_local((held,), p.dtype)
                gate_raw = T.alloc_local((held,), p.dtype)
                z = T.alloc_local((held,), "float32")
                scale = T.alloc_local((held if early else p.vec,), p.weight_dtype)
                out = T.alloc_local((p.vec,), p.dtype)
                acc = T.alloc_local((ACCUMULATORS,), "float32")
                total = T.alloc_local((1,), "float32")
                part = T.alloc_shared((1, config.threads // WARP), "float32")
                parts = T.alloc_shared((1, cluster, config.threads // WARP), "float32")
                if cluster > 1:
                    T.cluster_arrive_relaxed()
                if deal.ragged or not exact:
                    clear(raw, held)
                    clear(gate_raw, held)
                row[0] = block // cluster * at_once + tx // config.lanes
                start[0] = p.place.start(row[0], sizes)
                start[1] = p.gate.start(row[0], sizes)
                if exact or row[0] < rows:
                    load(raw, 0, flat(x, p.dtype), start[0], p.place.unit, deal, lane, rank)
                    load(gate_raw, 0, flat(gate, p.dtype), start[1], p.gate.unit, deal, lane, rank)
                if early:
                    load(scale, 0, flat(weight, p.weight_dtype), T.int64(0), p.vec, deal, lane, rank)
                clear(acc, ACCUMULATORS)
                for i in T.unroll(held):
                    z[i] = p.summed(raw[i], gate_raw[i])
                    acc[i % ACCUMULATORS] += z[i] * z[i]
                total[0] = added(acc)
                if cluster > 1:
                    T.cluster_wait()
                sum_row(total, 1, part, parts, 0, tx, config, rank)
                total[0] = T.rsqrt(total[0] / T.float32(p.n) + T.float32(p.eps))
                if exact or row[0] < rows:
                    for i in T.unroll(deal.chunks):
                        chunk = deal.chunk(i, lane, rank)
                        if deal.has(chunk):
                            if not early:
                                read(scale, 0, flat(weight, p.weight_dtype), T.int64(0), p.vec, chunk * p.vec, p.vec)
                            for v in T.vectorized(p.vec):
                                out[v] = p.scaled(
                                    z[i * p.vec + v],
                                    gate_raw[i * p.vec + v],
                                    total[0],
                                    scale[(i * p.vec if early else 0) + v],
                                )
                            for v in T.vectorized(p.vec):
                                flat(y, p.dtype)[deal.element(row[0], chunk) + v] = out[v]

        return main


class GatedRMSNormStream(Kernel):
    """A block walks its row twice, for the sum and to scale it: the last resort, for rows of any length."""

    archs = ARCHS
    pass_configs = PASSES

    def refuse(self, call: Call, device: Device) -> str | None:
        return refuse_rows(call, 1) or refuse_served(GatedRMSNormRows(), call, device)

    def configs(self, call: Call, device: Device) -> Iterator[StreamConfig]:
        yield StreamConfig(1024, 2)

    def program(self, static: Static, config: StreamConfig, device: Device) -> Any:
        t, sizes = arguments(static)
        p = Problem(static)
        deal = config.deal(p.n, p.vec)
        threads, held, warps = config.threads, deal.held, config.threads // WARP

        @T.prim_func
        def main(x: t.x, gate: t.gate, weight: t.weight, y: t.y):
            with T.Kernel(count(p.leading, sizes), threads=threads) as block:
                tx = T.get_thread_binding()
                start = T.alloc_local((2,), "int64")
                raw = T.alloc_local((held,), p.dtype)
                gate_raw = T.alloc_local((held,), p.dtype)
                z = T.alloc_local((p.vec,), "float32")
                scale = T.alloc_local((p.vec,), p.weight_dtype)
                out = T.alloc_local((p.vec,), p.dtype)
                acc = T.alloc_local((ACCUMULATORS,), "float32")
                total = T.alloc_local((1,), "float32")
                part = T.alloc_shared((1, warps), "float32")
                start[0] = p.place.start(block, sizes)
                start[1] = p.gate.start(block, sizes)
                clear(acc, ACCUMULATORS)
                for step in T.serial(deal.parts):
                    clear(raw, held)
                    clear(gate_raw, held)
                    load(raw, 0, flat(x, p.dtype), start[0], p.place.unit, deal, tx, step)
                    if p.gate_first:
                        load(gate_raw, 0, flat(gate, p.dtype), start[1], p.gate.unit, deal, tx, step)
                    for i in T.unroll(held):
                        z[0] = p.summed(raw[i], gate_raw[i])
                        acc[i % ACCUMULATORS] += z[0] * z[0]
                total[0] = added(acc)
                sum_block(total, part, 0, tx, warps)
                total[0] = T.rsqrt(total[0] / T.float32(p.n) + T.float32(p.eps))
                for step in T.serial(deal.parts):
                    load(raw, 0, flat(x, p.dtype), start[0], p.place.unit, deal, tx, step)
                    load(gate_raw, 0, flat(gate, p.dtype), start[1], p.gate.unit, deal, tx, step)
                    for i in T.unroll(deal.chunks):
                        chunk = deal.chunk(i, tx, step)
                        if deal.has(chunk):
                            read(scale, 0, flat(weight, p.weight_dtype), T.int64(0), p.vec, chunk * p.vec, p.vec)
                            for v in T.unroll(p.vec):
                                z[v] = p.summed(raw[i * p.vec + v], gate_raw[i * p.vec + v])
                            for v in T.vectorized(p.vec):
                                out[v] = p.scaled(z[v], gate_raw[i * p.vec + v], total[0], scale[v])
                            for v in T.vectorized(p.vec):
                                flat(y, p.dtype)[deal.element(block, chunk) + v] = out[v]

        return main


class Problem(Rows):
    """What the programs take from a call."""

    def __init__(self, static: Static) -> None:
        super().__init__(static)
        gate = static.tensor("gate")
        assert gate is not None
        self.gate = Place.of(gate, 1, self.vec)
        self.gate_first = not static["norm_before_gate"]
        self.eps = static["eps"]

    def summed(self, x: Any, gate: Any) -> Any:
        """An element of what is normalized."""
        x = T.cast(x, "float32")
        return x * silu(gate) if self.gate_first else x

    def scaled(self, z: Any, gate: Any, rstd: Any, weight: Any) -> Any:
        """One element of y: all in float32, rounded once."""
        y = z * rstd * T.cast(weight, "float32")
        return T.cast(y if self.gate_first else y * silu(gate), self.dtype)


def silu(gate: Any) -> Any:
    g = T.cast(gate, "float32")
    return g / (T.float32(1.0) + T.exp(-g))
