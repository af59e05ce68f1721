"""The rivals of the operators that add a residual mean what these mean, and say what they lack.

Libraries that need a GPU are stood in for by plain PyTorch of the same signature.
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
from tileops.norm import FusedAddRMSNormFwdOp
from tileops.norm.baselines import fused_add as baselines_fused_add
from tileops.norm.reference import rms_norm

RMS, LN, QUANT = (find_entry(f"FusedAdd{name}FwdOp") for name in ("RMSNorm", "LayerNorm", "RMSNormQuant"))


def calls(entry: Any) -> list[Call]:
    return [scaled(checker_of(entry), row, case, 2**16) for row in entry.workloads for case in cases(row)]


def verified(call: Call, name: str) -> bool:
    inputs = make_inputs(call)
    before = {n: None if t is None else t.clone() for n, t in inputs.items()}
    rival = baselines_fused_add.RIVALS[call.entry.name][name](call, inputs)
    results = collect(call, outputs(rival), inputs)
    assert all(t is None or torch.equal(t, inputs[n]) for n, t in before.items()), "the inputs are another rival's, too"
    return bool(verify(call, before, results))


def norm(x: Tensor, weight: Tensor, eps: float, offset: float, T: torch.dtype) -> Any:
    assert x.dim() == 2
    shape = tuple(x.shape[-1:])
    return rms_norm(x, weight, normalized_shape=shape, eps=eps, weight_offset=offset, return_rstd=True, T=T)


class FlashInfer:
    """Writes y over x, the sum over the residual."""

    @staticmethod
    def fused_add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> None:
        residual += x
        x.copy_(norm(residual, weight, eps, offset, x.dtype)[0])

    @staticmethod
    def gemma_fused_add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
        FlashInfer.fused_add_rmsnorm(x, residual, weight, eps, 1.0)

    @staticmethod
    def rms_norm(x: Any, weight: Any, out: Any, eps: float, in_scale: Any, out_scale: Any) -> None:
        y, _ = norm(x.float(), weight, eps, 0.0, torch.float32)
        out.copy_((y * out_scale).clamp(-448, 448))

    @staticmethod
    def rms_norm_add_residual(
        x: Any, residual: Any, weight: Any, eps: float, x_out: Any, x_in_scale: Any, x_out_scale: Any
    ) -> None:
        assert x.stride() == residual.stride()
        residual += x
        FlashInfer.rms_norm(residual, weight, x_out, eps, x_in_scale, x_out_scale)


def liger_forward(X: Tensor, R: Tensor, W: Tensor, eps: float, offset: float, casting_mode: str) -> Any:
    assert casting_mode == "gemma"
    total = X.view(-1, X.shape[-1]) + R.view(-1, X.shape[-1])
    y, rstd = norm(total, W, eps, offset, X.dtype)
    return y.view(X.shape), total.view(X.shape), rstd, 1024, 8, 2, 1


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU where all libraries are there."""
    stand_ins = {"flashinfer": FlashInfer, "liger_kernel": SimpleNamespace(fused_add_rms_norm_forward=liger_forward)}
    monkeypatch.setattr(baselines_fused_add, "on_gpu", lambda inputs, who: None)
    monkeypatch.setattr(baselines_fused_add, "package", lambda module, _: stand_ins[module.partition(".")[0]])
    monkeypatch.setattr(baselines_fused_add, "compiled", lambda function, inputs, *args: lambda: function(*args))


@pytest.mark.parametrize("entry", [RMS, LN, QUANT], ids=lambda e: e.name)
def test_every_required_rival_has_an_adapter_that_asks_for_a_gpu(entry: Any) -> None:
    call = calls(entry)[0]
    found = rivals_of(entry, "cuda")
    assert found
    for make in found.values():
        assert callable(make)
        with pytest.raises(Missing, match=r"needs? a CUDA device"):
            make(call, make_inputs(call))


@pytest.mark.parametrize("call", [*calls(RMS), *calls(LN), *calls(QUANT)], ids=lambda call: call.id)
def test_rows_compiled(call: Call, on_a_gpu: None) -> None:
    assert verified(call, "compile")


@pytest.mark.parametrize("call", calls(RMS), ids=lambda call: call.id)
@pytest.mark.parametrize("name", ["liger", "flashinfer"])
def test_rows_of_rms_norm(name: str, call: Call, on_a_gpu: None) -> None:
    weight, x = call.inputs["weight"], call.inputs["x"]
    assert weight is not None
    assert x is not None
    if name == "flashinfer" and (weight.dtype != x.dtype or x.dtype == "float32" or call["return_rstd"]):
        with pytest.raises(Missing, match="16-bit x and weight"):
            verified(call, name)
    else:
        assert verified(call, name)


@pytest.mark.parametrize("call", calls(QUANT), ids=lambda call: call.id)
def test_rows_of_codes(call: Call, on_a_gpu: None) -> None:
    if call["quant"] == "per_tensor":
        assert verified(call, "flashinfer")
    else:
        with pytest.raises(Missing, match="a scale that is given"):
            verified(call, "flashinfer")


def test_liger_has_no_longer_rows_than_a_block(on_a_gpu: None) -> None:
    inputs = {"x": torch.empty(1, 131072), "residual": torch.empty(1, 131072), "weight": torch.empty(131072)}
    with pytest.raises(Missing, match="rows of up to 65536"):
        baselines_fused_add.liger_fused_add_rms_norm(FusedAddRMSNormFwdOp().bind(*inputs.values()), inputs)
