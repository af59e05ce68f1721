"""Result documents as ``tileops bench`` writes them; ``docs/results.md`` describes each key."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import cattrs
from attrs.validators import ge, gt, lt, optional

from tileops.core.bench import SCHEMA
from tileops.core.errors import TileOpsError

_positive: Any = [gt(0), lt(math.inf)]
_amount: Any = optional([ge(0), lt(math.inf)])


@attrs.frozen
class Time:
    """Microseconds a call: the median of ``n`` bursts and their spread."""

    median: float = attrs.field(validator=_positive)
    p10: float = attrs.field(validator=_positive)
    p90: float = attrs.field(validator=_positive)
    n: float | None = None


@attrs.frozen
class Rival:
    """Another implementation on the same inputs: ok with its ``us``, else suspect, missing or failed with the reason.

    A suspect one has a time, too far from the bound to be that of the right call.
    """

    status: str
    us: float | None = attrs.field(default=None, validator=optional(_positive))
    reason: str | None = None
    error: float | None = None


@attrs.frozen
class Copy:
    """As many bytes copied, and the time of that over ours."""

    us: float = attrs.field(validator=_positive)
    ratio: float = attrs.field(validator=_positive)


@attrs.frozen
class Row:
    """One measured case. ``ratio`` is the fastest rival's median over ours; an ok row always has ``us``."""

    case: str
    op: str
    status: str
    label: str = ""
    dtypes: tuple[str, ...] = ()
    reason: str | None = None
    kernel: str | None = None
    us: Time | None = None
    host_us: float | None = None
    host_ratio: float | None = attrs.field(default=None, validator=optional(_positive))
    flops: float | None = attrs.field(default=None, validator=_amount)
    bytes: float | None = attrs.field(default=None, validator=_amount)
    tflops: float | None = attrs.field(default=None, validator=_amount)
    gbps: float | None = attrs.field(default=None, validator=_amount)
    bound_us: float | None = attrs.field(default=None, validator=_amount)
    bound_by: str | None = None
    error: float | None = None
    clock_mhz: float | None = attrs.field(default=None, validator=_amount)
    copy: Copy | None = None
    rivals: Mapping[str, Rival] = attrs.field(factory=dict)
    fastest: str | None = None
    ratio: float | None = attrs.field(default=None, validator=optional(_positive))

    def __attrs_post_init__(self) -> None:
        if self.ok and self.us is None:
            raise ValueError(f"{self.case} is ok but has no us")

    @property
    def ok(self) -> bool:
        """Ran, and was right."""
        return self.status == "ok"

    @property
    def name(self) -> str:
        """The case without its op."""
        return self.case.removeprefix(f"{self.op}/")

    @property
    def of_bound(self) -> float | None:
        """Bound over time, 1 at the bound; None where either is unknown."""
        return self.bound_us / self.us.median if self.us and self.bound_us else None


@attrs.frozen
class Document:
    """The rows of one run on one board, in the environment that they were measured in."""

    schema: str
    board: str
    rows: tuple[Row, ...]
    environment: Mapping[str, Any] = attrs.field(factory=dict)
    tree: str | None = None
    name: str = ""

    def __attrs_post_init__(self) -> None:
        seen: set[str] = set()
        for row in self.rows:
            if row.case in seen:
                raise ValueError(f"two rows are called {row.case}")
            seen.add(row.case)

    @property
    def date(self) -> str | None:
        """When it was measured, as its environment says."""
        found = self.environment.get("date")
        return None if found is None else str(found)


def load(path: str | os.PathLike[str]) -> Document:
    """The document in a file; unknown keys are left out. Raises TileOpsError naming the file and what is wrong."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise TileOpsError(f"{os.fspath(path)}: can't read this result document: {e}") from None
    schema = value.get("schema") if isinstance(value, dict) else None
    if schema != SCHEMA:
        raise TileOpsError(
            f"{os.fspath(path)}: its schema is {schema!r}, expected '{SCHEMA}'; `tileops bench` writes it"
        )
    try:
        return attrs.evolve(
            _converter().structure(value, Document), name="/".join(Path(path).absolute().with_suffix("").parts[-2:])
        )
    except Exception as e:
        faults = cattrs.transform_error(
            e, "document", lambda e, _: f"{e} is missing" if isinstance(e, KeyError) else str(e)
        )
    more = [f"  and {len(faults) - 3} more"] if len(faults) > 3 else []
    raise TileOpsError(
        "\n".join([f"{os.fspath(path)}: malformed result document", *(f"  {f}" for f in faults[:3]), *more])
    )


def _converter() -> cattrs.Converter:
    # cattrs itself makes text of anything, and numbers of text.
    def exact(kinds: tuple[type, ...], what: str) -> Any:
        def hook(value: Any, _: Any) -> Any:
            if isinstance(value, bool) or not isinstance(value, kinds):
                raise TypeError(f"got {value!r}, expected {what}")
            return value

        return hook

    converter = cattrs.Converter()
    converter.register_structure_hook(float, exact((int, float), "a number"))
    converter.register_structure_hook(str, exact((str,), "text"))
    return converter
