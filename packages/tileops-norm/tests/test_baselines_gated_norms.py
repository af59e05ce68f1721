"""The rivals of the conditioned, gated and rotating normalizations mean what the operators mean.

A library that needs a GPU is stood in for by plain PyTorch of the same signature.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tileops.core.accuracy import collect, verify
from tileops.core.bench.rivals import Missing, outputs, rivals_of
from tileops.core.check import Call
from tileops.core.families import find_entry
from tileops.core.inputs import make_inputs
from tileops.core.torch_ops import checker_of
from tileops.core.workloads import cases, scaled
from tileops.norm import GatedRMSNormFwdOp, reference
from tileops.norm.baselines import conditioned as baselines

OPS = ["AdaLayerNormFwdOp", "AdaLayerNormZeroFwdOp", "GatedRMSNormFwdOp", "FusedQKNormRoPEFwdOp"]


def calls(op: str) -> list[Call]:
    entry = find_entry(op)
    return [scaled(checker_of(entry), row, case, 2**16, 2**20) for row in entry.workloads for case in cases(row)]


def verified(call: Call, name: str) -> bool:
    inputs, before = make_inputs(call), make_inputs(call)
    rival = baselines.RIVALS[call.entry.name][name](call, inputs)
    return bool(verify(call, before, collect(call, outputs(rival), inputs)))


def rmsnorm_fn(x: Tensor, weight: Tensor, bias: Any, z: Tensor, eps: float, norm_before_gate: bool) -> Tensor:
    assert bias is None
    return reference.gated_rms_norm(x, z, weight, eps=eps, norm_before_gate=norm_before_gate, T=x.dtype)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU where all libraries are there."""
    fla = SimpleNamespace(rmsnorm_fn=rmsnorm_fn)
    monkeypatch.setattr(baselines, "on_gpu", lambda inputs, who: None)
    monkeypatch.setattr(baselines, "package", lambda module, distribution: fla)
    monkeypatch.setattr(baselines, "compiled", lambda function, inputs, *args: lambda: function(*args))


@pytest.mark.parametrize("op", OPS)
def test_every_required_rival_has_an_adapter_that_needs_a_gpu(op: str) -> None:
    entry, call = find_entry(op), calls(op)[0]
    found = rivals_of(entry, "cuda")
    for name in entry.baselines["cuda"].required:
        with pytest.raises(Missing, match=r"needs? a CUDA device"):
            found[name](call, make_inputs(call))


@pytest.mark.parametrize("call", [c for op in OPS for c in calls(op)], ids=lambda call: call.id)
def test_rows_by_the_formula(call: Call, gpu: None) -> None:
    assert verified(call, "compile")


@pytest.mark.parametrize("call", calls("GatedRMSNormFwdOp"), ids=lambda call: call.id)
def test_rows_by_fla(call: Call, gpu: None) -> None:
    if call["N"] * call.inputs["x"].nbytes // call.inputs["x"].numel > baselines.FLA_LONGEST:
        with pytest.raises(Missing, match="rows of up to 65536 bytes"):
            verified(call, "fla")
    else:
        assert verified(call, "fla")


def test_fla_has_no_longer_rows_than_its_block(gpu: None) -> None:
    x = torch.empty(1, 32769, dtype=torch.bfloat16)
    inputs = {"x": x, "gate": x, "weight": x[0]}
    with pytest.raises(Missing, match="rows of up to 65536 bytes"):
        baselines.fla_gated_rms_norm(GatedRMSNormFwdOp().bind(x, x, x[0]), inputs)
