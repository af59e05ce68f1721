"""One row measured: ours and its rivals verified on the inputs that are then timed, side by side in one run."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import attrs
import torch

from tileops.core.accuracy import collect, judge, mutated
from tileops.core.backend import gpu_backend
from tileops.core.bench import nvml, rates
from tileops.core.bench.host import gpu_cost
from tileops.core.bench.rivals import Missing, outputs, rivals_of
from tileops.core.bench.timers import TIMERS, TIMERS_OF, Burst, Calls, Lap, flusher
from tileops.core.bench.timing import (
    COOL,
    HOT,
    REAL,
    Clock,
    Protocol,
    alternate,
    copies_for_cold_l2,
    sampled,
    settled,
    timing,
)
from tileops.core.check import Call
from tileops.core.errors import TileOpsError
from tileops.core.families import op_class
from tileops.core.inputs import make_inputs
from tileops.core.roofline import Profile, bound

HOST_BELOW_US = 20  # of device time: above, no caller waits for the host
OURS = "tileops"
COPY, COPIED_FROM = "copy", 64e6  # bytes of a row: below, a copy says more of a launch than of memory


@attrs.frozen
class Bench:
    """How rows are measured. ``timer`` is a name of ``TIMERS``; ``floor_us`` is the time of the least kernel by it."""

    device: torch.device
    timer: str
    profile: Profile | None = None
    cold_l2: bool = True
    cool: Protocol = COOL
    hot: Protocol = HOT
    clock: Clock = REAL
    sampler: nvml.Sampler = lambda: None
    floor_us: float | None = None
    seed: int = 0

    @property
    def l2_bytes(self) -> int:
        """Of the device; 0 on a CPU, whose caches are left as they are."""
        backend = gpu_backend(self.device.type)
        return backend.device(self.device.index or 0).l2_bytes if backend else 0


Bursts = dict[str, dict[str, Burst]]  # by timer, by rival
Before = Callable[[], None]


def describe(call: Call) -> dict[str, Any]:
    """What a row says whatever comes of it."""
    return {
        "case": call.id,
        "op": call.entry.name,
        "label": (call.id or "").partition("/")[2],
        "dtypes": [call.indices[n] for n, i in call.entry.signature.indices.items() if i.kind == "DType"],
    }


def failed(call: Call, reason: str) -> dict[str, Any]:
    """The row of a call that came to nothing."""
    return describe(call) | {"status": "failed", "reason": reason}


def measure(call: Call, bench: Bench) -> dict[str, Any]:
    """The result of one row; a failure of ours or of a rival is part of it."""
    limit = bound(call, bench.profile)
    fits_l2 = not bench.cold_l2 and limit.bytes <= bench.l2_bytes
    row = describe(call) | rates.bounds(limit, bench.floor_us, fits_l2)
    copies = copies_for_cold_l2(limit.bytes, bench.l2_bytes) if bench.cold_l2 else 1
    small = bench.cold_l2 and copies * limit.bytes < 2 * bench.l2_bytes  # a whole burst might stay in L2
    before = flusher(bench.device, 2 * bench.l2_bytes if small else 0)
    inputs = [make_inputs(call, bench.device, bench.seed + i) for i in range(copies)]
    verified = _verify(row, call, inputs, bench)
    if row["status"] != "ok":
        return row
    ours = verified.pop(OURS)
    rough = TIMERS[bench.timer](ours, bench.cool.calls, bench.device, before)(lambda: None).us
    bench = attrs.evolve(bench, cool=bench.cool.of(rough), hot=bench.hot.of(rough))
    copied = row["bound_by"] == "memory" and limit.bytes >= COPIED_FROM
    if copied:
        verified[COPY], row["rivals"][COPY] = _copy(limit.bytes, bench.device), {}
    _cool(row, ours, verified, bench, before)
    if copied:
        row[COPY] = row["rivals"].pop(COPY)
    if row["bound_by"] == "compute":
        _hot(row, ours, verified, bench, before)
    row |= rates.rates(limit, row["us"]["median"], row.get("clock_mhz"), bench.profile)
    rivals = row["rivals"]
    for rival in rivals.values():
        if "us" in rival and (doubt := rates.doubt(row, rival["us"])):
            rival |= {"status": "suspect", "reason": doubt}
    row |= _lead(rivals, "fastest", "ratio") | _lead(rivals, "hot_fastest", "hot_ratio")
    row |= rates.impossible(row, limit.exact)
    if bench.device.type == "cuda" and row["us"]["median"] < HOST_BELOW_US:
        row["host"] = gpu_cost(call, str(bench.device))
        row["host_us"] = row["host"]["cached"]
        if "cached_ratio" in row["host"]:
            row["host_ratio"] = row["host"]["cached_ratio"]
    return row


def _verify(row: dict[str, Any], call: Call, inputs: list[Any], bench: Bench) -> dict[str, Calls]:
    """The calls that are right, ours first, each on every copy of the inputs; what the others lack is in the row."""
    op: Any = op_class(call.entry)(**call.params)
    ours = [partial(op, *i.values()) for i in inputs]
    try:
        row["first_call"] = {"warm_s": _seconds(ours[0], bench)}
        row["extra_bytes"] = extra_bytes(call, ours[0], bench.device)
        row["kernel"] = str(op.explain(*inputs[0].values()).kernel)
    except TileOpsError as e:
        row |= {"status": "failed", "reason": str(e)}
        return {}

    def anew() -> Any:
        """The first inputs, as they are before any call, which may write to them."""
        return make_inputs(call, bench.device, bench.seed) if mutated(call) else inputs[0]

    verdict = judge(call, anew())

    def error(make: Callable[[Any], Callable[[], Any]]) -> float:
        given = anew()
        return verdict(collect(call, outputs(make(given)), given)).error

    wrong = error(lambda given: partial(op, *given.values()))
    row["error"] = wrong if math.isfinite(wrong) else None
    if not wrong <= 1:
        row |= {"status": "failed", "reason": "the result is wrong"}
        return {}
    row |= {"status": "ok", "rivals": {}}
    verified: dict[str, Calls] = {OURS: ours}
    for name, make in rivals_of(call.entry, bench.device.type).items():
        row["rivals"][name], calls = _verified(make, call, inputs, error)
        if calls:
            verified[name] = calls
    return verified


def extra_bytes(call: Call, run: Callable[[], Any], device: torch.device) -> int | None:
    """The most memory that a call takes beside its inputs and outputs; None on a CPU."""
    if device.type == "cpu":
        return None
    memory = torch.get_device_module(device)
    memory.synchronize(device)
    before = memory.memory_allocated(device)
    memory.reset_peak_memory_stats(device)
    run()
    memory.synchronize(device)
    given = sum(m.nbytes for m in call.outputs.values() if m is not None)
    return max(0, int(memory.max_memory_allocated(device)) - int(before) - given)


def floor_us(bench: Bench) -> float:
    """The time of the least kernel, which touches one element, by the bench's timer."""
    one = torch.ones(1, device=bench.device)
    burst = TIMERS[bench.timer]([one.neg_], bench.cool.calls, bench.device, lambda: None)
    laps = alternate({"least": burst}, bench.cool, bench.clock)["least"]
    return statistics.median(lap.us for lap in laps)


