"""What kernels over channels share: where the elements lie that have statistics in common, and those statistics.

``x``, ``[B, C, *L]``, falls into sets that threads walk together: a group of an instance, or a channel of the batch. A
set consists of runs of elements side by side, some way apart: one run where positions lie side by side, one for each
instance where the set is a channel of the batch, one for each position where channels lie side by side. A run is cut
into vectors, and vector q of a set is vector q % run of run q // run.

Where channels lie side by side and a set's are fewer than 32 bytes, sets are walked by bundles: a vector has elements
of several sets, and each thread keeps ``stats`` statistics. Whole sectors are read so, whatever the groups. Bundles of
fewer bytes make less code, which counts where there is little to read.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import tilelang.language as T

from tileops.core.kernel import Form
from tileops.core.spec.dtypes import itemsize
from tileops.norm.kernels.rows import WARP, count, vector

SECTOR = 32  # bytes that are read from memory at least
FARTHEST = 2**31 - 2**17  # vectors of a set, which int32 numbers, those of the last step beyond it too
PIVOTS = 8  # values of a set whose mean the others count from


@attrs.frozen
class Lie:
    """The strides, in elements, of a tensor's instances, of its sets and of a set's runs.

    Each is a multiple of ``unit``, the number of elements that can be accessed at once.
    """

    instance: int
    step: int
    pitch: int
    unit: int


@attrs.frozen
class Sets:
    """A call's sets, in vectors of ``vec`` elements.

    A set, or a bundle of sets, is ``runs`` (a product of sizes) runs of ``run`` vectors; it has ``channels`` channels,
    and ``span`` elements after another have the same. There are ``count`` of them, in each instance where there are
    ``instances``. Each ``vec // stats`` elements of a vector have a statistic. The runs of a channel of the batch may
    go from instance to instance, ``split`` in each, at another stride than within one.
    """

    vec: int
    run: int
    runs: tuple[int | str, ...]
    span: int
    channels: int
    count: int
    instances: tuple[int | str, ...]
    stats: int
    split: int | None
    lies: Mapping[str, Lie]

    @property
    def per(self) -> int:
        return self.vec // self.stats

    @property
    def wide(self) -> int:
        """How many values of ``[C]`` a vector needs."""
        return 1 if self.span % self.vec == 0 else self.vec

    @property
    def held(self) -> int | None:
        """Vectors of a set; None where it is a channel of the batch, whose size may change."""
        return None if not self.instances else self.run * math.prod(int(n) for n in self.runs)

    def vectors(self, sizes: Mapping[str, Any]) -> Any:
        return count(self.runs, sizes) * self.run

    def values(self, sizes: Mapping[str, Any]) -> Any:
        """Elements of one statistic, as float32: they may be more than int32 has."""
        n: Any = T.float32(self.run * self.per)
        for axis in self.runs:
            n = n * (T.float32(axis) if isinstance(axis, int) else T.cast(sizes[axis], "float32"))
        return n

    def total(self, sizes: Mapping[str, Any]) -> Any:
        """The number of sets, or bundles."""
        return count(self.instances, sizes) * self.count

    def start(self, name: str, number: Any) -> Any:
        """The offset of a set, in units of its tensor."""
        lie = self.lies[name]
        if not self.instances:
            return T.cast(number, "int64") * (lie.step // lie.unit)
        instance = T.truncdiv(number, self.count)
        across = T.cast(number - instance * self.count, "int64") * (lie.step // lie.unit)
        return across + T.cast(instance, "int64") * (lie.instance // lie.unit)

    def offset(self, name: str, at: Any) -> Any:
        """The offset of a located vector in its set, in units of its tensor."""
        lie = self.lies[name]
        offset: Any = T.cast(at[0], "int64") * (self.vec // lie.unit)
        if self.runs != (1,):
            offset = offset + T.cast(at[1], "int64") * (lie.pitch // lie.unit)
        if self.split is not None:
            offset = offset + T.cast(at[2], "int64") * (lie.instance // lie.unit)
        return offset

    def inner(self, number: Any) -> Any:
        """The number of a set in its instance."""
        return T.truncmod(number, self.count) if self.instances else number

    def channel(self, column: Any, e: Any) -> Any:
        """The channel, in its set, of an element of the vector at this place of a run, where positions are adjacent."""
        if self.channels == 1:
            return 0
        if self.span % self.vec == 0:
            return T.truncdiv(column, self.span // self.vec)
        return T.truncdiv(column * self.vec + e, self.span)

    def steady(self, lanes: int) -> bool:
        """Whether the channels of a thread's vectors are always the same."""
        if self.channels == 1:
            return True
        return self.span == 1 and (self.run == 1 or (self.runs != (1,) and lanes % self.run == 0))


