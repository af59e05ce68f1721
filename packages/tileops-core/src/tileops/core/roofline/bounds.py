"""The least time a call can take on a board, and how near a measured time came to it."""

from __future__ import annotations

from typing import Literal

import attrs

from tileops.core.check.call import Call
from tileops.core.roofline.counting import spec_error, work
from tileops.core.roofline.hardware import Figure, Profile, Unit, peak_figure
from tileops.core.spec.dtypes import BITS

Side = Literal["compute", "memory"]


@attrs.frozen
class Bound:
    """The time bound of a call in seconds, None where a figure that it needs is unknown (``reason`` says which).

    ``by`` is the side that takes longer. ``intensity`` is FLOP per byte, None where no byte moves. ``peak`` (FLOP/s,
    of ``unit`` and ``dtype``) and ``bandwidth`` (B/s) are the figures used: the theoretical ones or, where a profile
    has none, the calibrated ones, which a better program may pass. Unless ``exact``, that may be so, or flops and bytes
    are upper bounds, so that a run below ``seconds`` is no fault.
    """

    seconds: float | None
    by: Side | None
    flops: float
    bytes: float
    intensity: float | None
    exact: bool
    compute_seconds: float | None
    memory_seconds: float | None
    unit: Unit | None
    dtype: str | None
    peak: Figure
    bandwidth: Figure
    reason: str | None = None


_NO_PROFILE = Figure(None, "unknown", "no profile of this device")
_NO_UNIT = Figure(None, "unknown", "the entry names no unit or no dtype")


def bound(call: Call, profile: Profile | None) -> Bound:
    """``max(flops / peak, bytes / bandwidth)`` of a call; with no profile (a CPU) only the work is known.

    Raises SpecError where the entry can't count its work or names no dtype that the call knows.
    """
    counted = work(call)
    unit, dtype = _rated_for(call)
    peak, bandwidth = _NO_PROFILE, _NO_PROFILE
    if profile:
        peak = peak_figure(profile, unit, dtype) if unit and dtype else _NO_UNIT
        bandwidth = profile.bandwidth.known
    compute, memory = _seconds(counted.flops, peak), _seconds(counted.bytes, bandwidth)
    seconds: float | None = None
    by: Side | None = None
    if compute is not None and memory is not None:
        seconds, by = max(compute, memory), "compute" if compute > memory else "memory"
    gaps = {
        f"peak of {unit} {dtype}": None if compute is not None else peak.source,
        "bandwidth": None if memory is not None else bandwidth.source,
    }
    return Bound(
        seconds=seconds,
        by=by,
        flops=counted.flops,
        bytes=counted.bytes,
        intensity=counted.flops / counted.bytes if counted.bytes else None,
        exact=counted.exact and "measured" not in (peak.confidence, bandwidth.confidence),
        compute_seconds=compute,
        memory_seconds=memory,
        unit=unit,
        dtype=dtype,
        peak=peak,
        bandwidth=bandwidth,
        reason="; ".join(f"no {what}: {why}" for what, why in gaps.items() if why) or None,
    )


def _seconds(amount: float, rate: Figure) -> float | None:
    return 0.0 if amount == 0 else None if rate.value is None else amount / rate.value


def _rated_for(call: Call) -> tuple[Unit | None, str | None]:
    """The unit and the dtype whose peak counts; ``dtype`` in an entry is a dtype or an index that holds one."""
    roofline = call.entry.roofline
    if roofline is None or roofline.dtype is None or roofline.dtype in BITS:
        return (roofline.unit, roofline.dtype) if roofline else (None, None)
    dtype = call.env.get(roofline.dtype)
    if dtype not in BITS:
        what = f"roofline dtype of {call.entry.name}, '{roofline.dtype}', is {dtype!r} in this call, no dtype"
        raise spec_error(roofline.place, what, f"the call is {call}")
    return roofline.unit, dtype
