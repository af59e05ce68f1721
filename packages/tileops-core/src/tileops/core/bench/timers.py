"""Timers: what a burst of calls takes on a device.

A timer is made for calls and returns their burst: the calls in turn, over and over, ``turns`` in all. A burst first
runs ``before``, untimed, and runs ``during`` once the work is under way. The calls go round copies of their inputs.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from tileops.core.errors import BackendError


class Lap(NamedTuple):
    """Microseconds a call in one burst; ``span_us``, where a timer knows it, counts the gaps between kernels too."""

    us: float
    span_us: float | None = None


HEAD_START = 2_000_000  # cycles, some 1 ms: by then even a host that just slept has enqueued what it launches

Burst = Callable[[Callable[[], None]], Lap]
Calls = Sequence[Callable[[], Any]]
Timer = Callable[[Calls, int, torch.device, Callable[[], None]], Burst]


def graph(calls: Calls, turns: int, device: torch.device, before: Callable[[], None]) -> Burst:
    """Replays of a captured graph between two events, so that no host time enters. CUDA only."""
    _warm(calls, device)
    captured = torch.cuda.CUDAGraph()
    held: deque[Any] = deque(maxlen=len(calls))  # outputs go round as inputs do; all of them might not fit
    with torch.cuda.graph(captured):
        for i in range(turns):
            held.append(calls[i % len(calls)]())
    held.clear()
    return _between_events(partial(_replay, captured, calls), turns, device, before)


def _replay(captured: torch.cuda.CUDAGraph, calls: Calls) -> None:
    """The calls are here to stay: the graph reads and writes the memory that they hold."""
    captured.replay()


def events(calls: Calls, turns: int, device: torch.device, before: Callable[[], None]) -> Burst:
    """Calls between two events: a burst that the host takes longer to enqueue than its head start is the host's."""
    _warm(calls, device)
    return _between_events(lambda: _run(calls, turns), turns, device, before)


def cupti(calls: Calls, turns: int, device: torch.device, before: Callable[[], None]) -> Burst:
    """What CUPTI records of the burst: busy time is the union of its kernels, copies and fills. CUDA only."""
    library, records = _cupti()
    _warm(calls, device)

    def burst(during: Callable[[], None]) -> Lap:
        before()
        torch.cuda.synchronize(device)
        records.clear()
        kinds = [library.ActivityKind[kind] for kind in ("CONCURRENT_KERNEL", "MEMCPY", "MEMSET")]
        for kind in kinds:
            library.activity_enable(kind)
        try:
            _run(calls, turns)
            during()
            torch.cuda.synchronize(device)
            library.activity_flush_all(1)
        finally:  # while it records, what other timers see is slower
            for kind in kinds:
                library.activity_disable(kind)
        if not records:
            raise BackendError("CUPTI recorded no kernel; another profiler may hold it: choose another --timer")
        span = max(end for _, end in records) - min(begin for begin, _ in records)
        return Lap(union(records) / turns / 1e3, span / turns / 1e3)

    return burst


def wall(calls: Calls, turns: int, device: torch.device, before: Callable[[], None]) -> Burst:
    """A plain clock, for a CPU."""
    _warm(calls, device)

    def burst(during: Callable[[], None]) -> Lap:
        before()
        start = time.perf_counter()
        _run(calls, turns)
        took = time.perf_counter() - start
        during()
        return Lap(took / turns * 1e6)

    return burst


TIMERS: Mapping[str, Timer] = {"graph": graph, "cupti": cupti, "events": events, "wall": wall}
# Those that a backend has, the default first; the others stand in, in this order, where a rival can't be captured.
TIMERS_OF: Mapping[str, tuple[str, ...]] = {
    "cuda": ("graph", "cupti", "events"),
    "musa": ("events",),
    "cpu": ("wall",),
}


def union(intervals: Iterable[tuple[int, int]]) -> int:
    """How much of the time line is covered."""
    covered, last = 0, -math.inf
    for begin, end in sorted(intervals):
        covered += max(0, end - int(max(begin, last)))
        last = max(last, end)
    return covered


def flusher(device: torch.device, nbytes: int) -> Callable[[], None]:
    """Reads so many bytes, which leaves nothing else in a smaller cache, and nothing that waits to be written back."""
    if nbytes == 0:
        return lambda: None
    space = torch.zeros(nbytes // 4, device=device)

    def flush() -> None:
        space.amax()

    return flush


def _warm(calls: Calls, device: torch.device) -> None:
    """Each call once, so that what it makes on its first run, or raises, comes before any burst."""
    for call in calls:
        call()
    torch.get_device_module(device).synchronize(device)


def _run(calls: Calls, turns: int) -> None:
    n = len(calls)
    for i in range(turns):
        calls[i % n]()


def _between_events(run: Callable[[], None], turns: int, device: torch.device, before: Callable[[], None]) -> Burst:
    module = torch.get_device_module(device)
    hold = getattr(module, "_sleep", lambda cycles: None)  # torch_musa need not have one
    start, stop = (module.Event(enable_timing=True) for _ in range(2))

    def burst(during: Callable[[], None]) -> Lap:
        before()
        hold(HEAD_START)
        start.record()
        run()
        stop.record()
        start.synchronize()
        during()
        stop.synchronize()
        return Lap(start.elapsed_time(stop) * 1e3 / turns)

    return burst


@cache
def _cupti() -> tuple[Any, list[tuple[int, int]]]:
    """CUPTI, and the list into which it puts begin and end, in nanoseconds, of what runs."""
    try:
        from cupti import cupti as library
    except ImportError as e:
        mend = 'pip install "tileops-core[bench]"'
        raise BackendError(f"CUPTI can't be imported ({e}); {mend}") from None
    records: list[tuple[int, int]] = []

    def completed(activities: list[Any]) -> None:
        records.extend((a.start, a.end) for a in activities)

    library.activity_register_callbacks(lambda: (8 << 20, 0), completed)
    return library, records