def sets_of(tensors: Mapping[str, Form], groups: int | None, bundled: int = SECTOR) -> "Sets | str":
    """The sets of a call: ``groups`` of them in each instance or, where that is None, the channels of the batch.

    ``tensors`` are those of shape ``[B, C, *L]``. A bundle has ``bundled`` bytes at most. Where no walk is the same in
    all tensors, why.
    """
    (B, C, *L), dtype = next((form.shape, form.dtype) for form in tensors.values())
    assert isinstance(C, int)
    S, size = math.prod(int(n) for n in L), itemsize(dtype)
    strides = {name: _strides(form) for name, form in tensors.items()}
    pitches = {name: _pitch(L, s[2:]) for name, s in strides.items()}
    if None in pitches.values():
        return "the positions of an instance do not lie at one stride"
    pitch = {name: p or 0 for name, p in pitches.items()}
    each = 1 if groups is None else C // groups
    split = None
    if all(s[1] == 1 or C == 1 for s in strides.values()) and (S == 1 or any(p != 1 for p in pitch.values())):
        bundle = math.gcd(C, bundled // size)
        whole = bundle % each == 0
        channels = bundle if whole else each
        stats = channels // each
        vec = channels if whole else vector(each, dtype)
        run, span = channels // vec, 1
        runs: tuple[int | str, ...] = (B, S) if groups is None else (S,)
        if S == 1:
            pitch = {name: s[0] if groups is None else 0 for name, s in strides.items()}
        elif groups is None and any(s[0] != S * pitch[name] for name, s in strides.items()):
            split = S
        step = dict.fromkeys(strides, channels)
    elif all(p == 1 or S == 1 for p in pitch.values()):
        if each > 1 and any(s[1] != S for s in strides.values()):
            return "the channels of a group do not lie side by side"
        vec, channels, stats, span = vector(S, dtype), each, 1, S
        if vec * size < 8:  # then vectors of two channels, whose weights are found one by one, are still faster
            vec = vector(each * S, dtype)
        run, runs = each * S // vec, (B,) if groups is None else (1,)
        pitch = {name: s[0] if groups is None else 0 for name, s in strides.items()}
        step = {name: each * s[1] for name, s in strides.items()}
    else:
        return "neither positions nor channels lie side by side"
    lies = {}
    for name, s in strides.items():
        instance = s[0] if groups is not None or split is not None else 0
        lies[name] = Lie(
            instance, step[name], pitch[name], math.gcd(vec, 16 // size, instance, step[name], pitch[name])
        )
    return Sets(vec, run, runs, span, channels, C // channels, (B,) if groups is not None else (), stats, split, lies)


def _strides(form: Form) -> list[int]:
    """All strides as numbers; an axis of size 1 is packed, whatever its stride."""
    strides: list[int] = []
    step = 1
    for n, stride in zip(reversed(form.shape), reversed(form.strides), strict=True):
        strides.insert(0, step if stride is None or n == 1 else stride)
        step = strides[0] * n if isinstance(n, int) else 0  # only the outermost size is none
    return strides


def _pitch(sizes: Sequence[int | str], strides: Sequence[int]) -> int | None:
    """The stride of axes that lie in one row, packed against each other; None where they don't."""
    pitch, step = None, None
    for n, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if n == 1:
            continue
        if step is not None and stride != step:
            return None
        pitch = stride if pitch is None else pitch
        step = stride * int(n)
    return 1 if pitch is None else pitch


@T.macro
def locate(at, q, s):
    """Where vector q is: in which place of its run, in which run, of which instance. Divided here, as int32, once.

    A place is one of the run's, beyond the last vector too, unless the set is a single run of several.
    """
    at[1] = q
    at[0] = 0
    if s.run > 1 and s.runs == (1,):
        at[0] = q
    elif s.run > 1:
        at[1] = T.truncdiv(q, s.run)
        at[0] = q - at[1] * s.run
    if s.split is not None:
        at[2] = T.truncdiv(at[1], s.split)
        at[1] = at[1] - at[2] * s.split


@T.macro
def load_vector(into, i, tensor, start, name, s, at):
    """A located vector, the i-th of ``into``, of a set that starts ``start`` units into a flat tensor."""
    for h in T.unroll(s.vec // s.lies[name].unit):
        for v in T.vectorized(s.lies[name].unit):
            into[i * s.vec + h * s.lies[name].unit + v] = tensor[
                (start + s.offset(name, at) + h) * s.lies[name].unit + v
            ]


@T.macro
def store_vector(tensor, start, name, s, at, out):
    for h in T.unroll(s.vec // s.lies[name].unit):
        for v in T.vectorized(s.lies[name].unit):
            tensor[(start + s.offset(name, at) + h) * s.lies[name].unit + v] = out[h * s.lies[name].unit + v]


@T.macro
def load_channels(into, tensor, s, inner, at):
    """What a located vector needs of ``[C]``; ``inner`` is its set's number in the instance."""
    if s.span == 1:
        for h in T.unroll(-(-s.vec // 8)):
            for v in T.vectorized(min(s.vec, 8)):
                into[h * 8 + v] = tensor[(inner * s.run + at[0]) * s.vec + h * 8 + v]
    else:
        for e in T.unroll(s.wide):
            at[3] = inner * s.channels + s.channel(at[0], e)
            into[e] = tensor[at[3]]


@T.macro
def find_pivot(pivot, tensor, start, name, s, vectors, at, first):
    """What the values of each statistic count from: the mean of its first eight or so.

    That is near enough to all of them, however far from zero they are, and no further from their mean than they are
    from each other: what is left of the distance would be rounded like the largest of them. Values that are all the
    same are their own mean, to the bit, since what is averaged is how far they are from the first.
    """
    base = T.alloc_local((s.stats,), "float32")
    for j in T.unroll(-(-PIVOTS // s.per)):
        locate(at, T.min(j, vectors - 1), s)
        load_vector(first, 0, tensor, start, name, s, at)
        for e in T.unroll(s.vec):
            if j == 0 and e % s.per == 0:
                base[e // s.per] = T.cast(first[e], "float32")
            pivot[e // s.per] += (T.cast(first[e], "float32") - base[e // s.per]) * T.float32(
                1 / (-(-PIVOTS // s.per) * s.per)
            )
    for g in T.unroll(s.stats):
        pivot[g] += base[g]


@T.macro
def add_step(m, raw, there, pivot, tmp, s, chunks):
    """Take a step's vectors, those that are ``there``, into a thread's moments.

    These are a count, then means, then sums of squares around them. The step's own are taken first, then merged by the
    distance of the means. Values count from ``pivot``, if there is one.
    """
    tmp[0] = 0.0
    for i in T.unroll(chunks):
        if there(i):
            tmp[0] += T.float32(s.per)
    m[0] += tmp[0]
    for g in T.unroll(s.stats):
        tmp[1] = 0.0
        for i in T.unroll(chunks):
            if there(i):
                for e in T.unroll(s.per):
                    tmp[1] += counted(raw[i * s.vec + g * s.per + e], pivot, g)
        tmp[1] = tmp[1] / T.max(tmp[0], T.float32(1))
        tmp[2] = 0.0
        for i in T.unroll(chunks):
            if there(i):
                for e in T.unroll(s.per):
                    tmp[3] = counted(raw[i * s.vec + g * s.per + e], pivot, g) - tmp[1]
                    tmp[2] += tmp[3] * tmp[3]
        tmp[3] = tmp[1] - m[1 + g]
        tmp[1] = tmp[0] / T.max(m[0], T.float32(1))
        # In this order nothing overflows at the first step, whose distance counts for nothing.
        m[1 + s.stats + g] += tmp[2] + tmp[3] * tmp[1] * ((m[0] - tmp[0]) * tmp[3])
        m[1 + g] += tmp[3] * tmp[1]


def counted(value: Any, pivot: Any, g: Any) -> Any:
    """A value as it counts from its pivot."""
    value = T.cast(value, "float32")
    return value if pivot is None else value - pivot[g]


@T.macro
def merge_moments(m, tmp, stats):
    """The moments of a warp's lanes as one, in all of them; a lane may be empty, the first one if all are.

    Means count from the first lane's, so that means that are all the same stay so, to the bit.
    """
    tmp[0] = T.warp_reduce_sum(m[0])
    tmp[1] = 1.0 / T.max(tmp[0], 1.0)
    for g in T.unroll(stats):
        tmp[3] = T.shfl_sync(m[1 + g], 0)
        tmp[2] = tmp[3] + T.warp_reduce_sum(m[0] * (m[1 + g] - tmp[3])) * tmp[1]
        tmp[3] = m[1 + g] - tmp[2]
        m[1 + stats + g] = T.warp_reduce_sum(m[1 + stats + g] + m[0] * tmp[3] * tmp[3])
        m[1 + g] = tmp[2]
    m[0] = tmp[0]


@T.macro
def merge_sums(m, tmp, k):
    for i in T.unroll(k):
        m[i] = T.warp_reduce_sum(m[i])


@T.macro
def merge_set(m, tmp, k, merge, arg, part, tx, rank, lanes, cluster):
    """What the threads of a set have, ``k`` numbers each, merged in all of them.

    First over a warp; then over the block's warps, whose numbers are the first rows of the shared ``part``; then over
    the cluster's blocks, each of which sends what it has, the next row, into a row of its own in all of them. They are
    rows of one tensor, since of several one might get the memory of another while others still read that.
    """
    merge(m, tmp, arg)
    if lanes > WARP:
        if tx % WARP == 0:
            for i in T.unroll(k):
                part[0, tx // WARP, i] = m[i]
        T.sync_threads()
        for i in T.unroll(k):
            m[i] = 0.0
            if tx % WARP < lanes // WARP:
                m[i] = part[0, tx % WARP, i]
        merge(m, tmp, arg)
    if cluster > 1:
        if tx == 0:
            for i in T.unroll(k):
                part[0, lanes // WARP, i] = m[i]
        T.sync_threads()
        T.cluster_wait()  # until all blocks are there, and so is their shared memory
        for other in T.unroll(cluster):
            T.copy_cluster(part[0, lanes // WARP, 0:k], part[0, lanes // WARP + 1 + rank, 0:k], dst_block=other)
        T.cluster_sync()
        for i in T.unroll(k):
            m[i] = 0.0
            if tx % WARP < cluster:
                m[i] = part[0, lanes // WARP + 1 + tx % WARP, i]
        merge(m, tmp, arg)
