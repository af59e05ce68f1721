"""The rivals of the normalization operators mean what the operators mean, and say what they lack.

Libraries that need a GPU are stood in for by plain PyTorch of the same signature.
"""

from __future__ import annotations

from types import SimpleNamespace
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
from tileops.norm import RMSNormFwdOp, reference
from tileops.norm.baselines import rms_norm as baselines

FORWARD, BACKWARD = find_entry("RMSNormFwdOp"), find_entry("RMSNormBwdOp")


def calls(entry: Any) -> list[Call]:
    return [scaled(checker_of(entry), row, case, 2**16) for row in entry.workloads for case in cases(row)]


def verified(call: Call, name: str) -> bool:
    inputs = make_inputs(call)
    rival = baselines.RIVALS[call.entry.name][name](call, inputs)
    return bool(verify(call, inputs, collect(call, outputs(rival), inputs)))


def forward(x: torch.Tensor, weight: Any, eps: float, offset: float) -> Any:
    assert x.dim() == 2
    assert weight is None or weight.dim() == 1
    shape, dtype = x.shape[-1:], x.dtype
    return reference.rms_norm(
        x, weight, normalized_shape=shape, eps=eps, weight_offset=offset, return_rstd=True, T=dtype
    )


def backward(dy: torch.Tensor, x: torch.Tensor, weight: Any, rstd: torch.Tensor, offset: float) -> Any:
    assert x.dim() == dy.dim() == 2
    assert rstd.dim() == 1
    shape = x.shape[-1:]
    return reference.rms_norm_bwd(dy, x, weight, rstd, normalized_shape=shape, weight_offset=offset, T=x.dtype)


class Liger:
    @staticmethod
    def rms_norm_forward(X: Any, W: Any, eps: float, offset: float, casting_mode: str, row_mode: Any) -> Any:
        assert casting_mode == "gemma"
        y, rstd = forward(X, W, eps, offset)
        return y, X, rstd, 1024, 8, 1

    @staticmethod
    def rms_norm_backward(
        dY: Any, X: Any, W: Any, RSTD: Any, offset: float, mode: int, block: int, warps: int, in_place: bool, rows: Any
    ) -> Any:
        assert (mode, in_place) == (1, True)
        dx, dweight = backward(dY, X, W, RSTD, offset)
        return dY.copy_(dx), dweight

    @staticmethod
    def calculate_settings(n: int) -> tuple[int, int]:
        return 1024, 8


class Quack:
    @staticmethod
    def rmsnorm_fwd(x: Any, weight: Any, *, eps: float, store_rstd: bool, weight_offset: float) -> Any:
        y, rstd = forward(x, weight, eps, weight_offset)
        return y, x, rstd if store_rstd else None

    @staticmethod
    def rmsnorm_bwd(x: Any, weight: Any, dout: Any, rstd: Any, *, weight_offset: float) -> Any:
        return *backward(dout, x, weight, rstd, weight_offset), None, None


FLASHINFER = SimpleNamespace(
    rmsnorm=lambda x, weight, eps: forward(x, weight, eps, 0.0)[0],
    gemma_rmsnorm=lambda x, weight, eps: forward(x, weight, eps, 1.0)[0],
)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU where all libraries are there."""
    stand_ins = {"liger_kernel": Liger, "quack": Quack, "flashinfer": FLASHINFER}
    monkeypatch.setattr(baselines, "on_gpu", lambda inputs, who: None)
    monkeypatch.setattr(baselines, "package", lambda module, distribution: stand_ins[module.partition(".")[0]])
    monkeypatch.setattr(baselines, "compiled", lambda function, inputs, *args: lambda: function(*args))


@pytest.mark.parametrize("entry", [FORWARD, BACKWARD], ids=lambda e: e.name)
def test_every_required_rival_has_an_adapter(entry: Any) -> None:
    found = rivals_of(entry, "cuda")
    assert all(callable(found[name]) for name in entry.baselines["cuda"].required)


@pytest.mark.parametrize("entry", [FORWARD, BACKWARD], ids=lambda e: e.name)
def test_what_needs_a_gpu_says_so(entry: Any) -> None:
    call = calls(entry)[0]
    for name, make in rivals_of(entry, "cpu").items():
        if name != "torch":
            with pytest.raises(Missing, match=r"needs? a CUDA device"):
                make(call, make_inputs(call))


@pytest.mark.parametrize("call", [*calls(FORWARD), *calls(BACKWARD)], ids=lambda call: call.id)
@pytest.mark.parametrize("name", ["compile", "liger", "quack"])
def test_rows(name: str, call: Call, gpu: None) -> None:
    assert verified(call, name)


@pytest.mark.parametrize("call", calls(FORWARD), ids=lambda call: call.id)
@pytest.mark.parametrize("name", ["torch", "flashinfer"])
def test_rows_that_torch_and_flashinfer_can_serve(name: str, call: Call, gpu: None) -> None:
    weight, x = call.inputs["weight"], call.inputs["x"]
    mixed = weight is not None and weight.dtype != x.dtype
    if name == "torch":
        served = not mixed and not call["weight_offset"]
    else:
        served = not mixed and weight is not None and x.dtype != "float32" and not call["return_rstd"]
    if served:
        assert verified(call, name)
    else:
        with pytest.raises(Missing, match=r"rms_?norm"):
            verified(call, name)


def test_liger_has_no_longer_rows_than_a_block(gpu: None) -> None:
    x, weight = torch.empty(1, 131072), torch.empty(131072)
    call = RMSNormFwdOp(131072).bind(x, weight)
    with pytest.raises(Missing, match="rows of up to 65536"):
        baselines.liger_rms_norm(call, {"x": x, "weight": weight})
