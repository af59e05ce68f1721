"""RMSNorm forward by blocks that stay and walk the rows, the next rows on their way in shared memory."""

import itertools
from collections.abc import Iterator
from typing import Any

import attrs
import tilelang.language as T

from tileops.core.check import Call
from tileops.core.kernel import Device, Kernel, Static
from tileops.core.spec.dtypes import itemsize
from tileops.norm.kernels import rms_norm
from tileops.norm.kernels.rms_norm import Problem, row_of, square
from tileops.norm.kernels.rows import (
    ACCUMULATORS,
    ARCHS,
    MAX_RESIDENT,
    PASSES,
    REGISTERS,
    WARP,
    Deal,
    added,
    arguments,
    clear,
    count,
    flat,
    give_block,
    launch,
    load,
    load_vector,
    refuse_rows,
    stage,
    sum_lanes,
    take_block,
    take_cluster,
    vector,
    words,
)


@attrs.frozen
class Config:
    """``lanes``, ``chunks`` and ``cluster`` are those of RMSNormRows: they are a sum's order.

    The rest has no part in it: so many ``workers``, blocks of ``threads`` or clusters, walk all rows, ``unroll`` at
    once; ``stages`` steps are on their way, ``resident`` blocks share a multiprocessor, and the weight is read
    ``early``, once for all rows, or again for each.
    """

    lanes: int
    chunks: int
    cluster: int
    threads: int
    workers: int
    stages: int = 2
    unroll: int = 1
    early: bool = True
    resident: int = 1


VECTORS = 2048  # of a step on a multiprocessor: with two stages, 64 KB on their way
RESERVED = 1024  # bytes of shared memory that each block costs beside its own
OTHERS, RAGGED = 30, 4  # registers of a thread for addresses and sums, and where some vectors are not there
QUAD = 4  # float32 numbers in 16 bytes


