"""GEMMFwdOp through its front door: every case that its entry gives, and inputs that broke others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tileops.core.errors import CheckError
from tileops.core.testing import Case, TorchCase, assert_right, case_of, run_case, run_torch_case
from tileops.gemm import GEMMFwdOp

pytestmark = pytest.mark.op("GEMMFwdOp")

NN = GEMMFwdOp(trans_b=False)


def test_rows(workload_case: Case, device: str) -> None:
    run_case(workload_case, device)


def test_edges(edge_case: Case, device: str) -> None:
    run_case(edge_case, device)


def test_torch(torch_case: TorchCase, device: str) -> None:
    run_torch_case(torch_case, device)


def integers(*shape: int, device: str, dtype: torch.dtype = torch.float16, seed: int = 0) -> Tensor:
    """Small integers: their products and sums are exact in float32."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def exact(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` of integer values."""
    return (a.cpu().double() @ b.cpu().double()).to(a.device, a.dtype)


@pytest.mark.semantics("GEMMFwdOp", "accumulate")
@pytest.mark.parametrize("M", [1, 64, 130])
def test_no_tail_of_k_is_dropped(M: int, device: str) -> None:
    every = (*range(1, 41), 48, 64, 100)
    few = (1, 7, 8, 20, 24, 31, 40, 48, 100)  # on a GPU each K is a program to compile
    for K in every if device == "cpu" else few:
        a, b = integers(M, K, device=device), integers(K, 64, device=device, seed=1)
        assert torch.equal(NN(a, b), exact(a, b)), f"K = {K}"


@pytest.mark.parametrize("N", [1, 2, 4, 6, 9, 100])
@pytest.mark.parametrize("trans_b", [False, True])
def test_no_tail_of_n_is_dropped(N: int, trans_b: bool, device: str) -> None:
    a, b = integers(64, 64, device=device), integers(64, N, device=device, seed=1)
    assert torch.equal(GEMMFwdOp(trans_b=trans_b)(a, b.T.contiguous() if trans_b else b), exact(a, b))


@pytest.mark.semantics("GEMMFwdOp", "accumulate")
@pytest.mark.parametrize("M", [1, 4, 64])
def test_partial_sums_of_a_long_k_are_float32(M: int, device: str) -> None:
    """Where K was split, partial sums in bfloat16 were off by 0.4 of a value; one rounding is 2**-8 at most."""
    rng = torch.Generator().manual_seed(0)
    a, b = (torch.rand(n, 14336, generator=rng).mul(2).sub(1).to(device, torch.bfloat16) for n in (M, 96))
    d, oracle = GEMMFwdOp()(a, b).double(), a.double() @ b.double().T
    assert ((d - oracle).abs() / oracle.abs())[oracle.abs() > 1].max() < 1.05 * 2**-8


def test_a_vector_transposed(device: str) -> None:
    """Its one column has a stride of 1, as if it were contiguous."""
    a, b = integers(2, 1, device=device).t(), integers(2, 32, device=device, seed=1)
    assert torch.equal(NN(a, b), exact(a, b))


LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("rows-of-130-bytes", {"layouts": {"a": "odd-pitch"}}),
    ("unaligned-base", {"layouts": {"a": "misaligned"}}),
    ("unaligned-both", {"layouts": {"a": "misaligned", "b": "odd-pitch"}}),
    ("transposed-both", {"layouts": {"a": "transposed", "b": "transposed"}}),
    ("expanded-rows", {"layouts": {"a": "expanded0"}}),
    ("expanded-columns", {"layouts": {"a": "expanded1", "b": "expanded1"}}),
]


@pytest.mark.parametrize(("label", "how"), LAYOUTS, ids=[label for label, _ in LAYOUTS])
@pytest.mark.parametrize("shape", [(64, 64, 64), (200, 136, 264)], ids=["tile", "tiles"])
def test_operands_of_any_layout(shape: tuple[int, int, int], label: str, how: dict[str, Any], device: str) -> None:
    M, N, K = shape
    run_case(case_of(NN.bind((M, K), (K, N), T=torch.bfloat16), label, **how), device)


def test_an_operand_that_is_both(device: str) -> None:
    x = integers(65, 65, device=device)
    assert torch.equal(NN(x, x), exact(x, x))
    assert_right(GEMMFwdOp(), x, x)


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ((2, 3), (4, 5), r"b: got shape \(4, 5\), expected \[N, K\].* K = 3"),
        ((6,), (5, 6), r"a: got rank 1, shape \(6,\), expected \[M, K\]"),
        ((2, 3), (1, 5, 3), r"b: got rank 3"),
        ((1, 2, 3), (5, 3), r"a: got rank 3"),
    ],
)
def test_shapes_that_do_not_fit(a: tuple[int, ...], b: tuple[int, ...], message: str, device: str) -> None:
    with pytest.raises(CheckError, match=message):
        GEMMFwdOp()(integers(*a, device=device), integers(*b, device=device))


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (torch.float16, torch.bfloat16, r"b: got bfloat16, expected float16"),
        (torch.float32, torch.float32, r"a: got float32, expected float16 or bfloat16"),
        (torch.int8, torch.float16, r"a: got int8"),
    ],
)
def test_dtypes_that_do_not_fit(a: torch.dtype, b: torch.dtype, message: str, device: str) -> None:
    with pytest.raises(CheckError, match=message):
        GEMMFwdOp()(integers(2, 3, device=device, dtype=a), integers(4, 3, device=device, dtype=b))


@pytest.mark.parametrize("trans_b", [False, True])
@pytest.mark.parametrize("trans_a", [False, True])
@pytest.mark.parametrize("wanted", ["a", "b", "ab"])
def test_gradients_are_products(wanted: str, trans_a: bool, trans_b: bool, device: str) -> None:
    """Of the operand that asks for one, in each layout; integers, so that they are exact."""
    op = GEMMFwdOp(trans_a=trans_a, trans_b=trans_b)
    a = integers(*((9, 5) if trans_a else (5, 9)), device=device).requires_grad_("a" in wanted)
    b = integers(*((7, 9) if trans_b else (9, 7)), device=device, seed=1).requires_grad_("b" in wanted)
    dd = integers(5, 7, device=device, seed=2)
    op(a, b).backward(dd)
    A, B = (a.t() if trans_a else a).detach(), (b.t() if trans_b else b).detach()
    dA, dB = exact(dd, B.t()), exact(A.t(), dd)
    for x, gradient in ((a, dA.t() if trans_a else dA), (b, dB.t() if trans_b else dB)):
        if x.requires_grad:
            assert x.grad is not None
            assert torch.equal(x.grad, gradient)
        else:
            assert x.grad is None


def test_a_gradient_has_gradients(device: str) -> None:
    a, b = integers(2, 3, device=device).requires_grad_(), integers(4, 3, device=device, seed=1).requires_grad_()
    (first,) = torch.autograd.grad(GEMMFwdOp()(a, b).square().sum(), a, create_graph=True)
    first.sum().backward()
    assert a.grad is not None
    assert torch.equal(a.grad, (2 * exact(b.detach().t(), b.detach()).sum(0)).expand(2, 3))


def test_operands_on_two_devices(device: str) -> None:
    a = integers(2, 3, device=device)
    with pytest.raises(CheckError, match=r"b: got a tensor on meta, expected .*, where a is"):
        GEMMFwdOp()(a, a.to("meta"))


def test_flags_are_flags() -> None:
    with pytest.raises(CheckError, match="trans_a: got 1, expected"):
        GEMMFwdOp(trans_a=1)
