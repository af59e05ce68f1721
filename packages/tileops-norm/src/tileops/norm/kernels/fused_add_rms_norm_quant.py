"""RMSNorm of a sum with a residual, in 8-bit codes: each element is read once and its code is written once."""

from collections.abc import Iterator
from typing import Any

import tilelang.language as T

from tileops.core.check import Call
from tileops.core.kernel import Device, Static
from tileops.norm.kernels.centred import given
from tileops.norm.kernels.fused_add import Config, FusedAdd, Sum, add, configs, fetch, reload
from tileops.norm.kernels.rows import (
    ACCUMULATORS,
    WARP,
    Deal,
    added,
    arguments,
    clear,
    count,
    few_rows,
    flat,
    inverse_sqrt,
    launch,
    load,
    load_vector,
    sum_row,
    vector,
)

BLOCK = 128  # elements of a row that share a scale in block128
LEAST_SCALE = 2.0**-126  # whose inverse is finite
LARGEST = {"float8_e4m3fn": 448.0, "int8": 127.0}


class FusedAddRMSNormQuantRows(FusedAdd):
    """A row is shared by some lanes of a warp, by a block or by a cluster, and stays in registers once it is added up.

    y is computed twice, for its largest magnitude and for codes.
    """

    def configs(self, call: Call, device: Device) -> Iterator[Config]:
        # Beyond a warp, so many lanes that their vectors side by side are whole blocks.
        whole = max(WARP, BLOCK // vector(call["N"], call["T"]))
        return configs(call["N"], call["T"], few_rows(call, 1), whole)

    def program(self, static: Static, config: Config, device: Device) -> Any:
        t, sizes = arguments(static)
        p = Sum(static)
        eps, code, ub = static["eps"], static["quant_dtype"], static["scale_ub"]
        in_blocks = static["quant"] == "block128" and p.n > BLOCK  # a row within one is a block by itself
        deal = config.deal(p.n, p.vec)
        rows = count(p.leading, sizes)
        unroll, held, cluster, warps = config.unroll, deal.held, config.cluster, config.threads // WARP
        at_once = config.threads // config.lanes  # rows of a block that are worked on side by side
        exact = unroll * at_once == 1  # no row of a block is beyond the last

        def at(i: Any) -> Any:
            """Where the weights of a thread's i-th vector are."""
            return i * p.vec if config.early else 0

        def normed(value: Any, rstd: Any, weight: Any) -> Any:
            return T.cast(value, "float32") * rstd * T.cast(weight, "float32")

        def scale_of(top: Any) -> Any:
            within = top if ub is None else T.min(top, T.float32(ub))
            scale = T.max(within / T.float32(LARGEST[code]), T.float32(LEAST_SCALE))
            return T.if_then_else(T.isnan(top), top, scale)

        def coded(quotient: Any) -> Any:
            if code == "float8_e4m3fn":
                return T.cast(quotient, code)  # saturates, and keeps NaN
            whole = T.nearbyint(T.min(T.max(quotient, T.float32(-128)), T.float32(127)))
            return T.cast(T.if_then_else(T.isnan(quotient), T.float32(0), whole), code)

        each = T.unroll if code == "int8" else T.vectorized  # there is no vector of integers from floats

        @T.macro
        def weigh(scale, weight, chunk):
            if not config.early:
                load_vector(scale, weight, p.weight_dtype, p.vec, chunk)

        @T.macro
        def largest(top, to, u, i, raw, scale, rstd):
            """Raise ``top[to]`` to the largest magnitude of y in a vector."""
            for v in T.unroll(p.vec):
                top[to] = larger(
                    top[to],
                    T.abs(normed(raw[u * held + i * p.vec + v], rstd[u], scale[at(i) + v])),
                )

        @T.macro
        def encode(q, row, u, i, chunk, raw, scale, rstd, inverse, out):
            """Store the codes of a vector."""
            for v in each(p.vec):
                out[v] = coded(normed(raw[u * held + i * p.vec + v], rstd[u], scale[at(i) + v]) * inverse)
            for v in T.vectorized(p.vec):
                flat(q, code)[deal.element(row[u], chunk) + v] = out[v]

        @T.macro
        def norm(block, x, residual, weight, scale_in, q, scale_out, residual_out):
            T.annotate_min_blocks_per_sm(config.resident)
            tx = T.get_thread_binding()
            lane = tx % config.lanes
            rank = block % cluster
            row = T.alloc_local((unroll,), "int32")
            raw = T.alloc_local((unroll * held,), p.dtype)
            more = T.alloc_local((unroll * held,), p.dtype)
            scale = T.alloc_local((held if config.early else p.vec,), p.weight_dtype)
            out = T.alloc_local((p.vec,), code)
            acc = T.alloc_local((unroll * ACCUMULATORS,), "float32")
            rstd = T.alloc_local((unroll,), "float32")
            top = T.alloc_local((max(unroll, deal.chunks),), "float32")
            inverse = T.alloc_local((max(unroll, deal.chunks),), "float32")
            part = T.alloc_shared((2, warps), "float32")
            parts = T.alloc_shared((2, cluster, warps), "float32")
            block_tops = T.alloc_shared((warps, deal.chunks), "float32")
            if cluster > 1:
                T.cluster_arrive_relaxed()
            for u in T.unroll(unroll):
                row[u] = ((block // cluster) * unroll + u) * at_once + tx // config.lanes
            clear(acc, unroll * ACCUMULATORS)
            for step in T.serial(config.steps):
                fetch(raw, more, row, rows, exact, x, residual, p, deal, config, sizes, lane, rank + step)
                if config.early:
                    load(scale, 0, flat(weight, p.weight_dtype), T.int64(0), p.vec, deal, lane, rank + step)
                if p.residual is not None:
                    add(raw, more, row, rows, exact, residual_out, p, deal, config, lane, rank + step)
                for u in T.unroll(unroll):
                    for i in T.unroll(held):
                        acc[u * ACCUMULATORS + i % ACCUMULATORS] += T.cast(raw[u * held + i], "float32") * T.cast(
                            raw[u * held + i], "float32"
                        )
            for u in T.unroll(unroll):
                rstd[u] = added(acc, u * ACCUMULATORS)
            if cluster > 1:
                T.cluster_wait()
            sum_row(rstd, unroll, part, parts, 0, tx, config, rank)
            for u in T.unroll(unroll):
                rstd[u] = inverse_sqrt(rstd[u] / T.float32(p.n) + T.float32(eps))
            if t.scale_in is not None:
                for u in T.unroll(unroll):
                    inverse[u] = T.float32(1) / T.max(flat(scale_in, "float32")[0], T.float32(LEAST_SCALE))
            elif not in_blocks:
                clear(top, unroll)
                for step in T.serial(config.steps):
                    if config.steps > 1:
                        reload(raw, row, x, residual_out, p, deal, sizes, lane, step)
                    for u in T.unroll(unroll):
                        for i in T.unroll(deal.chunks):
                            chunk = deal.chunk(i, lane, rank + step)
                            if deal.has(chunk):
                                weigh(scale, weight, chunk)
                                largest(top, u, u, i, raw, scale, rstd)
                largest_row(top, part, parts, 1, tx, rank, config)
                for u in T.unroll(unroll):
                    if lane + rank == 0 and (exact or row[u] < rows):
                        flat(scale_out, "float32")[T.cast(row[u], "int64")] = scale_of(top[u])
                    inverse[u] = T.float32(1) / scale_of(top[u])
            for step in T.serial(config.steps):
                if config.steps > 1:
                    reload(raw, row, x, residual_out, p, deal, sizes, lane, step)
                for u in T.unroll(unroll):
                    if in_blocks:
                        clear(top, deal.chunks)
                        for i in T.unroll(deal.chunks):
                            chunk = deal.chunk(i, lane, rank + step)
                            if deal.has(chunk):
                                weigh(scale, weight, chunk)
                                largest(top, i, u, i, raw, scale, rstd)
                        fold_blocks(top, block_tops, tx, deal)
                    if exact or row[u] < rows:
                        for i in T.unroll(deal.chunks):
                            chunk = deal.chunk(i, lane, rank + step)
                            if deal.has(chunk):
                                if in_blocks:
                                    inverse[i] = T.float32(1) / scale_of(top[i])
                                    if chunk * p.vec % BLOCK == 0:
                                        flat(scale_out, "float32")[
                                            T.cast(row[u], "int64") * -(-p.n // BLOCK) + chunk * p.vec // BLOCK
                                        ] = scale_of(top[i])
                                weigh(scale, weight, chunk)
                                encode(q, row, u, i, chunk, raw, scale, rstd, inverse[i if in_blocks else u], out)

        @T.prim_func
        def main(
            x: t.x, residual: t.residual, weight: t.weight, scale_in: t.scale_in,
            q: t.q, scale: t.scale, residual_out: t.residual_out,
        ):  # fmt: skip
            with launch(T.ceildiv(rows, unroll * at_once), config.threads, cluster) as block:
                norm(block, x, residual, weight, scale_in, q, scale, residual_out)

        return main


def larger(a: Any, b: Any) -> Any:
    """The larger of two magnitudes, as integers, in whose order NaN is the largest: no fold drops it."""
    return T.reinterpret(T.max(T.reinterpret(a, "int32"), T.reinterpret(b, "int32")), "float32")


@T.macro
def largest_lane(top, i, lanes):
    """The largest of each ``lanes`` neighbours of a warp, a power of two of them, in every one of them."""
    for k in T.unroll(lanes.bit_length() - 1):
        top[i] = larger(top[i], T.shfl_xor(top[i], lanes >> (k + 1)))


@T.macro
def largest_row(top, part, parts, buffer, tx, rank, config):
    """The largest of each row, in all of its threads; ``part`` and ``parts`` are those of ``sum_row``, which was first.

    They are rows of one array: TileLang lets two arrays share memory whose uses do not overlap, and knows nothing of
    warps that lag behind.
    """
    for u in T.unroll(config.unroll):
        largest_lane(top, u, min(config.lanes, WARP))
    if config.lanes > WARP:
        warps = config.threads // WARP
        count = warps * config.cluster
        if tx % WARP == 0:
            part[buffer, tx // WARP] = top[0]
        T.sync_threads()
        if config.cluster > 1:
            for other in T.unroll(config.cluster):
                T.copy_cluster(part[buffer, 0:warps], parts[buffer, rank, 0:warps], dst_block=other)
            T.cluster_sync()
        top[0] = 0.0
        for i in T.unroll(-(-count // WARP)):
            if i * WARP + tx % WARP < count:
                top[0] = larger(top[0], given(part, parts, config, buffer, 0, i * WARP + tx % WARP))
        largest_lane(top, 0, WARP)


@T.macro
def fold_blocks(top, buffer, tx, deal: Deal):
    """The largest of each block of ``BLOCK`` elements that a thread has a vector of, in all threads that share it."""
    lanes = BLOCK // deal.vec
    for i in T.unroll(deal.chunks):
        largest_lane(top, i, min(lanes, WARP))
    if lanes > WARP:
        group = lanes // WARP  # warps that share a block
        T.sync_threads()  # the step before may still be read, or the sums, whose memory this may be
        if tx % WARP == 0:
            for i in T.unroll(deal.chunks):
                buffer[tx // WARP, i] = top[i]
        T.sync_threads()
        for i in T.unroll(deal.chunks):
            for j in T.unroll(group):
                top[i] = larger(top[i], buffer[tx // WARP // group * group + j, i])
