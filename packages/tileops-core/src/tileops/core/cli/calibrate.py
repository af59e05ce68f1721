"""``tileops calibrate``: what this board reaches, as a profile."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from tileops.core.cli import INTERRUPTED, output
from tileops.core.files import check_writable


@click.command("calibrate")
@click.option("--backend", default="cuda", show_default=True, help="cuda, musa or cpu, with an index if need be.")
@click.option("--quick", is_flag=True, help="In few rounds.")
@click.option("--yaml", "as_yaml", type=click.Path(path_type=Path), help="Write the profile here.")
@click.option("--json", "as_json", type=click.Path(path_type=Path), help="Write it here as JSON.")
def command(backend: str, quick: bool, as_yaml: Path | None, as_json: Path | None) -> None:
    """Measure bandwidth, the launch floor and the peaks of matrix products with torch's own kernels.

    The profile that is written serves `tileops bench --profile`; the vendor's figures in it are those of the shipped
    profile, where there is one.
    """
    from tileops.core.bench import calibrate, run
    from tileops.core.cli.rows import device_of

    for into in filter(None, (as_yaml, as_json)):
        check_writable(into)
    bench = run.prepare(device_of(backend), None, cold_l2=False, brief=quick)
    console = output.console()
    reached = []
    try:
        for r in calibrate.calibrate(bench):
            reached.append(r)
            unit = "B/s" if r.what in calibrate.STREAMS else "FLOP/s"
            said = output.duration(r.value) if r.what == calibrate.FLOOR else f"{output.amount(r.value)}{unit}"
            console.print(f"{r.what}: {said}, {r.how}", soft_wrap=True, markup=False)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    made = calibrate.profile_of(reached, bench)
    for into in filter(None, (as_yaml, as_json)):
        calibrate.write(made, into)
