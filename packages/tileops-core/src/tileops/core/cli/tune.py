"""``tileops tune``: which kernel and config serve rows best on a board."""

from __future__ import annotations

import datetime
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import click

from tileops.core.cli import FAILED, INTERRUPTED, output
from tileops.core.errors import BackendError
from tileops.core.files import check_writable, write_whole
from tileops.core.kernel import Device
from tileops.core.tune import results, search, shipped
from tileops.core.tune.child import Child
from tileops.core.tune.results import Result
from tileops.core.tune.search import Built, Progress
from tileops.core.tune.task import LIMIT, Task, tasks


@click.command("tune")
@click.argument("ops", nargs=-1, required=True, metavar="OP...")
@click.option("--row", "labels", multiple=True, metavar="LABEL", help="Only this row; repeatable.")
@click.option("--dtype", "dtypes", multiple=True, metavar="DTYPE", help="Only cases with this dtype; repeatable.")
@click.option("--gpus", default="all", show_default=True, metavar="all|0,1", help="Those that measure.")
@click.option("--limit", default=LIMIT, show_default=True, type=click.IntRange(1), help="Configs of each kernel.")
@click.option("--workers", type=click.IntRange(1), help="Compiling processes; one for each CPU core if not given.")
@click.option("--json", "into", type=click.Path(path_type=Path), help="Write every candidate's time or reason here.")
@click.option("--ship", is_flag=True, help="Write the choices into the family's table for this board.")
@click.option("--all", "every", is_flag=True, help="With --ship: those too that gain nothing over the default.")
def command(
    ops: tuple[str, ...],
    labels: tuple[str, ...],
    dtypes: tuple[str, ...],
    gpus: str,
    limit: int,
    workers: int | None,
    into: Path | None,
    ship: bool,
    every: bool,
) -> None:
    """Compile and measure the candidates of rows, and keep what is best in the result cache.

    Rows that share a bucket, within which one choice serves, are tuned together. Every result is verified before it is
    timed. What is known already stands; Ctrl-C keeps what is finished.
    """
    if into:
        check_writable(into)
    indices, device, board = _chosen(gpus)
    todo = _tasks(ops, labels, dtypes, device, board, limit)
    console = output.console()

    def report(p: Progress) -> None:
        left = datetime.timedelta(seconds=round(p.left))
        console.print(f"{p.phase} [{p.done}/{p.total}] {left} left  {p.last}", soft_wrap=True, markup=False)

    try:
        built = search.build(todo, workers, report)
        if built.count:
            each = built.seconds / built.count
            count = min(workers or os.cpu_count() or 1, built.count)
            console.print(f"compiled {built.count} in {built.seconds:.0f} s: {each:.2f} s each, {count} at a time")
        faults = search.run(todo, indices, built.failures, report)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    found = [(task, result) for task in todo if (result := results.read(task.bucket)) and result.chosen]
    _print(found, faults)
    if into:
        write_whole(into, json.dumps(_document(todo, faults, built, board), indent=1) + "\n")
    if ship:
        for table, count in _ship(found, every).items():
            console.print(f"{table}: {count} of {len(found)} choices", soft_wrap=True)
    if faults:
        sys.exit(FAILED)


def _chosen(gpus: str) -> tuple[list[int], Device, str]:
    """The GPUs that are to measure, which must be alike."""
    found = _devices()
    words = [str(i) for i in range(len(found))] if gpus == "all" else [w.strip() for w in gpus.split(",")]
    for word in words:
        if not word.isdigit():
            raise click.UsageError(f"--gpus is 'all' or numbers such as '0,1', not '{gpus}'")
        if int(word) >= len(found):
            raise BackendError(f"there is no GPU {word}: {len(found)} are visible; name fewer with --gpus")
    indices = sorted({int(word) for word in words})
    kinds = {found[i] for i in indices}
    if len(kinds) > 1:
        boards = ", ".join(f"{i}: {found[i][0]}" for i in indices)
        raise click.UsageError(f"the GPUs are not alike ({boards}); name those of one kind with --gpus")
    ((board, device),) = kinds
    return indices, device, board


