"""RMSNorm of query and key heads and rotary embedding in place: one read and one write of each element.

A thread takes whole pairs: vector j of the first rotated half together with vector j of the second (neox), or vectors
whose pairs lie within. So it writes nothing that another thread reads, and the sum of a head is all that threads share.
"""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import attrs
import tilelang.language as T

from tileops.core.check import Call
from tileops.core.kernel import Device, Kernel, Static
from tileops.core.spec.dtypes import itemsize
from tileops.norm.kernels.operands import read
from tileops.norm.kernels.rows import (
    ACCUMULATORS,
    ARCHS,
    OVERHEAD,
    PASSES,
    WARP,
    Place,
    added,
    arguments,
    clear,
    crowded,
    flat,
    lanes_for,
    refuse_rows,
    sum_lanes,
)

LONGEST = 2048  # elements of a head: 64 a lane, in float32 as they are rotated


@attrs.frozen
class Config:
    """``lanes`` of a warp take ``chunks`` pairs of vectors each of a head: that is a sum's order.

    The rest has no part in it: a block has ``threads`` and leaves registers for so many ``resident`` blocks.
    """

    lanes: int
    chunks: int
    threads: int
    resident: int


class FusedQKNormRoPEHeads(Kernel):
    """Some lanes of a warp a head, so that no barrier is needed; the heads of a token lie side by side in a block.

    They share the token's row of cosines and sines, which comes from the first-level cache for all but one.
    """

    archs = ARCHS
    pass_configs = PASSES

    def refuse(self, call: Call, device: Device) -> str | None:
        if call["D"] > LONGEST:
            return f"a head of {call['D']} elements is more than a warp's registers hold"
        return refuse_rows(call, 1)

    def configs(self, call: Call, device: Device) -> Iterator[Config]:
        deal = Head.of(call["D"], call["R"], call["T"], call.params["rope_layout"])
        lanes = lanes_for(deal.pairs, WARP)
        chunks = -(-deal.pairs // lanes)
        for threads, resident in itertools.product((64, 128, 256, 512), (1, 2, 4, 8)):
            config = Config(lanes, chunks, threads, resident)
            if excluded(config, 2 * chunks * deal.vec) is None:
                yield config

    def program(self, static: Static, config: Config, device: Device) -> Any:
        t, sizes = arguments(static)
        p = Problem.of(static)
        d, vec = p.head, p.head.vec
        tokens, held = sizes["tokens"], 2 * config.chunks * d.vec
        heads, groups = p.heads + p.heads_kv, config.threads // config.lanes  # groups of lanes, one a head

        @T.prim_func
        def main(
            qkv: t.qkv,
            q_weight: t.q_weight,
            k_weight: t.k_weight,
            cos_sin_cache: t.cos_sin_cache,
            positions: t.positions,
        ):
            # As many blocks as a token has heads share ``groups`` tokens: no number is then larger than the tokens'.
            with T.Kernel(T.ceildiv(tokens, groups) * heads, threads=config.threads) as block:
                T.annotate_min_blocks_per_sm(config.resident)
                tx = T.get_thread_binding()
                lane = tx % config.lanes
                item = T.alloc_local((1,), "int32")
                token = T.alloc_local((1,), "int32")
                head = T.alloc_local((1,), "int32")
                start = T.alloc_local((3,), "int64")
                raw = T.alloc_local((held,), p.dtype)
                scale = T.alloc_local((held,), p.scale_dtype)
                cos = T.alloc_local((config.chunks * vec,), p.cache_dtype)
                sin = T.alloc_local((config.chunks * vec,), p.cache_dtype)
                x = T.alloc_local((held,), "float32")
                a = T.alloc_local((1,), "float32")
                b = T.alloc_local((1,), "float32")
                c = T.alloc_local((1,), "float32")
                s = T.alloc_local((1,), "float32")
                acc = T.alloc_local((ACCUMULATORS,), "float32")
                total = T.alloc_local((1,), "float32")
                out = T.alloc_local((vec,), p.dtype)
                clear(raw, held)
                item[0] = block % heads * groups + tx // config.lanes
                token[0] = block // heads * groups + item[0] // heads
                head[0] = item[0] % heads
                if token[0] < tokens:
                    start[0] = p.place.start(token[0], sizes) + T.cast(head[0], "int64") * (d.D // p.place.unit)
                    start[1] = p.cache.start(flat(positions, "int64")[T.cast(token[0], "int64")], sizes)
                    start[2] = start[1] + d.R // 2 // p.cache.unit
                    for i in T.unroll(config.chunks):
                        j = i * config.lanes + lane
                        for k in T.unroll(2):
                            if d.has(j, k):
                                at = (i * 2 + k) * vec
                                n = d.element(j, k)
                                read(raw, at, flat(qkv, p.dtype), start[0], p.place.unit, n, vec)
                                if head[0] < p.heads:
                                    read(scale, at, flat(q_weight, p.scale_dtype), T.int64(0), p.scale_unit, n, vec)
                                else:
                                    read(scale, at, flat(k_weight, p.scale_dtype), T.int64(0), p.scale_unit, n, vec)
                        if d.turns(j):
                            at = i * vec
                            n = j * vec
                            read(cos, at, flat(cos_sin_cache, p.cache_dtype), start[1], p.cache.unit, n, vec)
                            read(sin, at, flat(cos_sin_cache, p.cache_dtype), start[2], p.cache.unit, n, vec)
                clear(acc, ACCUMULATORS)
                for i in T.unroll(held):
                    x[i] = T.cast(raw[i], "float32")
                    acc[i % ACCUMULATORS] += x[i] * x[i]
                total[0] = added(acc)
                sum_lanes(total, 1, config.lanes)
                total[0] = T.rsqrt(total[0] / T.float32(d.D) + T.float32(p.eps))
                if token[0] < tokens:
                    for i in T.unroll(config.chunks):
                        j = i * config.lanes + lane
                        for v in T.unroll(2 * vec):
                            x[i * 2 * vec + v] = (
                                x[i * 2 * vec + v] * total[0] * T.cast(scale[i * 2 * vec + v], "float32")
                            )
                        if d.turns(j):
                            for v in T.unroll(vec):
                                first, second = d.pair(v)
                                a[0] = x[i * 2 * vec + first]
                                b[0] = x[i * 2 * vec + second]
                                c[0] = T.cast(cos[i * vec + v], "float32")
                                s[0] = T.cast(sin[i * vec + v], "float32")
                                x[i * 2 * vec + first] = a[0] * c[0] - b[0] * s[0]
                                x[i * 2 * vec + second] = b[0] * c[0] + a[0] * s[0]
                        for k in T.unroll(2):
                            if d.has(j, k):
                                for v in T.vectorized(vec):
                                    out[v] = T.cast(x[(i * 2 + k) * vec + v], p.dtype)
                                for h in T.unroll(vec // p.place.unit):
                                    for v in T.vectorized(p.place.unit):
                                        flat(qkv, p.dtype)[
                                            start[0] * p.place.unit
                                            + T.cast(d.element(j, k) + h * p.place.unit, "int64")
                                            + v
                                        ] = out[h * p.place.unit + v]

        return main


@attrs.frozen
class Head:
    """A head of ``D`` elements, of which ``R`` are rotated, in vectors of ``vec``: two, k = 0 and 1, to each number j.

    Below ``turning`` those two hold ``vec`` pairs and nothing else, and the j-th ``vec`` angles are theirs.
    """

    D: int
    R: int
    vec: int
    neox: bool

    @classmethod
    def of(cls, D: int, R: int, dtype: str, rope_layout: str) -> "Head":
        return cls(D, R, math.gcd(D, R // 2, 16 // itemsize(dtype)), rope_layout == "neox")

    @property
    def pairs(self) -> int:
        """How many numbers j there are; the last may have one vector only."""
        return -(-self.D // (2 * self.vec))

    @property
    def turning(self) -> int:
        return self.R // 2 // self.vec

    def turns(self, j: Any) -> Any:
        return j < self.turning

    def has(self, j: Any, k: Any) -> Any:
        return 2 * j + k < self.D // self.vec

    def element(self, j: Any, k: Any) -> Any:
        """The first element of a vector."""
        if not self.neox:
            return (2 * j + k) * self.vec
        if self.R == self.D:
            return (j + k * self.turning) * self.vec
        return T.if_then_else(j < self.turning, j + k * self.turning, 2 * j + k) * self.vec

    def pair(self, v: Any) -> tuple[Any, Any]:
        """The places of a pair's two among the elements of both vectors."""
        return (v, self.vec + v) if self.neox else (2 * v, 2 * v + 1)


def excluded(config: Config, held: int) -> str | None:
    """Why a config, of which a thread holds so many elements, is left out; or None."""
    # Each element in float32, its weight, and half a cosine and half a sine.
    return crowded(config, 3 * held + OVERHEAD)


@attrs.frozen
class Problem:
    """What the program takes from a call."""

    head: Head
    heads: int
    heads_kv: int
    eps: float
    dtype: str
    scale_dtype: str  # the weights'
    cache_dtype: str
    place: Place
    cache: Place
    scale_unit: int

    @classmethod
    def of(cls, static: Static) -> "Problem":
        qkv, weight, cache = (static.tensor(name) for name in ("qkv", "q_weight", "cos_sin_cache"))
        head = Head.of(static["D"], static["R"], qkv.dtype, static["rope_layout"])
        dtypes = qkv.dtype, weight.dtype, cache.dtype
        scale_unit, cache_unit = (math.gcd(head.vec, 16 // itemsize(dtype)) for dtype in dtypes[1:])
        params = static["heads"], static["heads_kv"], static["eps"]
        return cls(head, *params, *dtypes, Place.of(qkv, 1, head.vec), Place.of(cache, 1, cache_unit), scale_unit)
