"""The rivals of the GEMM operators mean what the operators mean, and say what they lack."""

from __future__ import annotations

import sys
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
from tileops.gemm import baselines

ENTRY = find_entry("GEMMFwdOp")
CALLS = [scaled(checker_of(ENTRY), row, case, 2**20) for row in ENTRY.workloads for case in cases(row)]


def right(call: Call, make: Any) -> bool:
    inputs = make_inputs(call)
    return bool(verify(call, inputs, collect(call, outputs(make(call, inputs)), inputs)))


def test_the_rivals_that_are_declared_are_those_that_have_an_adapter() -> None:
    assert rivals_of(ENTRY, "cuda") == baselines.RIVALS["GEMMFwdOp"]


def test_what_needs_a_gpu_says_so() -> None:
    with pytest.raises(Missing, match="cublaslt needs a CUDA device"):
        baselines.cublaslt(CALLS[0], make_inputs(CALLS[0]))


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.id)
def test_torch(call: Call) -> None:
    assert right(call, baselines.torch_mm)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.id)
def test_cublaslt_writes_row_major_whatever_the_operands_are(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned: list[Any] = []

    class Matmul:
        """The contract of nvmath's: with ``inplace`` the result is c, overwritten."""

        def __init__(self, a: Any, b: Any, /, c: Any = None, *, beta: float, options: dict[str, Any]) -> None:
            assert (beta, options) == (0.0, {"inplace": True})
            self.operands, self.algorithms = (a, b, c), []

        def plan(self, algorithms: Any = ("second", "first")) -> None:
            self.algorithms = list(algorithms)

        def autotune(self, iterations: int) -> None:
            tuned.append(self)
            self.algorithms.sort()

        def execute(self) -> Any:
            assert self.algorithms[0] == "first"
            a, b, c = self.operands
            return torch.mm(a, b, out=c)

    monkeypatch.setattr(baselines, "_quickest", {})
    monkeypatch.setattr(baselines, "on_gpu", lambda inputs, who: None)
    monkeypatch.setattr(baselines, "package", lambda module, distribution: SimpleNamespace(Matmul=Matmul))
    assert right(call, baselines.cublaslt)
    inputs = make_inputs(call)
    assert baselines.cublaslt(call, inputs)().is_contiguous()
    assert len(tuned) == 1


def test_a_package_that_is_not_there_is_named_with_its_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "on_gpu", lambda inputs, who: None)
    monkeypatch.setitem(sys.modules, "nvmath", None)
    with pytest.raises(
        Missing, match=r"nvmath.linalg.advanced can't be imported .*; pip install nvmath-python\[cu13\]"
    ):
        baselines.cublaslt(CALLS[0], make_inputs(CALLS[0]))
