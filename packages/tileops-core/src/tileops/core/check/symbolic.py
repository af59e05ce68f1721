"""What expressions over symbolic sizes call, so that no symbolic comparison is ever turned into a bool.

Each function gives a plain value where it can be told without asking a symbolic size, else torch's symbolic one.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterable
from typing import Any

import torch

_Thunk = Callable[[], Any]


def _open(x: Any) -> bool:
    """Whether only a run can tell."""
    return isinstance(x, (torch.SymBool, torch.SymInt, torch.SymFloat))


def not_(x: Any) -> Any:
    return torch.sym_not(x) if _open(x) else not x


def _join(values: Iterable[Any], stop: bool) -> Any:
    """``and`` (``stop`` False) or ``or`` of values, none of which is asked for after one that decides."""
    undecided: Any = None
    last: Any = not stop
    for value in values:
        if not _open(value):
            if bool(value) is stop:
                return value
            last = value
        elif undecided is None:
            undecided = value
        else:
            undecided = undecided | value if stop else undecided & value
    return last if undecided is None else undecided


def and_(*items: _Thunk) -> Any:
    return _join((item() for item in items), stop=False)


def or_(*items: _Thunk) -> Any:
    return _join((item() for item in items), stop=True)


def all(items: Iterable[Any]) -> Any:
    value = _join(items, stop=False)
    return value if _open(value) else bool(value)


def any(items: Iterable[Any]) -> Any:
    value = _join(items, stop=True)
    return value if _open(value) else bool(value)


def choose(test: Any, then: _Thunk, other: _Thunk) -> Any:
    """Both sides are computed where only a run can tell; shapes of two ranks force the decision."""
    if not _open(test):
        return then() if test else other()
    a, b = then(), other()
    if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
        return tuple(_either(test, x, y) for x, y in zip(a, b, strict=True))
    return _either(test, a, b) if _is_size(a) and _is_size(b) else a if test else b


def _is_size(x: Any) -> bool:
    return isinstance(x, (int, torch.SymInt)) and not isinstance(x, bool)


def _either(test: Any, a: Any, b: Any) -> Any:
    if not _open(a) and not _open(b):
        if a == b:
            return a
        a, b = (torch.sym_int(test) * 0 + x for x in (a, b))
    elif not _open(a):
        a = b * 0 + a
    elif not _open(b):
        b = a * 0 + b
    return torch.sym_ite(test, a, b)


def same(a: Any, b: Any) -> Any:
    """Equality of sizes, or of shapes element by element."""
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


def within(a: Any, items: Iterable[Any]) -> Any:
    return any(same(a, x) for x in items)


def _extreme(plain: Callable[..., Any], pick: Callable[[Any, Any], Any], args: tuple[Any, ...]) -> Any:
    values = tuple(args[0]) if len(args) == 1 else args
    if not builtins.any(map(_open, values)):
        return plain(values)
    first, *rest = values
    for item in rest:
        first = pick(first, item)
    return first


def min(*args: Any) -> Any:
    return _extreme(builtins.min, torch.sym_min, args)


def max(*args: Any) -> Any:
    return _extreme(builtins.max, torch.sym_max, args)


def broadcast(*shapes: tuple[Any, ...]) -> tuple[Any, ...]:
    """As for plain sizes; a symbolic size is taken not to be 1, as torch takes it, and equal to what it meets."""
    rank = builtins.max(map(len, shapes), default=0)
    out = []
    for axis in zip(*((1,) * (rank - len(s)) + tuple(s) for s in shapes), strict=True):
        sizes = [n for n in axis if _open(n) or n != 1]
        for n in sizes[1:]:
            if not _open(fits := same(sizes[0], n)):
                if not fits:
                    raise ValueError(f"{' and '.join(str(tuple(s)) for s in shapes)} don't broadcast")
            else:
                torch._check(fits)
        out.append(sizes[0] if sizes else 1)
    return tuple(out)


def requirement(explain: Callable[..., Exception]) -> Callable[..., None]:
    """``require(condition, step, locals)``: refuse what is known not to hold, leave the rest to ``torch._check``."""

    def require(condition: Any, step: Any, scope: Any) -> None:
        if _open(condition):
            torch._check(condition, lambda: str(explain(step, scope)))
        elif not condition:
            raise explain(step, scope)

    return require
