"""What an entry says about others: names of its own, backward ops, files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs

from tileops.core.spec import Entry
from tileops.core.spec.diagnostics import did_you_mean
from tileops.core.spec.expr import Const, Expr, Func, Name, names, rewrite, walk
from tileops.core.spec.grad import axis_of, sizes_in
from tileops.core.spec.model import GradCall
from tileops.core.validate.subject import Subject, workspace_of


def unique_names(subjects: Iterable[Subject]) -> None:
    """No two entries share a name or alias: each is a class and an operator."""
    owners: dict[str, Subject] = {}
    for subject in subjects:
        for name in (subject.entry.name, *subject.entry.aliases):
            owner = owners.setdefault(name, subject)
            if owner is not subject:
                place = subject.entry.place if name == subject.entry.name else subject.at("aliases", name)
                subject.error(place, "S112", f"the name '{name}' is taken", f"first at {owner.entry.place}")


def still_needed(subject: Subject) -> None:
    """What a spec-only entry would need to be implemented, beside the keys that every entry has."""
    entry, roofline = subject.entry, subject.entry.roofline
    if entry.implemented:
        return
    lacking = [] if entry.baselines else ["'baselines'"]
    if roofline:
        lacking += [f"'{key}' of roofline" for key in ("unit", "dtype") if getattr(roofline, key) is None]
    if lacking:
        subject.warning(entry.place, "S111", f"to be implemented it still needs {', '.join(lacking)}")


def source_paths(subject: Subject) -> None:
    """The files that ``source`` names, from the workspace's root or, outside of one, from the spec's folder."""
    root = workspace_of(subject.spec.path) or subject.spec.path.parent
    for key, path in subject.entry.source.items():
        if path != "..." and not (root / path).exists():  # an abridged copy leaves paths out
            subject.error(
                subject.at("source", key), "S806", f"source '{key}' names '{path}', which is not there", f"below {root}"
            )


def gradients(subject: Subject, known: Mapping[str, Entry]) -> None:
    """Backward ops exist, are given what they need, and give what is asked of them."""
    for call in subject.entry.grad:
        backward = known.get(call.op)
        if backward is None:
            subject.error(call.place, "S801", f"grad names the unknown op '{call.op}'", did_you_mean(call.op, known))
            continue
        _given(subject, call, backward)
        _gives(subject, call, backward)


def _given(subject: Subject, call: GradCall, backward: Entry) -> None:
    sig = backward.signature
    params = {n: p.default is attrs.NOTHING for n, p in sig.params.items()}
    inputs = {n: not d.optional and d.when is None for n, d in sig.inputs.items()}
    for what, given, needed in (("param", call.params, params), ("input", call.inputs, inputs)):
        for name, text in given.items():
            if name not in needed:
                subject.error(
                    text.place, "S802", f"'{name}' is no {what} of {backward.name}", did_you_mean(name, needed)
                )
        for name in needed:
            if needed[name] and name not in given:
                subject.error(call.place, "S803", f"grad gives {backward.name} no {what} '{name}'")
    for name in sizes_in(subject.entry, call):
        if axis_of(subject.entry, call, name) is None:
            message = f"grad uses '{name}', which no tensor given to {backward.name} has as an axis"
            subject.error(call.place, "S807", message)
    for text in call.inputs.values():
        for name in _wrapped(text.expr, "saved"):
            output = subject.entry.signature.outputs[name]
            when = output.when and output.when.expr
            if when is not None and not (isinstance(when, Name) and when.id in subject.entry.signature.params):
                subject.error(
                    text.place, "S805", f"saved({name}) can't turn on the output {name}, there when {output.when}"
                )


def _gives(subject: Subject, call: GradCall, backward: Entry) -> None:
    for text in call.gives.values():
        own = rewrite(text.expr, lambda n: Const(0) if isinstance(n, Func) and n.name == "grad" else None)
        for known, used in (
            (backward, names(own)),
            (subject.entry, _wrapped(text.expr, "grad")),
        ):
            for name in sorted(set(used) - known.signature.outputs.keys()):
                hint = did_you_mean(name, known.signature.outputs)
                subject.error(text.place, "S804", f"'{name}' in 'gives' of grad is no output of {known.name}", hint)


def _wrapped(expr: Expr, function: str) -> list[str]:
    calls = (n for n in walk(expr) if isinstance(n, Func) and n.name == function)
    return [n.args[0].id for n in calls if len(n.args) == 1 and isinstance(n.args[0], Name)]
