"""The validator: each entry against the language, its reference, its class, its tests, its rows and its roofline."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from pathlib import Path

from tileops.core.check import Checker
from tileops.core.families import families
from tileops.core.spec import Diagnostic, Entry
from tileops.core.spec.diagnostics import Diagnostics
from tileops.core.validate import functions, links, rows, semantics, work
from tileops.core.validate.subject import Spec, Subject, metadata

__all__ = ["spec_files", "validate"]


def spec_files(paths: Iterable[str | Path] | None = None) -> tuple[Path, ...]:
    """The files that ``validate`` reads: those given, the ``*.yaml`` of a folder, the installed families' for None."""
    if paths is None:
        return tuple(families().values())
    given = [Path(p) for p in paths]
    return tuple(f for p in given for f in (sorted(p.glob("*.yaml")) if p.is_dir() else (p,)))


def validate(
    paths: Iterable[str | Path] | None = None, tests: Iterable[str | Path] | None = None
) -> tuple[Diagnostic, ...]:
    """Every finding about some specs, sorted by place; ``paths`` None means those of the installed families.

    ``tests`` are the folders whose tests name the semantics; None means ``packages/*/tests`` of the workspace that
    holds a spec. Without torch, what needs it is left out and one warning says so. Never raises for what a spec holds.
    """
    found = Diagnostics()
    specs = tuple({s.path: s for s in map(Spec.read, spec_files(paths))}.values())
    beside = [*families().values(), *(f for s in specs for f in s.path.parent.glob("*.yaml"))]
    others = [Spec.read(path) for path in sorted({f.resolve() for f in beside} - {s.path for s in specs})]
    known = {name: e for s in (*others, *specs) for name, e in s.file.entries.items()}
    subjects = [Subject(e, s, found) for s in specs for e in s.file.entries.values()]
    for spec in specs:
        found.extend(spec.file.diagnostics)
    links.unique_names(subjects)
    _semantics(subjects, specs, others, tests, found)
    torch = importlib.util.find_spec("torch") is not None
    if specs and not torch:
        message = "torch is not installed: references, classes, functions of rooflines and flops are not checked"
        found.warning(specs[0].start, "S005", message)
    for subject in subjects:
        if not _abridged(subject):
            _entry(subject, known, torch)
    return found.all


def _abridged(subject: Subject) -> bool:
    """An older entry that leaves its shapes out can be checked for form only; its reader says so."""
    return subject.entry.form == "older" and subject.at("signature", "...") != subject.at("signature")


def _entry(subject: Subject, known: dict[str, Entry], torch: bool) -> None:
    entry, roofline = subject.entry, subject.entry.roofline
    checker = Checker(entry)
    links.still_needed(subject)
    links.gradients(subject, known)
    links.source_paths(subject)
    rows.coverage(subject)
    calls = rows.calls(subject, checker)
    work.evaluate(subject, calls, functions=torch)
    work.default_bytes(subject)
    work.count_masks(subject, checker)
    if not torch:
        return
    from tileops.core.validate import opclass, run

    opclass.op_class(subject)
    reference = functions.meaning(subject)
    if not calls or reference is None or entry.reference is None:
        return
    run.outputs(subject, reference, entry.reference.place, calls)
    flops = work.flops_of(subject)
    if flops and roofline and roofline.unit == "tensor_core" and not metadata(entry):
        countable = work.unmasked(subject, checker) if work.masks(subject) else calls
        run.recount(subject, reference, countable, flops.place)


def _semantics(
    subjects: Sequence[Subject],
    specs: Sequence[Spec],
    others: Sequence[Spec],
    tests: Iterable[str | Path] | None,
    found: Diagnostics,
) -> None:
    given = None if tests is None else tuple(map(Path, tests))
    folders: set[Path] = set()
    held: list[Subject] = []
    for spec in specs:
        where = semantics.tests_of(spec.path) if given is None else given
        own = [s for s in subjects if s.spec is spec and s.entry.semantics]
        if where is not None:
            folders.update(where)
            held += own
        elif own:
            message = "no test of the semantics was looked for: the spec lies in no workspace"
            found.warning(spec.start, "S705", message, "name the tests' folder with --tests")
    semantics.check(held, [*specs, *others], semantics.marks(folders, found), found)
