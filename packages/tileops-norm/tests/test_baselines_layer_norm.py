"""The rivals of LayerNorm mean what it means, and say what they lack; plain PyTorch stands in for Liger."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tileops.core.accuracy import collect, verify
from tileops.core.bench.rivals import Missing, outputs, rivals_of
from tileops.core.check import Call
from tileops.core.families import find_entry
from tileops.core.inputs import make_inputs
from tileops.core.torch_ops import checker_of
from tileops.core.workloads import cases, scaled
from tileops.norm import LayerNormFwdOp, reference
from tileops.norm.baselines import layer_norm as baselines

ENTRIES = [find_entry(name) for name in ("LayerNormFwdOp", "LayerNormBwdOp")]


def calls(entry: Any) -> list[Call]:
    return [scaled(checker_of(entry), row, case, 2**16) for row in entry.workloads for case in cases(row)]


def served(call: Call, name: str) -> bool:
    if name == "torch":
        statistics = "mean" in call.inputs or call["return_stats"]
        mixed = any(m is not None and m.dtype != call["T"] for m in map(call.inputs.get, ("weight", "bias")))
        return not mixed and not (statistics and call["T"] != "float32")  # as it is on a CPU
    return name == "compile" or None not in (call.inputs["weight"], call.inputs["bias"])


class Liger:
    @staticmethod
    def layer_norm_forward(X: Any, W: Any, B: Any, eps: float) -> Any:
        shape, dtype = X.shape[-1:], X.dtype
        y, mean, rstd = reference.layer_norm(X, W, B, normalized_shape=shape, eps=eps, return_stats=True, T=dtype)
        return y, X, mean, rstd, 1024, 8

    @staticmethod
    def layer_norm_backward(dY: Any, X: Any, W: Any, B: Any, Mean: Any, RSTD: Any) -> Any:
        assert X.dim() == dY.dim() == 2
        assert Mean.dim() == RSTD.dim() == 1
        return reference.layer_norm_bwd(dY, X, W, Mean, RSTD, B, normalized_shape=X.shape[-1:], T=X.dtype)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU where all libraries are there."""
    monkeypatch.setattr(baselines, "on_gpu", lambda inputs, who: None)
    monkeypatch.setattr(baselines, "package", lambda module, distribution: Liger)
    monkeypatch.setattr(baselines, "compiled", lambda function, inputs, *args: lambda: function(*args))


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: e.name)
def test_every_required_rival_has_an_adapter(entry: Any) -> None:
    found = rivals_of(entry, "cuda")
    assert all(callable(found[name]) for name in entry.baselines["cuda"].required)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: e.name)
def test_what_needs_a_gpu_says_so(entry: Any) -> None:
    call = calls(entry)[0]
    for name, make in rivals_of(entry, "cpu").items():
        if name != "torch":
            with pytest.raises(Missing, match=r"needs? a CUDA device"):
                make(call, make_inputs(call))


@pytest.mark.parametrize(
    ("call", "name"),
    [(call, name) for entry in ENTRIES for name in entry.baselines["cuda"].required for call in calls(entry)],
    ids=lambda value: value if isinstance(value, str) else value.id,
)
def test_rows(call: Call, name: str, gpu: None) -> None:
    inputs, make = make_inputs(call), baselines.RIVALS[call.entry.name][name]
    if served(call, name):
        assert verify(call, inputs, collect(call, outputs(make(call, inputs)), inputs))
    else:
        with pytest.raises(Missing, match=r"one dtype|needs a weight and a bias"):
            make(call, inputs)


def test_liger_has_no_longer_rows_than_a_block(gpu: None) -> None:
    x, weight = torch.empty(1, 131072), torch.empty(131072)
    call = LayerNormFwdOp(131072).bind(x, weight, weight)
    with pytest.raises(Missing, match="rows of up to 65536"):
        baselines.liger_layer_norm(call, {"x": x, "weight": weight, "bias": weight})
