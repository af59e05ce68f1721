"""LayerNorm forward: one read and one write of each element while a row fits in registers, three reads beyond."""

from collections.abc import Iterator
from typing import Any

import attrs
import tilelang.language as T

from tileops.core.check import Call
from tileops.core.kernel import Device, Kernel, Static
from tileops.norm.kernels import rms_norm
from tileops.norm.kernels.centred import Centred, centre, centre_stream
from tileops.norm.kernels.rms_norm import Config, row_of
from tileops.norm.kernels.rows import (
    ARCHS,
    BUSY,
    OVERHEAD,
    PASSES,
    WARP,
    Deal,
    StreamConfig,
    arguments,
    clear,
    count,
    crowded,
    few_rows,
    flat,
    launch,
    load,
    load_vector,
    refuse_rows,
    refuse_served,
    touch,
    touched,
    touches,
    vector,
    words,
)

# Vectors of a row, and the most threads that share it.
LADDER = ((128, WARP), (256, 64), (512, 128), (1024, 256), (4096, 512), (8192, 1024))


def configs(n: int, dtype: str, few: bool) -> Iterator[Config]:
    """The configs for rows of a length, the default first: as RMSNorm's, where registers suffice for a bias too.

    All of them sum a row in one order, ``few`` rows and many.
    """
    found = list(rms_norm.configs(n, dtype, LADDER))
    for config in found[:1]:
        early = few or (config.chunks <= 4 and config.lanes <= 256)
        # Told of fewer, the compiler takes more registers than it needs.
        resident = 1 if few else max(BUSY // config.threads, 1)
        unroll = config.unroll if config.chunks == 1 else 1
        found.insert(0, attrs.evolve(config, early=early, unroll=unroll, resident=resident))
    yield from dict.fromkeys(config for config in found if excluded(config, n, dtype) is None)


def held(config: Config, n: int, dtype: str) -> int:
    """Registers for a thread's part of a row."""
    return config.chunks * words(vector(n, dtype), dtype)


def excluded(config: Config, n: int, dtype: str) -> str | None:
    """Why a config of RMSNorm is left out, or None."""
    # Of an early weight and bias the compiler fetches late what has no room: that gains all the same.
    return crowded(config, held(config, n, dtype) * (config.unroll + config.early) + OVERHEAD)


class LayerNormRows(Kernel):
    """Rows in registers, one read and one write of each element: wins wherever a row fits.

    A row is shared by some lanes of a warp, by a block or, beyond 128 KB, by a cluster of up to 8 blocks. Its mean and
    variance take one exchange between these threads, or two (``centred.centre``). Weight and bias that come behind that
    are touched before, so that they are in the caches.
    """

    archs = ARCHS
    pass_configs = PASSES

    def refuse(self, call: Call, device: Device) -> str | None:
        if next(self.configs(call, device), None) is None:
            return "a row of {} {} fits in no cluster's registers".format(*row_of(call))
        return refuse_rows(call, len(call.params["normalized_shape"]))

    def configs(self, call: Call, device: Device) -> Iterator[Config]:
        return configs(*row_of(call), few_rows(call, len(call.params["normalized_shape"])))

    def program(self, static: Static, config: Config, device: Device) -> Any:
        t, sizes = arguments(static)
        p = Problem(static)
        deal = Deal(p.n, p.vec, config.lanes, config.chunks, config.cluster)
        p.fine |= deal.ragged
        rows = count(p.leading, sizes)
        unroll, held, cluster = config.unroll, deal.held, config.cluster
        at_once = config.threads // config.lanes  # rows of a block that are worked on side by side
        exact = unroll * at_once == 1  # no row of a block is beyond the last
        late = not config.early
        kept = p.vec if late else held  # elements of weight and bias that a thread holds

        @T.prim_func
        def main(x: t.x, weight: t.weight, bias: t.bias, y: t.y, mean: t.mean, rstd: t.rstd):
            with launch(T.ceildiv(rows, unroll * at_once), config.threads, cluster) as block:
                T.annotate_min_blocks_per_sm(config.resident)
                tx = T.get_thread_binding()
                lane = tx % config.lanes
                rank = block % cluster
                row = T.alloc_local((unroll,), "int32")
                start = T.alloc_local((unroll,), "int64")
                raw = T.alloc_local((unroll * held,), p.dtype)
                scale = T.alloc_local((kept,), p.weight_dtype)
                offset = T.alloc_local((kept,), p.bias_dtype)
                scale_seen = T.alloc_local((touches(deal, p.weight_dtype),), "int32")
                offset_seen = T.alloc_local((touches(deal, p.bias_dtype),), "int32")
                out = T.alloc_local((p.vec,), p.dtype)
                middle = T.alloc_local((unroll,), "float32")
                rest = T.alloc_local((unroll,), "float32")
                inverse = T.alloc_local((unroll,), "float32")
                if cluster > 1:
                    T.cluster_arrive_relaxed()
                if deal.ragged or not exact:
                    clear(raw, unroll * held)
                for u in T.unroll(unroll):
                    row[u] = ((block // cluster) * unroll + u) * at_once + tx // config.lanes
                    start[u] = p.place.start(row[u], sizes)
                    if exact or row[u] < rows:
                        load(raw, u * held, flat(x, p.dtype), start[u], p.place.unit, deal, lane, rank)
                touch(scale_seen, late and p.weighted, weight, p.weight_dtype, deal, lane, rank)
                touch(offset_seen, late and p.biased, bias, p.bias_dtype, deal, lane, rank)
                if p.weighted and not late:
                    load(scale, 0, flat(weight, p.weight_dtype), T.int64(0), p.vec, deal, lane, rank)
                if p.biased and not late:
                    load(offset, 0, flat(bias, p.bias_dtype), T.int64(0), p.vec, deal, lane, rank)
                centre(middle, rest, inverse, raw, p, deal, config, unroll, tx, lane, rank)
                touched(scale_seen, late and p.weighted)
                touched(offset_seen, late and p.biased)
                for u in T.unroll(unroll):
                    inverse[u] = p.rstd(inverse[u])
                    if t.rstd is not None:
                        if T.And(lane + rank == 0, row[u] < rows):
                            flat(mean, "float32")[T.cast(row[u], "int64")] = p.mean(middle[u], rest[u])
                            flat(rstd, "float32")[T.cast(row[u], "int64")] = inverse[u]
                for i in T.unroll(deal.chunks):
                    chunk = deal.chunk(i, lane, rank)
                    if deal.has(chunk):
                        at = 0 if late else i * p.vec
                        if p.weighted and late:
                            load_vector(scale, weight, p.weight_dtype, p.vec, chunk)
                        if p.biased and late:
                            load_vector(offset, bias, p.bias_dtype, p.vec, chunk)
                        for u in T.unroll(unroll):
                            if exact or row[u] < rows:
                                for v in T.vectorized(p.vec):
                                    out[v] = p.affine(
                                        p.without(raw[u * held + i * p.vec + v], middle[u], rest[u]) * inverse[u],
                                        scale[at + v],
                                        offset[at + v],
                                    )
                                for v in T.vectorized(p.vec):
                                    flat(y, p.dtype)[deal.element(row[u], chunk) + v] = out[v]

        return main


class LayerNormStream(Kernel):
    """A block walks its row three times, for each sum and for y: the last resort, for rows of any length."""

    archs = ARCHS
    pass_configs = PASSES

    def refuse(self, call: Call, device: Device) -> str | None:
        return refuse_rows(call, len(call.params["normalized_shape"])) or refuse_served(LayerNormRows(), call, device)

    def configs(self, call: Call, device: Device) -> Iterator[StreamConfig]:
        yield StreamConfig(1024, 4)

    def program(self, static: Static, config: StreamConfig, device: Device) -> Any:
        t, sizes = arguments(static)
        p = Problem(static)
        deal = config.deal(p.n, p.vec)

        @T.prim_func
        def main(x: t.x, weight: t.weight, bias: t.bias, y: t.y, mean: t.mean, rstd: t.rstd):
            with T.Kernel(count(p.leading, sizes), threads=config.threads) as block:
                tx = T.get_thread_binding()
                start = T.alloc_local((1,), "int64")
                raw = T.alloc_local((deal.held,), p.dtype)
                scale = T.alloc_local((deal.held,), p.weight_dtype)
                offset = T.alloc_local((deal.held,), p.bias_dtype)
                out = T.alloc_local((p.vec,), p.dtype)
                middle = T.alloc_local((1,), "float32")
                rest = T.alloc_local((1,), "float32")
                inverse = T.alloc_local((1,), "float32")
                start[0] = p.place.start(block, sizes)
                centre_stream(middle, rest, inverse, raw, flat(x, p.dtype), start[0], p, deal, tx)
                inverse[0] = p.rstd(inverse[0])
                if t.rstd is not None:
                    if tx == 0:
                        flat(mean, "float32")[T.cast(block, "int64")] = p.mean(middle[0], rest[0])
                        flat(rstd, "float32")[T.cast(block, "int64")] = inverse[0]
                for step in T.serial(deal.parts):
                    load(raw, 0, flat(x, p.dtype), start[0], p.place.unit, deal, tx, step)
                    if p.weighted:
                        load(scale, 0, flat(weight, p.weight_dtype), T.int64(0), p.vec, deal, tx, step)
                    if p.biased:
                        load(offset, 0, flat(bias, p.bias_dtype), T.int64(0), p.vec, deal, tx, step)
                    for i in T.unroll(deal.chunks):
                        chunk = deal.chunk(i, tx, step)
                        if deal.has(chunk):
                            for v in T.vectorized(p.vec):
                                out[v] = p.affine(
                                    p.without(raw[i * p.vec + v], middle[0], rest[0]) * inverse[0],
                                    scale[i * p.vec + v],
                                    offset[i * p.vec + v],
                                )
                            for v in T.vectorized(p.vec):
                                flat(y, p.dtype)[deal.element(block, chunk) + v] = out[v]

        return main


class Problem(Centred):
    """What the programs take from a call."""

    def __init__(self, static: Static) -> None:
        super().__init__(static, len(static["normalized_shape"]))
        bias = static.tensor("bias")
        self.biased = bias is not None
        self.bias_dtype = self.dtype if bias is None else bias.dtype

    def affine(self, xhat: Any, weight: Any, bias: Any) -> Any:
        """One element of y: all in float32, rounded once."""
        if self.weighted:
            xhat = xhat * T.cast(weight, "float32")
        if self.biased:
            xhat = xhat + T.cast(bias, "float32")
        return T.cast(xhat, self.dtype)
