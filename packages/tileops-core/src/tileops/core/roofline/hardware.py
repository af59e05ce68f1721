"""Boards and their figures: what the silicon could do and what was measured, each with its source.

Shipped profiles lie in ``profiles/``; any other is read by path. A CPU has no profile: nobody calibrated one.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import attrs
import yaml

from tileops.core.errors import TileOpsError
from tileops.core.spec.dtypes import BITS

Unit = Literal["tensor_core", "cuda_core"]

Confidence = Literal[
    "measured",  # by this project, on the board
    "reported",  # measured and published by others
    "device query",  # what the driver says of itself
    "datasheet",  # the vendor's datasheet or whitepaper
    "derived",  # arithmetic on other figures
    "press",  # neither vendor nor measurement
    "unknown",  # no value; the source says why
]


@attrs.frozen
class Figure:
    """One number in SI units, or None with the reason in ``source``."""

    value: float | None
    confidence: Confidence
    source: str

    def __attrs_post_init__(self) -> None:
        if (self.value is None) != (self.confidence == "unknown"):
            raise ValueError("a figure is 'unknown' exactly if its value is null")
        if self.value is not None and not 0 < self.value < math.inf:
            raise ValueError(f"a figure must be positive and finite, not {self.value}")
        if not self.source.strip():
            raise ValueError("a figure needs a source, or the reason why there is none")


@attrs.frozen
class Rated:
    """A quantity as the board promises it and as a good program reaches it."""

    theoretical: Figure
    calibrated: Figure

    @property
    def known(self) -> Figure:
        """The theoretical figure or, where only that is known, the calibrated one."""
        return self.theoretical if self.theoretical.value or not self.calibrated.value else self.calibrated


@attrs.frozen
class Peak(Rated):
    """Arithmetic rate of one unit and dtype in FLOP/s, dense; ``per_cycle`` is FLOP per cycle and SM."""

    per_cycle: Figure


def _known_dtypes(_: Any, __: Any, peak: Mapping[str, Mapping[str, Peak]]) -> None:
    for dtype in (d for by_dtype in peak.values() for d in by_dtype):
        if dtype not in BITS:
            raise ValueError(f"'{dtype}' is no dtype")


@attrs.frozen
class Profile:
    """The figures of one board: bandwidth in B/s, the launch floor (the least time of any kernel) in seconds.

    ``matches`` are patterns (``*``, ``?``) of whole device names, letter case ignored.
    """

    board: str
    name: str
    matches: tuple[str, ...]
    peak: Mapping[Unit, Mapping[str, Peak]] = attrs.field(validator=_known_dtypes)
    bandwidth: Rated
    sm_count: Rated
    l2_bytes: Rated
    max_clock_hz: Rated
    launch_floor_s: Rated


def boards() -> tuple[str, ...]:
    """Names of the shipped boards, sorted."""
    return tuple(sorted(p.name.removesuffix(".yaml") for p in _folder().iterdir() if p.name.endswith(".yaml")))


def profile(board: str | os.PathLike[str]) -> Profile:
    """The profile of a shipped board, or the one in a file (a path object, or a string that ends in .yaml or .yml).

    Raises TileOpsError for an unknown board, an unreadable file or a malformed profile.
    """
    if isinstance(board, str) and not board.endswith((".yaml", ".yml")):
        return _shipped(board)
    try:
        text = Path(board).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise TileOpsError(f"{os.fspath(board)}: can't read this profile: {e}") from None
    return _parse(text, os.fspath(board))


def board_of(device_name: str) -> str | None:
    """The shipped board behind a device's name (``NVIDIA H200`` -> ``h200``); None where no profile matches."""
    name = device_name.casefold()
    return next((b for b in boards() if any(fnmatchcase(name, m.casefold()) for m in profile(b).matches)), None)


def peak_figure(profile: Profile, unit: Unit, dtype: str) -> Figure:
    """The peak of a unit and dtype in FLOP/s; unknown where the profile doesn't list it."""
    peak = profile.peak.get(unit, {}).get(dtype)
    return peak.known if peak else Figure(None, "unknown", "the profile lists none")


def peak_at_clock(profile: Profile, unit: Unit, dtype: str, clock_hz: float) -> float | None:
    """The theoretical peak in FLOP/s at a measured clock; None where FLOP per cycle or the SM count is unknown."""
    peak = profile.peak.get(unit, {}).get(dtype)
    per_cycle = peak.per_cycle.value if peak else None
    sms = profile.sm_count.theoretical.value
    return None if per_cycle is None or sms is None else per_cycle * sms * clock_hz


def _folder() -> Any:
    return files(__package__) / "profiles"


@cache
def _shipped(board: str) -> Profile:
    if board not in boards():
        known = ", ".join(boards())
        raise TileOpsError(f"unknown board '{board}'; known are {known}, and any profile by its path")
    return _parse((_folder() / f"{board}.yaml").read_text(encoding="utf-8"), f"{board}.yaml")


def _number(value: Any, _: Any) -> float:
    # YAML 1.1 reads 4.8e12 (no sign in the exponent) as text; counts stay integers.
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError("not a number")
    return value if isinstance(value, int) else float(value)


def _parse(text: str, path: str) -> Profile:
    import cattrs  # here, since every family imports this module and few calls read a profile

    converter = cattrs.Converter(forbid_extra_keys=True)
    converter.register_structure_hook(float, _number)
    try:
        return converter.structure(yaml.safe_load(text), Profile)
    except yaml.YAMLError as e:
        faults = [" ".join(str(e).split())]
    except Exception as e:
        faults = cattrs.transform_error(e, "profile", _describe)
    more = [f"  and {len(faults) - 3} more"] if len(faults) > 3 else []
    raise TileOpsError("\n".join([f"{path}: malformed board profile", *(f"  {f}" for f in faults[:3]), *more]))


def _describe(error: BaseException, _: type | None) -> str:
    if isinstance(error, KeyError):
        return f"{error} is missing"
    extra = getattr(error, "extra_fields", None)  # cattrs.ForbiddenExtraKeysError
    return f"unknown key {', '.join(map(repr, sorted(extra)))}" if extra else str(error)
