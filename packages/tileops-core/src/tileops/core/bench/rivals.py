"""Other implementations of an operator, as each family's ``baselines.py`` gives them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from tileops.core.check import Call
from tileops.core.spec import Entry

Inputs = Mapping[str, Tensor | None]
Make = Callable[[Call, Inputs], Callable[[], Any]]


class Missing(Exception):
    """A rival that can't run a call here; the message says why."""


def rivals_of(entry: Entry, backend: str) -> dict[str, Make | str]:
    """Each required or optional rival of an entry by name: what makes a call of it, or why it is missing.

    A family's ``baselines.RIVALS`` maps op names to rivals, and a rival to a function of a Call and its inputs that
    returns the call to time, or raises Missing.
    """
    declared = entry.baselines.get(backend)
    if declared is None:
        return {}
    known = importlib.import_module(f"tileops.{entry.family}.baselines").RIVALS.get(entry.name, {})
    return {n: known.get(n, "no adapter yet") for n in (*declared.required, *declared.optional)}
