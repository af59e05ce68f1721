"""``tileops cache``: the compiled programs on disk."""

from __future__ import annotations

import shutil

import click

from tileops.core.cli import output
from tileops.core.program import cache_dir, stored


@click.group(invoke_without_command=True)
@click.pass_context
def command(context: click.Context) -> None:
    """Where compiled programs are kept, and how much they take."""
    if context.invoked_subcommand is None:
        programs = list(stored())
        size = sum(f.stat().st_size for p in programs for f in p.iterdir())
        output.console().print(f"{cache_dir()}: {len(programs)} programs, {size / 1e6:.1f} MB", soft_wrap=True)


@command.command()
def clear() -> None:
    """Remove every compiled program; running processes keep what they have loaded."""
    programs = list(stored())
    for place in programs:
        shutil.rmtree(place, ignore_errors=True)
    output.console().print(f"{len(programs)} programs removed")
