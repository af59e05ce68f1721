"""``tileops demo``."""

from __future__ import annotations

import click

from tileops.core.cli import output


@click.command("demo")
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or musa, with an index if need be.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def command(device: str, as_json: bool) -> None:
    """Run every installed operator, scaled to what a CPU can do.

    The error is the measured one over what is allowed: at most 1 is right. Times are those of a plain clock.
    """
    entries = output.installed().values()
    from tileops.core.cli import rows

    rows.run_all(rows.workloads(entries), rows.Runner(rows.device_of(device), 0, rows.CPU_FLOPS), as_json)
