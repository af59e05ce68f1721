"""Device time of a call, rivals side by side, on a card whose clock follows its power.

*Cool* protocol: a pause, one burst of calls of one rival, a pause, a burst of the next, in rounds that alternate their
order. A burst is one replay of a CUDA graph, so that no host time enters. L2 is cold: the calls of a burst go round
copies of the inputs that together exceed it.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch

CALLS, MOST_CALLS, ROUNDS, PAUSE = 12, 200, 9, 0.04
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


def calls_of_a_burst(call: Callable[[], Any]) -> int:
    """12, or more where they take less than a millisecond: what a replay costs must not weigh."""
    once, stop = record([call]), torch.cuda.Event(enable_timing=True)
    start = torch.cuda.Event(enable_timing=True)
    once()
    start.record()
    once()
    stop.record()
    stop.synchronize()
    return max(CALLS, min(MOST_CALLS, int(CALLS / max(start.elapsed_time(stop), 1e-3))))


def record(calls: list[Callable[[], Any]], count: int = CALLS) -> Burst:
    """A replay of one burst: the calls in turn, ``count`` in all."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    turns = [calls[i % len(calls)] for i in range(count)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # As many outputs as inputs live at a time, so that they go round as those do.
        kept = deque((call() for call in turns), maxlen=len(calls))
    del kept
    replay: Burst = graph.replay
    return replay


def cool(bursts: Mapping[str, Burst], count: int = CALLS, rounds: int = ROUNDS) -> dict[str, Timing]:
    """Time bursts of ``count`` calls of several rivals by the cool protocol."""
    seen: dict[str, list[float]] = {name: [] for name in bursts}
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    until = time.perf_counter() + WARM_SECONDS
    while time.perf_counter() < until:
        for burst in bursts.values():
            burst()
        torch.cuda.synchronize()
    for turn in range(rounds):
        order = list(bursts.items())
        for name, burst in order if turn % 2 == 0 else reversed(order):
            time.sleep(PAUSE)
            start.record()
            burst()
            stop.record()
            stop.synchronize()
            seen[name].append(start.elapsed_time(stop) * 1e3 / count)
    return {name: timing(values) for name, values in seen.items()}
