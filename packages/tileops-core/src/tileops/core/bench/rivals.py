"""Other implementations of an operator, as each family's ``baselines.py`` gives them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from tileops.core.check import Call
from tileops.core.spec import Entry

Inputs = Mapping[str, Tensor | None]
Make = Callable[[Call, Inputs], Callable[[], Any]]


class Missing(Exception):
    """A rival that can't run a call here; the message says why."""


@attrs.frozen
class Rival:
    """A call to time whose result is not the operator's as it stands; ``read`` makes that of it, and is not timed."""

    run: Callable[[], Any]
    read: Callable[[Any], Any]

    def __call__(self) -> Any:
        return self.run()


def outputs(call: Callable[[], Any]) -> Any:
    """The operator's outputs by a rival's call."""
    return call.read(call()) if isinstance(call, Rival) else call()


def rivals_of(entry: Entry, backend: str) -> dict[str, Make | str]:
    """Each required or optional rival of an entry by name: what makes a call of it, or why it is missing.

    A family's ``baselines.RIVALS`` maps op names to rivals, and a rival to a function of a Call and its inputs that
    returns the call to time, or raises Missing. The cpu backend, which no entry names, has the cuda backend's: those
    that need no GPU.
    """
    declared = entry.baselines.get("cuda" if backend == "cpu" else backend)
    if declared is None:
        return {}
    known = importlib.import_module(f"tileops.{entry.family}.baselines").RIVALS.get(entry.name, {})
    return {n: known.get(n, "no adapter yet") for n in (*declared.required, *declared.optional)}


def package(module: str, distribution: str) -> Any:
    """A rival's module; raises Missing where it can't be imported."""
    try:
        return importlib.import_module(module)
    except Exception as e:  # what a package of others raises on import is theirs
        raise Missing(f"{module} can't be imported ({type(e).__name__}: {e}); pip install {distribution}") from None


def on_gpu(inputs: Inputs, who: str) -> None:
    """Raise Missing unless the tensors are on a CUDA device."""
    if not all(t.is_cuda for t in inputs.values() if t is not None):
        raise Missing(f"{who} needs a CUDA device")


def compiled(function: Callable[..., Any], inputs: Inputs, *args: Any) -> Callable[[], Any]:
    """``function(*args)`` by torch.compile, for these very shapes."""
    on_gpu(inputs, "torch.compile's code for GPUs")
    made = torch.compile(function, dynamic=False, fullgraph=True)
    return lambda: made(*args)
