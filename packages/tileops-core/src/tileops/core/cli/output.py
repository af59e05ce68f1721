"""What the commands share: how they print, and how they find what they are asked for."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from importlib import metadata
from typing import Any

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tileops.core.errors import BackendError, TileOpsError
from tileops.core.families import entries, find_entry
from tileops.core.spec import Entry
from tileops.core.spec.diagnostics import did_you_mean


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def console(stderr: bool = False) -> Console:
    """Plain text where it isn't a terminal; nothing in it is highlighted by guessing."""
    return _Console(stderr=stderr, highlight=False, emoji=False)


def table(*columns: str, title: str | None = None) -> Table:
    """A table of ours; a column whose heading starts with ``>`` holds numbers."""
    made = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        collapse_padding=True,
    )
    for name in columns:
        number = name.startswith(">")
        made.add_column(name.removeprefix(">"), justify="right" if number else "left", no_wrap=number, overflow="fold")
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


def no_such(what: str, name: str, known: Collection[str]) -> click.UsageError:
    """A name on the command line that means nothing."""
    hint = did_you_mean(name, known) or f"known are {', '.join(known)}"
    return click.UsageError(f"no {what} is called '{name}'; {hint}")


def version(distribution: str) -> str | None:
    """An installed distribution's version; None where it isn't installed, or runs from a source tree."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


_PREFIXES = (("", 1.0), ("k", 1e3), ("M", 1e6), ("G", 1e9), ("T", 1e12), ("P", 1e15))


def amount(value: float, unit: str = "") -> str:
    """Three digits and a decimal prefix: ``240 GFLOP``."""
    prefix, size = next((p for p in reversed(_PREFIXES) if value >= p[1]), _PREFIXES[0])
    return f"{_three(value / size)} {prefix}{unit}".rstrip()


def duration(seconds: float | None) -> str:
    """``243 us``; '-' for none."""
    if seconds is None:
        return "-"
    size, unit = next(((s, u) for s, u in ((1.0, "s"), (1e-3, "ms")) if seconds >= s), (1e-6, "us"))
    return f"{_three(seconds / size)} {unit}"


def _three(value: float) -> str:
    return (
        f"{value:.0f}"
        if value >= 99.95 or value == int(value)
        else f"{value:.1f}"
        if value >= 9.995
        else f"{value:.2f}"
    )


def setting(name: str, value: Any) -> str:
    """A size or param as people write it: ``B=4x2048``, ``is_causal``."""
    if value is True:
        return name
    return f"{name}={'x'.join(map(str, value)) if isinstance(value, tuple) else value}"
