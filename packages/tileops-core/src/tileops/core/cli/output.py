"""What the commands share: how they print, and how they find what they are asked for."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from importlib import metadata
from typing import Any

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console, JustifyMethod
from rich.table import Table

from tileops.core.errors import BackendError, TileOpsError
from tileops.core.families import entries, find_entry
from tileops.core.spec import Entry
from tileops.core.spec.diagnostics import did_you_mean

SHOWN = 12  # names that a hint lists
WIDE = 200  # columns where no terminal says how many there are: names are to be found again in a log


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def console(stderr: bool = False) -> Console:
    """Plain text where it isn't a terminal; nothing in it is highlighted by guessing."""
    stream = sys.stderr if stderr else sys.stdout
    wide = None if stream.isatty() or "COLUMNS" in os.environ else WIDE
    return _Console(stderr=stderr, highlight=False, emoji=False, width=wide)


def table(*columns: str, title: str | None = None) -> Table:
    """A table of ours. A heading that starts with ``>`` is that of numbers, one with ``=`` that of names kept whole."""
    made = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, show_edge=False)
    made.pad_edge, made.collapse_padding = False, True
    for name in columns:
        whole = name[:1] in (">", "=")
        justify: JustifyMethod = "right" if name.startswith(">") else "left"
        made.add_column(name[1:] if whole else name, justify=justify, no_wrap=whole, overflow="fold")
    return made


def print_json(value: Any) -> None:
    """One JSON document, as machines read it."""
    click.echo(json.dumps(value, indent=2, allow_nan=False))


def installed() -> Mapping[str, Entry]:
    """The entries of the installed families; raises BackendError where there is none."""
    found = entries()
    if not found:
        raise BackendError("no operator family is installed; pip install tileops")
    return found


def entry_of(name: str) -> Entry:
    """The entry of an operator named on the command line."""
    installed()
    try:
        return find_entry(name)
    except TileOpsError as e:
        raise click.UsageError(str(e)) from None


def chosen(families: Sequence[str], ops: Sequence[str]) -> list[Entry]:
    """The entries of these families and operators; of all, where none is named. Raises UsageError without any."""
    known = sorted({e.family for e in installed().values()})
    for name in families:
        if name not in known:
            raise no_such("family", name, known)
    entries = [entry_of(op) for op in ops] if ops else list(installed().values())
    found = [e for e in entries if not families or e.family in families]
    if not found:
        raise click.UsageError(f"{', '.join(ops)} is not of the family {', '.join(families)}")
    return found


def no_such(what: str, name: str, known: Collection[str]) -> click.UsageError:
    """A name on the command line that means nothing."""
    few, more = [*known][:SHOWN], len(known) - SHOWN
    hint = did_you_mean(name, known) or f"known are {', '.join(few)}{f' and {more} more' if more > 0 else ''}"
    return click.UsageError(f"no {what} is called '{name}'; {hint}")


def version(distribution: str) -> str | None:
    """An installed distribution's version; None where it isn't installed, or runs from a source tree."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


_PREFIXES = ((1e15, " P"), (1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k"), (0.0, ""))
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (0.0, "ns"))


def amount(value: float) -> str:
    """Three digits and a decimal prefix: ``240 G``."""
    size, prefix = next(p for p in _PREFIXES if value >= p[0])
    return f"{digits(value / (size or 1))}{prefix}"


def duration(seconds: float | None) -> str:
    """``243 us``; '-' for none."""
    if seconds is None:
        return "-"
    size, unit = next(u for u in _UNITS if seconds >= u[0])
    return f"{digits(seconds / (size or 1e-9))} {unit}"


def digits(value: float) -> str:
    """Three digits, or all of a larger number's."""
    if value >= 99.95 or value == int(value):
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def settings(entry: Entry, values: Mapping[str, Any]) -> str:
    """Sizes, and params unlike their defaults, as people write them: ``B=4x2048 is_causal``."""
    defaults = {n: p.default for n, p in entry.signature.params.items()}
    return " ".join(_setting(n, v) for n, v in values.items() if n not in defaults or v != defaults[n])


def _setting(name: str, value: Any) -> str:
    if value is True:
        return name
    return f"{name}={'x'.join(map(str, value)) if isinstance(value, tuple) else value}"
