"""``tileops run``."""

from __future__ import annotations

import math

import click

from tileops.core.cli import output


@click.command("run")
@click.argument("op")
@click.option("--row", "labels", multiple=True, metavar="LABEL", help="Only this row, or this case of it; repeatable.")
@click.option("--max-flops", type=click.FloatRange(min=1), help="Scale rows down to this; 2**28 on a CPU, else inf.")
@click.option("--device", help="cpu, cuda or musa, with an index if need be; a GPU where there is one.")
@click.option("--seed", default=0, show_default=True, help="Of the inputs' values.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def command(
    op: str, labels: tuple[str, ...], max_flops: float | None, device: str | None, seed: int, as_json: bool
) -> None:
    """Run an operator's workloads here: verified, timed, against their bound.

    The error is the measured one over what is allowed: at most 1 is right. Times are those of a plain clock.
    """
    entry = output.entry_of(op)
    from tileops.core.cli import rows

    todo = rows.select(rows.workloads([entry]), labels, ())
    where = rows.device_of(device)
    if max_flops is None:
        max_flops = rows.CPU_FLOPS if where.type == "cpu" else math.inf
    rows.run_all(todo, rows.Runner(where, seed, max_flops), as_json)
