"""``tileops list``."""

from __future__ import annotations

import click

from tileops.core.cli import output
from tileops.core.families import families


@click.command("list")
@click.option("--family", help="Only the operators of this family.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def command(family: str | None, as_json: bool) -> None:
    """List the installed operators."""
    found = output.installed().values()
    if family is not None and family not in families():
        raise output.no_such("installed family", family, families())
    chosen = [e for e in found if family in (None, e.family)]
    if as_json:
        output.print_json(
            [
                {
                    "name": e.name,
                    "family": e.family,
                    "status": e.status,
                    "aliases": e.aliases,
                    "rows": len(e.workloads),
                    "summary": e.summary,
                }
                for e in chosen
            ]
        )
        return
    table = output.table("operator", "family", "status", ">rows", "summary")
    for e in chosen:
        table.add_row(e.name, e.family, e.status, str(len(e.workloads)), e.summary)
    output.console().print(table)