def _devices() -> list[tuple[str, Device]]:
    """Board and properties of each visible GPU, as another process sees them: this one stays off them."""
    from tileops.core.backend import cuda

    if reason := cuda.available() or cuda.toolchain():
        raise BackendError(reason)
    with Child("tileops.core.tune.measure:devices") as child:
        return list(child.ask(cuda.device_type))


def _tasks(
    ops: Sequence[str], labels: Sequence[str], dtypes: Sequence[str], device: Device, board: str, limit: int
) -> list[Task]:
    from tileops.core.backend import cuda
    from tileops.core.cli import rows
    from tileops.core.families import op_class

    entries = [output.entry_of(op) for op in dict.fromkeys(ops)]
    all_rows = rows.workloads(entries)
    wanted = {w.id for w in rows.select(all_rows, labels, dtypes)}
    found = []
    for entry in entries:
        op_class(entry)
        calls = [w.call(math.inf) for w in all_rows if w.entry is entry]
        found += [task for task in tasks(cuda, calls, device, board, limit) if wanted & task.calls.keys()]
    if not found:
        raise click.UsageError("no kernel serves any of these rows")
    return found


def _print(found: Sequence[tuple[Task, Result]], faults: Mapping[str, str]) -> None:
    console = output.console()
    table = output.table("=case", ">default", ">choice", ">gain", "kernel and config")
    gains = []
    for task, result in found:
        for case in task.calls:
            default, choice = (us and us * 1e-6 for us in result.times(case))
            gain = result.gain(case)
            gains += [gain] if gain else []
            shown = "-" if gain is None else f"x{gain:.3f}"
            table.add_row(case, output.duration(default), output.duration(choice), shown, str(result.chosen))
    if found:
        console.print(table, "")
    for fault in faults.values():
        console.print(fault, style="red", soft_wrap=True, markup=False)
    if gains:
        out = sum(c.reason is not None for _, result in found for c in result.candidates)
        mean = math.exp(sum(map(math.log, gains)) / len(gains))
        console.print(f"x{mean:.3f} over the defaults, geometric mean of {len(gains)}; {out} candidates are out")


def _document(todo: Sequence[Task], faults: Mapping[str, str], built: Built, board: str) -> dict[str, Any]:
    rows = []
    for task in todo:
        result = results.read(task.bucket)
        row = {} if result is None else attrs.asdict(result)
        row |= {"op": task.bucket.op, "call": task.bucket.call, "fault": faults.get(task.bucket.key)}
        row["gain"] = {} if result is None else {case: result.gain(case) for case in task.calls}
        rows.append(row)
    compiled = {"count": built.count, "seconds": built.seconds}
    return {"board": board, "protocol": search.PROTOCOL, "compiled": compiled, "buckets": rows}


def _ship(found: Sequence[tuple[Task, Result]], every: bool) -> dict[Path, int]:
    """Write each family's table; gives how many of these choices are in it."""
    from tileops.core.torch_ops import class_of

    tables: dict[Path, dict[str, shipped.Shipped | None]] = {}
    for task, result in found:
        table = shipped.path(class_of(next(iter(task.calls.values())).entry), task.bucket.board)
        assert table is not None
        entry = shipped.entry_of(result, list(task.calls), every)
        tables.setdefault(table, {})[task.bucket.text] = entry
    for table, entries in tables.items():
        bucket = next(task.bucket for task, _ in found if task.bucket.text in entries)
        provenance = {
            "board": bucket.board,
            "date": datetime.date.today().isoformat(),
            "versions": bucket.versions,
            "kernels": bucket.sources[:16],
            "protocol": search.PROTOCOL,
        }
        shipped.write(table, provenance, entries)
    return {table: sum(e is not None for e in entries.values()) for table, entries in tables.items()}
