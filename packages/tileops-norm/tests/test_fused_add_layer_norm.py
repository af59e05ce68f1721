"""FusedAddLayerNormFwdOp through its front door: every case that its entry gives, and inputs that broke others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tileops.core.errors import CheckError
from tileops.core.testing import Case, TorchCase, assert_right, case_of, run_case, run_torch_case
from tileops.norm import FusedAddLayerNormFwdOp

pytestmark = pytest.mark.op("FusedAddLayerNormFwdOp")

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NAN = float("nan")


def test_rows(workload_case: Case, device: str) -> None:
    run_case(workload_case, device)


def test_edges(edge_case: Case, device: str) -> None:
    run_case(edge_case, device)


def test_torch(torch_case: TorchCase, device: str) -> None:
    run_torch_case(torch_case, device)


def normal(*shape: int, device: str = "cpu", dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def random(*shape: int, device: str, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    shapes = (shape, shape, shape[-1:], shape[-1:])
    return [normal(*s, device=device, dtype=dtype, seed=i) for i, s in enumerate(shapes)]


@pytest.mark.parametrize("T", DTYPES)
@pytest.mark.parametrize("N", [1, 3, 127, 1000, 1536, 5120, 16384, 65536])
def test_any_length(N: int, T: torch.dtype, device: str) -> None:
    """Lengths that are no power of two, where a masked lane must not count as a difference from the mean."""
    op = FusedAddLayerNormFwdOp(return_stats=True)
    run_case(case_of(op.bind((3, N), (3, N), (N,), (N,), T=T, weight=T, bias=T), f"N={N}"), device)


@pytest.mark.semantics("FusedAddLayerNormFwdOp", "residual", "definition")
@pytest.mark.parametrize("T", DTYPES)
def test_it_is_an_addition_and_a_norm(T: torch.dtype, device: str) -> None:
    x, residual, weight, bias = random(4, 1000, device=device, dtype=T)
    y, residual_out = FusedAddLayerNormFwdOp()(x, residual, weight, bias)
    assert torch.equal(residual_out, x + residual)
    exact = F.layer_norm(residual_out.double(), (1000,), weight.double(), bias.double())
    torch.testing.assert_close(y.double(), exact, rtol=torch.finfo(T).eps, atol=2**-19)


@pytest.mark.parametrize("T", DTYPES)
def test_rows_that_do_not_lie_in_a_row(T: torch.dtype, device: str) -> None:
    x, residual, weight, bias = random(40, 96, device=device, dtype=T)
    op = FusedAddLayerNormFwdOp()
    assert_right(op, x.t(), residual.t().contiguous(), weight[:40], bias[:40])
    assert_right(op, x[:, ::2], residual[:, 1::2], weight[::2], bias[:48])
    assert_right(op, x[1::3, 1:47], residual[1::3, 3:49], weight[1:47], bias[2:48])


@pytest.mark.semantics("FusedAddLayerNormFwdOp", "variance")
def test_rows_of_large_and_nearly_equal_values(device: str) -> None:
    x = torch.tensor([[40000.0, 40001.0, 40002.0, 40003.0], [8e4, 8e4 + 1, 8e4 + 2, 8e4 + 3]], device=device)
    one, zero = torch.ones(4, device=device), torch.zeros(4, device=device)
    op = FusedAddLayerNormFwdOp(return_stats=True)
    _, _, mean, rstd = assert_right(op, x, torch.zeros_like(x), one, zero)
    assert mean.tolist() == [40001.5, 80001.5]
    torch.testing.assert_close(rstd, torch.full_like(rstd, (1.25 + 1e-5) ** -0.5))


@pytest.mark.parametrize(("value", "T"), [(1234.0, torch.float32), (3.0, torch.float16), (0.0, torch.bfloat16)])
def test_constant_rows_give_the_bias(value: float, T: torch.dtype, device: str) -> None:
    """With an eps that float16 has not: it is added in float32."""
    x, _, weight, bias = random(3, 256, device=device, dtype=T)
    x.fill_(value)
    y, _ = FusedAddLayerNormFwdOp(eps=1e-12)(x, torch.zeros_like(x), weight, bias)
    assert torch.equal(y, bias.expand(3, -1))


@pytest.mark.parametrize("rows", [65535, 65536, 65537])
def test_more_rows_than_a_grid_axis(rows: int, device: str) -> None:
    x, residual, weight, bias = random(7, 64, device=device)
    op, turns = FusedAddLayerNormFwdOp(), rows // 7 + 1
    y, _ = op(x.repeat(turns, 1)[:rows], residual.repeat(turns, 1)[:rows], weight, bias)
    assert torch.equal(y[[0, -1]], op(x, residual, weight, bias)[0][[0, (rows - 1) % 7]])


@pytest.mark.semantics("FusedAddLayerNormFwdOp", "batch-invariant")
@pytest.mark.parametrize("N", [128, 4096, 5120, 100_003])
def test_a_row_alone_has_the_bits_it_has_in_a_batch(N: int, device: str) -> None:
    x, residual, weight, bias = random(300 if N < 5000 else 17, N, device=device)
    op = FusedAddLayerNormFwdOp(return_stats=True)
    whole = op(x, residual, weight, bias)
    for rows in (slice(0, 1), slice(3, 5), slice(-1, None), slice(2, 2)):
        for alone, batched in zip(op(x[rows], residual[rows], weight, bias), whole, strict=True):
            assert torch.equal(alone, batched[rows])


@pytest.mark.semantics("FusedAddLayerNormFwdOp", "row-isolation")
def test_a_bad_row_leaves_the_others_alone(device: str) -> None:
    x, residual, weight, bias = random(5, 1000, device=device)
    clean = FusedAddLayerNormFwdOp()(x, residual, weight, bias)
    residual[2, 7] = NAN
    y, residual_out = FusedAddLayerNormFwdOp()(x, residual, weight, bias)
    for now, before in zip((y, residual_out), clean, strict=True):
        assert torch.equal(now[[0, 1, 3, 4]], before[[0, 1, 3, 4]])
    assert y[2].isnan().all()


@pytest.mark.parametrize(
    ("params", "shapes", "message"),
    [
        ({}, [(3, 8), (3, 7), (8,), (8,)], r"residual: got shape \(3, 7\), expected .*8"),
        ({}, [(3, 8), (3, 8), (7,), (8,)], r"weight: got shape \(7,\), expected .*8"),
        ({}, [(3, 8), (3, 8), (8,), (1, 8)], r"bias: got rank 2"),
        ({}, [(3, 0), (3, 0), (0,), (0,)], r"N = 0, expected a last axis that is not empty"),
        ({"eps": -1.0}, [(3, 8), (3, 8), (8,), (8,)], r"eps = -1.0, expected an eps that is not negative"),
    ],
)
def test_calls_that_do_not_fit(params: dict[str, Any], shapes: list[Any], message: str, device: str) -> None:
    with pytest.raises(CheckError, match=message):
        FusedAddLayerNormFwdOp(**params)(*(normal(*shape, device=device) for shape in shapes))


@pytest.mark.parametrize("T", DTYPES)
@pytest.mark.parametrize("N", [96, 1536])
def test_gradients(N: int, T: torch.dtype, device: str) -> None:
    """By autograd in float64 through the very sum that was rounded; residual_out has a gradient of its own."""
    inputs = random(3, 5, N, device=device, dtype=T)
    gradients = [normal(3, 5, N, device=device, dtype=T, seed=seed) for seed in (7, 8)]
    leaves = [t.clone().requires_grad_() for t in inputs]
    torch.autograd.backward(FusedAddLayerNormFwdOp()(*leaves), gradients)
    exact = [t.double().requires_grad_() for t in inputs]
    total = exact[0] + exact[1]
    total = total + ((inputs[0] + inputs[1]).double() - total).detach()
    y = F.layer_norm(total, (N,), exact[2], exact[3])
    torch.autograd.backward([y, total], [g.double() for g in gradients])
    eps = torch.finfo(T).eps
    for leaf, true in zip(leaves, exact, strict=True):
        assert leaf.grad is not None
        assert true.grad is not None
        torch.testing.assert_close(leaf.grad.double(), true.grad, rtol=4 * eps, atol=2 * eps * true.grad.abs().max())
