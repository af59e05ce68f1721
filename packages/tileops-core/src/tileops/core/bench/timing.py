"""Device time of a call, rivals side by side, on a card whose clock follows its power.

*Cool* protocol: a pause, one burst of calls of one rival, a pause, a burst of the next, in rounds that alternate their
order. A burst is one replay of a CUDA graph, so that no host time enters. L2 is cold: the calls of a burst go round
copies of the inputs that together exceed it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import attrs
import torch

CALLS, ROUNDS, PAUSE = 12, 9, 0.04
WARM_SECONDS = 0.2


@attrs.frozen
class Timing:
    """Microseconds a call: median and spread of ``n`` bursts."""

    median: float
    p10: float
    p90: float
    n: int


def timing(microseconds: list[float]) -> Timing:
    """The summary of bursts."""
    tenths = statistics.quantiles(microseconds, n=10, method="inclusive")
    return Timing(statistics.median(microseconds), tenths[0], tenths[-1], len(microseconds))


def copies_for_cold_l2(nbytes: float, l2_bytes: int) -> int:
    """How many copies of a call's tensors a burst goes round so that none is still in L2."""
    return max(1, min(CALLS, int(3 * l2_bytes // max(nbytes, 1)) + 1))


Burst = Callable[[], None]


def record(calls: list[Callable[[], Any]]) -> Burst:
    """A replay of one burst: the calls in turn, ``CALLS`` in all."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    turns = [calls[i % len(calls)] for i in range(CALLS)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in turns]  # outputs that live as long as the graph, so that none shares memory
    del kept
    replay: Burst = graph.replay
    return replay


def turns(bursts: Mapping[str, Burst]) -> Iterator[dict[str, float]]:
    """Microseconds a call of each rival, round by round without end: the cool protocol."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    until = time.perf_counter() + WARM_SECONDS
    while time.perf_counter() < until:
        for burst in bursts.values():
            burst()
        torch.cuda.synchronize()
    order = list(bursts.items())
    while True:
        took = {}
        for name, burst in order:
            time.sleep(PAUSE)
            start.record()
            burst()
            stop.record()
            stop.synchronize()
            took[name] = start.elapsed_time(stop) * 1e3 / CALLS
        yield took
        order.reverse()


def cool(bursts: Mapping[str, Burst], rounds: int = ROUNDS) -> dict[str, Timing]:
    """Time bursts of several rivals by the cool protocol."""
    seen = list(islice(turns(bursts), rounds))
    return {name: timing([took[name] for took in seen]) for name in bursts}
