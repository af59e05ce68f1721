"""What the kernels that add a residual share: how a row is dealt, the sum and its place.

A thread keeps its part of a row's sum in registers, so that x and the residual are read once and residual_out is
written once. A row too long for a cluster's registers is taken in steps by one block, which reads back what it wrote:
each thread its own part, so that no barrier is needed for that.
"""

import itertools
from collections.abc import Iterator

import attrs
import tilelang.language as T

from tileops.core.check import Call
from tileops.core.kernel import Device, Kernel, Static
from tileops.norm.kernels.rows import (
    ARCHS,
    MAX_CLUSTER,
    PASSES,
    REGISTERS,
    WARP,
    Deal,
    Place,
    Rows,
    clear,
    crowded,
    evenly,
    few_rows,
    flat,
    load,
    refuse_rows,
    vector,
    words,
)


@attrs.frozen
class Config:
    """``lanes`` threads of each of ``cluster`` blocks hold ``chunks`` vectors each of a row: that is a sum's order.

    One block does in ``steps`` what no cluster holds. The rest has no part in the order: a block has ``threads``,
    takes ``unroll`` rows at once, loads the weights ``early``, before a row is summed, and leaves registers for so many
    ``resident`` blocks a multiprocessor.
    """

    lanes: int
    chunks: int
    cluster: int = 1
    steps: int = 1
    threads: int = 128
    unroll: int = 1
    early: bool = True
    resident: int = 1

    def deal(self, n: int, vec: int) -> Deal:
        """A part is a block of the cluster, or a step: never both."""
        return Deal(n, vec, self.lanes, self.chunks, self.cluster * self.steps)


# Vectors of a block's share of a row, and the most threads that take it: with two tensors to read, half the vectors a
# thread keep as many bytes on their way as in RMSNorm.
LADDER = ((64, WARP), (256, 128), (512, 256))
MOST = 512  # threads beyond: 1024 leave each too few registers for two tensors
WANTED = 16  # registers for a thread's part of a row, as long as a cluster has that many; the residual takes as many
HELD = 32  # the same, at most
STEP = 16  # the same where a row is taken in steps
OTHERS = 32  # registers for all else


def configs(n: int, dtype: str, few: bool, multiple: int = WARP) -> Iterator[Config]:
    """The configs for ``few`` rows of a length, or many, the default first; lanes beyond a warp are a ``multiple``.

    All of them sum a row in one order: neither the number of rows nor a tuner has a say in it.
    """
    vec = vector(n, dtype)
    vectors, size = n // vec, words(vec, dtype)
    for most, cluster in [*((WANTED, c) for c in (1, 2, 4, MAX_CLUSTER)), (HELD, MAX_CLUSTER)]:
        share = -(-vectors // cluster)
        lanes = evenly(share, next((threads for limit, threads in LADDER if share <= limit), MOST))
        lanes = lanes if lanes <= WARP else -(-lanes // multiple) * multiple
        deal = Config(lanes, -(-share // lanes), cluster, threads=max(lanes, 128) if lanes <= WARP else lanes)
        if deal.chunks * size <= most:
            break
    else:
        chunks = STEP // size
        deal = Config(MOST, chunks, steps=-(-vectors // (MOST * chunks)), threads=MOST)
    held = deal.chunks * size
    early = deal.steps == 1 and (few or 3 * held + OTHERS <= REGISTERS // (2 * deal.threads))
    two = not few and (2 * held + OTHERS) * 2 * deal.threads <= REGISTERS
    default = attrs.evolve(
        deal, unroll=2 if lanes <= WARP else 1, early=early, resident=2 if two and lanes > WARP else 1
    )
    seen = [default]
    for threads in (128, 256) if deal.lanes <= WARP else (deal.lanes,):
        for unroll, weight, resident in itertools.product((1, 2, 4), (True, False), (1, 2, 3, 4, 6, 8)):
            config = attrs.evolve(deal, threads=threads, unroll=unroll, early=weight, resident=resident)
            if config not in seen and excluded(config, n, dtype) is None:
                seen.append(config)
    yield from seen


def excluded(config: Config, n: int, dtype: str) -> str | None:
    """Why a config is left out, or None."""
    held = config.chunks * words(vector(n, dtype), dtype)
    if config.unroll > 1 and config.lanes > WARP:
        return "rows at once that a block would sum one by one"
    if config.early and config.steps > 1:
        return "weights of one step alone"
    return crowded(config, held * (2 * config.unroll + config.early) + OTHERS)


class FusedAdd(Kernel):
    """Rows of a sum in registers: one read of x and of the residual, one write of their sum and of the result."""

    archs = ARCHS
    pass_configs = PASSES

    def refuse(self, call: Call, device: Device) -> str | None:
        return refuse_rows(call, 1)

    def configs(self, call: Call, device: Device) -> Iterator[Config]:
        return configs(call["N"], call["T"], few_rows(call, 1))


class Sum(Rows):
    """The rows of x, and of the residual where there is one."""

    def __init__(self, static: Static) -> None:
        super().__init__(static)
        residual = static.tensor("residual")
        self.residual = None if residual is None else Place.of(residual, 1, self.vec)


@T.macro
def fetch(raw, more, row, rows, exact, x, residual, p, deal, config, sizes, lane, part):
    """Load a thread's parts of its rows of x into ``raw``, zeros for what is not there, of the residual into ``more``.

    No row is beyond the last where ``exact``.
    """
    start = T.alloc_local((2,), "int64")
    if deal.ragged or not exact:
        clear(raw, config.unroll * deal.held)
    for u in T.unroll(config.unroll):
        if exact or row[u] < rows:
            start[0] = p.place.start(row[u], sizes)
            load(raw, u * deal.held, flat(x, p.dtype), start[0], p.place.unit, deal, lane, part)
            if p.residual is not None:
                start[1] = p.residual.start(row[u], sizes)
                load(more, u * deal.held, flat(residual, p.dtype), start[1], p.residual.unit, deal, lane, part)


@T.macro
def add(raw, more, row, rows, exact, residual_out, p, deal, config, lane, part):
    """Add ``more`` to ``raw``, rounded, and store the sum."""
    for u in T.unroll(config.unroll):
        if exact or row[u] < rows:
            for i in T.unroll(deal.chunks):
                if deal.has(deal.chunk(i, lane, part)):
                    at = u * deal.held + i * p.vec
                    for v in T.vectorized(p.vec):
                        raw[at + v] = T.cast(T.cast(raw[at + v], "float32") + T.cast(more[at + v], "float32"), p.dtype)
                    for v in T.vectorized(p.vec):
                        flat(residual_out, p.dtype)[deal.element(row[u], deal.chunk(i, lane, part)) + v] = raw[at + v]


@T.macro
def reload(raw, row, x, residual_out, p, deal, sizes, lane, step):
    """Load the part of a step again, of the sum if there is one."""
    start = T.alloc_local((1,), "int64")
    if deal.ragged:
        clear(raw, deal.held)
    if p.residual is not None:
        load(raw, 0, flat(residual_out, p.dtype), T.cast(row[0], "int64") * deal.vectors, p.vec, deal, lane, step)
    else:
        start[0] = p.place.start(row[0], sizes)
        load(raw, 0, flat(x, p.dtype), start[0], p.place.unit, deal, lane, step)
