"""``tileops bench``: rows against their rivals on a GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from tileops.core.cli import FAILED, INTERRUPTED, output


@click.command("bench")
@click.option("--backend", default="cuda", show_default=True, help="cuda.")
@click.option("--family", "names", multiple=True, metavar="FAMILY", help="Only this family; repeatable.")
@click.option("--op", "ops", multiple=True, metavar="OP", help="Only this operator; repeatable.")
@click.option("--row", "labels", multiple=True, metavar="LABEL", help="Only this row; repeatable.")
@click.option("--json", "into", type=click.Path(path_type=Path), help="Write the result document here, row by row.")
def command(
    backend: str, names: tuple[str, ...], ops: tuple[str, ...], labels: tuple[str, ...], into: Path | None
) -> None:
    """Measure rows and their rivals side by side, each verified on the inputs that are timed.

    A document that is there already is continued: its rows stand. Ctrl-C keeps what is finished.
    """
    entries = [e for e in output.installed().values() if not names or e.family in names]
    if ops:
        entries = [output.entry_of(op) for op in ops]
    from tileops.core.backend import gpu_backend
    from tileops.core.errors import BackendError

    found = gpu_backend(backend)
    if found is None or backend != "cuda":
        raise click.UsageError(f"rows are measured on cuda, not on '{backend}'")
    if reason := found.available():
        raise BackendError(reason)
    from tileops.core.bench.rows import document, measure
    from tileops.core.torch_ops import checker_of
    from tileops.core.workloads import cases, row_call

    held = json.loads(into.read_text())["rows"] if into and into.exists() else []
    done = {row["case"]: row for row in held}
    wanted = [(e, row) for e in entries for row in e.workloads if not labels or row.label in labels]
    todo = [row_call(checker_of(e), row, case) for e, row in wanted for case in cases(row)]
    console = output.console()
    try:
        for i, call in enumerate(todo):
            if call.id not in done:
                done[str(call.id)] = measure(call)
                if into:
                    _write(into, document(list(done.values())))
            console.print(f"[{i + 1}/{len(todo)}] {_line(done[str(call.id)])}", soft_wrap=True, markup=False)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    if any(done[str(c.id)]["status"] != "ok" for c in todo):
        sys.exit(FAILED)


def _line(row: dict[str, Any]) -> str:
    if row["status"] != "ok":
        return f"{row['case']}: {row['status']}: {row['reason']}"
    us = row["us"]["median"]
    rivals = ", ".join(f"{n} {r['us']:.1f}" for n, r in row["rivals"].items() if "us" in r)
    parts = [
        f"{us:.1f} us",
        f"x{row['ratio']:.3f} of {row['fastest']} ({rivals})" if "ratio" in row else "no rival",
        f"{row['tflops']:.0f} TFLOP/s",
        f"{row['gbps']:.0f} GB/s",
        f"{row['bound_us'] / us:.0%} of the {row['bound_by']} bound" if row["bound_us"] else "no bound",
        f"host x{row['host_ratio']:.2f}" if "host_ratio" in row else "",
        f"error {row['error']:.2f}",
        row["kernel"],
    ]
    return f"{row['case']}: {', '.join(filter(None, parts))}"


def _write(into: Path, value: dict[str, Any]) -> None:
    into.parent.mkdir(parents=True, exist_ok=True)
    fresh = into.with_suffix(".part")
    fresh.write_text(json.dumps(value, indent=1) + "\n")
    fresh.replace(into)
