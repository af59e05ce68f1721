"""AdaLayerNorm with and without a gate: one read and one write of x while a row fits in registers, three reads beyond.

What conditions a row is found by its leading axes, which broadcast: all tokens of a sequence read the same row of scale
and shift, which stays in the caches.
"""

from collections.abc import Iterator
from typing import Any

import tilelang.language as T

from tileops.core.check import Call
from tileops.core.kernel import Device, Kernel, Static
from tileops.norm.kernels.centred import Centred, centre, centre_stream
from tileops.norm.kernels.operands import Broadcast, Config, configs, read
from tileops.norm.kernels.rows import (
    ARCHS,
    PASSES,
    Deal,
    StreamConfig,
    arguments,
    clear,
    count,
    flat,
    launch,
    load,
    refuse_rows,
    refuse_served,
    vector,
    words,
)


class AdaLayerNormRows(Kernel):
    """Rows in registers, one read and one write of each element of x: wins wherever a row fits.

    A row is shared by some lanes of a warp, by a block, or by a cluster of up to 8 blocks. Its mean and variance take
    one exchange between these threads, or two (``centred.centre``). Short rows' scale, shift and gate are loaded while
    the row is on its way.
    """

    archs = ARCHS
    pass_configs = PASSES

    def refuse(self, call: Call, device: Device) -> str | None:
        if next(self.configs(call, device), None) is None:
            return f"a row of {call['N']} {call['T']} fits in no cluster's registers"
        return refuse_rows(call, 1)

    def configs(self, call: Call, device: Device) -> Iterator[Config]:
        n, dtype = call["N"], call["T"]
        return configs(n, dtype, 1, (len(call.inputs) - 1) * words(vector(n, dtype), dtype))

    def program(self, static: Static, config: Config, device: Device) -> Any:
        t, sizes = arguments(static)
        p = Problem(static)
        deal = Deal(p.n, p.vec, config.lanes, config.chunks, config.cluster)
        p.fine |= deal.ragged
        rows = count(p.leading, sizes)
        held, cluster, early = deal.held, config.cluster, config.early
        at_once = config.threads // config.lanes  # rows of a block that are worked on side by side
        exact = at_once == 1  # no row of a block is beyond the last
        operand = held if early else p.vec

        @T.prim_func
        def main(x: t.x, scale: t.scale, shift: t.shift, gate: t.gate, y: t.y):
            with launch(T.ceildiv(rows, at_once), config.threads, cluster) as block:
                T.annotate_min_blocks_per_sm(config.resident)
                tx = T.get_thread_binding()
                lane = tx % config.lanes
                rank = block % cluster
                row = T.alloc_local((1,), "int32")
                start = T.alloc_local((4,), "int64")
                raw = T.alloc_local((held,), p.dtype)
                scale_raw = T.alloc_local((operand,), p.dtype)
                shift_raw = T.alloc_local((operand,), p.dtype)
                gate_raw = T.alloc_local((operand,), p.dtype)
                out = T.alloc_local((p.vec,), p.dtype)
                mean = T.alloc_local((1,), "float32")
                rest = T.alloc_local((1,), "float32")
                rstd = T.alloc_local((1,), "float32")
                if cluster > 1:
                    T.cluster_arrive_relaxed()
                if deal.ragged or not exact:
                    clear(raw, held)
                row[0] = block // cluster * at_once + tx // config.lanes
                start[0] = p.place.start(row[0], sizes)
                start[1] = p.scale.start(row[0], sizes)
                start[2] = p.shift.start(row[0], sizes)
                if p.gate is not None:
                    start[3] = p.gate.start(row[0], sizes)
                if exact or row[0] < rows:
                    load(raw, 0, flat(x, p.dtype), start[0], p.place.unit, deal, lane, rank)
                    if early:
                        load(scale_raw, 0, flat(scale, p.dtype), start[1], p.scale.unit, deal, lane, rank)
                        load(shift_raw, 0, flat(shift, p.dtype), start[2], p.shift.unit, deal, lane, rank)
                        if p.gate is not None:
                            load(gate_raw, 0, flat(gate, p.dtype), start[3], p.gate.unit, deal, lane, rank)
                centre(mean, rest, rstd, raw, p, deal, config, 1, tx, lane, rank)
                rstd[0] = p.rstd(rstd[0])
                if exact or row[0] < rows:
                    for i in T.unroll(deal.chunks):
                        chunk = deal.chunk(i, lane, rank)
                        if deal.has(chunk):
                            at = i * p.vec if early else 0
                            if not early:
                                read(scale_raw, 0, flat(scale, p.dtype), start[1], p.scale.unit, chunk * p.vec, p.vec)
                                read(shift_raw, 0, flat(shift, p.dtype), start[2], p.shift.unit, chunk * p.vec, p.vec)
                                if p.gate is not None:
                                    read(gate_raw, 0, flat(gate, p.dtype), start[3], p.gate.unit, chunk * p.vec, p.vec)
                            for v in T.vectorized(p.vec):
                                out[v] = p.modulated(
                                    p.without(raw[i * p.vec + v], mean[0], rest[0]) * rstd[0],
                                    scale_raw[at + v],
                                    shift_raw[at + v],
                                    None if p.gate is None else gate_raw[at + v],
                                )
                            for v in T.vectorized(p.vec):
                                flat(y, p.dtype)[deal.element(row[0], chunk) + v] = out[v]

        return main


