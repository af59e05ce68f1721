"""The rivals of group, instance and batch normalization mean what the operators mean, and say what they lack."""

from __future__ import annotations

from typing import Any

import pytest

from tileops.core.accuracy import collect, verify
from tileops.core.bench.rivals import Missing, outputs, rivals_of
from tileops.core.check import Call
from tileops.core.families import find_entry
from tileops.core.inputs import make_inputs
from tileops.core.torch_ops import checker_of
from tileops.core.workloads import cases, scaled
from tileops.norm.baselines import channels as baselines_channels

ENTRIES = [find_entry(name) for name in baselines_channels.RIVALS]


def calls(entry: Any) -> list[Call]:
    """Small calls of all rows; without a weight in float32, since torch's cpu kernel then works in x's dtype."""
    declared = [
        (row, case if "weight" in row.some else {"T": "float32"}) for row in entry.workloads for case in cases(row)
    ]
    return [scaled(checker_of(entry), row, case, 2**16) for row, case in declared]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, but that nothing is compiled."""
    monkeypatch.setattr(baselines_channels, "compiled", lambda function, inputs, *args: lambda: function(*args))


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: e.name)
def test_every_required_rival_has_an_adapter(entry: Any) -> None:
    found = rivals_of(entry, "cuda")
    assert all(callable(found[name]) for name in entry.baselines["cuda"].required)


@pytest.mark.parametrize(
    ("name", "call"),
    [(name, call) for e in ENTRIES for name in baselines_channels.RIVALS[e.name] for call in calls(e)],
    ids=str,
)
def test_rows(name: str, call: Call, gpu: None) -> None:
    """Their mutated inputs too."""
    inputs = make_inputs(call)
    before = {n: None if x is None else x.clone() for n, x in inputs.items()}
    make = baselines_channels.RIVALS[call.entry.name][name]
    if name == "torch" and call.entry.name == "GroupNormFwdOp" and "bfloat16-float32" in str(call.id):
        with pytest.raises(Missing, match="one dtype"):
            make(call, inputs)
        return
    verdict = verify(call, before, collect(call, outputs(make(call, inputs)), inputs))
    assert verdict, str(verdict)
