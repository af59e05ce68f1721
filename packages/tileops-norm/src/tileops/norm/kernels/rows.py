"""What kernels over rows share: how a row is dealt to threads, where it lies, and sums over it.

A row of n elements is cut into vectors of 16 bytes (of fewer where n is no multiple), and a thread takes every so many
of them. Which thread takes what, and so the order of a row's sum, depends on n and the dtype only: neither the number
of rows nor their pitch reaches it. A pitch that is no multiple of 16 bytes only makes the accesses narrower.

Rows are found by one number, whatever the rank: leading axes that are packed against each other count as one, and the
others are split off by a division a row. Offsets are of 64 bits.
"""

import math
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import attrs
import tilelang.language as T

from tileops.core.check import Call, TensorMeta
from tileops.core.kernel import Device, Form, Kernel, Static
from tileops.core.program import tensors
from tileops.core.spec.dtypes import itemsize

ARCHS: Mapping[str, tuple[str, ...]] = {"cuda": ("sm90",)}
# Every access is guarded by hand, and every barrier is written out: the automatic ones put a test around each store and
# one more barrier behind each of ours.
PASSES: Mapping[str, Any] = {"TL_DISABLE_SAFE_MEMORY_ACCESS": True, "TL_DISABLE_THREAD_STORAGE_SYNC": True}
WARP = 32
MAX_THREADS, MAX_CLUSTER = 1024, 8  # of a block, and its blocks; larger clusters are not portable
REGISTERS, MAX_RESIDENT = 65536, 2048  # of a multiprocessor, and its threads
BUSY = 1024  # threads of a multiprocessor that keep enough rows on their way
FEW = 64  # rows that each have a multiprocessor to themselves; an op whose kernels ask has a bucket that ends here
TOO_MANY = 2**30  # rows: int32 numbers them, and those that the last blocks have beyond them
LINE = 64  # bytes that memory gives at once
OVERHEAD = 28  # registers of a thread for addresses and sums, where a row has several operands
ACCUMULATORS = 4  # of a thread's sum: one alone would wait four cycles for each product
COLUMN_WARPS, COLUMN_ROWS = 16, 8  # warps that share the rows of 32 columns, and rows that a warp loads at once
_STATISTICS = ("mean", "rstd")  # tensors with one number a row
_ANY_LENGTH = 1 << 40  # of a flat view: it has no bounds of its own


@attrs.frozen
class Deal:
    """A row of ``n`` elements in vectors of ``vec``: ``chunks`` to each of ``lanes`` threads, in each of ``parts``.

    A part is a block of a cluster, or a step of a loop.
    """

    n: int
    vec: int
    lanes: int
    chunks: int
    parts: int = 1

    @property
    def held(self) -> int:
        """Elements that a thread holds of a part."""
        return self.chunks * self.vec

    @property
    def vectors(self) -> int:
        return self.n // self.vec

    @property
    def ragged(self) -> bool:
        """Whether some threads hold fewer than others."""
        return self.parts * self.lanes * self.held > self.n

    def chunk(self, i: Any, lane: Any, part: Any) -> Any:
        """The number, in the row, of a thread's i-th vector."""
        return (part * self.chunks + i) * self.lanes + lane

    def has(self, chunk: Any) -> Any:
        """Whether the row has that vector; plain True where it always does."""
        return chunk < self.vectors if self.ragged else True

    def element(self, row: Any, chunk: Any) -> Any:
        """Where a row's vector begins in a tensor without gaps."""
        return (T.cast(row, "int64") * self.vectors + chunk) * self.vec


