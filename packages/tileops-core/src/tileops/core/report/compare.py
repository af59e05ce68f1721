"""What changed from one result document to another of the same board."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Literal

import attrs

from tileops.core.errors import TileOpsError
from tileops.core.report.documents import Document, Row, Time

NOISE = 0.02  # at least

Outcome = Literal["regression", "improvement", "drift", "same", "failed"]


@attrs.frozen
class Change:
    """One case in both documents; factors are new over old, None where one side has no figure.

    ``time`` is of our median, ``ratio`` of the ratio to the fastest rival. ``relative`` is of our median over the
    fastest of the rivals timed in both: it shows what is ours and what the machine's. All count as changed beyond
    ``noise``.
    """

    case: str
    outcome: Outcome
    old: Row
    new: Row
    time: float | None
    ratio: float | None
    relative: float | None
    noise: float


@attrs.frozen
class Comparison:
    """Changes by outcome, regressions first; cases in one document only; what else differs, as (old, new)."""

    changes: tuple[Change, ...]
    only_old: tuple[str, ...]
    only_new: tuple[str, ...]
    environment: Mapping[str, tuple[str, str]]

    def count(self, outcome: Outcome) -> int:
        """How many cases came out so."""
        return sum(c.outcome == outcome for c in self.changes)


def compare(old: Document, new: Document) -> Comparison:
    """Compare case by case; raises TileOpsError where the boards differ."""
    if old.board != new.board:
        raise TileOpsError(f"{old.name} is of {old.board} and {new.name} of {new.board}; compare runs on one board")
    before, after = {r.case: r for r in old.rows}, {r.case: r for r in new.rows}
    order = ("regression", "failed", "improvement", "drift", "same")
    changes = [_change(before[case], after[case]) for case in before if case in after]
    changes.sort(key=lambda c: (order.index(c.outcome), -(c.time or 0)))
    was, now = ({"tree": d.tree, **d.environment} for d in (old, new))
    return Comparison(
        tuple(changes),
        tuple(case for case in before if case not in after),
        tuple(case for case in after if case not in before),
        {k: (text(was.get(k)), text(now.get(k))) for k in {**was, **now} if was.get(k) != now.get(k)},
    )


def text(value: object) -> str:
    """A value of an environment as people read it."""
    return "-" if value is None else value if isinstance(value, str) else json.dumps(value)


def _change(old: Row, new: Row) -> Change:
    ratio = new.ratio / old.ratio if old.ratio and new.ratio else None
    if old.us is None or new.us is None or not (old.ok and new.ok):
        outcome: Outcome = "regression" if old.ok else "improvement" if new.ok else "failed"
        return Change(old.case, outcome, old, new, None, ratio, None, NOISE)
    noise = max(NOISE, _spread(old.us) + _spread(new.us))
    time = new.us.median / old.us.median
    relative = _relative(old, new, time)
    return Change(old.case, _outcome(time, relative, noise), old, new, time, ratio, relative, noise)


def _spread(us: Time) -> float:
    """Half of what lies between p10 and p90, over the median."""
    return (us.p90 - us.p10) / (2 * us.median)


def _relative(old: Row, new: Row, time: float) -> float | None:
    before, after = ({n: r.us for n, r in row.rivals.items() if r.us} for row in (old, new))
    shared = before.keys() & after.keys()
    return time * min(before[n] for n in shared) / min(after[n] for n in shared) if shared else None


def _outcome(time: float, relative: float | None, noise: float) -> Outcome:
    """Ours has changed where both figures say so; where one does, the machine or a rival has."""

    def side(factor: float) -> int:
        return (factor > 1 + noise) - (factor < 1 / (1 + noise))

    sides = {side(time), side(time if relative is None else relative)}
    if sides == {0}:
        return "same"
    return "regression" if sides == {1} else "improvement" if sides == {-1} else "drift"
