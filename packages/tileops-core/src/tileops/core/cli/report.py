"""``tileops report``: result documents as a page, or what changed between two of them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
from rich.markup import escape

from tileops.core.cli import FAILED, output
from tileops.core.errors import TileOpsError
from tileops.core.files import write_whole
from tileops.core.report import Change, Comparison, Row, compare, load, render

_DOCUMENT = click.Path(exists=True, dir_okay=False, path_type=Path)
_STYLES = {"regression": "red", "failed": "red", "improvement": "green", "drift": "yellow", "same": "dim"}


@click.command("report")
@click.argument("results", nargs=-1, required=True, type=_DOCUMENT, metavar="RESULT...")
@click.option("-o", "--output", "into", type=click.Path(dir_okay=False, path_type=Path), help="The page; report.html.")
@click.option("--compare", "old", type=_DOCUMENT, metavar="OLD", help="Compare OLD with the one RESULT instead.")
@click.option("--partial", is_flag=True, help="With --compare: OLD may have rows that RESULT lacks.")
@click.option("--json", "as_json", is_flag=True, help="The comparison for machines.")
def command(results: tuple[Path, ...], into: Path | None, old: Path | None, partial: bool, as_json: bool) -> None:
    """Turn result documents of `tileops bench` into one HTML page that needs no network.

    Documents of one board, oldest first, give its history. With --compare, exit code 1 says that a row regressed
    beyond noise, or is there no longer.
    """
    if old is None:
        if as_json or partial:
            raise click.UsageError(f"{'--json' if as_json else '--partial'} is for --compare")
        into = into or Path("report.html")
        write_whole(into, render(_load(path) for path in results))
        output.console().print(str(into), soft_wrap=True, markup=False)
        return
    if into or len(results) != 1:
        raise click.UsageError("--compare takes two documents, OLD and one RESULT, and writes no page")
    try:
        found = compare(_load(old), _load(results[0]))
    except TileOpsError as e:
        raise click.UsageError(str(e)) from None
    if not found.changes:
        raise click.UsageError(f"no row is in both {old} and {results[0]}")
    if as_json:
        output.print_json(_document(found))
    else:
        _print(found)
    sys.exit(FAILED if found.count("regression") or (found.only_old and not partial) else 0)


def _load(path: Path) -> Any:
    try:
        return load(path)
    except TileOpsError as e:
        raise click.UsageError(str(e)) from None


def _print(found: Comparison) -> None:
    console = output.console()
    table = output.table("=", "=case", ">old us", ">new us", ">new/old", ">noise", ">ratio new/old")
    for c in found.changes:
        table.add_row(
            f"[{_STYLES[c.outcome]}]{c.outcome}[/]",
            escape(c.case),
            _us(c.old),
            _us(c.new),
            _figure(c.time),
            f"{c.noise:.0%}",
            _figure(c.ratio),
        )
    console.print(table)
    for title, cases in (("only in the old document", found.only_old), ("only in the new document", found.only_new)):
        for case in cases:
            console.print(f"{title}: {case}", soft_wrap=True, markup=False)
    for key, (was, now) in found.environment.items():
        console.print(f"{key}: {was} -> {now}", soft_wrap=True, markup=False)
    counts = ", ".join(f"{n} {name}" for name in _STYLES if (n := found.count(name)))  # type: ignore[arg-type]
    lost = f"; {len(found.only_old)} in the old document only" if found.only_old else ""
    console.print(f"{len(found.changes)} rows in both: {counts}{lost}", markup=False)


def _us(row: Row) -> str:
    return output.digits(row.us.median) if row.ok and row.us else row.status


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _document(found: Comparison) -> dict[str, Any]:
    return {
        "rows": [_change(c) for c in found.changes],
        "only_old": found.only_old,
        "only_new": found.only_new,
        "environment": {key: {"old": was, "new": now} for key, (was, now) in found.environment.items()},
    }


def _change(c: Change) -> dict[str, Any]:
    return {
        "case": c.case,
        "outcome": c.outcome,
        "old": _side(c.old),
        "new": _side(c.new),
        "time": c.time,
        "ratio": c.ratio,
        "relative": c.relative,
        "noise": c.noise,
    }


def _side(row: Row) -> dict[str, Any]:
    return {"status": row.status, "us": row.us and row.us.median, "ratio": row.ratio, "fastest": row.fastest}
