"""One self-contained HTML page of result documents: it loads nothing, and follows the reader's light or dark."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.resources import files
from math import log
from string import Template

from tileops.core import roofline
from tileops.core.report import plots
from tileops.core.report.compare import text
from tileops.core.report.documents import Document, Row
from tileops.core.report.html import Child, Html, tag
from tileops.core.report.summary import (
    Absent,
    Board,
    absent,
    boards,
    by,
    counted,
    history,
    op_of,
    rated_for,
    side,
    verdict,
    verdicts,
)
from tileops.core.report.table import number, op_table, percent

READING = (
    "Ratio: the fastest rival's time over ours in the same run; above 1 ours is faster. Within 1 % is a tie and counts "
    "as 1.00. Summaries are geometric means. The bound is what the spec's FLOP and bytes allow at the board's "
    "theoretical figures."
)
MARKS = (
    "Each mark is a row: its arithmetic intensity against what it reached. Solid roofs are theoretical, dashed ones "
    "calibrated."
)
WIDE = (1.25, 3.0)  # the least and the largest ratio at which bars end


def render(documents: Iterable[Document]) -> str:
    """The page of one or more documents; several of one board give its history."""
    shown = boards(documents)
    title = f"TileOPs on {', '.join(_title(b) for b in shown)}"
    template = (files(__package__) / "page.html").read_text(encoding="utf-8")
    return Template(template).substitute(title=tag("title", title), body=tag("main", [_board(b) for b in shown]))


def _title(board: Board) -> str:
    return found.name if (found := _profile(board)) else board.name


def _profile(board: Board) -> roofline.Profile | None:
    return roofline.profile(board.name) if board.name in roofline.boards() else None


def _board(board: Board) -> Html:
    families = board.families()
    links = [tag("a", name, href=f"#{board.name}-{name}") for name in families]
    return tag(
        "article",
        tag("header", tag("p", "TileOPs results", class_="over"), tag("h1", _title(board)), tag("nav", links)),
        _environment(board),
        _tiles(board.rows),
        _faults(board.rows),
        _summary(board, families),
        [_family(board, name, rows) for name, rows in families.items()],
        _history(board),
    )


def _environment(board: Board) -> Html:
    columns = [{"tree": d.tree, **d.environment} for d in board.documents]
    if len(columns) == 1:
        facts = [tag("div", tag("dt", key), tag("dd", text(v))) for key, v in columns[0].items() if v is not None]
        return tag("dl", facts, class_="facts")
    head = tag("tr", tag("th", ""), [tag("th", d.name) for d in board.documents])
    rows = []
    for key in dict.fromkeys(key for c in columns for key in c):
        values = [text(c.get(key)) for c in columns]
        same = len(set(values)) == 1
        cells = tag("td", values[0], colspan=len(values)) if same else [tag("td", v, class_="differs") for v in values]
        rows.append(tag("tr", tag("th", key), cells))
    return _wide(tag("table", tag("thead", head), tag("tbody", rows), class_="environment"))


def _wide(table: Html) -> Html:
    return tag("div", table, class_="wide")


def _tiles(rows: Sequence[Row]) -> Html:
    stands: dict[str, int] = {str(name): n for name, n in verdicts(rows).items() if n or name != "no rival"}
    counts = {"rows": len(rows), **stands}
    tiles = [
        tag("div", tag("b", str(n)), tag("span", name), class_=f"tile {_class(name) if n else 'none'}")
        for name, n in counts.items()
    ]
    return tag("div", tiles, class_="tiles") if rows else tag("p", "The document holds no rows.", class_="empty")


def _class(name: str) -> str:
    return name.replace(" ", "-")


def _faults(rows: Sequence[Row]) -> Html | None:
    failed = [(row, row.reason or row.status) for row in rows if not row.ok]
    over = [(row, f"{percent(row.of_bound)} of its bound: its time, FLOP or bytes are wrong")
            for row in rows if row.of_bound and row.of_bound > 1]  # fmt: skip
    doubts = [
        (row, f"{name}: {rival.reason}")
        for row in rows
        for name, rival in row.rivals.items()
        if rival.status == "suspect"
    ]
    missing = absent(rows)
    parts: list[Child] = [
        _items("Failed", failed, "bad"),
        _items("Above the bound", over, "bad"),
        _missing("Required rivals without a time", [a for a in missing if a.required], "bad"),
        _missing("Optional rivals without a time", [a for a in missing if not a.required], ""),
        _items("Suspect rivals", doubts, "doubt"),
    ]
    return tag("section", parts, class_="faults") if any(parts) else None


def _items(title: str, found: Sequence[tuple[Row, str]], style: str) -> Html | None:
    if not found:
        return None
    items = [tag("li", tag("code", row.case), " ", tag("span", why)) for row, why in found]
    opened = {"open": "open"} if style == "bad" else {}
    return tag("details", tag("summary", f"{title}: {len(found)}"), tag("ul", items), class_=style or None, **opened)


def _missing(title: str, found: Sequence[Absent], style: str) -> Html | None:
    if not found:
        return None
    items = [
        tag(
            "li",
            tag("b", a.rival),
            f" {a.status}, {a.op}: {a.reason} ",
            tag("details", tag("summary", _rows(len(a.rows))), ", ".join(row.name for row in a.rows)),
        )
        for a in found
    ]
    counts = {name: sum(len(a.rows) for a in held) for name, held in by(found, lambda a: a.rival).items()}
    told = ", ".join(f"{name} in {_rows(n)}" for name, n in counts.items())
    opened = {"open": "open"} if style == "bad" else {}
    return tag("details", tag("summary", f"{title}: {told}"), tag("ul", items), class_=style or None, **opened)


def _rows(n: int) -> str:
    return f"{n} row{'' if n == 1 else 's'}"


def _summary(board: Board, families: dict[str, list[Row]]) -> Html | None:
    if not families:
        return None
    heads = ("operator", "ratio", "worst row", "rows", "slower", "tie", "faster", "of bound", "host ratio")
    texts = ("operator", "worst row")
    head = tag("tr", [tag("th", h, class_=None if h in texts else "n") for h in heads])
    bodies = []
    for family, rows in families.items():
        lines = [tag("tr", tag("th", family, colspan=len(heads), scope="rowgroup"))]
        for op in (op_of(name, held) for name, held in by(rows, lambda row: row.op).items()):
            worst = op.worst
            told = [tag("code", worst.name), f" {number(worst.ratio, 3)} against {worst.fastest}"] if worst else "-"
            cells: list[Child] = [
                tag("td", tag("a", op.name, href=f"#{board.name}-{op.name}")),
                tag("td", number(op.ratio, 3), class_=f"n strong {side(op.ratio) if op.ratio else ''}"),
                tag("td", told, class_="worst"),
                _n(str(len(op.rows))),
                *(_n(str(op.verdicts[v]) if op.verdicts[v] else "-") for v in ("slower", "tie", "faster")),
                _n(percent(op.of_bound)),
                _n(number(op.host_ratio, 2)),
            ]
            lines.append(tag("tr", cells))
        bodies.append(tag("tbody", lines))
    table = tag("table", tag("thead", head), bodies, class_="summary")
    return tag("section", tag("h2", "By operator"), _wide(table), tag("p", READING, class_="reading"))


def _n(told: str) -> Html:
    return tag("td", told, class_="n")


def _family(board: Board, name: str, rows: Sequence[Row]) -> Html:
    held = by(rows, lambda row: row.op)
    opened = {"open": "open"} if len(board.rows) <= 12 else {}
    tables = [
        tag(
            "details",
            tag("summary", tag("b", op), f" {_rows(len(of_op))}"),
            _wide(op_table(of_op, _profile(board), board.stale)),
            id=f"{board.name}-{op}",
            class_="rows",
            **opened,
        )
        for op, of_op in held.items()
    ]
    return tag(
        "section",
        tag("h2", name, id=f"{board.name}-{name}"),
        tag("div", _roofline(board, rows), class_="plots"),
        _bars(rows, several=len(held) > 1),
        tag("h3", "Rows"),
        tables,
    )


def _tip(row: Row) -> str:
    us = row.us.median if row.us else None
    lines = [
        row.case,
        f"{number(us)} us, {number(row.tflops)} TFLOP/s, {number(row.gbps)} GB/s",
        f"{percent(row.of_bound)} of the {row.bound_by} bound" if row.of_bound else "",
        f"ratio {number(row.ratio, 3)} against {row.fastest}" if row.ratio else "no rival",
    ]
    return "\n".join(filter(None, lines))


def _roofline(board: Board, rows: Sequence[Row]) -> Child:
    known = _profile(board)
    memory, *compute = roofs = _roofs(known, rows) if known else [plots.Roof("memory", None, None)]
    standing = {name: n for name, n in verdicts(rows).items() if n and name != "failed"}
    marks = [tag("li", tag("i", class_=f"dot {_class(name)}"), f"{name} ({n})") for name, n in standing.items()]
    limits = [
        tag("li", tag("b", roof.name), f" {number(value / 1e12)} {'TB/s' if roof is memory else 'TFLOP/s'}, {figure}")
        for roof in roofs
        for figure, value in roof.known()
    ]
    plot = plots.roofline(rows, memory, compute, lambda row: _class(verdict(row)), _tip)
    legend = tag("ul", marks, class_="legend"), tag("ul", limits or tag("li", f"{board.name} has no profile: no roofs"))
    return tag("figure", plot), tag("aside", tag("h3", "Roofline"), tag("p", MARKS), legend)


def _roofs(known: roofline.Profile, rows: Sequence[Row]) -> list[plots.Roof]:
    """Memory's, then those of the units and dtypes that rows are rated for; dtypes of one peak share a roof."""
    kinds = dict.fromkeys(kind for row in rows if (kind := rated_for(row)))
    peaks = [(unit, dtype, known.peak[unit][dtype]) for unit, dtype in kinds if dtype in known.peak.get(unit, {})]
    roofs = [plots.Roof("memory", known.bandwidth.theoretical.value, known.bandwidth.calibrated.value)]
    for (unit, value), held in by(peaks, lambda p: (p[0], p[2].theoretical.value)).items():
        reached = [v for *_, peak in held if (v := peak.calibrated.value)]
        name = f"{unit.replace('_', ' ')} {', '.join(dtype for _, dtype, _ in held)}"
        roofs.append(plots.Roof(name, value, max(reached, default=None)))
    return roofs


