"""The way in: a file or text -> entries, or every finding about it."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import attrs

from tileops.core.errors import SpecError
from tileops.core.spec.determined import check_solvable
from tileops.core.spec.diagnostics import Diagnostic, Place
from tileops.core.spec.legacy import is_older, modernise
from tileops.core.spec.model import Entry
from tileops.core.spec.read import read_entry
from tileops.core.spec.source import Source


@attrs.frozen
class SpecFile:
    """A file's entries that have no error of their own; ``diagnostics`` has errors and warnings, sorted by place."""

    path: str
    entries: Mapping[str, Entry]
    diagnostics: tuple[Diagnostic, ...]

    @property
    def errors(self) -> tuple[Diagnostic, ...]:
        return tuple(d for d in self.diagnostics if d.severity == "error")


def parse_spec(text: str, path: str = "<spec>") -> SpecFile:
    """Read spec text. Never raises for what the text holds: faults are in ``diagnostics``."""
    with _collector_paused():
        return _parse(text, path)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """A large file makes a million nodes and marks, none in a cycle; looking for cycles among them doubles the time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _parse(text: str, path: str) -> SpecFile:
    src = Source(path)
    root = src.compose(text)
    entries: dict[str, Entry] = {}
    for name, key, node in src.items(root, "a spec file") if root is not None else ():
        older = is_older(node)
        before = src.found.failed
        entry = read_entry(src, name, key, modernise(src, node) if older else node, "older" if older else "newer")
        if entry is not None and src.found.failed == before:
            src.found.extend(check_solvable(entry))
            if src.found.failed == before:
                entries[name] = entry
    return SpecFile(path, entries, src.found.all)


def load(path: str | Path) -> Mapping[str, Entry]:
    """The entries of a spec file by name; raises SpecError with every error, or if the file can't be read."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as e:
        reason = "it is not UTF-8" if isinstance(e, UnicodeDecodeError) else getattr(e, "strerror", None) or str(e)
        raise SpecError([Diagnostic(Place(str(path)), "error", "S000", f"can't be read: {reason}")]) from None
    file = parse_spec(text, str(path))
    if file.errors:
        raise SpecError(file.errors)
    return file.entries