def _copy(nbytes: float, device: torch.device) -> Calls:
    """What moves as many bytes at the rate of memory; a kernel, for a graph makes copy_ a node that is slower."""
    source = torch.randn(int(nbytes) // 8, device=device)
    return [partial(torch.neg, source, out=torch.empty_like(source))]


def _verified(
    make: Any, call: Call, inputs: list[Any], error: Callable[[Callable[[Any], Callable[[], Any]]], float]
) -> tuple[dict[str, Any], Calls | None]:
    """What is known of a rival, and its calls if they can be timed."""
    if isinstance(make, str):
        return {"status": "missing", "reason": make}, None
    try:
        wrong = error(partial(make, call))
        calls = [make(call, i) for i in inputs]
    except Missing as e:
        return {"status": "missing", "reason": str(e)}, None
    except Exception as e:  # a rival may fail in any way
        return {"status": "failed", "reason": _told(e)}, None
    if not wrong <= 4:  # another rounding than ours is no fault of theirs; another result is
        error_of = wrong if math.isfinite(wrong) else None
        return {"status": "failed", "reason": f"its error is {wrong:.3g} of the bound", "error": error_of}, None
    return {"status": "ok", "error": wrong}, calls


def _cool(row: dict[str, Any], ours: Calls, verified: dict[str, Calls], bench: Bench, before: Before) -> None:
    """Ours against each rival, by the timer asked for or, of a rival that it can't time, by another for both."""
    for timer, bursts in _record(row, ours, verified, bench, bench.cool.calls, before).items():
        laps = alternate(bursts, bench.cool, bench.clock)
        times = {name: timing([lap.us for lap in seen]) for name, seen in laps.items()}
        mine = times.pop(OURS)
        if timer == bench.timer:
            row["us"] = attrs.asdict(mine)
            row["settled"] = all(settled([lap.us for lap in seen]) for seen in laps.values())
            row |= _spans(laps[OURS]) | _state(bursts[OURS], bench.cool, bench)
        for name, took in times.items():
            row["rivals"][name] |= {"us": took.median, "ratio": took.median / mine.median}
            if timer != bench.timer:
                row["rivals"][name] |= {"timer": timer, "ours_us": mine.median}


def _hot(row: dict[str, Any], ours: Calls, verified: dict[str, Calls], bench: Bench, before: Before) -> None:
    """The same under load, beside the cool figures, for what the first timer can time."""
    same = {n: calls for n, calls in verified.items() if "us" in row["rivals"][n] and "timer" not in row["rivals"][n]}
    bursts = _record(row, ours, same, bench, bench.hot.calls, before)[bench.timer]
    laps = alternate(bursts, bench.hot, bench.clock)
    times = {name: timing([lap.us for lap in seen]) for name, seen in laps.items()}
    mine = times.pop(OURS)
    row["hot"] = {"us": attrs.asdict(mine)} | _state(bursts[OURS], bench.hot, bench)
    for name, took in times.items():
        row["rivals"][name] |= {"hot_us": took.median, "hot_ratio": took.median / mine.median}


def _record(
    row: dict[str, Any], ours: Calls, verified: Mapping[str, Calls], bench: Bench, turns: int, before: Before
) -> Bursts:
    """Bursts by timer and rival; a rival that no timer can time is failed in the row."""

    def burst(timer: str, calls: Calls) -> Burst:
        return TIMERS[timer](calls, turns, bench.device, before)

    bursts: Bursts = {bench.timer: {OURS: burst(bench.timer, ours)}}
    others = [t for t in TIMERS_OF[bench.device.type] if t != bench.timer]
    for name, calls in verified.items():
        refused: dict[str, str] = {}
        for timer in (bench.timer, *others):
            try:
                made = burst(timer, calls)
            except Exception as e:  # what a rival does in a capture is not ours to foresee
                refused[timer] = _told(e)
                continue
            if timer not in bursts:
                bursts[timer] = {OURS: burst(timer, ours)}
            bursts[timer][name] = made
            break
        reason = "; ".join(f"{timer}: {why}" for timer, why in refused.items())
        if len(refused) > len(others):
            row["rivals"][name] |= {"status": "failed", "reason": reason}
        elif refused:
            row["rivals"][name]["note"] = reason
    return bursts


def _state(burst: Burst, protocol: Protocol, bench: Bench) -> dict[str, Any]:
    """Clock and power while a burst runs."""
    samples: list[nvml.Sample | None] = []
    sampled(burst, protocol, lambda: samples.append(bench.sampler()), bench.clock)
    return nvml.state([sample for sample in samples if sample is not None])


def _spans(laps: list[Lap]) -> dict[str, float]:
    spans = [lap.span_us for lap in laps if lap.span_us is not None]
    return {"span_us": statistics.median(spans)} if spans else {}


def _lead(rivals: Mapping[str, Mapping[str, Any]], who: str, ratio: str) -> dict[str, Any]:
    """The rival that is ahead, and its time over ours; a suspect one leads nobody."""
    timed = {n: r[ratio] for n, r in rivals.items() if ratio in r and r["status"] == "ok"}
    if not timed:
        return {}
    first = min(timed, key=lambda n: timed[n])
    return {who: first, ratio: timed[first]}


def _seconds(run: Callable[[], Any], bench: Bench) -> float:
    start = time.perf_counter()
    run()
    torch.get_device_module(bench.device).synchronize(bench.device)
    return time.perf_counter() - start


def _told(e: Exception) -> str:
    return f"{type(e).__name__}: {(str(e).splitlines() or [''])[0][:200]}"
