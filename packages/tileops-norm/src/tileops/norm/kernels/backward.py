"""What the backward of RMSNorm and of LayerNorm share: rows staged ahead of the walk, and sums over rows."""

from collections.abc import Mapping
from typing import Any

import tilelang.language as T

from tileops.core.kernel import Static
from tileops.norm.kernels.rows import WARP, Deal, Place, Rows, clear, count, flat, load, stage

STAGES = 3  # rows of a worker in shared memory: one gets its dx, the next is summed, the next but one is on its way


class Gradients(Rows):
    """The rows of x and of dy."""

    def __init__(self, static: Static) -> None:
        axes = len(static["normalized_shape"])
        super().__init__(static, axes)
        dy = static.tensor("dy")
        assert dy is not None
        self.dy_place = Place.of(dy, axes, self.vec)


class Walk:
    """How the workers of a config walk the rows: in a step ``unroll`` times, each time ``groups`` side by side."""

    def __init__(self, p: Gradients, config: Any, sizes: Mapping[str, Any]) -> None:
        self.p, self.config, self.sizes = p, config, sizes
        self.deal = Deal(p.n, p.vec, config.lanes, config.chunks, config.cluster)
        self.rows = count(p.leading, sizes)
        self.unroll = config.unroll
        self.groups = config.threads // config.lanes
        self.workers = T.min(config.workers, T.ceildiv(self.rows, self.groups * self.unroll))
        self.slot = config.threads * p.vec  # elements of a vector a thread
        self.depth = self.unroll * self.deal.chunks * self.slot  # of a stage

    def row(self, step: Any, worker: Any, u: Any, group: Any) -> Any:
        return ((step * self.config.workers + worker) * self.unroll + u) * self.groups + group


@T.macro
def fetch(w, step, worker, tx, rank, row, start, x, dy, x_staged, dy_staged):
    """Start the thread's part of a step's rows on its way."""
    for u in T.unroll(w.unroll):
        row[0] = w.row(step, worker, u, tx // w.config.lanes)
        at = step % STAGES * w.depth + u * w.deal.chunks * w.slot + tx * w.p.vec
        lane, there = tx % w.config.lanes, row[0] < w.rows
        start[0] = w.p.place.start(row[0], w.sizes)
        stage(x_staged, at, w.slot, flat(x, w.p.dtype), start[0], w.p.place.unit, w.deal, lane, rank, there)
        start[0] = w.p.dy_place.start(row[0], w.sizes)
        stage(dy_staged, at, w.slot, flat(dy, w.p.dtype), start[0], w.p.dy_place.unit, w.deal, lane, rank, there)
    T.ptx_commit_group()


@T.macro
def unstage(w, step, u, i, tx, x_staged, dy_staged, x_raw, dy_raw):
    for v in T.vectorized(w.p.vec):
        x_raw[v] = x_staged[step % STAGES * w.depth + (u * w.deal.chunks + i) * w.slot + tx * w.p.vec + v]
    for v in T.vectorized(w.p.vec):
        dy_raw[v] = dy_staged[step % STAGES * w.depth + (u * w.deal.chunks + i) * w.slot + tx * w.p.vec + v]


@T.macro
def wait_shares(config):
    """Until the others of a row have given their shares; a cluster's blocks have arrived before."""
    if config.cluster > 1:
        T.cluster_wait()
    elif config.lanes > WARP:
        T.sync_threads()


@T.macro
def add_groups(w, mine, sums, group, lane):
    """The sums over all groups of a block, in its last group."""
    for g in T.unroll(w.groups):
        if group == g:
            for i in T.unroll(w.deal.chunks):
                chunk = w.deal.chunk(i, lane, 0)
                if w.deal.has(chunk):
                    for v in T.unroll(w.p.vec):
                        if g > 0:
                            mine[i * w.p.vec + v] += sums[chunk * w.p.vec + v]
                        sums[chunk * w.p.vec + v] = mine[i * w.p.vec + v]
        T.sync_threads()


@T.macro
def write_partial(w, partial, mine, worker, lane, rank):
    """A worker's sums over its rows, to its row of ``partial``."""
    for i in T.unroll(w.deal.chunks):
        chunk = w.deal.chunk(i, lane, rank)
        if w.deal.has(chunk):
            for v in T.vectorized(w.p.vec):
                flat(partial, "float32")[w.deal.element(worker, chunk) + v] = mine[i * w.p.vec + v]


@T.macro
def load_both(p, sizes, x_raw, dy_raw, x, dy, row, deal, lane, part):
    """A thread's vectors of a row of x and of dy, zeros for what is not there."""
    clear(x_raw, deal.held)
    clear(dy_raw, deal.held)
    load(x_raw, 0, flat(x, p.dtype), p.place.start(row, sizes), p.place.unit, deal, lane, part)
    load(dy_raw, 0, flat(dy, p.dtype), p.dy_place.start(row, sizes), p.dy_place.unit, deal, lane, part)
