"""A measured time against what the board allows."""

from __future__ import annotations

from typing import Any

from tileops.core.roofline import Bound, Profile, peak_at_clock

LARGE_US = 50  # a bound above which a launch no longer counts
SUSPECT = 0.3  # of the bound


def bounds(limit: Bound, floor_us: float | None, fits_l2: bool = False) -> dict[str, Any]:
    """The bound of a call as a row says it.

    ``bound_by`` is the slower side. Where the tensors stay in L2, whose rate no profile has, memory bounds nothing:
    ``bound_us`` is the arithmetic's. ``limit`` names what is above all: ``compute``, ``memory``, ``l2`` or ``launch``.
    """
    seconds = limit.compute_seconds if fits_l2 else limit.seconds
    by = limit.by if not fits_l2 or limit.by == "compute" else "l2"
    bound_us = None if seconds is None else seconds * 1e6
    launch = floor_us is not None and bound_us is not None and floor_us > bound_us
    return {
        "flops": limit.flops,
        "bytes": limit.bytes,
        "bound_us": bound_us,
        "bound_by": by,
        "floor_us": floor_us,
        "limit": "launch" if launch else by,
    }


def rates(limit: Bound, us: float, clock_mhz: float | None, profile: Profile | None) -> dict[str, Any]:
    """Rates of a run, and of compute-bound ones the share of the peak at the measured clock."""
    found: dict[str, Any] = {"tflops": limit.flops / us / 1e6, "gbps": limit.bytes / us / 1e3}
    if limit.by == "compute" and clock_mhz and profile and limit.unit and limit.dtype:
        peak = peak_at_clock(profile, limit.unit, limit.dtype, clock_mhz * 1e6)
        if peak:
            found["percent_at_clock"] = 100 * limit.flops / (us * 1e-6) / peak
    return found


def impossible(row: dict[str, Any], exact: bool) -> dict[str, Any]:
    """The share of the bound; over 100 % something is timed or counted wrongly, and the row has failed."""
    if not row["bound_us"]:
        return {}
    us = row["us"]["median"]
    share: dict[str, Any] = {"percent": 100 * row["bound_us"] / us}
    if share["percent"] > 100 and exact:
        reason = f"{us:.4g} us is less than the {row['bound_us']:.4g} us that the board's {row['bound_by']} peak allows"
        share |= {"status": "failed", "reason": f"{reason}: timed or counted wrongly"}
    return share


def doubt(row: dict[str, Any], us: float) -> str | None:
    """Why a rival's time is no fair one: far from the bound on a large shape, as a call that is wired wrongly."""
    if not row["bound_us"] or row["bound_us"] < LARGE_US or row["bound_us"] / us >= SUSPECT:
        return None
    return f"at {row['bound_us'] / us:.0%} of the bound on a large shape: is it the call that was meant?"