def _bars(rows: Sequence[Row], several: bool) -> Child:
    rated = sorted(((row, v) for row in rows if (v := counted(row))), key=lambda found: found[0].ratio or 0)
    if not rated:
        return None
    reach = max(WIDE[0], min(WIDE[1], max(max(v, 1 / v) for _, v in rated)))
    bars = [_bar(row, ratio, reach, several) for row, ratio in rated]
    told = tag("small", f" logarithmic, {1 / reach:.2f} to {reach:.2f}, 1 in the middle")
    return [tag("h3", "Ratio to the fastest, worst first", told), tag("ol", bars, class_="bars")]


def _bar(row: Row, ratio: float, reach: float, several: bool) -> Html:
    at = 50 * max(-1.0, min(1.0, log(ratio) / log(reach)))
    style = f"left:{50 + min(at, 0):.1f}%;width:{abs(at):.1f}%"
    named = [row.name, tag("small", f" {row.op}") if several else None]
    bar = tag("span", tag("i", style=style), class_="track")
    return tag(
        "li",
        tag("span", named, class_="name"),
        bar,
        tag("b", f"{ratio:.2f}"),
        title=_tip(row),
        class_=_class(verdict(row)),
    )


def _history(board: Board) -> Html | None:
    lines = history(board)
    if not lines:
        return None
    charts = [
        tag("figure", tag("figcaption", op), plots.history([((d.date or d.name)[:10], v) for d, v in points]))
        for op, points in lines.items()
    ]
    told = "Geometric mean of the ratio to the fastest, over the rows that every document of the operator rates."
    return tag("section", tag("h2", "History"), tag("p", told), tag("div", charts, class_="history"))
