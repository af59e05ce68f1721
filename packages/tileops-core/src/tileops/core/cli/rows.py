"""Workload rows run here: inputs made, the op called through its front door, its result verified and timed."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

import attrs
import click
import torch
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Table

from tileops.core.accuracy import collect, mutated, verify
from tileops.core.backend import BACKENDS
from tileops.core.bench.timing import Timing, timing
from tileops.core.check import Call
from tileops.core.cli import FAILED, INTERRUPTED, output
from tileops.core.errors import BackendError, NoKernelError
from tileops.core.families import op_class
from tileops.core.inputs import make_inputs
from tileops.core.roofline import Bound, board_of, bound, profile
from tileops.core.spec import Entry, Row
from tileops.core.torch_ops import checker_of
from tileops.core.workloads import Case, call_id, cases, row_call, scaled

CPU_FLOPS = 2.0**28
FLOPS_PER_BYTE = 16  # a budget of flops is one of bytes too, or a memory-bound row would take gigabytes


Timer = Callable[[Callable[[], object], torch.device], Timing]


def wall_clock(run: Callable[[], object], device: torch.device) -> Timing:
    """The time of calls one by one, each waited for; at least three, and as many as 0.1 s hold."""
    wait = partial(torch.get_device_module(device).synchronize, device)
    run()
    wait()
    seen: list[float] = []
    while len(seen) < 3 or (sum(seen) < 1e5 and len(seen) < 100):
        start = time.perf_counter()
        run()
        wait()
        seen.append((time.perf_counter() - start) * 1e6)
    return timing(seen)


@attrs.frozen
class Workload:
    """One row with one of its dtype cases."""

    entry: Entry
    row: Row
    case: Case

    @property
    def id(self) -> str:
        """The case's id."""
        return call_id(self.entry, self.row, self.case)

    @property
    def name(self) -> str:
        """The same without its op."""
        return self.id.partition("/")[2]

    def call(self, max_flops: float) -> Call:
        """Its call, scaled down until it needs no more flops than that, and no more bytes than fit them."""
        return scaled(checker_of(self.entry), self.row, self.case, max_flops, max_flops / FLOPS_PER_BYTE)

    def changed(self, call: Call) -> dict[str, Any]:
        """The sizes of a scaled call that are not the row's own."""
        return {n: call.env[n] for n, v in self.row.values.items() if call.env.get(n, v) != v}


@attrs.frozen
class Result:
    """What became of a workload. ``error`` is the measured error over its bound: at most 1 is right."""

    workload: Workload
    call: Call
    status: Literal["ok", "wrong", "failed", "no kernel"]
    error: float | None = None
    us: Timing | None = None
    bound: Bound | None = None
    message: str | None = None

    @property
    def scaled(self) -> dict[str, Any]:
        """The sizes that are not the row's own."""
        return self.workload.changed(self.call)


@attrs.frozen
class Runner:
    """How workloads are run: where, on which random values, and within how many flops."""

    device: torch.device
    seed: int
    max_flops: float
    timer: Timer = wall_clock

    @property
    def max_bytes(self) -> float:
        return self.max_flops / FLOPS_PER_BYTE

    @property
    def board(self) -> str | None:
        """The board whose figures bound a call here."""
        name = getattr(torch.get_device_module(self.device), "get_device_name", None)
        return board_of(name(self.device)) if name else None

    def run(self, workload: Workload) -> Result:
        """Run one workload. What its op or reference raises is part of the result."""
        entry, checker = workload.entry, checker_of(workload.entry)
        call = row_call(checker, workload.row, workload.case)
        try:
            call = workload.call(self.max_flops)
            at_best = bound(call, profile(self.board) if self.board else None)
            inputs = make_inputs(call, self.device, self.seed)
            given = make_inputs(call, self.device, self.seed) if mutated(call) else inputs
            op: Any = op_class(entry)(**call.params)
            verdict = verify(call, inputs, collect(call, op(*given.values()), given))
            us = self.timer(lambda: op(*given.values()), self.device)
        except NoKernelError as e:
            return Result(workload, call, "no kernel", message=str(e))
        except Exception as e:  # one row's fault must not cost the others their result
            return Result(workload, call, "failed", message=f"{type(e).__name__}: {e}")
        message = "; ".join(f.message for f in verdict.findings if not f.ok) or None
        return Result(workload, call, "ok" if verdict else "wrong", verdict.error, us, at_best, message)


def workloads(entries: Iterable[Entry]) -> list[Workload]:
    """Every row and dtype case of these entries."""
    return [Workload(e, row, case) for e in entries for row in e.workloads for case in cases(row)]


def select(workloads: Sequence[Workload], labels: Sequence[str], dtypes: Sequence[str]) -> list[Workload]:
    """The workloads of these rows or cases, with one of these dtypes; of all, where none is named.

    Raises UsageError for a row or dtype that none has, and where nothing fits both.
    """

    def names(w: Workload) -> set[str]:
        return {w.row.label, w.name, w.id}

    known = dict.fromkeys([*(w.row.label for w in workloads), *(name for w in workloads for name in names(w))])
    seen = sorted({dtype for w in workloads for dtype in w.case.values()})
    for what, asked, there in (("row", labels, known), ("dtype of a row", dtypes, seen)):
        for name in asked:
            if name not in there:
                raise output.no_such(what, name, there)
    chosen = [
        w for w in workloads if (not labels or names(w) & {*labels}) and (not dtypes or {*w.case.values()} & {*dtypes})
    ]
    if not chosen:
        asked = [f"--row {label}" for label in labels] + [f"--dtype {dtype}" for dtype in dtypes]
        raise click.UsageError(f"no row of these operators fits {' '.join(asked)}")
    return chosen


