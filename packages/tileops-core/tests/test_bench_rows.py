"""One row measured: what is verified, which times stand beside which, and what makes a row or a rival fail.

Times are made up: a timer here gives what a call says of itself.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import attrs
import pytest
import torch

from tileops.core import program
from tileops.core.bench import nvml, rows, run
from tileops.core.bench.rivals import Missing, Rival
from tileops.core.bench.rows import Bench, measure
from tileops.core.bench.timers import Lap
from tileops.core.bench.timing import COOL, HOT, Clock
from tileops.core.check import Call
from tileops.core.errors import BackendError, TileOpsError
from tileops.core.families import find_entry
from tileops.core.roofline import Figure, Peak, Profile, Rated
from tileops.core.workloads import labelled
from tileops.gemm import GEMMFwdOp
from tileops.norm import BatchNormFwdOp

OURS_US = 10.0
UNKNOWN = Figure(None, "unknown", "not asked for here")


def rated(value: float) -> Rated:
    return Rated(Figure(value, "datasheet", "made up"), UNKNOWN)


def board(call: Call, percent: float, by: str) -> Profile:
    """Figures by which 10 us are so much of a call's bound."""
    from tileops.core.roofline import work

    seconds, counted = OURS_US * 1e-6 * percent / 100, work(call)
    slow, fast = 1 / seconds, 1e3 / seconds
    peak = Peak(
        rated(counted.flops * (slow if by == "compute" else fast)).theoretical,
        UNKNOWN,
        Figure(4096, "derived", "made up"),
    )
    return Profile(
        board="made-up",
        name="made up",
        matches=(),
        peak={"tensor_core": {"bfloat16": peak}},
        bandwidth=rated(counted.bytes * (slow if by == "memory" else fast)),
        sm_count=rated(132),
        l2_bytes=rated(1),
        max_clock_hz=rated(1),
        launch_floor_s=rated(1),
    )


@pytest.fixture
def call() -> Call:
    op = GEMMFwdOp()
    return attrs.evolve(op.bind((8, 16), (4, 16), T="bfloat16"), id="GEMMFwdOp/small-bfloat16")


@attrs.define
class Kit:
    """A bench whose times are what calls say; ``rivals`` are those of the next row."""

    rivals: dict[str, Any] = attrs.field(factory=dict)
    recorded: list[tuple[str, str]] = attrs.field(factory=list)  # timer, whose
    time: float = 0.0
    refuses: set[str] = attrs.field(factory=set)  # rivals that "graph" can't capture

    def timer(self, timer: str) -> Any:
        def record(calls: Any, turns: int, device: Any, before: Any) -> Any:
            who = getattr(calls[0], "name", "tileops")
            if timer == "graph" and who in self.refuses:
                raise RuntimeError("operation not permitted when stream is capturing")
            self.recorded.append((timer, who))
            us = getattr(calls[0], "us", OURS_US) * (2 if turns == HOT.calls else 1)
            us += 1 if timer == "events" else 0

            def burst(during: Callable[[], None]) -> Lap:
                self.time += 0.05
                begun = self.time
                during()
                return Lap(us + (self.time - begun) * 1e6)

            return burst

        return record

    def bench(self, **changes: Any) -> Bench:
        clock = Clock(lambda: self.time, lambda seconds: None)
        cool, hot = (attrs.evolve(protocol, lasts=0) for protocol in (COOL, HOT))
        return Bench(torch.device("cpu"), "graph", clock=clock, floor_us=2.0, cool=cool, hot=hot, **changes)


@pytest.fixture
def kit(monkeypatch: pytest.MonkeyPatch) -> Kit:
    made = Kit()
    monkeypatch.setattr(rows, "TIMERS", {name: made.timer(name) for name in ("graph", "events")})
    monkeypatch.setattr(rows, "TIMERS_OF", {"cpu": ("graph", "events")})
    monkeypatch.setattr(rows, "rivals_of", lambda entry, backend: made.rivals)
    return made


@attrs.define
class Timed:
    """A rival's call that takes ``us``."""

    run: Callable[[], Any]
    us: float
    name: str = "torch"

    def __call__(self) -> Any:
        return self.run()


def rival(us: float, name: str = "torch", scale: float = 1.0) -> Any:
    def make(call: Call, inputs: Any) -> Any:
        return Timed(lambda: scale * torch.mm(inputs["a"], inputs["b"].mT), us, name)

    return make