def vector(n: int, dtype: str) -> int:
    """Elements that a thread takes at once: 16 bytes, or what divides a row."""
    return math.gcd(n, 16 // itemsize(dtype))


def words(vec: int, dtype: str) -> int:
    """Registers that a vector takes."""
    return max(vec * itemsize(dtype) // 4, 1)


def lanes_for(vectors: int, most: int) -> int:
    """The fewest threads that take as many vectors each as ``most`` threads would.

    Within a warp a power of two of them, so that neighbours add up, else whole warps.
    """
    if most <= WARP:
        return min(most, 1 << (vectors - 1).bit_length())
    return -(-vectors // -(-vectors // most) // WARP) * WARP


def evenly(vectors: int, most: int) -> int:
    """As ``lanes_for``, but up to a third fewer if all of them then take the same: no access needs a guard."""
    least = -(-vectors // most)
    exact = (n for n in range(least, least + least // 2 + 1) if vectors % (n * WARP) == 0)
    return next((vectors // n for n in exact), lanes_for(vectors, most))


def crowded(config: Any, registers: int) -> str | None:
    """Why no multiprocessor has room for a config whose threads take so many registers, or None."""
    if config.threads * config.resident > MAX_RESIDENT:
        return "more threads than a multiprocessor has"
    if registers > min(255, REGISTERS // (config.threads * config.resident)):
        return "more registers than a thread has"
    return None


@attrs.frozen
class Place:
    """Where the rows of a tensor lie: leading axes in groups, the innermost first, each with its stride in elements.

    Any row's start is a multiple of ``unit`` elements, which a thread can therefore access at once.
    """

    groups: tuple[tuple[tuple[int | str, ...], int], ...]
    unit: int

    @classmethod
    def of(cls, form: Form, axes: int, vec: int) -> "Place":
        """The place of rows that are the last ``axes`` axes of a tensor, side by side."""
        leading = len(form.shape) - axes
        n = math.prod(axis for axis in form.shape[leading:] if isinstance(axis, int))
        groups: list[tuple[tuple[int | str, ...], int]] = []
        for axis, stride in zip(reversed(form.shape[:leading]), reversed(form.strides[:leading]), strict=True):
            if stride is not None or not groups:
                groups.append(((axis,), n if stride is None else stride))
            else:
                groups[-1] = (*groups[-1][0], axis), groups[-1][1]
        return cls(tuple(groups), math.gcd(vec, *(stride for _, stride in groups)))

    def start(self, row: Any, sizes: Mapping[str, Any]) -> Any:
        """The offset of a row, in units: an access is wide only if its index is seen to be a multiple."""
        start: Any = T.int64(0)
        for axes, stride in self.groups[:-1]:
            rest = T.truncdiv(row, count(axes, sizes))
            start = start + T.cast(row - rest * count(axes, sizes), "int64") * (stride // self.unit)
            row = rest
        for _, stride in self.groups[-1:]:
            start = start + T.cast(row, "int64") * (stride // self.unit)
        return start


class Rows:
    """The rows of x, its last ``axes`` axes, as a program sees them, and the weight they may have.

    A row has ``n`` elements, in vectors of ``vec``.
    """

    def __init__(self, static: Static, axes: int = 1) -> None:
        x, weight = static.tensor("x"), static.tensor("weight")
        assert x is not None
        leading = len(x.shape) - axes
        self.leading = x.shape[:leading]
        self.n = math.prod(axis for axis in x.shape[leading:] if isinstance(axis, int))
        self.dtype = x.dtype
        self.vec = vector(self.n, x.dtype)
        self.place = Place.of(x, axes, self.vec)
        self.weighted = weight is not None
        self.weight_dtype = (weight or x).dtype


@attrs.frozen
class StreamConfig:
    """A block of ``threads`` takes ``chunks`` vectors a thread at once, and its row in as many steps as that needs."""

    threads: int
    chunks: int

    def deal(self, n: int, vec: int) -> Deal:
        return Deal(n, vec, self.threads, self.chunks, -(-n // (self.threads * self.chunks * vec)))


class _Arguments(SimpleNamespace):
    def __getattr__(self, name: str) -> None:
        return None


def arguments(static: Static) -> tuple[SimpleNamespace, dict[str, Any]]:
    """``tensors`` of core by attribute; what the call lacks is None here, and so no argument of a prim_func.

    A program asks this, not the argument: in its body, an argument that is not there is no None.
    """
    forms, sizes = tensors(static)
    return _Arguments(**forms), sizes


def count(axes: Iterable[int | str], sizes: Mapping[str, Any]) -> Any:
    """The product of axes, some of them symbolic."""
    product: Any = 1
    for axis in axes:
        product = product * (axis if isinstance(axis, int) else sizes[axis])
    return product


def refuse_rows(call: Call, axes: int) -> str | None:
    """Why kernels over rows of the last ``axes`` axes can't take a call, or None."""
    if max(math.prod(m.shape[: len(m.shape) - axes]) for m in call.inputs.values() if m is not None) >= TOO_MANY:
        return "2**30 rows or more, which are numbered by int32"
    for name, meta in {**call.inputs, **call.outputs}.items():
        if meta is None:
            continue
        if name in _STATISTICS:
            if strided(meta, len(meta.shape)):
                return f"{name} is not contiguous"
        elif strided(meta, axes):
            return f"the elements of {name}'s rows do not lie side by side"
    return None


def refuse_served(first: Kernel, call: Call, device: Device) -> str | None:
    """Why a last resort leaves a call alone: ``first`` has a config for it, and a sum has one order, however tuned."""
    if next(iter(first.configs(call, device)), None) is None:
        return None
    return f"{type(first).__name__} has a config for it, and would sum in another order"


def few_rows(call: Call, axes: int) -> bool:
    """Whether a call has few rows of the last ``axes`` axes: its time is that of one, not of what memory moves."""
    x = call.inputs["x"]
    assert x is not None
    return math.prod(x.shape[: len(x.shape) - axes]) <= FEW


def strided(meta: TensorMeta, axes: int) -> bool:
    """Whether the elements of the last ``axes`` axes do not lie side by side."""
    step = 1
    for n, stride in zip(reversed(meta.shape), reversed(meta.strides), strict=True):
        if axes == 0:
            break
        if n > 1 and stride != step:
            return True
        step, axes = step * n, axes - 1
    return False


def flat(tensor: Any, dtype: str) -> Any:
    """A tensor as one axis without end, for offsets of our own."""
    return T.Tensor((T.int64(_ANY_LENGTH),), dtype, tensor.data)


def inverse_sqrt(x: Any) -> Any:
    """Within 1 ulp, where rsqrt is within 2: a float32 row's elements have no digits to spare."""
    return T.float32(1) / T.sqrt(x)


def launch(blocks: Any, threads: int, cluster: int) -> Any:
    """A launch of so many blocks, or clusters of blocks."""
    if cluster > 1:
        return T.ClusterKernel(blocks * cluster, threads=threads, cluster_dims=(cluster, 1, 1))
    return T.Kernel(blocks, threads=threads)


@T.macro
def clear(into, n):
    for i in T.unroll(n):
        into[i] = T.cast(0, into.dtype)


def added(acc: Any, at: Any = 0) -> Any:
    """The sum of a thread's accumulators for a row."""
    return (acc[at] + acc[at + 1]) + (acc[at + 2] + acc[at + 3])


@T.macro
def load(into, at, tensor, start, unit, deal, lane, part):
    """A thread's vectors of a row that starts ``start`` units into a flat tensor; those not there are left alone."""
    for i in T.unroll(deal.chunks):
        if deal.has(deal.chunk(i, lane, part)):
            for h in T.unroll(deal.vec // unit):
                for v in T.vectorized(unit):
                    into[at + i * deal.vec + h * unit + v] = tensor[
                        start * unit + T.cast(deal.chunk(i, lane, part), "int64") * deal.vec + h * unit + v
                    ]


@T.macro
def load_vector(into, weight, dtype, vec, chunk):
    """One vector of a weight or bias."""
    for v in T.vectorized(vec):
        into[v] = flat(weight, dtype)[T.cast(chunk, "int64") * vec + v]


def touches(deal: Deal, dtype: str) -> int:
    """How many lines of a weight's part each thread brings."""
    return -(-deal.lanes * deal.held * itemsize(dtype) // (LINE * deal.lanes))


@T.macro
def touch(seen, late, tensor, dtype, deal, lane, part):
    """Bring a weight's part near while the row is on its way, if it is ``late``: loaded behind the sums.

    ``seen`` has one int32 a line, ``touches`` of them, for ``touched`` behind the sums.
    """
    if late:
        for i in T.unroll(touches(deal, dtype)):
            at = deal.chunk(0, 0, part) * deal.vec + (i * deal.lanes + lane) * (LINE // itemsize(dtype))
            seen[i] = 0
            if at + 4 // itemsize(dtype) <= T.min(deal.n, deal.chunk(0, 0, part + 1) * deal.vec):
                seen[i] = flat(tensor, "int32")[T.cast(at, "int64") * itemsize(dtype) // 4]


@T.macro
def touched(seen, late):
    """A fence, without which the compiler would leave the loads of ``touch`` out."""
    if late:
        T.warpgroup_fence_operand(seen, num_regs=int(seen.shape[0]))


@T.macro
def stage(into, at, step, tensor, start, unit, deal, lane, part, there):
    """The same into shared memory, vector i at ``at + i * step``, zeros for what is not there, by the async copies.

    What is narrower than their 4 bytes is copied at once.
    """
    for i in T.unroll(deal.chunks):
        for h in T.unroll(deal.vec // unit):
            source = start * unit + T.cast(deal.chunk(i, lane, part), "int64") * deal.vec + h * unit
            if unit * itemsize(into.dtype) >= 4:
                T.ptx_cp_async(
                    T.access_ptr(into[at + i * step + h * unit], "w", unit),
                    T.access_ptr(tensor[source], "r", unit),
                    unit,
                    predicate=T.And(there, deal.has(deal.chunk(i, lane, part))),
                )
            else:
                into[at + i * step + h] = T.cast(0, into.dtype)
                if T.And(there, deal.has(deal.chunk(i, lane, part))):
                    into[at + i * step + h] = tensor[source]


@T.macro
def sum_lanes(value, n, lanes):
    """Sums over each ``lanes`` neighbours of a warp, a power of two of them, in every one of them."""
    for i in T.unroll(n):
        for k in T.unroll(lanes.bit_length() - 1):
            value[i] += T.shfl_xor(value[i], lanes >> (k + 1))


@T.macro
def give_block(value, part, buffer, tx):
    """Give a thread's share of a block's sum: ``part`` has a number a warp in each buffer.

    ``take_block`` has the sum after the block's next barrier; another must lie between two sums in one buffer.
    """
    value[0] = T.warp_reduce_sum(value[0])
    if tx % WARP == 0:
        part[buffer, tx // WARP] = value[0]


@T.macro
def take_block(value, part, buffer, tx, warps):
    """The sum of a block's shares, in every thread."""
    value[0] = 0.0
    if warps <= 8:
        for i in T.unroll(warps):
            value[0] += part[buffer, i]
    else:
        if tx % WARP < warps:
            value[0] = part[buffer, tx % WARP]
        value[0] = T.warp_reduce_sum(value[0])


@T.macro
def sum_block(value, part, buffer, tx, warps):
    """The sum of a block's shares where no other goes with it."""
    give_block(value, part, buffer, tx)
    T.sync_threads()
    take_block(value, part, buffer, tx, warps)


@T.macro
def give_cluster(value, part, parts, buffer, tx, warps, rank, blocks):
    """The same for a cluster and its barrier: each block sends its warps' sums to all blocks, into ``parts`` there.

    All blocks must have met at a barrier before the first sum, so that their shared memory is there.
    """
    give_block(value, part, buffer, tx)
    T.sync_threads()
    for other in T.unroll(blocks):
        T.copy_cluster(part[buffer, 0:warps], parts[buffer, rank, 0:warps], dst_block=other)


@T.macro
def take_cluster(value, parts, buffer, tx, warps, blocks):
    """The sum of a cluster's shares, in every thread."""
    value[0] = 0.0
    for i in T.unroll(-(-blocks * warps // WARP)):
        if i * WARP + tx % WARP < blocks * warps:
            value[0] += parts[buffer, (i * WARP + tx % WARP) // warps, (i * WARP + tx % WARP) % warps]
    value[0] = T.warp_reduce_sum(value[0])


@T.macro
def give_row(value, n, part, parts, buffer, tx, config, rank):
    """Give a thread's share of ``n`` rows' sums; each sum of a program has a ``buffer`` of its own.

    ``take_row`` has it behind ``meet``. In a cluster, all blocks must have met at a barrier before the first.
    """
    if config.cluster > 1:
        give_cluster(value, part, parts, buffer, tx, config.threads // WARP, rank, config.cluster)
    elif config.lanes > WARP:
        give_block(value, part, buffer, tx)
    else:
        sum_lanes(value, n, config.lanes)


@T.macro
def meet(config):
    """The barrier of those that share a row."""
    if config.cluster > 1:
        T.cluster_sync()
    elif config.lanes > WARP:
        T.sync_threads()


@T.macro
def take_row(value, part, parts, buffer, tx, config):
    """The sum of a row's shares, in each of its threads."""
    if config.cluster > 1:
        take_cluster(value, parts, buffer, tx, config.threads // WARP, config.cluster)
    elif config.lanes > WARP:
        take_block(value, part, buffer, tx, config.threads // WARP)


@T.macro
def sum_row(value, n, part, parts, buffer, tx, config, rank):
    """The sums of ``n`` rows' shares where no others go with them."""
    give_row(value, n, part, parts, buffer, tx, config, rank)
    meet(config)
    take_row(value, part, parts, buffer, tx, config)


def column_blocks(n: int, cluster: int) -> int:
    """Blocks of ``sum_columns``, a multiple of the first launch's cluster: TileLang gives that to all of a function."""
    return -(-n // (WARP * cluster)) * cluster


@T.macro
def sum_columns(block, total, partial, n, dtype, rows):
    """The sums of 32 columns of float32 ``partial``, of which the first ``rows`` rows count, always in one order."""
    tx = T.get_thread_binding()
    part = T.alloc_shared((COLUMN_WARPS, WARP), "float32")
    read = T.alloc_local((COLUMN_ROWS,), "float32")
    acc = T.alloc_local((ACCUMULATORS,), "float32")
    column = block * WARP + tx % WARP
    clear(acc, ACCUMULATORS)
    for step in T.serial(T.ceildiv(rows, COLUMN_WARPS * COLUMN_ROWS)):
        clear(read, COLUMN_ROWS)  # all loads before the first sum: one by one, each would wait for memory
        for i in T.unroll(COLUMN_ROWS):
            row = (step * COLUMN_ROWS + i) * COLUMN_WARPS + tx // WARP
            if T.And(row < rows, column < n):
                read[i] = flat(partial, "float32")[T.cast(row, "int64") * n + column]
        for i in T.unroll(COLUMN_ROWS):
            acc[i % ACCUMULATORS] += read[i]
    part[tx // WARP, tx % WARP] = added(acc)
    T.sync_threads()
    if T.And(tx < WARP, column < n):
        acc[0] = 0.0
        for i in T.unroll(COLUMN_WARPS):
            acc[0] += part[i, tx]
        flat(total, dtype)[column] = T.cast(acc[0], dtype)
