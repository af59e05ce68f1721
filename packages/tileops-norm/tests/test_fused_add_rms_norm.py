"""FusedAddRMSNormFwdOp through its front door: the cases of its entry, its gradient, inputs that broke others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tileops.core.errors import CheckError
from tileops.core.testing import Case, TorchCase, assert_right, case_of, run_case, run_torch_case
from tileops.norm import FusedAddRMSNormFwdOp, RMSNormFwdOp

pytestmark = pytest.mark.op("FusedAddRMSNormFwdOp")

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


@pytest.mark.parametrize("T", DTYPES)
@pytest.mark.parametrize("N", [1, 3, 127, 1000, 1536, 8192, 16384, 32768, 65536])
def test_any_length(N: int, T: torch.dtype, device: str) -> None:
    """Lengths that are no power of two, and rows that outgrow shared memory."""
    op = FusedAddRMSNormFwdOp(return_rstd=True)
    run_case(case_of(op.bind((3, N), (3, N), (N,), T=T, weight=T), f"N={N}"), device)


@pytest.mark.parametrize("T", DTYPES)
def test_rows_that_do_not_lie_in_a_row(T: torch.dtype, device: str) -> None:
    x, residual = normal(40, 96, device=device, dtype=T), normal(96, 40, device=device, dtype=T, seed=1)
    weight, op = normal(96, device=device, dtype=T, seed=2), FusedAddRMSNormFwdOp()
    assert_right(op, x.t(), residual, weight[:40])
    assert_right(op, x[:, ::2], residual.t()[:, 1::2], weight[::2])
    assert_right(op, x[1::3, 1:47], residual.t()[1::3, 3:49], weight[1:47])


@pytest.mark.parametrize("T", DTYPES)
def test_the_inputs_are_still_what_they_were(T: torch.dtype, device: str) -> None:
    """Others write the sum over the residual; here both outputs are new, also where x is its own residual."""
    x, residual = normal(4, 64, device=device, dtype=T), normal(4, 64, device=device, dtype=T, seed=1)
    weight, before = normal(64, device=device, dtype=T, seed=2), (x.clone(), residual.clone())
    for output in (*FusedAddRMSNormFwdOp()(x, residual, weight), *FusedAddRMSNormFwdOp()(x, x, weight)):
        output.zero_()
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


@pytest.mark.semantics("FusedAddRMSNormFwdOp", "residual", "definition")
@pytest.mark.parametrize("T", DTYPES)
def test_it_is_an_addition_and_a_norm(T: torch.dtype, device: str) -> None:
    x, residual = normal(4, 1000, device=device, dtype=T), normal(4, 1000, device=device, dtype=T, seed=1)
    weight = normal(1000, device=device, dtype=T, seed=2)
    y, residual_out = FusedAddRMSNormFwdOp(weight_offset=1.0)(x, residual, weight)
    assert torch.equal(residual_out, x + residual)
    expected = RMSNormFwdOp(1000, eps=1e-6, weight_offset=1.0)(x + residual, weight)
    torch.testing.assert_close(y, expected, rtol=2 * torch.finfo(T).eps, atol=2**-24)


@pytest.mark.semantics("FusedAddRMSNormFwdOp", "batch-invariant")
@pytest.mark.parametrize("N", [128, 4096, 5120, 100_003])
def test_a_row_alone_has_the_bits_it_has_in_a_batch(N: int, device: str) -> None:
    B = 300 if N < 5000 else 17
    x, residual, weight = normal(B, N, device=device), normal(B, N, device=device, seed=1), normal(N, device=device)
    op = FusedAddRMSNormFwdOp(return_rstd=True)
    whole = op(x, residual, weight)
    for rows in (slice(0, 1), slice(3, 5), slice(-1, None), slice(2, 2)):
        for alone, batched in zip(op(x[rows], residual[rows], weight), whole, strict=True):
            assert torch.equal(alone, batched[rows])


@pytest.mark.semantics("FusedAddRMSNormFwdOp", "row-isolation")
def test_a_bad_row_leaves_the_others_alone(device: str) -> None:
    x, residual, weight = (normal(*s, device=device, seed=i) for i, s in enumerate([(5, 1000), (5, 1000), (1000,)]))
    clean = FusedAddRMSNormFwdOp()(x, residual, weight)
    residual[2, 7] = NAN
    y, residual_out = FusedAddRMSNormFwdOp()(x, residual, weight)
    for now, before in zip((y, residual_out), clean, strict=True):
        assert torch.equal(now[[0, 1, 3, 4]], before[[0, 1, 3, 4]])
    assert y[2].isnan().all()
    assert residual_out[2].isnan().sum() == 1


def exact_gradients(inputs: list[Tensor], dy: Tensor, ds: Tensor, offset: float) -> list[Tensor]:
    """By autograd in float64, through the very sum that was rounded."""
    x, residual, weight = (t.detach().double().requires_grad_() for t in inputs)
    total = x + residual
    total = total + ((inputs[0] + inputs[1]).double() - total).detach()
    y = torch.nn.functional.rms_norm(total, total.shape[-1:], weight + offset, eps=1e-6)
    torch.autograd.backward([y, total], [dy.double(), ds.double()])
    assert x.grad is not None
    assert residual.grad is not None
    assert weight.grad is not None
    return [x.grad, residual.grad, weight.grad]


@pytest.mark.parametrize("T", DTYPES)
@pytest.mark.parametrize("N", [96, 1536])
def test_gradients(N: int, T: torch.dtype, device: str) -> None:
    """What reaches residual_out from later layers goes to x and to the residual beside what comes through y."""
    inputs = [normal(*s, device=device, dtype=T, seed=i) for i, s in enumerate([(3, 5, N), (3, 5, N), (N,)])]
    dy, ds = normal(3, 5, N, device=device, dtype=T, seed=3), normal(3, 5, N, device=device, dtype=T, seed=4)
    leaves = [t.clone().requires_grad_() for t in inputs]
    outputs = FusedAddRMSNormFwdOp(weight_offset=1.0)(*leaves)
    assert len(outputs) == 2, "rstd is saved, not shown"
    torch.autograd.backward(outputs, [dy, ds])
    eps = torch.finfo(T).eps
    for leaf, exact in zip(leaves, exact_gradients(inputs, dy, ds, 1.0), strict=True):
        assert leaf.grad is not None
        scale = exact.abs().max().item()
        torch.testing.assert_close(leaf.grad.double(), exact, rtol=4 * eps, atol=2 * eps * scale)


def test_a_gradient_of_one_output_alone(device: str) -> None:
    x, residual, weight = (normal(*s, device=device, dtype=torch.float32) for s in [(3, 8), (3, 8), (8,)])
    x.requires_grad_()
    _, residual_out = FusedAddRMSNormFwdOp()(x, residual, weight)
    residual_out.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones_like(x))
    assert residual.grad is None
    x.grad = None
    y, _ = FusedAddRMSNormFwdOp()(x, residual, weight)
    y.sum().backward()
    plain = (x.detach() + residual).requires_grad_()
    RMSNormFwdOp(8, eps=1e-6)(plain, weight).sum().backward()
    torch.testing.assert_close(x.grad, plain.grad)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_training_step_compiles_whole(dynamic: bool, device: str) -> None:
    torch._dynamo.reset()
    op = FusedAddRMSNormFwdOp()

    def step(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        y, residual_out = op(x * 2, residual, weight)
        return (y * residual_out).sum()

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for N in (64, 96):
        made = [[normal(*s, device=device, dtype=torch.float32, seed=i).requires_grad_() for i, s in
                 enumerate([(4, N), (4, N), (N,)])] for _ in range(2)]  # fmt: skip
        step(*made[0]).backward()
        compiled(*made[1]).backward()
        for plain, traced in zip(*made, strict=True):
            torch.testing.assert_close(traced.grad, plain.grad)


@pytest.mark.parametrize(
    ("params", "x", "residual", "weight", "message"),
    [
        ({}, (3, 8), (3, 7), (8,), r"residual: got shape \(3, 7\), expected .*8"),
        ({}, (3, 8), (2, 8), (8,), r"residual: got shape \(2, 8\), expected .*3"),
        ({}, (3, 8), (8,), (8,), r"residual: got rank 1"),
        ({}, (3, 8), (3, 8), (7,), r"weight: got shape \(7,\), expected .*8"),
        ({}, (), (), (1,), r"x: got rank 0"),
        ({}, (3, 0), (3, 0), (0,), r"N = 0, expected a last axis that is not empty"),
        ({"eps": -1.0}, (3, 8), (3, 8), (8,), r"eps = -1.0, expected an eps that is not negative"),
    ],
)
def test_calls_that_do_not_fit(
    params: dict[str, Any], x: Any, residual: Any, weight: Any, message: str, device: str
) -> None:
    with pytest.raises(CheckError, match=message):
        FusedAddRMSNormFwdOp(**params)(*(normal(*shape, device=device) for shape in (x, residual, weight)))


def test_dtypes_that_do_not_fit(device: str) -> None:
    x, weight = normal(3, 8, device=device), normal(8, device=device)
    with pytest.raises(CheckError, match=r"residual: got float32, expected bfloat16"):
        FusedAddRMSNormFwdOp()(x, x.float(), weight)
    with pytest.raises(CheckError, match=r"weight: got float16, expected bfloat16.* or float32"):
        FusedAddRMSNormFwdOp()(x, x, weight.half())