def test_a_memory_bound_row_has_the_cool_figures(kit: Kit, call: Call) -> None:
    kit.rivals = {"torch": rival(12.0), "slow": rival(15.0, "slow")}
    row = measure(call, kit.bench(profile=board(call, 80, "memory")))
    assert (row["status"], row["case"], row["kernel"]) == ("ok", call.id, "reference")
    assert row["us"] == {"median": 10.0, "p10": 10.0, "p90": 10.0, "n": COOL.least}
    assert (row["fastest"], row["ratio"]) == ("torch", pytest.approx(1.2))
    assert row["rivals"]["slow"]["us"] == 15.0
    assert row["percent"] == pytest.approx(80)
    assert (row["bound_by"], row["limit"]) == ("memory", "memory")
    assert row["settled"]
    assert row["error"] <= 1
    assert "hot" not in row
    json.dumps(row, allow_nan=False)


def test_a_compute_bound_row_has_the_hot_figures_beside_the_cool_ones(kit: Kit, call: Call) -> None:
    kit.rivals = {"torch": rival(12.0)}
    row = measure(call, kit.bench(profile=board(call, 80, "compute")))
    assert row["ratio"] == pytest.approx(1.2)
    assert row["us"]["median"] == 10.0
    assert row["hot"]["us"]["median"] == 20.0
    assert (row["rivals"]["torch"]["hot_us"], row["hot_ratio"]) == (24.0, pytest.approx(1.2))


def test_a_driver_that_takes_its_time_is_in_no_figure(kit: Kit, call: Call) -> None:
    def slow() -> nvml.Sample:
        kit.time += 1e-4
        return nvml.Sample(1980, 650.0)

    kit.rivals = {"torch": rival(12.0)}
    row = measure(call, kit.bench(sampler=slow, profile=board(call, 80, "compute")))
    assert (row["us"]["median"], row["us"]["p90"], row["hot"]["us"]["p90"]) == (10.0, 10.0, 20.0)
    assert (row["clock_mhz"], row["hot"]["clock_mhz"]) == (1980, 1980)


def test_clock_and_power_are_those_of_our_bursts(kit: Kit, call: Call) -> None:
    clocks = iter(range(1700, 1800))
    kit.rivals = {"torch": rival(12.0)}
    sampler = lambda: nvml.Sample(next(clocks), 650.0, ("power cap",))  # noqa: E731
    row = measure(call, kit.bench(profile=board(call, 80, "compute"), sampler=sampler))
    assert (row["clock_mhz"], row["power_w"], row["throttle"]) == (1702, 650.0, ["power cap"])
    assert row["hot"]["clock_mhz"] == 1707
    peak = 4096 * 132 * 1702e6
    assert row["percent_at_clock"] == pytest.approx(100 * row["flops"] / 10e-6 / peak)


def test_over_the_boards_peak_a_row_fails(kit: Kit, call: Call) -> None:
    row = measure(call, kit.bench(profile=board(call, 101, "compute")))
    assert row["status"] == "failed"
    assert row["reason"] == (
        "10 us is less than the 10.1 us that the board's compute peak allows: timed or counted wrongly"
    )
    assert row["us"]["median"] == 10.0


def test_a_launch_may_be_what_limits(kit: Kit, call: Call) -> None:
    row = measure(call, kit.bench(profile=board(call, 15, "memory")))
    assert (row["bound_by"], row["limit"], row["floor_us"]) == ("memory", "launch", 2.0)


def test_tensors_that_stay_in_l2_are_not_bound_by_memory(kit: Kit, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bench, "l2_bytes", property(lambda self: 1 << 20))
    hot = measure(call, kit.bench(profile=board(call, 120, "memory"), cold_l2=False))
    assert (hot["status"], hot["bound_by"]) == ("ok", "l2")
    cold = measure(call, kit.bench(profile=board(call, 120, "memory")))
    assert cold["status"] == "failed"


