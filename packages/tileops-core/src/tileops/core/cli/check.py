"""``tileops check``: what is wrong with specs, as a compiler says it."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

import attrs
import click

from tileops.core.validate import spec_files, validate


@click.command()
@click.argument("paths", nargs=-1, metavar="[PATH]...", type=click.Path(exists=True, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the findings as a JSON list, and nothing else.")
@click.option(
    "--tests",
    multiple=True,
    metavar="DIR",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Where tests name the semantics, instead of packages/*/tests of the spec's workspace.",
)
@click.option("--strict", is_flag=True, help="Make warnings errors.")
def command(paths: tuple[Path, ...], as_json: bool, tests: tuple[Path, ...], strict: bool) -> None:
    """Check specs against the language, their references, classes, tests, rows and rooflines.

    PATH is a spec file or a folder of them; without any, the specs of the installed families are checked. Exits with 0
    where there is no error, 1 where there is one, 2 for wrong usage.
    """
    files = spec_files(paths or None)
    if not files:
        where = f"no *.yaml in {', '.join(map(str, paths))}" if paths else "no family is installed; name a spec file"
        raise click.UsageError(where)
    # What a spec names is imported, and may print.
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        found = validate(files, tests or None)
    if strict:
        found = tuple(attrs.evolve(d, severity="error") for d in found)
    errors = sum(d.severity == "error" for d in found)
    if as_json:
        click.echo(json.dumps([attrs.asdict(d) for d in found], indent=2))
    else:
        for finding in found:
            click.echo(str(finding))
        counts = (_count(len(files), "spec"), _count(errors, "error"), _count(len(found) - errors, "warning"))
        click.echo("{} checked: {}, {}".format(*counts))
    sys.exit(1 if errors else 0)


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"
