"""Is every index determined? An entry's signature looked at in the variants that calls can have."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

from tileops.core.spec.diagnostics import Diagnostic
from tileops.core.spec.expr import (
    Const,
    Expr,
    Func,
    IfElse,
    Name,
    Star,
    compile_expr,
    names,
    unparse,
    walk,
)
from tileops.core.spec.model import Entry, ParamType, Signature
from tileops.core.spec.solve import FAILURES, solve, tests

MAX_ASSIGNMENTS, MAX_VARIANTS = 128, 512  # that are looked at when an entry is checked


def _samples(type_: ParamType, numbers: set[float]) -> list[Any]:
    """Values that decide the conditions on a param which ask for these numbers, and for None."""
    around = sorted({n + d for n in numbers | {0, 1} for d in (-1, 0, 1)})
    whole = sorted({math.floor(n) for n in around})
    values: dict[str, list[Any]] = {
        "bool": [False, True], "int": whole, "float": [float(n) for n in around],
        "list[int]": [(1,) * n for n in whole if 0 <= n <= 8],
        "literal": [*type_.choices], "dtype": [*type_.choices],
    }  # fmt: skip
    return [*values[type_.base], *([None] if type_.optional else [])]


def _assignments(signature: Signature, asked: Sequence[Expr]) -> Iterator[dict[str, Any]]:
    """Values of the params that are asked: all, or where they are too many a drawn part."""
    used = sorted(set().union(*map(names, asked)) & signature.params.keys())
    constants = (n.value for e in asked for n in walk(e) if isinstance(n, Const))
    numbers = {value for value in constants if isinstance(value, (int, float)) and not isinstance(value, bool)}
    samples = [_samples(signature.params[n].type, numbers) for n in used]
    if math.prod(map(len, samples)) <= MAX_ASSIGNMENTS:
        yield from (dict(zip(used, values, strict=True)) for values in itertools.product(*samples))
        return
    rng = random.Random(0)
    for i in range(MAX_ASSIGNMENTS):  # each value comes up: the first draws walk through all lists at once
        yield {n: s[i] if i < len(s) else rng.choice(s) for n, s in zip(used, samples, strict=True)}


def _variants(signature: Signature) -> Iterator[tuple[dict[str, bool], dict[Expr, bool]]]:
    """Variants that calls can have: the asked params' values, and each optional input alone on and alone off."""
    asked = tests(signature)
    conditions = {n: compile_expr(d.when.expr) for n, d in signature.inputs.items() if d.when}
    questions = [(t, compile_expr(t)) for t in asked]
    free = [n for n, d in signature.inputs.items() if d.optional]
    corners = {frozenset(), frozenset(free), *(frozenset([n]) for n in free), *(frozenset(free) - {n} for n in free)}
    whens = [d.when.expr for d in signature.inputs.values() if d.when]
    candidates = list(itertools.product(_assignments(signature, [*asked, *whens]), sorted(corners, key=sorted)))
    if len(candidates) > MAX_VARIANTS:
        candidates = random.Random(0).sample(candidates, MAX_VARIANTS)
    seen = set()
    for values, on in candidates:
        env = {**values, **{f"present({n})": not d.optional or n in on for n, d in signature.inputs.items()}}
        try:
            for name, condition in conditions.items():
                env[f"present({name})"] = bool(condition(env))
            outcome = {t: bool(question(env)) for t, question in questions}
        except FAILURES:  # no call has these values
            continue
        present = {n: env[f"present({n})"] for n in signature.inputs}
        key = (tuple(present.values()), tuple(outcome.values()))
        if key not in seen:
            seen.add(key)
            yield present, outcome


def _misplaced(signature: Signature) -> Iterator[Diagnostic]:
    """Conditions on inputs that ask what only a solved call knows."""
    settled = {n for n, d in signature.inputs.items() if not d.when}
    for decl in signature.inputs.values():
        conditions = [(t, n.test) for t in (decl.shape, decl.dtype) for n in walk(t.expr) if isinstance(n, IfElse)]
        if decl.when:
            conditions.append((decl.when, decl.when.expr))
            for other in sorted(_asked(decl.when.expr) - settled):
                message = f"input {decl.name} is there when '{other}' is, whose own condition comes later"
                yield Diagnostic(decl.when.place, "error", "S203", message)
        for text, test in conditions:
            if not names(test) <= signature.params.keys():
                message = f"a condition of input {decl.name} may ask only params and present()"
                yield Diagnostic(text.place, "error", "S203", message)
        settled.add(decl.name)


def _asked(expr: Expr) -> set[str]:
    """The tensors whose presence an expression asks for."""
    calls = (n for n in walk(expr) if isinstance(n, Func) and n.name == "present")
    return {n.args[0].id for n in calls if isinstance(n.args[0], Name)}


def check_solvable(entry: Entry) -> Iterator[Diagnostic]:
    """Findings about indices that no call determines, or a variant leaves unbound, and sizes computed from moving ones.

    A program and its launch know a size that changes from call to call by its axis alone: none is computed from it.
    """
    signature = entry.signature
    if misplaced := list(_misplaced(signature)):
        yield from misplaced
        return
    determined: set[str] = set()
    moving = {symbolic.index for symbolic in signature.symbolic}
    computed = {(text.place, f"let {name}", text.expr): None for name, text in signature.let.items()}
    faults: dict[tuple[Any, str], str] = {}
    for present, truth in _variants(signature):
        solution = solve(signature, present, truth)
        determined.update(solution.bound)
        for tensor in (*solution.inputs, *solution.outputs):
            axes = (axis.value if isinstance(axis, Star) else axis for axis in tensor.axes)
            what = f"an axis of {tensor.decl.name}"
            computed |= {(tensor.decl.shape.place, what, a): None for a in axes if not isinstance(a, Name)}
        absent = [n for n, there in present.items() if not there]
        for fault in solution.faults:
            faults.setdefault(
                fault, f" when {' and '.join(absent)} {'is' if len(absent) == 1 else 'are'} absent" if absent else ""
            )
    for index in signature.indices.values():
        if index.name not in determined:
            hint = "let it stand alone on some axis of an input, or as c*X + e"
            hint = "give it as the dtype of an input" if index.kind == "DType" else hint
            yield Diagnostic(index.place, "error", "S205", f"no call can determine the index '{index.name}'", hint)
    for (place, message), absent_text in faults.items():
        if not any(f"'{i}'" in message for i in signature.indices if i not in determined):
            yield Diagnostic(place, "error", "S206", message + absent_text)
    for place, what, expr in computed:
        for name in sorted(names(expr) & moving):
            message = f"'{name}' changes from call to call, so {what} can't be computed from it: '{unparse(expr)}'"
            yield Diagnostic(
                place, "error", "S207", message, f"leave '{name}' out of 'symbolic', or give the axis a name"
            )
