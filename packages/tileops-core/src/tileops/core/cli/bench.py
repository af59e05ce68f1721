"""``tileops bench``: rows against their rivals."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tileops.core.cli import FAILED, INTERRUPTED, output

if TYPE_CHECKING:
    from rich.console import Console

CPU_FLOPS = 2.0**22  # a burst is a dozen calls
EVERY = 10  # seconds between signs of life while programs are compiled


@click.command("bench")
@click.option("--backend", default="cuda", show_default=True, help="cuda, musa or cpu, with an index if need be.")
@click.option("--family", "names", multiple=True, metavar="FAMILY", help="Only this family; repeatable.")
@click.option("--op", "ops", multiple=True, metavar="OP", help="Only this operator; repeatable.")
@click.option("--row", "labels", multiple=True, metavar="LABEL", help="Only this row, or this case of it; repeatable.")
@click.option("--dtype", "dtypes", multiple=True, metavar="DTYPE", help="Only cases with this dtype; repeatable.")
@click.option("--quick", is_flag=True, help="The first row of each operator, in few rounds.")
@click.option(
    "--timer", type=click.Choice(["graph", "cupti", "events", "wall"]), help="The backend's first if not given."
)
@click.option("--hot-l2", is_flag=True, help="Leave the inputs in L2 between calls.")
@click.option(
    "--profile", "board", type=click.Path(path_type=Path), help="The board's figures, of a file; ours if not given."
)
@click.option("--max-flops", type=click.FloatRange(min=1), help="Scale rows down to this; 2**22 on a CPU, else inf.")
@click.option("--json", "into", type=click.Path(path_type=Path), help="Write the result document here, row by row.")
def command(
    backend: str,
    names: tuple[str, ...],
    ops: tuple[str, ...],
    labels: tuple[str, ...],
    dtypes: tuple[str, ...],
    quick: bool,
    timer: str | None,
    hot_l2: bool,
    board: Path | None,
    max_flops: float | None,
    into: Path | None,
) -> None:
    """Measure rows and their rivals side by side, each verified on the inputs that are timed.

    A document that is there already is continued: what was measured from the same sources in the same environment
    stands, but for rows that failed. Ctrl-C keeps what is finished. On a CPU rows are scaled down, to try the way.
    """
    entries = output.chosen(names, ops)
    import attrs

    from tileops.core.bench import document, run
    from tileops.core.bench.rows import floor_us
    from tileops.core.bench.timers import TIMERS_OF
    from tileops.core.cli import rows
    from tileops.core.roofline import profile

    todo = rows.select(rows.workloads(entries), labels, dtypes)
    if quick:
        todo = list({w.entry.name: w for w in reversed(todo)}.values())[::-1]
    device = rows.device_of(backend)
    if timer and timer not in TIMERS_OF[device.type]:
        raise output.no_such(f"timer of {device.type}", timer, TIMERS_OF[device.type])
    bench = run.prepare(device, timer, not hot_l2, quick, profile(board) if board else None)
    if max_flops is None:
        max_flops = CPU_FLOPS if device.type == "cpu" else math.inf
    environment = document.environment(bench) | {"max_flops": max_flops if math.isfinite(max_flops) else None}
    console = output.console()
    if into:
        click.get_current_context().with_resource(document.to_oneself(into))
    kept = document.held(into, environment) if into else document.Held({})
    if into and kept.stale:
        aside = document.put_aside(into)
        console.print(f"rows of {kept.stale} are measured again; the old ones are in {aside}", soft_wrap=True)
    calls = {w.id: w.call(max_flops) for w in todo}
    changed = {w.id: w.changed(calls[w.id]) for w in todo}
    done: dict[str, Mapping[str, Any]] = dict(kept.rows)
    due = [call for case, call in calls.items() if done.get(case, {}).get("status") != "ok"]
    if into and len(due) < len(calls):
        console.print(f"{len(calls) - len(due)} rows of {into} stand", soft_wrap=True)
    try:
        _compile(run.recipes(due, bench.device), console)
        bench = attrs.evolve(bench, floor_us=floor_us(bench) if due else None)
        for row in _with_progress(run.run(due, bench, cold=not quick), len(due), console):
            done[row["case"]] = row | ({"scaled": changed[row["case"]]} if changed[row["case"]] else {})
            if into:
                document.write(into, document.document(done.values(), environment))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    finally:
        finished = [done[case] for case in calls if case in done]
        for s in document.summaries(finished):
            worst = f"worst x{s.worst_ratio:.3f}, {s.worst}"
            console.print(f"{s.op}: x{s.ratio:.3f} of the fastest over {s.rows} rows; {worst}", soft_wrap=True)
    if any(row["status"] != "ok" for row in finished):
        sys.exit(FAILED)


def _compile(recipes: Sequence[Any], console: Console) -> None:
    """All programs by one pool of processes; what fails to compile says so in its row, too."""
    from tileops.core.program import build

    total, said = len({recipe.key for recipe in recipes}), time.monotonic()
    for i, (recipe, failure) in enumerate(build(recipes), 1):
        if failure:
            name = f"{recipe.static.op}, {type(recipe.kernel).__name__}"
            console.print(f"[program {i}/{total}] {name}: {failure.splitlines()[0]}", soft_wrap=True, markup=False)
        elif i == total or time.monotonic() - said > EVERY:
            console.print(f"[program {i}/{total}]", markup=False)
            said = time.monotonic()


def _with_progress(measured: Iterable[dict[str, Any]], total: int, console: Console) -> Iterator[dict[str, Any]]:
    """The rows, each with a line of its own and with the time that the rest may take."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    start = time.monotonic()
    columns = BarColumn(20), MofNCompleteColumn(), TextColumn("{task.description}")
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=total)
        for i, row in enumerate(measured, 1):
            left = f"{(time.monotonic() - start) / i * (total - i) / 60:.0f} min left"
            progress.update(task, advance=1, description=left)
            console.print(f"[{i}/{total}, {left}] {line(row)}", soft_wrap=True, markup=False)
            yield row


def line(row: Mapping[str, Any]) -> str:
    """A row for people."""
    if row["status"] != "ok":
        return f"{row['case']}: {row['status']}: {row['reason']}"
    us = row["us"]["median"]
    doubtful = {n for n, r in row["rivals"].items() if r["status"] == "suspect"}
    rivals = ", ".join(f"{n} {r['us']:.1f}{'?' * (n in doubtful)}" for n, r in row["rivals"].items() if "us" in r)
    missing = [n for n, r in row["rivals"].items() if "us" not in r]
    parts = [
        f"{us:.1f} us",
        f"x{row['ratio']:.3f} of {row['fastest']} ({rivals})" if "ratio" in row else rivals or "no rival",
        f"hot x{row['hot_ratio']:.3f}" if "hot_ratio" in row else "",
        f"{row['tflops']:.0f} TFLOP/s",
        f"{row['gbps']:.0f} GB/s",
        f"{row['percent']:.0f}% of the {row['bound_by']} bound" if "percent" in row else "no bound",
        f"{100 * row['copy']['ratio']:.0f}% of a copy" if "copy" in row else "",
        f"host x{row['host_ratio']:.2f}" if "host_ratio" in row else "",
        f"error {row['error']:.2f}",
        row["kernel"],
        f"without {', '.join(missing)}" if missing else "",
    ]
    return f"{row['case']}: {', '.join(filter(None, parts))}"