def device_of(name: str | None) -> torch.device:
    """The device that a command line names, or the first GPU that can run, else the CPU.

    Raises UsageError for a name that means no device, BackendError for one that isn't here.
    """
    if name is None:
        return torch.device(next((n for n, b in BACKENDS.items() if n != "cpu" and b.available() is None), "cpu"))
    kind, _, index = name.partition(":")
    if kind not in BACKENDS:
        raise output.no_such("device", kind, BACKENDS)
    if index and not index.isdigit():
        raise click.UsageError(f"'{name}' is no device; say '{kind}' or '{kind}:0'")
    if reason := BACKENDS[kind].available():
        raise BackendError(reason)
    if (count := torch.get_device_module(kind).device_count()) <= int(index or 0):
        raise BackendError(f"there is no {name}: torch sees {count} in all")
    return torch.device(name)


def run_all(todo: list[Workload], runner: Runner, as_json: bool) -> None:
    """Run workloads and print what came of them; exits with 1 unless all of them are right, with 130 on Ctrl-C."""
    start = time.perf_counter()
    results: list[Result] = []
    interrupted = False
    try:
        for result in _with_progress(todo, runner):
            results.append(result)
    except KeyboardInterrupt:
        interrupted = True
    if as_json:
        output.print_json(_document(results, runner))
    else:
        _print(results, runner, len(todo), time.perf_counter() - start)
    if interrupted:
        sys.exit(INTERRUPTED)
    if any(r.status != "ok" for r in results):
        sys.exit(FAILED)


def _with_progress(todo: list[Workload], runner: Runner) -> Iterator[Result]:
    console = output.console(stderr=True)
    columns = SpinnerColumn(), BarColumn(20), MofNCompleteColumn(), TextColumn("{task.description}")
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(todo))
        for workload in todo:
            progress.update(task, description=escape(workload.id))
            yield runner.run(workload)
            progress.advance(task)


def _print(results: list[Result], runner: Runner, due: int, seconds: float) -> None:
    console = output.console()
    for entry in {r.workload.entry.name: r.workload.entry for r in results}.values():
        console.print(_table(entry, [r for r in results if r.workload.entry is entry], runner), "")
    bad = [r for r in results if r.status != "ok"]
    for result in bad[:5]:
        console.print(f"[red]{escape(f'{result.call.id}: {result.message}')}[/]", soft_wrap=True)
    if len(bad) > 5:
        console.print(f"[red]and {len(bad) - 5} more; --json has what each one says[/]")
    if any(r.scaled for r in results):
        limits = f"{output.amount(runner.max_flops)}FLOP and {output.amount(runner.max_bytes)}B"
        console.print(f"Sizes under 'scaled to' were halved until a call needs at most {limits}.")
    if not results:
        console.print(f"none of {due} cases was run")
        return
    style, right = ("red" if bad else "green"), len(results) - len(bad)
    missed = f", {due - len(results)} not run" if due > len(results) else ""
    console.print(f"[{style}]{right} of {len(results)} right[/] on {runner.device} in {seconds:.0f} s{missed}")


def _table(entry: Entry, results: list[Result], runner: Runner) -> Table:
    changed = ("scaled to",) if any(r.scaled for r in results) else ()
    table = output.table("=case", *changed, ">error", ">time", ">bound", "on", title=entry.name)
    for r in results:
        error = r.status if r.error is None or not math.isfinite(r.error) else f"{r.error:.2f}"
        table.add_row(
            escape(r.workload.name),
            *(escape(output.settings(entry, r.scaled)) for _ in changed),
            f"{error} > 1" if r.status == "wrong" and error != r.status else error,
            output.duration(r.us.median * 1e-6 if r.us else None),
            output.duration(r.bound.seconds if r.bound else None),
            runner.device.type,
            style=None if r.status == "ok" else "red",
        )
    return table


def _document(results: list[Result], runner: Runner) -> dict[str, Any]:
    return {
        "device": str(runner.device),
        "board": runner.board,
        "torch": torch.__version__,
        "seed": runner.seed,
        "max_flops": _finite(runner.max_flops),
        "max_bytes": _finite(runner.max_bytes),
        "rows": [_row(r, runner) for r in results],
    }


def _row(r: Result, runner: Runner) -> dict[str, Any]:
    return {
        "case": r.call.id,
        "op": r.workload.entry.name,
        "label": r.workload.row.label,
        "dtypes": [*r.workload.case.values()],
        "status": r.status,
        "backend": runner.device.type,
        "inputs": {n: str(m) for n, m in r.call.inputs.items() if m},
        "scaled": r.scaled,
        "error": _finite(r.error),
        "us": r.us and attrs.asdict(r.us),
        "flops": r.bound and r.bound.flops,
        "bytes": r.bound and r.bound.bytes,
        "bound_us": r.bound and r.bound.seconds and r.bound.seconds * 1e6,
        "bound_by": r.bound and r.bound.by,
        "message": r.message,
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