def configs(n: int, dtype: str, weight: str | None, device: Device) -> Iterator[Config]:
    """The configs for rows of a length and a weight's dtype, the default first; all sum a row as RMSNormRows does."""
    deal = next(rms_norm.configs(n, dtype), None)
    if deal is None:
        return
    lanes, chunks, cluster = deal.lanes, deal.chunks, deal.cluster
    all_threads = (256, 128, 512) if lanes <= WARP else (lanes,)
    busy = min(max(round(VECTORS / (all_threads[0] * chunks)), 2), 8)
    # Clusters of more than two find no room in what is left of a group of multiprocessors, nor perhaps all of these:
    # with turns, those that have to wait do not double the time.
    sms, turns = (device.sm_count, (1,)) if cluster == 1 else (device.sm_count // 2 * 2, (1, 4))
    if cluster > 2:
        sms, turns = device.sm_count // 8 * 8, (16, 1, 4)
    seen = set()
    for stages, early, resident, turn, threads, unroll in itertools.product(
        (2, 3, 4, 1), (True, False), (busy, 1, 2, 3, 4, 5, 6, 8), turns, all_threads, (1, 2, 4)
    ):
        workers = sms * resident * turn // cluster
        config = Config(lanes, chunks, cluster, threads, workers, stages, unroll, early, resident)
        if config not in seen and excluded(config, n, dtype, weight, device) is None:
            seen.add(config)
            yield config


def excluded(config: Config, n: int, dtype: str, weight: str | None, device: Device) -> str | None:
    """Why a config is left out, or None."""
    vec = vector(n, dtype)
    if config.unroll > 1 and config.lanes > WARP:
        return "rows at once that a block would sum one by one"
    if config.threads * config.resident > MAX_RESIDENT:
        return "more threads than a multiprocessor has"
    staged = config.stages * config.unroll * config.threads * config.chunks * vec * itemsize(dtype)
    sums = 2 * 4 * config.threads // WARP * (config.cluster + 1)
    if (staged + sums + RESERVED) * config.resident > device.shared_bytes + RESERVED:
        return "more shared memory than a multiprocessor has"
    most = min(255, REGISTERS // (config.threads * config.resident) // 8 * 8)
    row = config.chunks * words(vec, dtype) * config.unroll + OTHERS
    if row > most:
        return "more registers than a thread has"
    if weight is None:
        return "no weight to read early" if config.early else None
    ragged = config.lanes * config.chunks * config.cluster * vec > n
    fits = row + config.chunks * words(vec, weight) + RAGGED * ragged <= most
    if config.early and not fits:
        return "more registers than a thread has"
    if fits and not config.early:
        return "a weight read for each row that registers hold"
    return None


class RMSNormWalk(Kernel):
    """One read and one write of each element: for many rows, whose reads never pause for the writes.

    As many blocks, or clusters, as fit the device walk the rows. The next rows come into shared memory by asynchronous
    copies; a thread reads only what it copied itself, into registers, so that the place is free at once and the sum of
    a row is the only barrier. A row is dealt and summed as by RMSNormRows, to the same bits. The number of rows is no
    reason to refuse a call: one plan serves all of them.
    """

    archs = ARCHS
    pass_configs = PASSES

    def refuse(self, call: Call, device: Device) -> str | None:
        if next(configs_of(call, device), None) is None:
            return "a row of {} {} fits in no cluster's registers and shared memory".format(*row_of(call))
        return refuse_rows(call, len(call.params["normalized_shape"]))

    def configs(self, call: Call, device: Device) -> Iterator[Config]:
        return configs_of(call, device)

    def program(self, static: Static, config: Config, device: Device) -> Any:
        t, sizes = arguments(static)
        p = Problem(static)
        deal = Deal(p.n, p.vec, config.lanes, config.chunks, config.cluster)
        rows = count(p.leading, sizes)
        stages, unroll, held, cluster = config.stages, config.unroll, deal.held, config.cluster
        warps, at_once = config.threads // WARP, config.threads // config.lanes
        sums = -(-warps // QUAD) * QUAD  # of a block, with what fills a bulk copy's 16 bytes
        stride = config.workers * unroll * at_once  # rows from a step to the next
        slot = config.threads * p.vec  # elements of a vector a thread
        depth = unroll * deal.chunks * slot  # of a stage
        early = config.early and p.weighted

        def number(step, worker, u, tx):
            """Of a row, in 64 bits: steps go on behind the last row."""
            return T.cast(step, "int64") * stride + ((worker * unroll + u) * at_once + tx // config.lanes)

        @T.macro
        def fetch(step, worker, tx, rank, row, start, x, staged):
            """Start the thread's part of a step's rows on its way."""
            for u in T.unroll(unroll):
                row[0] = number(step, worker, u, tx)
                start[0] = p.place.start(T.cast(row[0], "int32"), sizes)
                at = step % stages * depth + u * deal.chunks * slot + tx * p.vec
                lane = tx % config.lanes
                stage(staged, at, slot, flat(x, p.dtype), start[0], p.place.unit, deal, lane, rank, row[0] < rows)
            T.ptx_commit_group()

        @T.macro
        def send(part, parts, there, buffer, rank):
            """Send a block's sums to all blocks of its cluster; each learns at its own ``there`` that it has them.

            A cluster's barrier would have every thread wait for its stores, and forget the weight that L1 holds.
            """
            T.fence_proxy_async()
            T.sync_threads()
            for other in T.unroll(cluster):
                T.copy_cluster(
                    part[buffer, 0:sums], parts[buffer, rank, 0:sums], dst_block=other, remote_barrier=there[buffer]
                )

        blocks = T.min(config.workers, T.ceildiv(rows, unroll * at_once))

        @T.prim_func
        def main(x: t.x, weight: t.weight, y: t.y, rstd: t.rstd):
            with launch(blocks, config.threads, cluster) as block:
                T.annotate_min_blocks_per_sm(config.resident)
                tx = T.get_thread_binding()
                lane = tx % config.lanes
                rank = block % cluster
                worker = block // cluster
                staged = T.alloc_shared((stages * depth,), p.dtype)
                row = T.alloc_local((1,), "int64")
                start = T.alloc_local((1,), "int64")
                raw = T.alloc_local((unroll * held,), p.dtype)
                scale = T.alloc_local((held if early else p.vec,), p.weight_dtype)
                out = T.alloc_local((p.vec,), p.dtype)
                acc = T.alloc_local((ACCUMULATORS,), "float32")
                total = T.alloc_local((unroll,), "float32")
                part = T.alloc_shared((2, sums), "float32")
                if cluster > 1:
                    parts = T.alloc_shared((2, cluster, sums), "float32")
                    there = T.alloc_cluster_barrier([cluster, cluster])  # all blocks meet behind it
                for ahead in T.unroll(stages):
                    fetch(ahead, worker, tx, rank, row, start, x, staged)
                if early:
                    load(scale, 0, flat(weight, p.weight_dtype), T.int64(0), p.vec, deal, lane, rank)
                for step in T.serial(T.truncdiv(rows - 1, stride) + 1):
                    # The compiler knows of no copy and no wait: a warp's barrier keeps its reads on their side of them.
                    T.ptx_wait_group(stages - 1)
                    T.sync_warp()
                    for u in T.unroll(unroll):
                        clear(acc, ACCUMULATORS)
                        for i in T.unroll(deal.chunks):
                            for v in T.vectorized(p.vec):
                                out[v] = staged[step % stages * depth + (u * deal.chunks + i) * slot + tx * p.vec + v]
                            for v in T.unroll(p.vec):
                                acc[(i * p.vec + v) % ACCUMULATORS] += square(out[v])
                        total[u] = added(acc)
                    # Read again, so that no register holds an element unpacked.
                    T.sync_warp()
                    for i in T.unroll(unroll * deal.chunks):
                        for v in T.vectorized(p.vec):
                            raw[i * p.vec + v] = staged[step % stages * depth + i * slot + tx * p.vec + v]
                    T.sync_warp()
                    fetch(step + stages, worker, tx, rank, row, start, x, staged)
                    # Sums take turns with two buffers: a step's barrier lies between the reads of one and its next use.
                    if config.lanes > WARP:
                        give_block(total, part, step % 2, tx)
                        if cluster > 1:
                            send(part, parts, there, step % 2, rank)
                            T.mbarrier_wait_parity(there[step % 2], step // 2 % 2)
                            take_cluster(total, parts, step % 2, tx, warps, cluster)
                        else:
                            T.sync_threads()
                            take_block(total, part, step % 2, tx, warps)
                    else:
                        sum_lanes(total, unroll, config.lanes)
                    for u in T.unroll(unroll):
                        total[u] = T.rsqrt(total[u] / T.float32(p.n) + T.float32(p.eps))
                        row[0] = number(step, worker, u, tx)
                        if row[0] < rows:
                            if t.rstd is not None:
                                if lane + rank == 0:
                                    flat(rstd, "float32")[row[0]] = total[u]
                            for i in T.unroll(deal.chunks):
                                chunk = deal.chunk(i, lane, rank)
                                if deal.has(chunk):
                                    if p.weighted and not early:
                                        load_vector(scale, weight, p.weight_dtype, p.vec, chunk)
                                    at = u * held + i * p.vec
                                    for v in T.vectorized(p.vec):
                                        out[v] = p.scaled(raw[at + v], total[u], scale[(i * p.vec if early else 0) + v])
                                    for v in T.vectorized(p.vec):
                                        flat(y, p.dtype)[deal.element(row[0], chunk) + v] = out[v]
                T.ptx_wait_group(0)  # no copy may outlive its block
                if cluster > 1:
                    T.cluster_sync()

        return main


def configs_of(call: Call, device: Device) -> Iterator[Config]:
    weight = call.inputs["weight"]
    return configs(*row_of(call), None if weight is None else weight.dtype, device)
