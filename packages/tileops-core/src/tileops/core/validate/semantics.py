"""Every sentence of an entry's ``semantics`` is named by a test: ``@pytest.mark.semantics("GEMMFwdOp", "empty-k")``."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import attrs

from tileops.core.spec import Place
from tileops.core.spec.diagnostics import Diagnostics, did_you_mean
from tileops.core.validate.subject import Spec, Subject, shown, workspace_of


@attrs.frozen
class Mark:
    """One id that a test claims for an op; ``id`` is None where the mark names none."""

    op: str
    id: str | None
    place: Place


def tests_of(spec: Path) -> tuple[Path, ...] | None:
    """The test folders of the workspace that holds a spec; None outside a workspace."""
    root = workspace_of(spec)
    return None if root is None else tuple(sorted(p for p in root.glob("packages/*/tests") if p.is_dir()))


def marks(folders: Iterable[Path], found: Diagnostics) -> tuple[Mark, ...]:
    """The marks of all test files below some folders."""
    files = {f for folder in folders for pattern in ("test_*.py", "*_test.py") for f in folder.rglob(pattern)}
    return tuple(mark for file in sorted(files) for mark in _marks_in(file, found))


def _marks_in(file: Path, found: Diagnostics) -> Iterator[Mark]:
    name = shown(file)
    try:
        text = file.read_text(encoding="utf-8")
        tree = ast.parse(text) if "semantics" in text else ast.Module([], [])
    except (OSError, ValueError, SyntaxError) as e:
        place = Place(name, getattr(e, "lineno", None) or 1, getattr(e, "offset", None) or 1)
        found.error(place, "S704", f"a test file that can't be read: {e.msg if isinstance(e, SyntaxError) else e}")
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _is_mark(node.func):
            words = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            places = [Place(name, a.lineno, a.col_offset + 1) for a in node.args]
            if len(words) < 2 or len(words) < len(node.args) or node.keywords:
                place = Place(name, node.lineno, node.col_offset + 1)
                found.error(place, "S703", "a semantics mark names an op and its ids, all as literals")
            else:
                yield Mark(words[0], None, places[0])
                yield from (Mark(words[0], id, at) for id, at in zip(words[1:], places[1:], strict=True))


def _is_mark(function: ast.expr) -> bool:
    match function:
        case ast.Attribute(attr="semantics", value=ast.Name(id="mark") | ast.Attribute(attr="mark")):
            return True
    return False


def check(subjects: Sequence[Subject], specs: Sequence[Spec], claims: Sequence[Mark], found: Diagnostics) -> None:
    """Compare what entries say with what tests claim. ``specs`` hold all entries that a test may name."""
    claimed = {(m.op, m.id) for m in claims}
    for subject in subjects:
        for id in subject.entry.semantics:
            if (subject.entry.name, id) not in claimed:
                hint = f'mark one: @pytest.mark.semantics("{subject.entry.name}", "{id}")'
                subject.error(subject.at("semantics", id), "S701", f"no test names the semantics '{id}'", hint)
    ids: dict[str, set[str]] = {}
    for entry in (e for s in specs for e in s.file.entries.values()):
        ids.setdefault(entry.name, set()).update(entry.semantics)
    unread = {n for s in specs if s.file.errors for n in s.names if n not in s.file.entries}
    for mark in claims:
        if mark.id is None:
            if mark.op not in ids and mark.op not in unread:
                message, known = f"no entry is called '{mark.op}'", [*ids, *unread]
                found.error(mark.place, "S702", message, did_you_mean(mark.op, known))
        elif mark.op in ids and mark.op not in unread and mark.id not in ids[mark.op]:
            message = f"{mark.op} has no semantics '{mark.id}'"
            found.error(mark.place, "S702", message, did_you_mean(mark.id, ids[mark.op]))
