"""An entry's rows: each makes a call, and together they reach what the entry can do."""

from __future__ import annotations

from tileops.core.check import Call, Checker
from tileops.core.errors import SpecError
from tileops.core.spec import Row
from tileops.core.spec.expr import compile_expr
from tileops.core.spec.predicates import PREDICATES
from tileops.core.validate.subject import Subject
from tileops.core.workloads import cases, row_call


def calls(subject: Subject, checker: Checker) -> tuple[Call, ...]:
    """The calls of all rows and dtype cases; a row that gives none is a finding."""
    made: dict[str | None, Call] = {}
    for row in subject.entry.workloads:
        for case in cases(row):
            try:
                call = row_call(checker, row, case)
            except SpecError as e:
                subject.found.extend(e.diagnostics)
            else:
                if call.id in made:
                    subject.error(row.place, "S305", f"two calls have the id '{call.id}'")
                if _content_holds(subject, row, call):
                    made[call.id] = call
    return tuple(made.values())


def _content_holds(subject: Subject, row: Row, call: Call) -> bool:
    """Whether the content that a row generates is what its tensors require."""
    good = True
    for name, made in (call.content or {}).items():
        requires = subject.entry.signature.inputs[name].requires
        if requires is None:
            continue
        try:
            arguments = [compile_expr(a)(call.env) for a in requires.args]
            holds = PREDICATES[requires.name].holds(made, *arguments)
        except (LookupError, ValueError, TypeError, ArithmeticError):
            holds = False
        good = good and holds
        if not holds:
            place = row.content[name].place if name in row.content else row.place
            subject.error(place, "S309", f"what row '{row.label}' puts into {name} is not {requires.source}")
    return good


def coverage(subject: Subject) -> None:
    """Every optional tensor is passed and omitted, every boolean param takes both values."""
    rows, sig = subject.entry.workloads, subject.entry.signature
    if not rows:
        subject.due(subject.at("workloads"), "S308", "it has no rows")
        return
    for decl in sig.inputs.values():
        passed = {decl.name in row.some for row in rows}
        if decl.optional and len(passed) == 1:
            what, how = ("omits", "leave it out of") if True in passed else ("passes", "name it in")
            message, hint = f"no row {what} the optional input {decl.name}", f"{how} some row's 'some'"
            subject.due(decl.place, "S306", message, hint)
    for param in sig.params.values():
        taken = {row.values.get(param.name) for row in rows}
        for value in (False, True):
            if param.type.base == "bool" and value not in taken:
                subject.due(param.place, "S307", f"no row has {param.name}: {str(value).lower()}")
