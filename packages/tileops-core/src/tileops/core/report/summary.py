"""What a page shows of result documents: the newest rows of a board, their groups, what went wrong, the history."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import geometric_mean
from typing import Literal, TypeVar, get_args

import attrs

from tileops.core.bench import is_tie
from tileops.core.families import entries
from tileops.core.report.documents import Document, Row
from tileops.core.roofline import Unit
from tileops.core.spec.dtypes import BITS

T = TypeVar("T")
K = TypeVar("K")
Verdict = Literal["slower", "tie", "faster", "no rival", "failed"]


@attrs.frozen
class Board:
    """All that was measured on one board, ``documents`` oldest first.

    ``rows`` holds each case as the newest document that has it does; ``stale`` names that document where a newer one
    measured the case's op without it.
    """

    name: str
    documents: tuple[Document, ...]
    rows: tuple[Row, ...]
    stale: Mapping[str, Document]

    def families(self) -> dict[str, list[Row]]:
        """The rows by family, in the order of the families that are installed."""
        order = dict.fromkeys(entry.family for entry in entries().values())
        grouped = by(self.rows, lambda row: family_of(row.op))
        return {name: grouped[name] for name in (*order, *(n for n in grouped if n not in order)) if name in grouped}


@attrs.frozen
class Op:
    """The rows of one op in short: geometric means, and the row that is worst; None where no row has a figure."""

    name: str
    rows: tuple[Row, ...]
    verdicts: Mapping[Verdict, int]
    ratio: float | None
    worst: Row | None
    of_bound: float | None
    host_ratio: float | None


@attrs.frozen
class Absent:
    """A rival that gave no time in some rows of an op, for one reason."""

    op: str
    rival: str
    status: str
    reason: str
    required: bool
    rows: tuple[Row, ...]


def boards(documents: Iterable[Document]) -> list[Board]:
    """The boards of documents, which count as oldest first unless all of a board's say their date."""
    return [_board(name, held) for name, held in by(documents, lambda d: d.board).items()]


def _board(name: str, documents: list[Document]) -> Board:
    if all(d.date for d in documents):
        documents = sorted(documents, key=lambda d: str(d.date))
    rows = {row.case: row for d in documents for row in d.rows}
    source = {row.case: d for d in documents for row in d.rows}
    newest = {row.op: d for d in documents for row in d.rows}
    stale = {case: source[case] for case, row in rows.items() if source[case] is not newest[row.op]}
    return Board(name, tuple(documents), tuple(rows.values()), stale)


def by(values: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Values in groups, both in the order of their first sight."""
    grouped: dict[K, list[T]] = {}
    for value in values:
        grouped.setdefault(key(value), []).append(value)
    return grouped


def family_of(op: str) -> str:
    """The family of an op; 'other' where its family isn't installed."""
    entry = entries().get(op)
    return entry.family if entry else "other"


def rated_for(row: Row) -> tuple[Unit, str] | None:
    """The unit and the dtype whose peak counts for a row; None where its family isn't installed."""
    entry = entries().get(row.op)
    if entry is None or entry.roofline is None or entry.roofline.unit is None:
        return None
    named = [n for n, i in entry.signature.indices.items() if i.kind == "DType"]
    dtype = dict(zip(named, row.dtypes, strict=False)).get(entry.roofline.dtype or "", entry.roofline.dtype)
    return (entry.roofline.unit, dtype) if dtype in BITS else None


def counted(row: Row) -> float | None:
    """A row's ratio as summaries count it: a tie is 1."""
    if row.ratio is None or not row.ok:
        return None
    return 1.0 if side(row.ratio) == "tie" else row.ratio


def side(ratio: float) -> Verdict:
    """Where a ratio stands from 1."""
    return "tie" if is_tie(ratio) else "faster" if ratio > 1 else "slower"


def verdict(row: Row) -> Verdict:
    """How a row stands against its fastest rival."""
    if not row.ok:
        return "failed"
    return "no rival" if row.ratio is None else side(row.ratio)


def verdicts(rows: Iterable[Row]) -> dict[Verdict, int]:
    """How many rows stand how."""
    found = [verdict(row) for row in rows]
    return {name: found.count(name) for name in get_args(Verdict)}


def op_of(name: str, rows: Sequence[Row]) -> Op:
    """An op's rows in short."""
    rated = [row for row in rows if counted(row)]
    return Op(
        name,
        tuple(rows),
        verdicts(rows),
        _mean(map(counted, rows)),
        min(rated, key=lambda row: row.ratio or math.inf, default=None),
        _mean(row.of_bound for row in rows if row.ok),
        _mean(row.host_ratio for row in rows if row.ok),
    )


def _mean(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return geometric_mean(known) if known else None


def absent(rows: Iterable[Row]) -> list[Absent]:
    """Rivals without a time, required ones first."""
    found = [(row, name, rival) for row in rows for name, rival in row.rivals.items() if rival.us is None]
    groups = by(found, lambda f: (f[0].op, f[1], f[2].status, f[2].reason or "no reason given"))
    made = [Absent(*key, required(key[0], key[1]), tuple(row for row, *_ in held)) for key, held in groups.items()]
    return sorted(made, key=lambda a: not a.required)


def required(op: str, rival: str) -> bool:
    """Whether an op is to be measured against a rival, as its spec says; any, where its family isn't installed."""
    entry = entries().get(op)
    return entry is None or any(rival in b.required for b in entry.baselines.values())


def history(board: Board) -> dict[str, list[tuple[Document, float]]]:
    """An op's geometric mean in each document that has it, over the rows that all of these rate.

    Ops in fewer than two documents, or without such rows, have none.
    """
    lines = {}
    for op in dict.fromkeys(row.op for row in board.rows):
        rated = [(d, {r.case: v for r in d.rows if r.op == op and (v := counted(r))}) for d in board.documents]
        rated = [(d, ratios) for d, ratios in rated if ratios]
        common = set.intersection(*(set(ratios) for _, ratios in rated)) if len(rated) > 1 else set()
        if common:
            lines[op] = [(d, geometric_mean(ratios[case] for case in sorted(common))) for d, ratios in rated]
    return lines
