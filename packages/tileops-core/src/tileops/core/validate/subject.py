"""What is checked: a spec file that can say where each of its keys stands, and one entry of it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import attrs
import yaml

from tileops.core.check import Call
from tileops.core.errors import SpecError
from tileops.core.spec import Diagnostic, Entry, Place, SpecFile, parse_spec
from tileops.core.spec.diagnostics import Diagnostics
from tileops.core.spec.model import FuncRef
from tileops.core.spec.predicates import PREDICATES
from tileops.core.spec.source import Node, Source


def shown(path: Path) -> str:
    """A file as findings name it: relative where it lies below the current directory."""
    real, here = path.resolve(), Path.cwd().resolve()
    return str(real.relative_to(here) if real.is_relative_to(here) else real)


def workspace_of(path: Path) -> Path | None:
    """The workspace that holds a file, symlinks followed: the nearest folder with a pyproject.toml and packages/."""
    for folder in path.resolve().parents:
        if (folder / "pyproject.toml").is_file() and (folder / "packages").is_dir():
            return folder
    return None


@attrs.frozen(slots=False, eq=False)
class Spec:
    """A spec file as read. ``path`` is the real one, symlinks followed."""

    path: Path
    text: str
    file: SpecFile

    @classmethod
    def read(cls, path: Path) -> Spec:
        """Never raises: what can't be read is a finding."""
        name = shown(path)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as e:
            reason = "it is not UTF-8" if isinstance(e, UnicodeDecodeError) else getattr(e, "strerror", None) or str(e)
            unread = Diagnostic(Place(name), "error", "S000", f"can't be read: {reason}")
            return cls(path.resolve(), "", SpecFile(name, {}, (unread,)))
        return cls(path.resolve(), text, parse_spec(text, name))

    @cached_property
    def _root(self) -> Node | None:
        return Source(self.file.path).compose(self.text)

    @property
    def start(self) -> Place:
        return Place(self.file.path)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all entries, those that have faults too."""
        return tuple(key.value for key, _ in _parts(self._root))

    def at(self, *keys: str) -> Place:
        """Where the innermost of nested keys or list items stands, as far as there are such."""
        place, node = self.start, self._root
        for wanted in keys:
            found = next(((key, value) for key, value in _parts(node) if key.value == wanted), None)
            if found is None:
                break
            key, node = found
            place = Place(self.file.path, key.start_mark.line + 1, key.start_mark.column + 1)
        return place


def _parts(node: Node | None) -> Iterator[tuple[Node, Node]]:
    if isinstance(node, yaml.MappingNode):
        yield from (pair for pair in node.value if isinstance(pair[0], yaml.ScalarNode))
    elif isinstance(node, yaml.SequenceNode):
        yield from ((item, item) for item in node.value)


@attrs.frozen
class Subject:
    """One entry under check, and where its findings go."""

    entry: Entry
    spec: Spec
    found: Diagnostics

    def at(self, *keys: str) -> Place:
        """Where keys of the entry stand."""
        return self.spec.at(self.entry.name, *keys)

    def error(self, place: Place, code: str, message: str, hint: str | None = None) -> None:
        self.found.error(place, code, f"{self.entry.name}: {message}", hint)

    def warning(self, place: Place, code: str, message: str, hint: str | None = None) -> None:
        self.found.warning(place, code, f"{self.entry.name}: {message}", hint)

    def due(self, place: Place, code: str, message: str, hint: str | None = None) -> None:
        """What an implemented entry must have and a spec-only one may still lack."""
        (self.error if self.entry.implemented else self.warning)(place, code, message, hint)

    def load(self, ref: FuncRef, what: str, code: str) -> Any:
        """The function that an entry names, or None with a finding."""
        try:
            function = ref.load()
        except Exception as e:  # an import runs any code
            # A family whose spec has errors can't be imported, but those are found already.
            if not (isinstance(e, SpecError) and self.spec.file.errors):
                self.error(ref.place, code, f"{what} '{ref.target}' can't be imported: {told(e)}")
            return None
        if not callable(function):
            self.error(ref.place, code, f"{what} '{ref.target}' is a {type(function).__name__}, no function")
            return None
        return function


def told(e: Exception) -> str:
    """An exception in one line."""
    return f"{type(e).__name__}: {str(e).splitlines()[0]}" if str(e).strip() else type(e).__name__


def metadata(entry: Entry) -> tuple[str, ...]:
    """The inputs whose content steers a call: tables, lengths, offsets."""
    return tuple(
        name
        for name, decl in entry.signature.inputs.items()
        if any(p and p.name in PREDICATES and p.name != "positive" for p in (decl.requires, decl.values))
    )


@attrs.frozen
class Tally:
    """Faults that calls show: one that many of them share is told once, with the first of these."""

    subject: Subject
    calls: dict[tuple[Place, str, str], list[str | None]] = attrs.field(factory=dict)
    messages: dict[tuple[Place, str, str], tuple[str, str | None]] = attrs.field(factory=dict)

    def add(self, call: Call, place: Place, code: str, message: str, hint: str | None = None, kind: str = "") -> None:
        """Note a fault; ``kind`` tells those of one place and code apart."""
        key = place, code, kind
        self.calls.setdefault(key, []).append(call.id)
        self.messages.setdefault(key, (message, hint))

    def tell(self, severity: Literal["error", "warning"] = "error") -> None:
        for (place, code, kind), ids in self.calls.items():
            message, hint = self.messages[place, code, kind]
            more = f" and {len(ids) - 1} more" if len(ids) > 1 else ""
            say = self.subject.error if severity == "error" else self.subject.warning
            say(place, code, f"{message} (in {ids[0]}{more})", hint)
