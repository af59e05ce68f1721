"""GatedRMSNormFwdOp through its front door: every case that its entry gives, and inputs that broke others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tileops.core.errors import CheckError
from tileops.core.testing import Case, TorchCase, assert_right, case_of, run_case, run_torch_case
from tileops.norm import GatedRMSNormFwdOp

pytestmark = pytest.mark.op("GatedRMSNormFwdOp")

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
both_orders = pytest.mark.parametrize("norm_before_gate", [True, False])


def test_rows(workload_case: Case, device: str) -> None:
    run_case(workload_case, device)


def test_edges(edge_case: Case, device: str) -> None:
    run_case(edge_case, device)


def test_torch(torch_case: TorchCase, device: str) -> None:
    run_torch_case(torch_case, device)


def normal(*shape: int, device: str = "cpu", dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


@pytest.mark.parametrize("T", DTYPES)
@pytest.mark.parametrize("N", [1, 3, 127, 1000, 1536, 3000, 5120, 8192, 16384, 32768, 65536])
@both_orders
def test_any_length(N: int, T: torch.dtype, norm_before_gate: bool, device: str) -> None:
    op = GatedRMSNormFwdOp(norm_before_gate=norm_before_gate)
    run_case(case_of(op.bind((3, N), (3, N), (N,), T=T, weight=T), f"N={N}"), device)


@both_orders
def test_x_and_gate_from_one_projection(norm_before_gate: bool, device: str) -> None:
    """They are views into it; what lies beside them, here NaN, is neither read nor written."""
    both = normal(5, 3 * 64, device=device)
    both[:, 128:] = float("nan")
    gate, x, _ = both.chunk(3, dim=1)
    op, weight = GatedRMSNormFwdOp(norm_before_gate=norm_before_gate), normal(64, device=device, seed=1)
    before = both.clone()
    assert torch.equal(assert_right(op, x, gate, weight), op(x.contiguous(), gate.contiguous(), weight))
    assert torch.equal(both.view(torch.int16), before.view(torch.int16))


@pytest.mark.parametrize("T", DTYPES)
@both_orders
def test_rows_that_do_not_lie_in_a_row(T: torch.dtype, norm_before_gate: bool, device: str) -> None:
    x, gate = normal(40, 96, device=device, dtype=T), normal(40, 96, device=device, dtype=T, seed=1)
    op, weight = GatedRMSNormFwdOp(norm_before_gate=norm_before_gate), normal(48, device=device, dtype=T, seed=2)
    assert_right(op, x.t(), gate.t(), weight[:40])
    assert_right(op, x[:, ::2], gate[:, 48:], weight)
    assert_right(op, x[:, 1:49], gate[:1, :48].expand(40, 48), weight)


@both_orders
def test_gates_of_any_size(norm_before_gate: bool, device: str) -> None:
    x = normal(2, 256, device=device, dtype=torch.float32)
    gate = normal(2, 256, device=device, dtype=torch.float32, seed=1) * 40
    assert_right(GatedRMSNormFwdOp(norm_before_gate=norm_before_gate), x, gate, torch.ones(256, device=device))


@pytest.mark.parametrize("T", DTYPES)
@both_orders
def test_inputs_stay_as_they_are(T: torch.dtype, norm_before_gate: bool, device: str) -> None:
    tensors = [normal(4, 64, device=device, dtype=T, seed=s) for s in range(2)]
    tensors.append(normal(64, device=device, dtype=T, seed=2))
    before = [t.clone() for t in tensors]
    GatedRMSNormFwdOp(norm_before_gate=norm_before_gate)(*tensors).zero_()
    assert all(torch.equal(t, b) for t, b in zip(tensors, before, strict=True))


@pytest.mark.parametrize("N", [128, 5120, 100_003])
@both_orders
def test_a_row_alone_has_the_bits_it_has_in_a_batch(N: int, norm_before_gate: bool, device: str) -> None:
    x, gate, weight = normal(17, N, device=device), normal(17, N, device=device, seed=1), normal(N, device=device)
    op = GatedRMSNormFwdOp(norm_before_gate=norm_before_gate)
    y = op(x, gate, weight)
    for rows in (slice(0, 1), slice(3, 5), slice(-1, None), slice(2, 2)):
        assert torch.equal(op(x[rows], gate[rows], weight), y[rows])


@both_orders
def test_no_rows(norm_before_gate: bool, device: str) -> None:
    op = GatedRMSNormFwdOp(norm_before_gate=norm_before_gate)
    run_case(case_of(op.bind((2, 0, 8), (2, 0, 8), (8,), T=torch.bfloat16), "empty"), device)


@pytest.mark.parametrize(
    ("eps", "x", "gate", "weight", "message"),
    [
        (1e-6, (3, 8), (8,), (8,), r"gate: got rank 1"),
        (1e-6, (3, 8), (3, 7), (8,), r"gate: got shape \(3, 7\), expected .*8"),
        (1e-6, (3, 8), (3, 8), (7,), r"weight: got shape \(7,\), expected .*8"),
        (1e-6, (3, 0), (3, 0), (0,), r"expected rows that are not empty"),
        (-1.0, (3, 8), (3, 8), (8,), r"expected an eps that is not negative"),
    ],
)
def test_calls_that_do_not_fit(
    eps: float, x: tuple[int, ...], gate: tuple[int, ...], weight: tuple[int, ...], message: str, device: str
) -> None:
    with pytest.raises(CheckError, match=message):
        GatedRMSNormFwdOp(eps=eps)(normal(*x, device=device), normal(*gate, device=device), normal(*weight).to(device))


def test_dtypes_that_do_not_fit(device: str) -> None:
    x, weight = normal(3, 8, device=device), normal(8, device=device)
    with pytest.raises(CheckError, match=r"gate: got float32, expected bfloat16"):
        GatedRMSNormFwdOp()(x, x.float(), weight)
    with pytest.raises(CheckError, match=r"weight: got float16, expected bfloat16.* or float32"):
        GatedRMSNormFwdOp()(x, x, weight.half())
