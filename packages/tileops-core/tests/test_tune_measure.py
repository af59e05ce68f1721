"""What the measuring process makes of a candidate. Kernels are functions of CPU tensors here; the clock is planted."""

from __future__ import annotations

import math
import sys
from itertools import repeat
from types import SimpleNamespace

import attrs
import pytest
import torch

from tileops.core import program
from tileops.core.backend import gpu
from tileops.core.bench.timers import Lap
from tileops.core.choice import Choice
from tileops.core.errors import TileOpsError
from tileops.core.kernel import H200, Kernel, Scratch
from tileops.core.op import make_op
from tileops.core.program import Program
from tileops.core.tune import measure
from tileops.core.tune.child import Rejected
from tileops.core.tune.trial import Trial

SPEC = """
MeasuredToyFwdOp:
  family: test
  summary: Twice the input.
  status: spec-only
  reference: measured_toy:twice
  signature:
    forall: {M: Dim}
    inputs: {x: {dtype: float32, shape: "[M]"}}
    outputs: {y: {dtype: float32, shape: "[M]"}}
    symbolic: [M]
  workloads: [{label: toy, M: 64}]
  roofline: {flops: M}
"""


@attrs.frozen
class Config:
    name: str


class Toy(Kernel):
    def workspace(self, call, config):
        return [Scratch((4,), "float32"), Scratch((4,), "float32", zeroed=True)]


def right(x, y, scratch, zeros):
    y.copy_(2 * x)


def idle(x, y, scratch, zeros):
    """What was in its memory would pass for a result."""


def wrong(x, y, scratch, zeros):
    y.copy_(2 * x + (x == x[7]))


def uninitialised(x, y, scratch, zeros):
    y.copy_(2 * x + scratch[0])


def zeroed(x, y, scratch, zeros):
    y.copy_(2 * x + zeros[0])


def broken(x, y, scratch, zeros):
    raise RuntimeError("CUDA error: an illegal memory access")


def too_large(x, y, scratch, zeros):
    raise torch.OutOfMemoryError("no memory")


def destructive(x, y, scratch, zeros):
    x.zero_()


class Device:
    """A GPU of CPU tensors."""

    device_type = "cpu"

    def device(self, index):
        return H200

    def target(self, device):
        return {}

    def empty(self, index):
        return lambda size, stride, dtype: torch.zeros(size, dtype=dtype)

    def fence(self, index):
        return None, None


@pytest.fixture(autouse=True)
def device(monkeypatch):
    def load(recipe):
        return Program(recipe.key, globals()[recipe.config.name])

    monkeypatch.setattr(program, "load", load)
    monkeypatch.setattr(program, "sources_digest", lambda module: module)
    monkeypatch.setattr(measure, "gpu_backend", lambda kind: Device())
    monkeypatch.setattr(measure, "op_class", lambda entry: None)
    monkeypatch.setattr(
        measure, "record", lambda calls, device: [call() for call in calls] and (lambda during: Lap(0.0))
    )
    monkeypatch.setattr(
        measure, "turns", lambda bursts, protocol: repeat({name: Lap(float(len(name))) for name in bursts})
    )
    monkeypatch.setattr(measure, "_held", measure.Held())


@pytest.fixture(scope="module")
def call(tmp_path_factory):
    sys.modules["measured_toy"] = SimpleNamespace(twice=lambda x: 2 * x)
    path = tmp_path_factory.mktemp("spec") / "toy.yaml"
    path.write_text(SPEC)
    return make_op("MeasuredToyFwdOp", path)().bind((64,))


def trial(call, function):
    return Trial(call, Choice(Toy(), Config(function.__name__), {}, ()), "cpu", 0)


def ask(call, function, reference=None, rounds=2, slowest=None):
    (pairs,) = measure.measure(trial(call, function), reference and trial(call, reference), rounds, slowest)
    return pairs


def test_a_right_candidate_is_timed_beside_the_reference(call):
    names = {f: float(len(trial(call, f).name)) for f in (right, zeroed)}
    assert ask(call, right) == [(names[right], names[right])] * 2
    assert ask(call, zeroed, right, rounds=3) == [(names[zeroed], names[right])] * 3


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (idle, r"y: non-finite at \[0\]: expected .*, got nan 64 elements are NaN"),
        (uninitialised, r"y: non-finite at \[0\]"),
        (wrong, r"y: element error .* x its bound at \[7\]"),
        (broken, r"refused to launch Toy.* CUDA error: an illegal memory access; "),
    ],
)
def test_a_wrong_one_is_rejected_before_it_is_timed(call, monkeypatch, function, reason):
    monkeypatch.setattr(measure, "turns", lambda bursts, protocol: pytest.fail("it was timed"))
    with pytest.raises(Rejected, match=reason) as caught:
        ask(call, function)
    assert caught.value.spoilt is (function is broken), "only an error leaves the device in doubt"


def test_too_little_memory_is_no_fault_of_a_candidate(call, monkeypatch):
    def plan(*args):
        return SimpleNamespace(launch=lambda x: too_large(x, None, None, None))

    monkeypatch.setattr(gpu, "planned", plan)
    with pytest.raises(torch.OutOfMemoryError):
        ask(call, right)


def test_one_that_writes_to_its_inputs_leaves_the_next_unharmed(call):
    ask(call, right)
    with pytest.raises(Rejected):
        ask(call, destructive, right)
    assert ask(call, zeroed, right)


def test_the_truth_and_the_reference_are_made_once_for_a_call(call, monkeypatch):
    made = []
    judge, prepared = measure.judge, measure._prepared
    monkeypatch.setattr(measure, "judge", lambda *a: made.append("truth") or judge(*a))
    monkeypatch.setattr(measure, "_prepared", lambda t, held: made.append(t.choice.config.name) or prepared(t, held))
    ask(call, right)
    ask(call, zeroed, right)
    ask(call, zeroed, right)
    assert made == ["truth", "right", "zeroed"]


def test_a_reference_that_fails_is_not_held_against_the_candidate(call):
    with pytest.raises(TileOpsError, match=r"Toy with Config\(name=.wrong.\), which was right before: y: element"):
        ask(call, right, wrong)


def test_early_stop_takes_one_round():
    clock = iter([(14.0, 10.0), (9.0, 10.0)])
    with pytest.raises(Rejected, match=r"14.0 us, 1.40 x the reference's: far behind the best"):
        measure.in_turn(clock, 3, slowest=1.3)
    assert next(clock) == (9.0, 10.0)
    later = [(12.0, 10.0), (14.0, 10.0), (math.nan, 1.0)]
    assert measure.in_turn(iter(later), 2, slowest=1.3) == later[:2]
