"""The forward of group, instance and batch normalization: the statistics of each set, then its elements."""

from functools import partial
from typing import Any

import attrs
import tilelang.language as T

from tileops.core.kernel import Static
from tileops.norm.kernels.centred import Centring, centre
from tileops.norm.kernels.rows import (
    MAX_RESIDENT,
    REGISTERS,
    WARP,
    Deal,
    arguments,
    clear,
    flat,
    inverse_sqrt,
    launch,
    words,
)
from tileops.norm.kernels.sets import (
    SECTOR,
    Sets,
    add_step,
    find_pivot,
    load_channels,
    load_vector,
    locate,
    merge_moments,
    merge_set,
    store_vector,
)


@attrs.frozen
class Config:
    """``lanes`` threads of each of ``cluster`` blocks take ``chunks`` vectors each of a set at once: that is its order.

    The rest has no part in it: a block has ``threads`` and leaves registers for so many ``resident`` blocks a
    multiprocessor, and a bundle of channels of the batch has ``bundled`` bytes at most.
    """

    lanes: int
    chunks: int
    cluster: int = 1
    threads: int = 256
    resident: int = 1
    bundled: int = SECTOR


def excluded(config: Config, s: Sets, dtype: str, tensors: int = 1) -> str | None:
    """Why a config is left out, or None; ``tensors`` are read at once."""
    if config.threads * config.resident > MAX_RESIDENT:
        return "more threads than a multiprocessor has"
    if config.cluster > 1 and config.threads == WARP:
        return "a cluster of single warps, which can't send a bundle's numbers at once"
    held = tensors * config.chunks * words(s.vec, dtype) + 4 * s.stats + 2 * s.wide
    if held + 26 > min(255, REGISTERS // (config.threads * config.resident)):
        return "more registers than a thread has"
    return None


@attrs.frozen
class Values(Centring):
    """The ``n`` values of one set, in vectors of ``vec``."""

    n: int
    vec: int
    dtype: str
    eps: float
    fine: bool


def program(static: Static, config: Config, s: Sets, held: bool, given: bool, moments: bool) -> Any:
    """The prim_func. A set is ``held`` in registers or read twice; its statistics may be ``given``, the running ones.

    Otherwise the running ones, where there are any, are moved; that is, with ``moments``, by a launch behind that takes
    the mean and variance of each instance's channels from scratch memory, and adds them in the order of the batch.
    """
    t, sizes = arguments(static)
    x, weight, bias = static.tensor("x"), static.tensor("weight"), static.tensor("bias")
    assert x is not None
    dtype, eps = x.dtype, static["eps"]
    weight_dtype, bias_dtype = (dtype if form is None else form.dtype for form in (weight, bias))
    running = static.tensor("running_mean") is not None and not given
    momentum = static["momentum"] if running else 0.0
    stats, per, vec, wide = s.stats, s.per, s.vec, s.wide
    lanes, chunks, cluster = config.lanes, config.chunks, config.cluster
    at_once = config.threads // lanes  # sets of a block that are worked on side by side
    vectors, total = s.vectors(sizes), s.total(sizes)
    steps = 1 if held else T.ceildiv(vectors, lanes * chunks * cluster)
    exact = held and cluster * chunks * lanes == s.held
    steady = s.steady(lanes)
    k = 2 * stats + 1
    # A set in registers that has one statistic is centred like a row, all others by their moments.
    values = deal = None
    if held and stats == 1:
        assert s.held is not None
        deal = Deal(s.held * vec, vec, lanes, chunks, cluster)
        values = Values(deal.n, vec, dtype, eps, dtype == "float32" or deal.ragged)
    pivoted = dtype != "bfloat16"  # its steps are so wide that no mean needs more digits
    rested = not given and (pivoted if values is None else values.fine)

    def inside(number: Any, q: Any) -> Any:
        """Whether there is such a set, and such a vector in it; plain True where there always is."""
        tests = ([number < total] if at_once > 1 else []) + ([] if exact else [q < vectors])
        return T.And(*tests) if len(tests) == 2 else tests[0] if tests else True

    def there(number: Any, begin: Any, i: Any) -> Any:
        return inside(number, begin + i * lanes)

    def unbiased(variance: Any) -> Any:
        return variance * (s.values(sizes) / (s.values(sizes) - T.float32(1)))

    def whole(pivot: Any, rest: Any) -> Any:
        """The mean as it is returned and moves the running one; a pivot's rest is less than it has digits for."""
        return pivot if values is None else values.mean(pivot, rest)

    def blend(old: Any, new: Any) -> Any:
        return T.float32(1 - momentum) * old + T.float32(momentum) * new

    @T.macro
    def load_all(raw, x, x_at, number, step, rank, lane, at):
        for i in T.unroll(chunks):
            q = ((step * cluster + rank) * chunks + i) * lanes + lane
            if inside(number, q):
                locate(at, q, s)
                load_vector(raw, i, flat(x, dtype), x_at, "x", s, at)

    @T.macro
    def load_affine(scale, shift, weight, bias, inner, at):
        if t.weight is not None:
            load_channels(scale, flat(weight, weight_dtype), s, inner, at)
        if t.bias is not None:
            load_channels(shift, flat(bias, bias_dtype), s, inner, at)

    def normal(x: Any, mean: Any, rest: Any, rstd: Any, scale: Any, shift: Any) -> Any:
        """One element of y: all in float32, rounded once."""
        y = T.cast(x, "float32") - mean
        y = (y - rest if rested else y) * rstd
        y = y * T.cast(scale, "float32") if t.weight is not None else y
        y = y + T.cast(shift, "float32") if t.bias is not None else y
        return T.cast(y, dtype)

    @T.macro
    def norm(block, x, running_mean, running_var, weight, bias, y, mean, rstd, scratch):
        T.annotate_min_blocks_per_sm(config.resident)
        tx = T.get_thread_binding()
        lane = tx % lanes
        rank = block % cluster
        number = T.alloc_local((1,), "int32")
        inner = T.alloc_local((1,), "int32")
        at = T.alloc_local((4,), "int32")
        x_at = T.alloc_local((1,), "int64")
        y_at = T.alloc_local((1,), "int64")
        raw = T.alloc_local((chunks * vec,), dtype)
        out = T.alloc_local((vec,), dtype)
        scale = T.alloc_local((wide,), weight_dtype)
        shift = T.alloc_local((wide,), bias_dtype)
        m = T.alloc_local((k,), "float32")
        pivot = T.alloc_local((stats,), "float32")
        rest = T.alloc_local((stats,), "float32")
        variance = T.alloc_local((stats,), "float32")
        r = T.alloc_local((stats,), "float32")
        old = T.alloc_local((2 * stats,), "float32")
        tmp = T.alloc_local((4,), "float32")
        first = T.alloc_local((vec,), dtype)
        part = T.alloc_shared((1, config.threads // WARP + 1 + cluster, k), "float32")
        if cluster > 1 and not given:
            T.cluster_arrive_relaxed()
        number[0] = (block // cluster) * at_once + tx // lanes
        inner[0] = s.inner(number[0])
        x_at[0] = s.start("x", number[0])
        y_at[0] = s.start("y", number[0])
        clear(m, k)
        clear(pivot, stats)
        clear(rest, stats)
        if steady:
            if at_once == 1 or number[0] < total:
                locate(at, lane, s)
                load_affine(scale, shift, weight, bias, inner[0], at)
        if running and not moments:
            if T.And(lane + rank == 0, number[0] < total):
                for g in T.unroll(stats):
                    old[g] = flat(running_mean, "float32")[inner[0] * s.channels + g]
                    old[stats + g] = flat(running_var, "float32")[inner[0] * s.channels + g]
        if given:
            for g in T.unroll(stats):
                pivot[g] = flat(running_mean, "float32")[inner[0] * s.channels + g]
                variance[g] = flat(running_var, "float32")[inner[0] * s.channels + g]
        elif values is not None:
            if not exact or at_once > 1:
                clear(raw, chunks * vec)
            load_all(raw, x, x_at[0], number[0], 0, rank, lane, at)
            centre(pivot, rest, variance, raw, values, deal, config, 1, tx, lane, rank)
        else:
            if pivoted and (at_once == 1 or number[0] < total):
                find_pivot(pivot, flat(x, dtype), x_at[0], "x", s, vectors, at, first)
            for step in T.serial(steps):
                load_all(raw, x, x_at[0], number[0], step, rank, lane, at)
                begin = (step * cluster + rank) * chunks * lanes + lane
                add_step(m, raw, partial(there, number[0], begin), pivot if pivoted else None, tmp, s, chunks)
            merge_set(m, tmp, k, merge_moments, stats, part, tx, rank, lanes, cluster)
            for g in T.unroll(stats):
                variance[g] = m[1 + stats + g] / T.max(m[0], 1.0)
                # From here on the pivot is the mean, and the rest is what rounding took off that.
                tmp[0] = pivot[g] + m[1 + g]
                tmp[1] = tmp[0] - pivot[g]
                rest[g] = (pivot[g] - (tmp[0] - tmp[1])) + (m[1 + g] - tmp[1])
                pivot[g] = tmp[0]
        for g in T.unroll(stats):
            r[g] = inverse_sqrt(variance[g] + T.float32(eps))
        # Backwards, since what was read last is the likeliest to be in the cache still.
        for step in T.serial(steps):
            if not held:
                load_all(raw, x, x_at[0], number[0], steps - 1 - step, rank, lane, at)
            for i in T.unroll(chunks):
                q = (((steps - 1 - step) * cluster + rank) * chunks + i) * lanes + lane
                if inside(number[0], q):
                    locate(at, q, s)
                    if not steady:
                        load_affine(scale, shift, weight, bias, inner[0], at)
                    for e in T.unroll(vec):
                        out[e] = normal(
                            raw[i * vec + e], pivot[e // per], rest[e // per], r[e // per],
                            scale[e % wide], shift[e % wide],
                        )  # fmt: skip
                    store_vector(flat(y, dtype), y_at[0], "y", s, at, out)
        if T.And(lane + rank == 0, number[0] < total):
            for g in T.unroll(stats):
                c = inner[0] * s.channels + g
                if t.mean is not None:
                    flat(mean, "float32")[c] = whole(pivot[g], rest[g])
                    flat(rstd, "float32")[c] = r[g]
                if moments:
                    pair = (T.cast(number[0], "int64") * stats + g) * 2
                    flat(scratch, "float32")[pair] = whole(pivot[g], rest[g])
                    flat(scratch, "float32")[pair + 1] = unbiased(variance[g])
                elif running:
                    flat(running_mean, "float32")[c] = blend(old[g], whole(pivot[g], rest[g]))
                    flat(running_var, "float32")[c] = blend(old[stats + g], unbiased(variance[g]))

    @T.macro
    def settle(block, running_mean, running_var, scratch, batch, channels):
        """A thread moves the statistics of a channel."""
        c = block * WARP + T.get_thread_binding()
        acc = T.alloc_local((2,), "float32")
        clear(acc, 2)
        if c < channels:
            for b in T.serial(batch):
                for i in T.unroll(2):
                    acc[i] += flat(scratch, "float32")[(T.cast(b, "int64") * channels + c) * 2 + i]
            for i in T.unroll(2):
                acc[i] = acc[i] / T.cast(batch, "float32")
            flat(running_mean, "float32")[c] = blend(flat(running_mean, "float32")[c], acc[0])
            flat(running_var, "float32")[c] = blend(flat(running_var, "float32")[c], acc[1])

    Scratch = T.Tensor((T.dynamic("scratch_size"),), "float32") if moments else None
    batch, channels = (sizes.get(axis, axis) for axis in x.shape[:2])
    blocks = T.ceildiv(total, at_once)

    @T.prim_func
    def main(
        x: t.x, running_mean: t.running_mean, running_var: t.running_var, weight: t.weight, bias: t.bias,
        y: t.y, mean: t.mean, rstd: t.rstd, scratch: Scratch,
    ):  # fmt: skip
        # With given statistics the blocks of a cluster have nothing to tell each other.
        with launch(blocks * (cluster if given else 1), config.threads, 1 if given else cluster) as block:
            norm(block, x, running_mean, running_var, weight, bias, y, mean, rstd, scratch)
        if moments:
            # Clusters as large as before it: TileLang's launches of one function all have the first one's size.
            with launch(T.ceildiv(channels, WARP), WARP, cluster) as block:
                settle(block, running_mean, running_var, scratch, batch, channels)

    return main
