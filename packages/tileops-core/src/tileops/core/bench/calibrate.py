"""What a board reaches with torch's own kernels, as a profile that bounds can be taken from."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import attrs
import torch
import yaml

from tileops.core.backend import gpu_backend
from tileops.core.bench.document import device_name
from tileops.core.bench.rows import Bench, floor_us
from tileops.core.bench.timers import TIMERS
from tileops.core.bench.timing import alternate
from tileops.core.dtypes import torch_dtype
from tileops.core.files import write_whole
from tileops.core.roofline import Figure, Peak, Profile, Rated, Unit, board_of, profile

# Bytes of a tensor, and M, N, K of products: of a GPU far beyond its L2, and long enough to meet its power limit.
STREAM = {"cpu": 1 << 24}
LARGE_STREAM = 1 << 30
PRODUCTS = {"cpu": ((256, 256, 256),)}
LARGE_PRODUCTS = ((4096, 4096, 7168), (8192, 8192, 8192))
UNITS: Mapping[str, Unit] = {
    "bfloat16": "tensor_core",
    "float16": "tensor_core",
    "float8_e4m3fn": "tensor_core",
    "int8": "tensor_core",
    "float64": "tensor_core",
    "float32": "cuda_core",
}
STREAMS = "copy", "read", "triad"
FLOOR = "launch floor"


@attrs.frozen
class Reached:
    """One thing that was measured: a stream in B/s, a dtype's product in FLOP/s, the launch floor in seconds."""

    what: str
    value: float
    how: str


def calibrate(bench: Bench) -> Iterator[Reached]:
    """Measure by the cool protocol, one thing after the other; a dtype that torch has no product for is left out."""
    yield Reached(FLOOR, floor_us(bench) * 1e-6, "one element negated")
    yield from _streams(bench)
    for dtype in UNITS:
        yield from _product(dtype, bench)


def profile_of(reached: Iterable[Reached], bench: Bench) -> Profile:
    """The device's profile with these figures as calibrated; the others are the shipped profile's, or unknown."""
    found = {r.what: r for r in reached}
    board = board_of(device_name(bench.device))
    base = profile(board) if board else _blank(bench)
    peaks: dict[Unit, dict[str, Peak]] = {unit: dict(by_dtype) for unit, by_dtype in base.peak.items()}
    for dtype, unit in UNITS.items():
        if dtype in found:
            known = peaks.setdefault(unit, {}).get(dtype) or Peak(_UNKNOWN, _UNKNOWN, _UNKNOWN)
            peaks[unit][dtype] = attrs.evolve(known, calibrated=_measured(found[dtype]))
    streams = [found[name] for name in STREAMS if name in found]
    best = max(streams, key=lambda r: r.value)
    how = ", ".join(f"{r.what} {r.value:.4g} B/s" for r in streams)
    return attrs.evolve(
        base,
        peak=peaks,
        bandwidth=attrs.evolve(base.bandwidth, calibrated=_measured(attrs.evolve(best, how=f"{how}; {best.how}"))),
        launch_floor_s=attrs.evolve(base.launch_floor_s, calibrated=_measured(found[FLOOR])),
    )


def write(made: Profile, into: Path) -> None:
    """Write a profile: JSON where the file's name says so, else YAML."""
    import cattrs

    value = cattrs.Converter().unstructure(made)
    value["matches"] = list(made.matches)
    text = json.dumps(value, indent=1) if into.suffix == ".json" else yaml.safe_dump(value, sort_keys=False, width=120)
    write_whole(into, text.rstrip("\n") + "\n")


_UNKNOWN = Figure(None, "unknown", "no profile of this device: the vendor's figure goes here")


def _blank(bench: Bench) -> Profile:
    """Of a device that no shipped profile matches: what it says of itself."""
    name, backend = device_name(bench.device), gpu_backend(bench.device.type)
    device = backend.device(bench.device.index or 0) if backend else None
    unknown = Rated(_UNKNOWN, _UNKNOWN)

    def query(value: int) -> Rated:
        nothing = Figure(None, "unknown", "nothing to calibrate")
        return Rated(Figure(value, "device query", "device properties"), nothing)

    return Profile(
        board=bench.device.type if backend is None else name.lower().replace(" ", "-"),
        name=name,
        matches=(name,),
        peak={},
        bandwidth=unknown,
        sm_count=query(device.sm_count) if device else unknown,
        l2_bytes=query(device.l2_bytes) if device else unknown,
        max_clock_hz=unknown,
        launch_floor_s=unknown,
    )


def _measured(reached: Reached) -> Figure:
    return Figure(reached.value, "measured", f"tileops calibrate: {reached.how} ({date.today()})")


def _streams(bench: Bench) -> Iterator[Reached]:
    n = STREAM.get(bench.device.type, LARGE_STREAM)
    a, b, c = (torch.rand(n // 4, device=bench.device) for _ in range(3))
    # Each byte counts once where it is read and once where it is written.
    streams: dict[str, tuple[int, Callable[[], Any]]] = {
        "copy": (2 * n, lambda: a.copy_(b)),
        "read": (n, lambda: torch.sum(b)),
        "triad": (3 * n, lambda: torch.add(b, c, alpha=3.0, out=a)),
    }
    for name, (moved, run) in streams.items():
        yield Reached(name, moved / _seconds(run, bench), f"tensors of {n >> 20} MiB")


def _product(dtype: str, bench: Bench) -> Iterator[Reached]:
    best: Reached | None = None
    for m, n, k in PRODUCTS.get(bench.device.type, LARGE_PRODUCTS):
        try:
            rate = 2 * m * n * k / _seconds(_matmul(dtype, m, n, k, bench.device), bench)
        except (RuntimeError, ValueError, AttributeError):  # this torch or this device has none
            continue
        if best is None or rate > best.value:
            best = Reached(dtype, rate, f"torch's product, {m}x{n}x{k}")
    if best:
        yield best


def _matmul(dtype: str, m: int, n: int, k: int, device: torch.device) -> Callable[[], Any]:
    made = torch_dtype(dtype)
    a, b = torch.randn(m, k, device=device), torch.randn(n, k, device=device)
    if dtype == "int8":
        codes, weights = (t.mul(32).clamp(-127, 127).to(made) for t in (a, b))
        return lambda: torch._int_mm(codes, weights.t())
    x, y = a.to(made), b.to(made).t()
    if dtype == "float8_e4m3fn":
        one = torch.ones((), device=device)
        return lambda: torch._scaled_mm(x, y, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    return lambda: torch.mm(x, y)


def _seconds(run: Callable[[], Any], bench: Bench) -> float:
    burst = TIMERS[bench.timer]([run], bench.cool.calls, bench.device, lambda: None)
    laps = alternate({"it": burst}, bench.cool, bench.clock)["it"]
    return statistics.median(lap.us for lap in laps) * 1e-6
