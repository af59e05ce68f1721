"""The GatedRMSNorm reference, held to hand-written numbers, to torch in float64 and to bits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tileops.norm.reference import gated_rms_norm

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NAN, INF = float("nan"), float("inf")
both_orders = pytest.mark.parametrize("norm_before_gate", [True, False])


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def norm(x: Tensor, gate: Tensor, weight: Tensor, norm_before_gate: bool, eps: float = 1e-6) -> Tensor:
    return gated_rms_norm(x, gate, weight, eps=eps, norm_before_gate=norm_before_gate, T=x.dtype)


def exact(x: Tensor, gate: Tensor, weight: Tensor, norm_before_gate: bool) -> Tensor:
    """By torch's rms_norm in float64."""
    x, gated = x.double(), F.silu(gate.double())
    if norm_before_gate:
        return F.rms_norm(x, x.shape[-1:], weight.double(), eps=1e-6) * gated
    return F.rms_norm(x * gated, x.shape[-1:], weight.double(), eps=1e-6)


def assert_rounded_once(y: Tensor, truth: Tensor) -> None:
    if y.dtype == torch.float32:
        torch.testing.assert_close(y.double(), truth, rtol=8 * 2**-23, atol=1e-12)
    else:
        assert (y == truth.to(y.dtype)).double().mean() > 0.998
        torch.testing.assert_close(y.double(), truth, rtol=torch.finfo(y.dtype).eps, atol=2**-24)


@pytest.mark.semantics("GatedRMSNormFwdOp", "definition")
def test_a_row_by_hand() -> None:
    """silu(log 3) is 3/4 of log 3, silu(0) is 0; the mean of squares of 1, 7, 5, 5 is 25."""
    x, weight = torch.tensor([[1.0, 7.0, 5.0, 5.0]]), torch.tensor([5.0, 5.0, 10.0, -5.0])
    log3 = math.log(3.0)
    gate = torch.tensor([[log3, 0.0, -log3, 100.0]])
    after = norm(x, gate, weight, True, eps=0.0)
    torch.testing.assert_close(after, torch.tensor([[0.75 * log3, 0.0, -2.5 * log3, -500.0]]))
    one = torch.full((1, 4), log3)
    before = norm(x, one, weight, False, eps=(0.75 * log3) ** 2 * 24)  # 25 + 24 is the square of 7
    torch.testing.assert_close(before, torch.tensor([[5 / 7, 5.0, 50 / 7, -25 / 7]]))


@pytest.mark.semantics("GatedRMSNormFwdOp", "definition", "rounding")
@pytest.mark.parametrize("T", DTYPES)
@pytest.mark.parametrize("N", [1, 3, 128, 1000, 1536, 3000, 5120])
@both_orders
def test_any_length_equals_torch_in_float64(N: int, T: torch.dtype, norm_before_gate: bool) -> None:
    tensors = normal(9, N, dtype=T), normal(9, N, dtype=T, seed=1), normal(N, dtype=T, seed=2)
    y = norm(*tensors, norm_before_gate)
    assert y.dtype == T
    assert_rounded_once(y, exact(*tensors, norm_before_gate))


@pytest.mark.semantics("GatedRMSNormFwdOp", "rounding")
@pytest.mark.parametrize("T", [torch.float16, torch.bfloat16])
@both_orders
def test_only_y_is_rounded(T: torch.dtype, norm_before_gate: bool) -> None:
    """Rounding the normalized or the gated row to T first, as some models do, changes a value in four."""
    x, gate, weight = normal(64, 256, dtype=T), normal(64, 256, dtype=T, seed=1), normal(256, seed=2)
    truth = exact(x, gate, weight, norm_before_gate)
    assert_rounded_once(norm(x, gate, weight, norm_before_gate), truth)
    if norm_before_gate:
        twice = F.rms_norm(x.double(), (256,), weight.double(), eps=1e-6).to(T).double() * F.silu(gate.double())
    else:
        inner = (x.double() * F.silu(gate.double())).to(T).double()
        twice = F.rms_norm(inner, (256,), weight.double(), eps=1e-6)
    assert (twice.to(T) == truth.to(T)).double().mean() < 0.9


@both_orders
def test_gates_far_from_zero(norm_before_gate: bool) -> None:
    """In float32 exp overflows from 89 on: what is left of x is zero, and no NaN."""
    gate = torch.tensor([[-1e4, -100.0, 100.0, 1e4]])
    y = norm(torch.ones(1, 4), gate, torch.ones(4), norm_before_gate)
    assert_rounded_once(y[:, 2:], exact(torch.ones(1, 4), gate, torch.ones(4), norm_before_gate)[:, 2:])
    assert y[0, :2].abs().max() < 1e-30


@pytest.mark.semantics("GatedRMSNormFwdOp", "batch-invariant", "row-isolation")
@pytest.mark.parametrize("N", [128, 5120, 100_003])
@both_orders
def test_a_row_is_its_own(N: int, norm_before_gate: bool) -> None:
    x, gate, weight = normal(9, N), normal(9, N, seed=1), normal(N, seed=2)
    y = norm(x, gate, weight, norm_before_gate)
    for rows in (slice(0, 1), slice(3, 5)):
        assert torch.equal(norm(x[rows].clone(), gate[rows].clone(), weight, norm_before_gate), y[rows])
    others = [0, 1, *range(3, 9)]
    for tensor in (x, gate):
        tensor[2, 7] = NAN
        spoilt = norm(x, gate, weight, norm_before_gate)
        assert torch.equal(spoilt[others], y[others])
        assert spoilt[2, 7].isnan()


@pytest.mark.parametrize("layout", [lambda x: x.t().contiguous().t(), lambda x: x.repeat_interleave(2, 1)[:, ::2]])
@both_orders
def test_any_strides(layout: Any, norm_before_gate: bool) -> None:
    x, gate, weight = normal(6, 40), normal(6, 40, seed=1), normal(40, seed=2)
    y = norm(layout(x), layout(gate), weight, norm_before_gate)
    assert y.is_contiguous()
    assert torch.equal(y, norm(x, gate, weight, norm_before_gate))


@both_orders
def test_float64_operands_give_a_float64_oracle(norm_before_gate: bool) -> None:
    x, gate, weight = (normal(3, 50, seed=s).double() for s in range(3))
    y = gated_rms_norm(x, gate, weight[0], eps=1e-6, norm_before_gate=norm_before_gate, T=torch.bfloat16)
    torch.testing.assert_close(y, exact(x, gate, weight[0], norm_before_gate), rtol=1e-13, atol=0)
