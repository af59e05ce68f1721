"""BatchNorm backward: the sums of each channel of the batch, then its elements."""

from collections.abc import Iterator
from typing import Any

import tilelang.language as T

from tileops.core.check import Call
from tileops.core.kernel import Device, Kernel, Static
from tileops.norm.kernels.batch_norm import batch_configs, refuse_batch
from tileops.norm.kernels.group_norm import forms_of
from tileops.norm.kernels.rows import ARCHS, PASSES, WARP, arguments, clear, flat, launch
from tileops.norm.kernels.set_norm import Config
from tileops.norm.kernels.sets import load_vector, locate, merge_set, merge_sums, sets_of, store_vector

NAMES = ("dy", "x", "dx")


class BatchNormBwd(Kernel):
    """A block, or a cluster of up to 8, walks its channel twice, for dweight and dbias and, with these, for dx.

    What was read is mostly in the cache still when it is read again, but for the largest tensors.
    """

    archs = ARCHS
    pass_configs = PASSES

    def refuse(self, call: Call, device: Device) -> str | None:
        return refuse_batch(call, NAMES)

    def configs(self, call: Call, device: Device) -> Iterator[Config]:
        return batch_configs(forms_of(call, NAMES), call["T"], device, tensors=2)

    def program(self, static: Static, config: Config, device: Device) -> Any:
        t, sizes = arguments(static)
        s = sets_of({name: form for name, form in static.tensors if name in NAMES}, None, config.bundled)
        assert not isinstance(s, str)
        dtype, weight, bias = static["T"], static.tensor("weight"), static.tensor("bias")
        weight_dtype, bias_dtype = (dtype if form is None else form.dtype for form in (weight, bias))
        stats, vec = s.stats, s.vec
        threads, chunks, cluster = config.threads, config.chunks, config.cluster
        vectors = s.vectors(sizes)
        steps = T.ceildiv(vectors, threads * chunks * cluster)
        k = 2 * stats

        @T.macro
        def load_both(dy_raw, x_raw, dy, x, dy_at, x_at, step, rank, tx, place):
            for i in T.unroll(chunks):
                q = ((step * cluster + rank) * chunks + i) * threads + tx
                if q < vectors:
                    locate(place, q, s)
                    load_vector(dy_raw, i, flat(dy, dtype), dy_at, "dy", s, place)
                    load_vector(x_raw, i, flat(x, dtype), x_at, "x", s, place)

        @T.macro
        def backward(block, dy, x, weight, mean, rstd, dx, dweight, dbias):
            T.annotate_min_blocks_per_sm(config.resident)
            tx = T.get_thread_binding()
            rank = block % cluster
            number = block // cluster
            at = T.alloc_local((3,), "int64")
            place = T.alloc_local((4,), "int32")
            dy_raw = T.alloc_local((chunks * vec,), dtype)
            x_raw = T.alloc_local((chunks * vec,), dtype)
            out = T.alloc_local((vec,), dtype)
            center = T.alloc_local((stats,), "float32")
            r = T.alloc_local((stats,), "float32")
            m = T.alloc_local((k,), "float32")
            scale = T.alloc_local((stats,), "float32")
            tmp = T.alloc_local((4,), "float32")
            part = T.alloc_shared((1, threads // WARP + 1 + cluster, k), "float32")
            if cluster > 1:
                T.cluster_arrive_relaxed()
            at[0] = s.start("dy", number)
            at[1] = s.start("x", number)
            at[2] = s.start("dx", number)
            for g in T.unroll(stats):
                center[g] = flat(mean, "float32")[number * s.channels + g]
                r[g] = flat(rstd, "float32")[number * s.channels + g]
            clear(m, k)
            for step in T.serial(steps):
                load_both(dy_raw, x_raw, dy, x, at[0], at[1], step, rank, tx, place)
                for i in T.unroll(chunks):
                    q = ((step * cluster + rank) * chunks + i) * threads + tx
                    if q < vectors:
                        for e in T.unroll(vec):
                            tmp[0] = T.cast(dy_raw[i * vec + e], "float32")
                            m[e % stats] += tmp[0]
                            m[stats + e % stats] += (
                                tmp[0] * (T.cast(x_raw[i * vec + e], "float32") - center[e % stats]) * r[e % stats]
                            )
            merge_set(m, tmp, k, merge_sums, k, part, tx, rank, threads, cluster)
            if tx + rank == 0:
                for g in T.unroll(stats):
                    if t.dbias is not None:
                        flat(dbias, bias_dtype)[number * s.channels + g] = T.cast(m[g], bias_dtype)
                    if t.dweight is not None:
                        flat(dweight, weight_dtype)[number * s.channels + g] = T.cast(m[stats + g], weight_dtype)
            for g in T.unroll(stats):
                scale[g] = r[g]
                if t.weight is not None:
                    scale[g] = r[g] * T.cast(flat(weight, weight_dtype)[number * s.channels + g], "float32")
            for i in T.unroll(k):
                m[i] = m[i] / s.values(sizes)
            # Backwards, since what was read last is the likeliest to be in the cache still.
            for step in T.serial(steps):
                load_both(dy_raw, x_raw, dy, x, at[0], at[1], steps - 1 - step, rank, tx, place)
                for i in T.unroll(chunks):
                    q = (((steps - 1 - step) * cluster + rank) * chunks + i) * threads + tx
                    if q < vectors:
                        for e in T.unroll(vec):
                            tmp[0] = (T.cast(x_raw[i * vec + e], "float32") - center[e % stats]) * r[e % stats]
                            tmp[1] = (
                                T.cast(dy_raw[i * vec + e], "float32") - m[e % stats] - tmp[0] * m[stats + e % stats]
                            )
                            out[e] = T.cast(tmp[1] * scale[e % stats], dtype)
                        locate(place, q, s)
                        store_vector(flat(dx, dtype), at[2], "dx", s, place, out)

        @T.prim_func
        def main(
            dy: t.dy, x: t.x, weight: t.weight, mean: t.mean, rstd: t.rstd, bias: t.bias,
            dx: t.dx, dweight: t.dweight, dbias: t.dbias,
        ):  # fmt: skip
            with launch(s.count, threads, cluster) as block:
                backward(block, dy, x, weight, mean, rstd, dx, dweight, dbias)

        return main
