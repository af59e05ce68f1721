"""The functions that give an entry its meaning, held to its signature."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable
from typing import Any

from tileops.core.spec.diagnostics import did_you_mean
from tileops.core.spec.model import FuncRef
from tileops.core.validate.subject import Subject

_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def meaning(subject: Subject) -> Callable[..., Any] | None:
    """Check all functions and ``ref_api``; the reference where it can be called by name, as the cpu backend does."""
    entry = subject.entry
    reference = _callable(subject, entry.reference, "reference") if entry.reference else None
    for what, function in ("model", entry.model), ("absolute", entry.absolute):
        if function:
            _callable(subject, function, what)
    if entry.ref_api:
        _ref_api(subject, entry.ref_api)
    return reference


def _callable(subject: Subject, ref: FuncRef, what: str) -> Callable[..., Any] | None:
    function: Callable[..., Any] | None = subject.load(ref, what, "S501")
    if function is None:
        return None
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        subject.error(ref.place, "S502", f"{what} '{ref.target}' has no signature to read")
        return None
    sig = subject.entry.signature
    wanted = [*sig.inputs, *sig.params, *(n for n, i in sig.indices.items() if i.kind == "DType")]
    named = [p.name for p in parameters if p.kind in _BY_NAME]
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in _VARIADIC]
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    lacking = [n for n in wanted if n not in named and not takes_any]
    foreign = [n for n in needed if n not in wanted or n not in named]
    for name in lacking:
        close = did_you_mean(name, foreign)
        subject.error(ref.place, "S502", f"{what} '{ref.target}' takes no argument '{name}' by name", close)
    for name in foreign:
        close = did_you_mean(name, lacking)
        subject.error(ref.place, "S503", f"{what} '{ref.target}' needs '{name}', which is not in the signature", close)
    return None if lacking or foreign else function


def _ref_api(subject: Subject, name: str) -> None:
    """A name that an importable package doesn't have; where the package is absent nothing is known."""
    try:
        pkgutil.resolve_name(name)
    except (AttributeError, ValueError):
        subject.warning(subject.at("ref_api"), "S507", f"'{name}' names nothing in {name.partition('.')[0]}")
    except Exception:
        return
