"""Rows of a command line, from their programs to their results."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from tileops.core import program
from tileops.core.backend import gpu, gpu_backend
from tileops.core.bench import nvml
from tileops.core.bench.rows import Bench, failed, measure
from tileops.core.bench.timers import TIMERS_OF
from tileops.core.bench.timing import COOL, HOT, quick
from tileops.core.check import Call
from tileops.core.errors import BackendError, NoKernelError
from tileops.core.families import op_class
from tileops.core.roofline import Profile, board_of
from tileops.core.roofline import profile as shipped


def prepare(
    device: torch.device, timer: str | None, cold_l2: bool, brief: bool, profile: Profile | None = None
) -> Bench:
    """How rows are measured on a device: the backend's first timer unless one is named, the board's own profile."""
    backend = gpu_backend(device.type)
    if device.index is not None:
        torch.get_device_module(device).set_device(device)  # graphs and events are the current device's
    if profile is None and backend and (board := board_of(backend.name(device.index or 0))):
        profile = shipped(board)
    return Bench(
        device=device,
        timer=timer or TIMERS_OF[device.type][0],
        profile=profile,
        cold_l2=cold_l2,
        cool=quick(COOL) if brief else COOL,
        hot=quick(HOT) if brief else HOT,
        sampler=nvml.sampler(device) if device.type == "cuda" else lambda: None,
    )


def recipes(calls: Iterable[Call], device: torch.device) -> list[program.Recipe]:
    """What the programs of these calls are made from; a call that no kernel serves says so when it is measured.

    Raises BackendError where TileLang is missing.
    """
    backend = gpu_backend(device.type)
    found = []
    for call in calls if backend else ():
        assert backend is not None
        op_class(call.entry)  # a family that nobody has imported yet has no kernels
        with suppress(NoKernelError):
            index = device.index or 0
            recipe = gpu.recipe(backend, call, backend.device(index), board=gpu.board_at(backend, index))
            found += [recipe] if recipe else []
    return found


def compile_seconds(recipe: program.Recipe) -> float:
    """What compiling a program takes where no cache holds it."""
    with tempfile.TemporaryDirectory() as home, _cache(home):
        start = time.perf_counter()
        program.compile_only(recipe)
        return time.perf_counter() - start


def run(
    calls: Iterable[Call], bench: Bench, measure: Callable[[Call, Bench], dict[str, Any]] = measure, cold: bool = False
) -> Iterator[dict[str, Any]]:
    """The row of each call; one that raises is a failed row. With ``cold``, an op's first says what its compiler takes.

    Raises BackendError where the device can't go on after a row, as after a kernel's illegal access.
    """
    compiled: set[str] = set()
    for call in calls:
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()  # else torch.compile gives each new shape less special code, and in the end none
        try:
            row = measure(call, bench)
        except Exception as e:  # one row's fault must not cost the others their result
            row = failed(call, f"{type(e).__name__}: {e}")
        if cold and row["status"] == "ok" and call.entry.name not in compiled:
            compiled.add(call.entry.name)
            for recipe in recipes([call], bench.device):
                row["first_call"]["cold_s"] = compile_seconds(recipe)
        yield row
        _tidy(bench.device, str(call.id))


def _tidy(device: torch.device, case: str) -> None:
    """Hand back the row's memory."""
    if device.type == "cpu":
        return
    module = torch.get_device_module(device)
    try:
        module.synchronize(device)
        module.empty_cache()
    except RuntimeError as e:
        reason = str(e).splitlines()[0]
        raise BackendError(f"{device} is lost after {case}: {reason}; run again: finished rows stay") from None


@contextmanager
def _cache(home: str) -> Iterator[None]:
    held = os.environ.get("TILEOPS_CACHE_DIR")
    os.environ["TILEOPS_CACHE_DIR"] = home
    try:
        yield
    finally:
        if held is None:
            del os.environ["TILEOPS_CACHE_DIR"]
        else:
            os.environ["TILEOPS_CACHE_DIR"] = held
