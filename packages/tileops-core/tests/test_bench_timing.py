"""How rivals take turns, when rounds end, and what a timer times; on a clock that tests turn."""

from __future__ import annotations

import sys
import weakref
from contextlib import nullcontext
from itertools import repeat
from types import SimpleNamespace

import attrs
import pytest
import torch

from tileops.core.bench import timers
from tileops.core.bench.timers import TIMERS, TIMERS_OF, Lap, union
from tileops.core.bench.timing import (
    COOL,
    HOT,
    SAMPLES,
    Clock,
    alternate,
    copies_for_cold_l2,
    quick,
    sampled,
    settled,
    timing,
)
from tileops.core.errors import BackendError

CPU = torch.device("cpu")


class Bench:
    """Bursts that take given microseconds on a clock of their own, and what happened, in order."""

    def __init__(self) -> None:
        self.time, self.said = 0.0, []
        self.clock = Clock(lambda: self.time, self.sleep)

    def sleep(self, seconds: float) -> None:
        self.said.append("pause")
        self.time += seconds

    def burst(self, name: str, takes):
        each = iter(takes) if isinstance(takes, list) else repeat(takes)

        def run(during):
            us = next(each)
            self.said.append(name)
            self.time += us * 1e-6
            during()
            return Lap(us)

        return run


@pytest.fixture
def bench() -> Bench:
    return Bench()


def turns(bench: Bench, protocol) -> str:
    """The order of three rivals' bursts, without those of the load."""
    bursts = {name: bench.burst(name, 1000.0) for name in "ABC"}
    alternate(bursts, attrs.evolve(protocol, load=0.0), bench.clock)
    return "".join("." if s == "pause" else s for s in bench.said[3:])


def test_rounds_alternate_their_order_with_a_pause_before_each_burst(bench: Bench) -> None:
    assert turns(bench, attrs.evolve(COOL, least=4, most=4)) == ".A.B.C" + ".C.B.A" + ".A.B.C" + ".C.B.A"


def test_hot_rounds_have_no_pause(bench: Bench) -> None:
    assert turns(bench, attrs.evolve(HOT, least=3, most=3)) == "ABC" + "CBA" + "ABC"


@pytest.mark.parametrize("protocol", [COOL, HOT])
def test_the_load_comes_first_by_time(bench: Bench, protocol) -> None:
    begun = []
    burst = bench.burst("A", 1000.0)

    def noted(during):
        begun.append(bench.time)
        return burst(during)

    laps = alternate({"A": noted}, protocol, bench.clock)["A"]
    assert begun[-len(laps)] == pytest.approx(protocol.load + protocol.pause, abs=0.002)
    assert protocol.load >= 0.2


def test_rounds_end_when_no_median_moves(bench: Bench) -> None:
    steady = alternate({"A": bench.burst("A", 10.0), "B": bench.burst("B", 11.0)}, COOL, bench.clock)
    assert [len(laps) for laps in steady.values()] == [COOL.least, COOL.least]


def test_one_that_drifts_keeps_all_going_to_the_last_round(bench: Bench) -> None:
    drift = [10.0 * 1.02**i for i in range(40)]
    protocol = attrs.evolve(COOL, load=0.0)
    laps = alternate({"A": bench.burst("A", 10.0), "B": bench.burst("B", drift)}, protocol, bench.clock)
    assert [len(seen) for seen in laps.values()] == [COOL.most, COOL.most]


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        ([10.0, 10.0], False),
        ([10.0, 10.0, 10.0], True),
        ([10.0, 10.0, 10.0, 10.09, 10.09], True),
        ([10.0, 10.0, 10.2, 10.2, 10.2], False),
    ],
)
def test_settled_is_half_a_percent_over_two_rounds(seen: list[float], expected: bool) -> None:
    assert settled(seen) is expected


def test_a_first_look_takes_three_rounds(bench: Bench) -> None:
    laps = alternate({"A": bench.burst("A", [1.0, 5.0, 9.0] * 9)}, attrs.evolve(quick(COOL), load=0.0), bench.clock)
    assert len(laps["A"]) == 3


def test_samples_are_taken_while_bursts_run_that_do_not_count(bench: Bench) -> None:
    sampled(bench.burst("A", 1.0), COOL, lambda: bench.said.append("asked"), bench.clock)
    assert bench.said == ["pause", "A", "asked"] * SAMPLES


def test_a_summary_has_median_and_spread() -> None:
    assert attrs.astuple(timing([float(i) for i in range(11)])) == (5.0, 1.0, 9.0, 11)


def test_copies_exceed_l2_until_a_burst_has_one_for_each_call() -> None:
    l2 = 60 << 20
    assert copies_for_cold_l2(1e9, l2) == 1
    assert copies_for_cold_l2(30 << 20, l2) * (30 << 20) > 3 * l2
    assert copies_for_cold_l2(16 << 10, l2) == COOL.of(1e-3).calls


def test_every_backend_has_timers_that_exist() -> None:
    assert {name for names in TIMERS_OF.values() for name in names} == {*TIMERS}
    assert TIMERS_OF["cuda"][0] == "graph"


