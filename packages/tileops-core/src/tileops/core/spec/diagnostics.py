"""Findings about a spec, each with its place, printed as a compiler prints them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Literal

import attrs


@attrs.frozen(order=True)
class Place:
    """A position in a spec file; line and column count from 1."""

    path: str
    line: int = 1
    column: int = 1

    def __str__(self) -> str:
        return f"{self.path}:{self.line}:{self.column}"


@attrs.frozen(order=True)
class Diagnostic:
    """One finding. ``code`` is stable; ``docs/spec-codes.md`` lists them all."""

    place: Place
    severity: Literal["error", "warning"]
    code: str
    message: str
    hint: str | None = None

    def __str__(self) -> str:
        hint = f"; {self.hint}" if self.hint else ""
        return f"{self.place}: {self.severity}[{self.code}] {self.message}{hint}"


class Diagnostics:
    """Collects findings so that all of a file's come at once; ``failed`` counts the errors as they come."""

    def __init__(self) -> None:
        self._found: set[Diagnostic] = set()
        self.failed = 0

    def error(self, place: Place, code: str, message: str, hint: str | None = None) -> None:
        self.failed += 1
        self._found.add(Diagnostic(place, "error", code, message, hint))

    def warning(self, place: Place, code: str, message: str, hint: str | None = None) -> None:
        self._found.add(Diagnostic(place, "warning", code, message, hint))

    def extend(self, found: Iterable[Diagnostic]) -> None:
        for finding in found:
            self.failed += finding.severity == "error"
            self._found.add(finding)

    @property
    def all(self) -> tuple[Diagnostic, ...]:
        return tuple(sorted(self._found, key=lambda d: (*attrs.astuple(d.place), d.severity, d.code, d.message)))


def did_you_mean(name: str, known: Iterable[str]) -> str | None:
    """A hint naming the closest known name, if one is close."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    if not close:
        folded = {k.lower(): k for k in known}
        close = [folded[name.lower()]] if name.lower() in folded else []
    return f"did you mean '{close[0]}'?" if close else None
