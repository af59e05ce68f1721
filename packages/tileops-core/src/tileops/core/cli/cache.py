"""``tileops cache``: the compiled programs on disk."""

from __future__ import annotations

import shutil
import sys

import click

from tileops.core.cli import FAILED, INTERRUPTED, output
from tileops.core.program import build, cache_dir, stored


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
    removed = 0
    try:
        for place in list(stored()):
            shutil.rmtree(place)
            removed += 1
    finally:
        output.console().print(f"{removed} programs removed")


@command.command("build")
@click.option("--family", "names", multiple=True, metavar="FAMILY", help="Only this family; repeatable.")
@click.option("--op", "ops", multiple=True, metavar="OP", help="Only this operator; repeatable.")
@click.option("--board", type=click.Choice(["h200"]), help="For this board, which need not be here; else for this GPU.")
@click.option("--workers", type=click.IntRange(1), help="Processes; one for each CPU core if not given.")
def build_command(names: tuple[str, ...], ops: tuple[str, ...], board: str | None, workers: int | None) -> None:
    """Compile the programs of all rows and test cases, as calls on the board choose them.

    The folder may then be copied to where they run. What is there already stays; Ctrl-C keeps what is finished.
    """
    entries = output.chosen(names, ops)
    from tileops.core.backend import cuda, gpu
    from tileops.core.errors import BackendError
    from tileops.core.kernel import H200
    from tileops.core.testing.programs import recipes

    if board is None and (reason := cuda.available()):
        raise BackendError(f"{reason}, or name a --board")
    device, board = (H200, board) if board else (cuda.device(0), gpu.board_at(cuda, 0))
    wanted = [recipe for entry in entries for recipe in recipes(entry, cuda, device, board).values()]
    failed = 0
    console = output.console()
    try:
        for i, (recipe, failure) in enumerate(build(wanted, workers)):
            said = failure or f"{recipe.static.op}, {type(recipe.kernel).__name__}"
            console.print(f"[{i + 1}/{len(wanted)}] {said}", soft_wrap=True, markup=False)
            failed += failure is not None
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    sys.exit(FAILED if failed else 0)