def test_a_large_row_that_memory_bounds_stands_beside_a_copy_of_as_many_bytes(
    kit: Kit, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = []
    monkeypatch.setattr(rows, "_copy", lambda nbytes, device: copied.append(nbytes) or [Timed(lambda: None, 9.0)])
    kit.rivals = {"torch": rival(12.0)}
    small = measure(call, kit.bench(profile=board(call, 80, "memory")))
    monkeypatch.setattr(rows, "COPIED_FROM", small["bytes"])
    computes, large = (measure(call, kit.bench(profile=board(call, 80, by))) for by in ("compute", "memory"))
    assert (copied, large["copy"]) == ([small["bytes"]], {"us": 9.0, "ratio": pytest.approx(0.9)})
    assert "copy" not in small | computes
    assert list(large["rivals"]) == ["torch"]  # a copy is no rival
    assert large["fastest"] == "torch"


def test_a_copy_reads_half_of_the_bytes_and_writes_half() -> None:
    (copy,) = rows._copy(800, torch.device("cpu"))
    assert copy().nbytes == 400


@pytest.mark.parametrize(("l2_bytes", "copies", "flushed"), [(0, 1, 0), (100, 1, 0), (1 << 20, 200, 2 << 20)])
def test_inputs_come_from_memory_by_copies_or_where_those_fit_l2_by_a_flush(
    l2_bytes: int, copies: int, flushed: int, kit: Kit, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, flushes = [], []
    make = rows.make_inputs
    monkeypatch.setattr(Bench, "l2_bytes", property(lambda self: l2_bytes))
    monkeypatch.setattr(rows, "make_inputs", lambda *args: made.append(1) or make(*args))
    monkeypatch.setattr(rows, "flusher", lambda device, nbytes: flushes.append(nbytes) or (lambda: None))
    assert measure(call, kit.bench())["status"] == "ok"
    assert (len(made), flushes) == (copies, [flushed])


def test_a_rival_far_from_the_bound_of_a_large_row_is_suspect_and_leads_nobody(
    kit: Kit, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit.rivals = {"torch": rival(100.0), "odd": rival(300.0, "odd")}
    monkeypatch.setattr(rows.rates, "LARGE_US", 5)
    row = measure(call, kit.bench(profile=board(call, 80, "memory")))
    assert {n: r["status"] for n, r in row["rivals"].items()} == {"torch": "suspect", "odd": "suspect"}
    assert row["rivals"]["torch"]["reason"].startswith("at 8% of the bound on a large shape")
    assert "ratio" not in row
    monkeypatch.undo()
    small = rows.rates.doubt({"bound_us": 8.0}, 100.0)
    assert small is None


def missing(call: Call, inputs: Any) -> Any:
    raise Missing("no wheels for this Python")


def broken(call: Call, inputs: Any) -> Any:
    raise ValueError("no such layout\nand more")


def test_what_a_rival_lacks_or_gets_wrong_is_said_and_our_row_stands(kit: Kit, call: Call) -> None:
    kit.rivals = {
        "absent": missing,
        "unwritten": "no adapter yet",
        "broken": broken,
        "wrong": rival(1.0, "wrong", scale=2.0),
        "nan": rival(1.0, "nan", scale=float("nan")),
        "torch": rival(12.0),
    }
    row = measure(call, kit.bench())
    found = row["rivals"]
    assert found["absent"] == {"status": "missing", "reason": "no wheels for this Python"}
    assert found["unwritten"] == {"status": "missing", "reason": "no adapter yet"}
    assert found["broken"] == {"status": "failed", "reason": "ValueError: no such layout"}
    assert found["wrong"]["status"] == found["nan"]["status"] == "failed"
    assert found["wrong"]["reason"].startswith("its error is ")
    assert (row["status"], row["fastest"]) == ("ok", "torch")
    json.dumps(row, allow_nan=False)


@pytest.mark.parametrize("factor", [1.0, 1.01])
def test_calls_that_write_to_their_inputs_are_verified_on_inputs_of_their_own(kit: Kit, factor: float) -> None:
    """Running statistics that an earlier call has moved would be another problem."""
    op = BatchNormFwdOp(training=True)
    call = attrs.evolve(op.bind((8, 3, 5), (3,), (3,), T="float32"), id="BatchNormFwdOp/small-float32")

    def make(call: Call, inputs: Any) -> Any:
        x, mean, var = inputs["x"], inputs["running_mean"], inputs["running_var"]

        def run() -> Any:
            y = torch.nn.functional.batch_norm(x, mean, var, training=True)
            mean.mul_(factor)
            return y

        return Timed(run, 12.0)

    kit.rivals = {"torch": make}
    row = measure(call, kit.bench())
    assert row["status"] == "ok"
    assert row["rivals"]["torch"]["status"] == ("ok" if factor == 1 else "failed")


def test_a_result_that_is_read_apart_is_not_timed(kit: Kit, call: Call) -> None:
    read = []

    def make(call: Call, inputs: Any) -> Rival:
        twice = rival(1.0, scale=2.0)(call, inputs)
        return Rival(twice, lambda result: read.append(1) or result / 2)

    kit.rivals = {"torch": make}
    assert measure(call, kit.bench())["rivals"]["torch"]["status"] == "ok"
    assert read == [1]


def test_where_a_rival_cannot_be_captured_both_sides_take_another_timer(kit: Kit, call: Call) -> None:
    kit.rivals = {"torch": rival(12.0), "lib": rival(9.0, "lib")}
    kit.refuses = {"lib"}
    row = measure(call, kit.bench())
    lib = row["rivals"]["lib"]
    assert (lib["timer"], lib["us"], lib["ours_us"]) == ("events", 10.0, 11.0)
    assert lib["note"] == "graph: RuntimeError: operation not permitted when stream is capturing"
    assert (row["fastest"], row["ratio"]) == ("lib", pytest.approx(10 / 11))
    assert "timer" not in row["rivals"]["torch"]
    assert {*kit.recorded} == {(t, "tileops") for t in ("graph", "events")} | {("graph", "torch"), ("events", "lib")}


def test_one_that_no_timer_can_time_has_failed(kit: Kit, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    kit.rivals, kit.refuses = {"torch": rival(12.0), "lib": rival(9.0, "lib")}, {"lib"}
    monkeypatch.setattr(rows, "TIMERS_OF", {"cpu": ("graph",)})
    row = measure(call, kit.bench())
    assert (row["rivals"]["lib"]["status"], row["fastest"]) == ("failed", "torch")


def test_a_wrong_result_of_ours_is_not_timed(kit: Kit, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GEMMFwdOp, "__call__", lambda self, a, b: 2 * self.run(a, b))
    row = measure(call, kit.bench())
    assert (row["status"], row["reason"]) == ("failed", "the result is wrong")
    assert row["error"] > 1
    assert kit.recorded == []


def test_what_our_op_refuses_is_the_rows_reason(kit: Kit, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any, a: Any, b: Any) -> Any:
        raise BackendError("nvcc is not on PATH")

    monkeypatch.setattr(GEMMFwdOp, "__call__", refuse)
    row = measure(call, kit.bench())
    assert (row["status"], row["reason"]) == ("failed", "nvcc is not on PATH")


def test_a_row_that_raises_is_a_failed_row_and_the_run_goes_on(kit: Kit) -> None:
    calls = [c for label in ("square-1k", "square-8k") for c in labelled(find_entry("GEMMFwdOp"), label)]

    def once(call: Call, bench: Bench) -> dict[str, Any]:
        if "8k" in str(call.id):
            return {"case": call.id, "status": "ok"}
        raise MemoryError("out of memory")

    found = list(run.run(calls, kit.bench(), once))
    assert [row["status"] for row in found] == ["failed", "failed", "ok"]
    assert found[0]["reason"] == "MemoryError: out of memory"
    assert found[0]["case"] == "GEMMFwdOp/square-1k-float16"


def test_a_row_without_its_op_fails_whatever_the_error(kit: Kit, call: Call) -> None:
    def refuse(call: Call, bench: Bench) -> dict[str, Any]:
        raise TileOpsError("no such thing")

    (row,) = run.run([call], kit.bench(), refuse)
    assert row["reason"] == "TileOpsError: no such thing"


def test_the_compilers_time_is_taken_once_an_op_from_an_empty_cache(
    kit: Kit, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TILEOPS_CACHE_DIR", str(tmp_path))
    homes = []
    monkeypatch.setattr(program, "compile_only", lambda recipe: homes.append(program.cache_dir()))
    monkeypatch.setattr(run, "recipes", lambda calls, device: ["recipe"])
    statuses = iter(["failed", "ok", "ok"])

    def fake(call: Call, bench: Bench) -> dict[str, Any]:
        return {"case": call.id, "status": next(statuses), "first_call": {"warm_s": 0.1}}

    calls = [c for label in ("square-1k", "square-8k") for c in labelled(find_entry("GEMMFwdOp"), label)]
    found = list(run.run(calls, kit.bench(), fake, cold=True))
    assert ["cold_s" in row["first_call"] for row in found] == [False, True, False]
    assert len(homes) == 1
    assert homes[0] != program.cache_dir() == tmp_path / "programs"


def test_a_device_that_is_lost_ends_the_run_after_its_row(
    kit: Kit, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(device: Any) -> None:
        raise RuntimeError("an illegal memory access was encountered\nCUDA kernel errors")

    monkeypatch.setattr(run.torch, "get_device_module", lambda device: SimpleNamespace(synchronize=lost))
    bench = attrs.evolve(kit.bench(), device=torch.device("cuda"))
    measured = run.run([call, call], bench, lambda call, bench: {"case": call.id, "status": "failed"})
    assert next(measured)["status"] == "failed"
    with pytest.raises(BackendError, match="lost after GEMMFwdOp/small-bfloat16: an illegal memory access was enc"):
        next(measured)


class Nvml(ModuleType):
    """The driver's library, as its package shows it."""

    NVML_CLOCK_SM = 1
    NVMLError = OSError
    broken = False

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        assert uuid == "GPU-1-2"
        return "handle"

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        if self.broken:
            raise OSError("GPU is lost")
        return 1755

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        return 695_500

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:
        return 0x1 | 0x4 | 0x40


def test_the_drivers_clock_and_power(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Nvml("pynvml")
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1-2"))
    read = nvml.sampler(torch.device("cuda"))
    assert read() == nvml.Sample(1755, 695.5, ("power cap", "hardware thermal"))
    library.broken = True
    assert read() is None


def test_without_the_drivers_package_there_is_no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvml.sampler(torch.device("cuda"))() is None
    assert nvml.state([]) == {}
