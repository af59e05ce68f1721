"""The table of an op's rows: each figure as its document gives it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tileops.core.report.documents import Document, Row
from tileops.core.report.html import Child, Html, tag
from tileops.core.report.summary import rated_for, required, verdict
from tileops.core.roofline import Profile, peak_at_clock


def number(value: float | None, places: int | None = None) -> str:
    """Three digits or all of a larger number's, unless ``places`` says how many after the point; '-' for none."""
    if value is None:
        return "-"
    if places is None:
        places = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2 if abs(value) >= 0.0995 else 3
    return f"{value:,.{places}f}"


def percent(share: float | None) -> str:
    """``94.2 %``; '-' for none."""
    return "-" if share is None else f"{100 * share:.1f} %"


def op_table(rows: Sequence[Row], profile: Profile | None, stale: Mapping[str, Document]) -> Html:
    """A table that sorts by a click on a heading; ``stale`` names the older document that a row comes from."""
    rivals = dict.fromkeys(name for row in rows for name in row.rivals)
    heads = {
        "case": "",
        "us": "median of ours",
        "p10 - p90": "spread of ours, us",
        "TFLOP/s": "",
        "GB/s": "",
        "of bound": "bound over time, at the theoretical figures",
        "by": "what bounds the row",
        "of copy": "time of a copy of as many bytes over ours",
        "at clock": "TFLOP/s over the peak at the measured clock, where compute bounds",
        **{f"{name} us": "median of this rival" for name in rivals},
        "ratio": "fastest rival's time over ours",
        "host ratio": "host time of a cached call over torch's",
        "error": "over its allowed bound",
        "kernel": "",
    }
    head = [
        tag("th", tag("button", h, title=told or None), class_=None if h in TEXTS else "n") for h, told in heads.items()
    ]
    return tag(
        "table",
        tag("thead", tag("tr", head)),
        tag("tbody", [_line(row, list(rivals), profile, stale.get(row.case)) for row in rows]),
        class_="sortable",
    )


TEXTS = ("case", "by", "kernel")


def _line(row: Row, rivals: Sequence[str], profile: Profile | None, source: Document | None) -> Html:
    us, state = row.us, verdict(row)
    name: list[Child] = [row.name, tag("small", f" from {source.name}") if source else None]
    spread = f"{number(us.p10)} - {number(us.p90)}" if us else "-"
    over = row.of_bound is not None and row.of_bound > 1
    of_copy = row.copy.ratio if row.copy else None
    cells = [
        tag("th", name, scope="row"),
        _cell(number(us.median), us.median, "n strong")
        if us and row.ok
        else _cell(row.status, None, "bad", row.reason),
        _cell(spread, us.p90 - us.p10 if us else None, "n quiet"),
        _cell(number(row.tflops), row.tflops),
        _cell(number(row.gbps), row.gbps),
        _cell(percent(row.of_bound), row.of_bound, "n bad" if over else "n"),
        _cell(row.bound_by or "-", None, "quiet"),
        _cell(percent(of_copy), of_copy),
        _cell(percent(at := _at_clock(row, profile)), at),
        *(_rival(row, name) for name in rivals),
        _cell(number(row.ratio, 3), row.ratio, f"n strong {state}"),
        _cell(number(row.host_ratio, 2), row.host_ratio),
        _cell(number(row.error), row.error, "n bad" if row.error is not None and row.error > 1 else "n"),
        _cell(row.kernel or "-", None, "quiet"),
    ]
    return tag("tr", cells, class_=None if row.ok else "failed")


def _cell(told: str, value: float | None = None, style: str = "n", why: str | None = None) -> Html:
    return tag("td", told, class_=style, title=why, data_v=value)


def _rival(row: Row, name: str) -> Html:
    rival = row.rivals.get(name)
    if rival is None:
        return _cell("-")
    if rival.us is None:
        return _cell(
            rival.status,
            None,
            "n bad" if rival.status == "failed" or required(row.op, name) else "n quiet",
            rival.reason,
        )
    style = "n strong" if name == row.fastest else "n"
    return _cell(number(rival.us) + (" ?" if rival.status == "suspect" else ""), rival.us, style, rival.reason)


def _at_clock(row: Row, profile: Profile | None) -> float | None:
    kind = rated_for(row)
    if not (profile and kind and row.clock_mhz and row.tflops and row.bound_by == "compute"):
        return None
    peak = peak_at_clock(profile, *kind, row.clock_mhz * 1e6)
    return row.tflops * 1e12 / peak if peak else None