@pytest.mark.parametrize("turns", [2, 7])
def test_a_burst_goes_round_the_copies_and_what_comes_before_it_is_not_timed(
    turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    time, ran = [0.0], []
    monkeypatch.setattr(timers.time, "perf_counter", lambda: time[0])

    def call(name: str, seconds: float):
        def run() -> None:
            ran.append(name)
            time[0] += seconds

        return run

    burst = TIMERS["wall"]([call("a", 1e-6), call("b", 1e-6), call("c", 1e-6)], turns, CPU, call("before", 1.0))
    assert ran == ["a", "b", "c"]  # each once, before anything counts
    lap = burst(lambda: ran.append("during"))
    assert ran[3:] == ["before", *("abc" * 3)[:turns], "during"]
    assert lap.us == pytest.approx(1.0)


def test_busy_time_is_the_union_of_kernels() -> None:
    assert union([]) == 0
    assert union([(0, 10), (20, 30)]) == 20
    assert union([(5, 15), (0, 10), (2, 3)]) == 15


def test_a_flush_reads_so_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    amax = torch.Tensor.amax
    monkeypatch.setattr(torch.Tensor, "amax", lambda self: read.append(self.nbytes) or amax(self))
    timers.flusher(CPU, 64)()
    timers.flusher(CPU, 0)()
    assert read == [64]


@pytest.fixture
def cupti(monkeypatch: pytest.MonkeyPatch):
    """CUPTI with two kernels, in nanoseconds, whatever runs; ``enabled`` is what it records just now."""
    library = SimpleNamespace(enabled=set(), found=[(1000, 3000), (2000, 6000), (8000, 9000)])
    kinds = {"CONCURRENT_KERNEL": 10, "MEMCPY": 1, "MEMSET": 2}
    library.ActivityKind = kinds
    library.activity_enable, library.activity_disable = library.enabled.add, library.enabled.remove

    def register(requested, completed):
        assert requested()[0] > 0
        library.activity_flush_all = lambda flag: completed(
            [SimpleNamespace(start=a, end=b) for a, b in library.found] if library.enabled == {*kinds.values()} else []
        )

    library.activity_register_callbacks = register
    monkeypatch.setitem(sys.modules, "cupti", SimpleNamespace(cupti=library))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    timers._cupti.cache_clear()
    yield library
    timers._cupti.cache_clear()


def test_cuptis_busy_time_leaves_out_the_gaps_that_its_span_has(cupti) -> None:
    burst = TIMERS["cupti"]([lambda: None], 2, CPU, lambda: None)
    for _ in range(2):
        assert burst(lambda: None) == Lap(us=3.0, span_us=4.0)
        assert not cupti.enabled


def test_cupti_that_records_nothing_says_so_and_is_off_again(cupti) -> None:
    cupti.found = []
    with pytest.raises(BackendError, match="CUPTI recorded no kernel"):
        TIMERS["cupti"]([lambda: None], 2, CPU, lambda: None)(lambda: None)
    assert not cupti.enabled


def test_without_cupti_its_timer_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    timers._cupti.cache_clear()
    monkeypatch.setitem(sys.modules, "cupti", None)
    with pytest.raises(BackendError, match=r'pip install "tileops-core\[bench\]"'):
        TIMERS["cupti"]([lambda: None], 2, CPU, lambda: None)


class Device:
    """A device of which every call takes 1 ms, its events and its graphs; ``seen`` is what it was asked for."""

    def __init__(self) -> None:
        self.ms, self.alive, self.most, self.seen = 0.0, 0, 0, []

    def Event(self, enable_timing: bool) -> SimpleNamespace:
        def record() -> None:
            event.at = self.ms
            self.seen.append("record")

        event = SimpleNamespace(at=None, record=record, synchronize=lambda: self.seen.append("synchronize"))
        event.elapsed_time = lambda stop: stop.at - event.at
        return event

    def _sleep(self, cycles: int) -> None:
        self.ms += cycles / 2e6
        self.seen.append("sleep")

    def synchronize(self, device=None) -> None: ...

    def run(self) -> object:
        """A call, whose output counts as long as somebody holds it."""
        self.ms += 1.0
        self.alive += 1
        self.most = max(self.most, self.alive)
        output = torch.empty(0)
        weakref.finalize(output, lambda: setattr(self, "alive", self.alive - 1))
        return output


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    captured = SimpleNamespace(replay=lambda: setattr(made, "ms", made.ms + 12.0))
    monkeypatch.setattr(torch, "get_device_module", lambda device: made)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: captured)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: nullcontext())
    return made


@pytest.mark.parametrize("timer", ["graph", "events"])
def test_events_stand_around_the_burst_alone(timer: str, device: Device) -> None:
    def before() -> None:
        device.ms += 100.0

    burst = TIMERS[timer]([device.run], 12, CPU, before)
    assert burst(lambda: None) == burst(lambda: None) == Lap(us=1000.0)


@pytest.mark.parametrize("timer", ["graph", "events"])
def test_a_burst_holds_its_calls_whose_memory_it_uses(timer: str, device: Device) -> None:
    calls = [lambda: device.run()]
    gone = weakref.ref(calls[0])
    burst = TIMERS[timer](calls, 12, CPU, lambda: None)
    del calls
    assert gone() is not None
    del burst
    assert gone() is None


@pytest.mark.parametrize("timer", ["graph", "events"])
def test_the_device_sleeps_while_the_host_enqueues_a_burst_and_is_sampled_once_it_runs(
    timer: str, device: Device
) -> None:
    burst = TIMERS[timer]([device.run], 12, CPU, lambda: device.seen.append("before"))
    burst(lambda: device.seen.append("during"))
    assert device.seen == ["before", "sleep", "record", "record", "synchronize", "during", "synchronize"]


@pytest.mark.parametrize("copies", [1, 4])
def test_a_graph_keeps_no_more_outputs_than_copies(copies: int, device: Device) -> None:
    TIMERS["graph"]([device.run] * copies, 12, CPU, lambda: None)
    assert device.alive == 0
    assert device.most == copies + 1  # the next is made before the oldest goes


def test_short_calls_come_in_longer_bursts() -> None:
    """A burst lasts a millisecond, as far as 200 calls go."""
    assert [COOL.of(us).calls for us in (1000, 50, 10, 1)] == [12, 20, 100, 200]
    assert [HOT.of(us).calls for us in (1000, 10)] == [20, 100]
