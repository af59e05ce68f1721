"""How rivals take turns on a card whose clock follows its power.

*Cool*: a pause, one burst of one rival, a pause, a burst of the next, in rounds that alternate their order (A B C,
C B A), until no median moves any more. *Hot*: the same without pauses, after a while of load, as a busy server runs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice

import attrs

from tileops.core.bench.timers import Burst, Lap

SETTLED = 0.005  # of a median: less is no movement
MOST_CALLS = 200  # of a burst
SAMPLES = 5  # of what the driver says


@attrs.frozen
class Timing:
    """Microseconds a call: median and spread of ``n`` bursts."""

    median: float
    p10: float
    p90: float
    n: int


def timing(microseconds: Sequence[float]) -> Timing:
    """The summary of two or more bursts."""
    tenths = statistics.quantiles(microseconds, n=10, method="inclusive")
    return Timing(statistics.median(microseconds), tenths[0], tenths[-1], len(microseconds))


@attrs.frozen
class Clock:
    """Seconds, as they pass here."""

    now: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], None] = time.sleep


REAL = Clock()


@attrs.frozen
class Protocol:
    """``load`` seconds of running, then ``least`` to ``most`` rounds of a ``pause`` and a burst of ``calls`` each.

    Short calls are more, ``MOST_CALLS`` at most, so that a burst lasts ``lasts`` seconds: its start must not weigh.
    """

    calls: int
    pause: float
    load: float
    least: int = 9
    most: int = 25
    lasts: float = 1e-3

    def __str__(self) -> str:
        pauses = f"{self.pause * 1e3:.0f} ms pauses" if self.pause else "no pauses"
        rounds = f"{self.least} to {self.most} alternating rounds"
        bursts = f"bursts of {self.calls} calls or {self.lasts * 1e3:.0f} ms"
        return f"{bursts}, {pauses}, {rounds}, {self.load:.1f} s of running before"

    def of(self, us: float) -> Protocol:
        """The protocol for calls that take so many microseconds."""
        return attrs.evolve(self, calls=max(self.calls, min(MOST_CALLS, int(self.lasts * 1e6 / us))))


COOL = Protocol(calls=12, pause=0.04, load=0.2)
HOT = Protocol(calls=20, pause=0.0, load=0.3)


def quick(protocol: Protocol) -> Protocol:
    """For a first look: three rounds, whether settled or not."""
    return attrs.evolve(protocol, least=3, most=3)


def turns(bursts: Mapping[str, Burst], protocol: Protocol, clock: Clock = REAL) -> Iterator[dict[str, Lap]]:
    """Round by round, without end, a lap of each rival."""
    until = clock.now() + protocol.load
    while True:
        for burst in bursts.values():
            burst(lambda: None)
        if clock.now() >= until:
            break
    order = list(bursts)
    while True:
        laps = {}
        for name in order:
            if protocol.pause:
                clock.sleep(protocol.pause)
            laps[name] = bursts[name](lambda: None)
        yield laps
        order.reverse()


def alternate(bursts: Mapping[str, Burst], protocol: Protocol, clock: Clock = REAL) -> dict[str, list[Lap]]:
    """The laps of each rival in as many rounds as the protocol asks for."""
    seen: dict[str, list[Lap]] = {name: [] for name in bursts}
    for turn, laps in enumerate(islice(turns(bursts, protocol, clock), protocol.most), 1):
        for name, lap in laps.items():
            seen[name].append(lap)
        if turn >= protocol.least and all(settled([lap.us for lap in of]) for of in seen.values()):
            break
    return seen


def sampled(burst: Burst, protocol: Protocol, sample: Callable[[], None], clock: Clock = REAL) -> None:
    """Call ``sample`` while bursts run that count for nothing: what it costs the device is in no figure."""
    for _ in range(SAMPLES):
        if protocol.pause:
            clock.sleep(protocol.pause)
        burst(sample)


def settled(microseconds: Sequence[float]) -> bool:
    """Whether the last two rounds, one of each order, have moved the median by 0.5 % at most."""
    if len(microseconds) < 3:
        return False
    median = statistics.median(microseconds)
    return abs(median - statistics.median(microseconds[:-2])) <= SETTLED * median


def copies_for_cold_l2(nbytes: float, l2_bytes: int) -> int:
    """How many copies of a call's tensors a burst goes round so that none is still in L2; at most one for each call."""
    return max(1, min(MOST_CALLS, int(3 * l2_bytes // max(nbytes, 1)) + 1))
