"""Work of a call: floating-point operations and bytes moved, as its entry counts them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import attrs

from tileops.core.check.call import Call, TensorMeta
from tileops.core.errors import SpecError, TileOpsError
from tileops.core.spec.diagnostics import Diagnostic, Place
from tileops.core.spec.dtypes import itemsize
from tileops.core.spec.expr import compile_expr
from tileops.core.spec.model import Entry, FuncRef, Predicate, Text


@attrs.frozen
class Work:
    """Operations and bytes of one call; an upper bound unless ``exact`` (the call lacks content that matters)."""

    flops: float
    bytes: float
    exact: bool = True


def work(call: Call) -> Work:
    """Count a call's work by its entry's ``roofline``.

    Content that the call lacks is assumed as in ``content_of``, and the result is then not exact. A function sees the
    call itself, so its result is exact only if no metadata input of the call lacks content.

    Raises SpecError if the entry has no roofline, or its expression or function fails or gives no count.
    """
    entry = call.entry
    roofline = entry.roofline
    if roofline is None:
        raise spec_error(entry.place, f"{entry.name} has no roofline")
    scope, flops, moved = _Scope(call), roofline.flops, roofline.bytes
    if isinstance(flops, FuncRef) and flops == moved:
        counts = _pair(scope, flops)
    else:
        counts = (
            _count(scope, "roofline flops", flops),
            _touched_once(scope) if moved is None else _count(scope, "roofline bytes", moved),
        )
    by_function = isinstance(flops, FuncRef) or isinstance(moved, FuncRef)
    return Work(*counts, exact=not scope.assumed and not (by_function and _lacks_content(call)))


def content_of(call: Call, name: str) -> Any:
    """The values of a metadata input; where the call lacks them, those that its ``requires`` admits and that cost most.

    Lengths are all at their maximum, sizes and offsets put everything into the first part, each index is the last one:
    an upper bound for work that grows with the lengths and doesn't shrink when parts are merged. For functions named in
    a ``roofline``. Raises KeyError where no such values are known.
    """
    return _Scope(call)[name]


# Content of one axis of n elements that makes the most work.
_HEAVIEST: Mapping[str, Callable[[int, int], tuple[int, ...]]] = {
    "lengths": lambda n, most: (most,) * n,
    "index": lambda n, hi: (max(hi - 1, 0),) * n,
    "sizes": lambda n, total: (total, *(0,) * (n - 1))[:n],
    "offsets": lambda n, total: (0, *(total,) * (n - 1))[:n],
}


class _Scope(dict[str, Any]):
    """The names of a call; content that it lacks is filled in when it is first read, and noted in ``assumed``."""

    def __init__(self, call: Call) -> None:
        super().__init__(call.env)
        self.call = call
        self.assumed: set[str] = set()

    def __missing__(self, name: str) -> Any:
        rules, meta = _compiled(self.call.entry), self.call.inputs.get(name)
        if meta is None or name not in rules.heaviest:
            raise KeyError(name)
        self[name] = rules.heaviest[name](self, meta.shape)
        self.assumed.add(name)
        return self[name]


@attrs.frozen
class _Rules:
    """An entry's compiled expressions by what they say; ``heaviest`` makes content from a scope and a shape."""

    texts: Mapping[str, Callable[[Mapping[str, Any]], Any]]
    heaviest: Mapping[str, Callable[[Mapping[str, Any], tuple[int, ...]], Any]]


@lru_cache(maxsize=512)
def _compiled(entry: Entry) -> _Rules:
    inputs = entry.signature.inputs
    texts: dict[str, Text | FuncRef | None] = {f"mutated of {n}": d.mutated for n, d in inputs.items()}
    if entry.roofline:
        texts |= {"roofline flops": entry.roofline.flops, "roofline bytes": entry.roofline.bytes}
    return _Rules(
        {what: compile_expr(text.expr) for what, text in texts.items() if isinstance(text, Text)},
        {n: _filler(d.requires) for n, d in inputs.items() if d.requires and d.requires.name in _HEAVIEST},
    )


def _filler(requires: Predicate) -> Callable[[Mapping[str, Any], tuple[int, ...]], Any]:
    row, limit = _HEAVIEST[requires.name], compile_expr(requires.args[0])

    def fill(scope: Mapping[str, Any], shape: tuple[int, ...]) -> Any:
        values: Any = row(shape[-1] if shape else 1, limit(scope))
        for n in reversed(shape[:-1]):
            values = (values,) * n
        return values if shape else values[0]

    return fill


def _touched_once(scope: _Scope) -> int:
    """Bytes if each present tensor is read once and written once by its declared effects."""
    call = scope.call
    moved = sum(m.nbytes for m in call.outputs.values() if m)
    for name, decl in call.entry.signature.inputs.items():
        if meta := call.inputs.get(name):
            written = decl.mutated and _run(scope, f"mutated of {name}", decl.mutated)
            moved += distinct_bytes(meta) * (2 if written else 1)
    return moved


def distinct_bytes(meta: TensorMeta) -> int:
    """Bytes of a tensor's distinct elements: an expanded axis repeats the same memory."""
    if 0 in meta.shape:
        return 0
    return math.prod(n for n, s in zip(meta.shape, meta.strides, strict=True) if s) * itemsize(meta.dtype)


def _lacks_content(call: Call) -> bool:
    declared = call.entry.signature.inputs
    metadata = (n for n, d in declared.items() if d.requires and d.requires.name != "positive" and call.inputs.get(n))
    return any(n not in (call.content or {}) for n in metadata)


def _count(scope: _Scope, what: str, rule: Text | FuncRef) -> float:
    return _checked(scope.call, what, rule, _run(scope, what, rule))


def _pair(scope: _Scope, rule: FuncRef) -> tuple[float, float]:
    pair = _run(scope, "roofline", rule)
    if not (isinstance(pair, tuple) and len(pair) == 2):
        raise _fault(scope.call, "roofline", rule, f"gives {pair!r}, not a pair (flops, bytes)")
    return _checked(scope.call, "roofline flops", rule, pair[0]), _checked(scope.call, "roofline bytes", rule, pair[1])


def _checked(call: Call, what: str, rule: Text | FuncRef, value: Any) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf:
        return value
    raise _fault(call, what, rule, f"gives {value!r}, not a count")


def _run(scope: _Scope, what: str, rule: Text | FuncRef) -> Any:
    call = scope.call
    try:
        return rule.load()(call) if isinstance(rule, FuncRef) else _compiled(call.entry).texts[what](scope)
    except TileOpsError:
        raise
    except ZeroDivisionError as e:
        raise _fault(call, what, rule, "divides by zero") from e
    except KeyError as e:
        raise _fault(call, what, rule, f"reads {e}, which has no value in this call") from e
    except Exception as e:  # a spec may name a function that fails in any way
        raise _fault(call, what, rule, f"fails: {type(e).__name__}: {e}") from e


def _fault(call: Call, what: str, rule: Text | FuncRef, problem: str) -> SpecError:
    shown = rule.target if isinstance(rule, FuncRef) else rule.source
    return spec_error(rule.place, f"{what} of {call.entry.name}, '{shown}', {problem}", f"the call is {call}")


def spec_error(place: Place, message: str, hint: str | None = None) -> SpecError:
    """A fault of an entry's roofline that only a call shows."""
    return SpecError([Diagnostic(place, "error", "S401", message, hint)])