class AdaLayerNormStream(Kernel):
    """A block walks its row three times, for each sum and for y: the last resort, for rows of any length."""

    archs = ARCHS
    pass_configs = PASSES

    def refuse(self, call: Call, device: Device) -> str | None:
        return refuse_rows(call, 1) or refuse_served(AdaLayerNormRows(), call, device)

    def configs(self, call: Call, device: Device) -> Iterator[StreamConfig]:
        yield StreamConfig(1024, 2)

    def program(self, static: Static, config: StreamConfig, device: Device) -> Any:
        t, sizes = arguments(static)
        p = Problem(static)
        deal = config.deal(p.n, p.vec)

        @T.prim_func
        def main(x: t.x, scale: t.scale, shift: t.shift, gate: t.gate, y: t.y):
            with T.Kernel(count(p.leading, sizes), threads=config.threads) as block:
                tx = T.get_thread_binding()
                start = T.alloc_local((4,), "int64")
                raw = T.alloc_local((deal.held,), p.dtype)
                scale_raw = T.alloc_local((p.vec,), p.dtype)
                shift_raw = T.alloc_local((p.vec,), p.dtype)
                gate_raw = T.alloc_local((p.vec,), p.dtype)
                out = T.alloc_local((p.vec,), p.dtype)
                mean = T.alloc_local((1,), "float32")
                rest = T.alloc_local((1,), "float32")
                rstd = T.alloc_local((1,), "float32")
                start[0] = p.place.start(block, sizes)
                start[1] = p.scale.start(block, sizes)
                start[2] = p.shift.start(block, sizes)
                if p.gate is not None:
                    start[3] = p.gate.start(block, sizes)
                centre_stream(mean, rest, rstd, raw, flat(x, p.dtype), start[0], p, deal, tx)
                rstd[0] = p.rstd(rstd[0])
                for step in T.serial(deal.parts):
                    load(raw, 0, flat(x, p.dtype), start[0], p.place.unit, deal, tx, step)
                    for i in T.unroll(deal.chunks):
                        chunk = deal.chunk(i, tx, step)
                        if deal.has(chunk):
                            read(scale_raw, 0, flat(scale, p.dtype), start[1], p.scale.unit, chunk * p.vec, p.vec)
                            read(shift_raw, 0, flat(shift, p.dtype), start[2], p.shift.unit, chunk * p.vec, p.vec)
                            if p.gate is not None:
                                read(gate_raw, 0, flat(gate, p.dtype), start[3], p.gate.unit, chunk * p.vec, p.vec)
                            for v in T.vectorized(p.vec):
                                out[v] = p.modulated(
                                    p.without(raw[i * p.vec + v], mean[0], rest[0]) * rstd[0],
                                    scale_raw[v],
                                    shift_raw[v],
                                    None if p.gate is None else gate_raw[v],
                                )
                            for v in T.vectorized(p.vec):
                                flat(y, p.dtype)[deal.element(block, chunk) + v] = out[v]

        return main


class Problem(Centred):
    """What the programs take from a call."""

    def __init__(self, static: Static) -> None:
        super().__init__(static)
        operands = (static.tensor(name) for name in ("scale", "shift", "gate"))
        self.scale, self.shift, self.gate = (form and Broadcast.of(form, self.leading, self.vec) for form in operands)

    def modulated(self, xhat: Any, scale: Any, shift: Any, gate: Any) -> Any:
        """One element of y: all in float32, rounded once."""
        y = xhat * (T.float32(1) + T.cast(scale, "float32")) + T.cast(shift, "float32")
        return T.cast(y if gate is None else y * T.cast(gate, "float32"), self.dtype)
