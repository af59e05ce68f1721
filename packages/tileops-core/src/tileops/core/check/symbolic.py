"""What expressions over symbolic sizes call, so that no symbolic comparison is ever turned into a bool.

Each function gives a plain value where it can be told without asking a symbolic size, else torch's symbolic one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

_Thunk = Callable[[], Any]


def _plain(x: Any) -> bool:
    return isinstance(x, bool)


def not_(x: Any) -> Any:
    return not x if _plain(x) else torch.sym_not(x)


def and_(*items: _Thunk) -> Any:
    result: Any = True
    for item in items:
        value = item()
        if value is False:
            return False
        result = value if result is True else result if value is True else result & value
    return result


def or_(*items: _Thunk) -> Any:
    result: Any = False
    for item in items:
        value = item()
        if value is True:
            return True
        result = value if result is False else result if value is False else result | value
    return result


def choose(test: Any, then: _Thunk, other: _Thunk) -> Any:
    if _plain(test):
        return then() if test else other()
    return torch.sym_ite(test, then(), other())


def same(a: Any, b: Any) -> Any:
    """Equality of sizes, or of shapes element by element."""
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


def all(items: Iterable[Any]) -> Any:  # noqa: A001 - the language's own name
    return and_(*(lambda v=v: v for v in items))


def any(items: Iterable[Any]) -> Any:  # noqa: A001
    return or_(*(lambda v=v: v for v in items))


def _extreme(pick: Callable[[Any, Any], Any], args: tuple[Any, ...]) -> Any:
    first, *rest = args[0] if len(args) == 1 else args
    for item in rest:
        first = pick(first, item)
    return first


def min(*args: Any) -> Any:  # noqa: A001
    return _extreme(torch.sym_min, args)


def max(*args: Any) -> Any:  # noqa: A001
    return _extreme(torch.sym_max, args)


def broadcast(*shapes: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(torch.broadcast_shapes(*shapes))


def requirement(fail: Callable[..., None]) -> Callable[..., None]:
    """``require(condition, step, locals)``: refuse at once where the condition is known, else leave it to ``torch._check``."""

    def require(condition: Any, step: Any, scope: Any) -> None:
        if condition is True:
            return
        if _plain(condition):
            fail(step, scope)
        torch._check(condition, lambda: f"a call doesn't satisfy {step}")

    return require
