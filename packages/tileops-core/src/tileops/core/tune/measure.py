"""What a measuring process does: a candidate is loaded, run into poisoned memory, held to the reference, and timed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import attrs
import torch
from torch import Tensor

from tileops.core import torch_ops
from tileops.core.accuracy import collect, judge
from tileops.core.backend import gpu, gpu_backend
from tileops.core.backend.gpu import Gpu
from tileops.core.bench.timers import TIMERS, TIMERS_OF, Burst, Calls
from tileops.core.bench.timing import COOL, copies_for_cold_l2, turns
from tileops.core.check import Call
from tileops.core.choice import Choice
from tileops.core.errors import BackendError, TileOpsError
from tileops.core.families import op_class
from tileops.core.inputs import make_inputs
from tileops.core.kernel import Device, static_of
from tileops.core.roofline import work
from tileops.core.tune.child import Rejected
from tileops.core.tune.trial import Trial

PROTOCOL = attrs.evolve(COOL, load=0.05)
POISON = 0xFF  # NaN in every floating type, -1 in every signed integer


def devices(backend: str) -> Iterator[tuple[str, Device]]:
    """The board and the properties of each visible device."""
    found = gpu_backend(backend)
    assert found is not None
    if reason := found.available():
        raise BackendError(reason)
    for index in range(torch.get_device_module(backend).device_count()):
        yield gpu.board_at(found, index), found.device(index)


def measure(trial: Trial, reference: Trial | None, rounds: int, slowest: float | None) -> Iterator[list[Any]]:
    """Microseconds of a trial and of a reference, taking turns: one list of pairs.

    Without a reference the trial stands for it. Raises Rejected where the trial's results are wrong, where it can't be
    run, and after one round where it is more than ``slowest`` times as slow as the reference.
    """
    global _held
    if _held.call != trial.call or _held.index != trial.index:
        _held = Held()  # its memory first
        _held = Held(trial)
    beside = reference or trial
    _held.bursts = {n: burst for n, burst in _held.bursts.items() if n in (trial.name, beside.name)}
    if reference is not None:
        try:
            _held.prepare(reference)
        except Rejected as e:
            raise TileOpsError(f"{reference.name}, which was right before: {e}") from None
    _held.prepare(trial)
    with _in_doubt():
        laps = turns(_held.bursts, PROTOCOL)
        pairs = ((took[trial.name].us, took[beside.name].us) for took in laps)
        taken = in_turn(pairs, rounds, slowest)
    yield taken


def in_turn(pairs: Iterable[tuple[float, float]], rounds: int, slowest: float | None) -> list[tuple[float, float]]:
    """So many of the pairs; raises Rejected where the first says that going on is a waste of time."""
    taken: list[tuple[float, float]] = []
    for us, reference in pairs:
        if not taken and slowest is not None and us > slowest * reference:
            raise Rejected(f"{us:.1f} us, {us / reference:.2f} x the reference's: far behind the best")
        taken.append((us, reference))
        if len(taken) == rounds:
            break
    return taken


class Held:
    """What the trials of one call share: the truth about it, and the bursts that may be timed again."""

    def __init__(self, trial: Trial | None = None) -> None:
        self.call = trial and trial.call
        self.index = trial and trial.index
        self.bursts: dict[str, Burst] = {}
        if trial is not None:
            call, self.device = trial.call, torch.device(trial.backend, trial.index)
            torch.get_device_module(self.device).set_device(self.device)
            self.judge = judge(call, make_inputs(call, self.device))

    def prepare(self, trial: Trial) -> None:
        """Have a burst of a trial."""
        if trial.name not in self.bursts:
            self.bursts[trial.name] = _prepared(trial, self)


_held = Held()


@contextmanager
def _in_doubt() -> Iterator[None]:
    """Errors of a candidate: after one of the device's nothing on it can be trusted. Too little memory is none."""
    try:
        yield
    except (Rejected, torch.OutOfMemoryError):
        raise
    except Exception as e:
        lines = str(e).strip().splitlines()
        raise Rejected(lines[0][:300] if lines else type(e).__name__, spoilt=True) from e


def _prepared(trial: Trial, held: Held) -> Burst:
    """A burst of a trial that has given right results; its inputs are made anew, in case another wrote to them."""
    call, index = trial.call, trial.index
    op_class(call.entry)
    backend = gpu_backend(trial.backend)
    assert backend is not None
    copies = copies_for_cold_l2(work(call).bytes, backend.device(index).l2_bytes)
    inputs = [make_inputs(call, held.device, seed) for seed in range(copies)]
    with _in_doubt():
        returned = launch_of(backend, call, trial.choice, index, poisoned=True)(*inputs[0].values())
        torch.get_device_module(held.device).synchronize(held.device)
    verdict = held.judge(collect(call, returned, inputs[0]))
    if not verdict:
        raise Rejected("; ".join(" ".join(f.message.split()) for f in verdict.findings if not f.ok))
    with _in_doubt():
        launch = launch_of(backend, call, trial.choice, index)
        return record([partial(launch, *given.values()) for given in inputs], held.device)


def launch_of(backend: Gpu, call: Call, choice: Choice, index: int, poisoned: bool = False) -> Callable[..., Any]:
    """What runs a call by a choice, whatever its op would choose; outputs and workspace may start ``poisoned``."""
    bounds, empty = gpu.intervals(call, static_of(torch_ops.checker_of(call.entry), call)), backend.empty(index)
    nobody = SimpleNamespace(run=None, settle=lambda plan, inputs: None)  # to be told of its sizes
    made = _poisoned(empty) if poisoned else empty
    return gpu.planned(backend, call, gpu.bucketed(call), bounds, choice, index, made, nobody).launch


def record(calls: Calls, device: torch.device) -> Burst:
    """A burst of calls, as the cool protocol has it, by the device's first timer."""
    timer = TIMERS[TIMERS_OF[device.type][0]]
    rough = timer(calls, PROTOCOL.calls, device, lambda: None)
    protocol = PROTOCOL.of(rough(lambda: None).us)
    return rough if protocol == PROTOCOL else timer(calls, protocol.calls, device, lambda: None)


def _poisoned(empty: Any) -> Any:
    """Memory that holds nothing that could pass for a result."""

    def poisoned(size: Any, stride: Any, dtype: Any) -> Tensor:
        made: Tensor = empty(size, stride, dtype)
        made.as_strided((made.numel(),), (1,)).view(torch.uint8).fill_(POISON)  # dense, in any order of axes
        return made

    return poisoned
