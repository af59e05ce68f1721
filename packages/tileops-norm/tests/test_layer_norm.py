"""LayerNorm, forward and backward, through its front door: its entries' cases, and inputs that broke others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tileops.core.errors import CheckError
from tileops.core.testing import Case, TorchCase, assert_right, case_of, run_case, run_torch_case
from tileops.norm import LayerNormFwdOp

pytestmark = pytest.mark.op("LayerNormFwdOp")

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NAN = float("nan")


both = pytest.mark.op("LayerNormFwdOp", "LayerNormBwdOp")


@both
def test_rows(workload_case: Case, device: str) -> None:
    run_case(workload_case, device)


@both
def test_edges(edge_case: Case, device: str) -> None:
    run_case(edge_case, device)


@both
def test_torch(torch_case: TorchCase, device: str) -> None:
    run_torch_case(torch_case, device)


def normal(*shape: int, device: str = "cpu", dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


@pytest.mark.parametrize("T", DTYPES)
@pytest.mark.parametrize("N", [1, 3, 127, 1000, 1536, 3000, 5120, 8192, 65536])
def test_any_length(N: int, T: torch.dtype, device: str) -> None:
    """Lengths that are no power of two, whose missing lanes have no part in the variance, and long rows."""
    op = LayerNormFwdOp(N, return_stats=True)
    run_case(case_of(op.bind((3, N), (N,), (N,), T=T, weight=T, bias=T), f"N={N}"), device)


@pytest.mark.parametrize("rows", [65535, 65536, 65537])
def test_more_rows_than_a_grid_axis(rows: int, device: str) -> None:
    x, op = normal(7, 64, device=device), LayerNormFwdOp(64)
    y = op(x.repeat(rows // 7 + 1, 1)[:rows])
    assert torch.equal(y[[0, -1]], op(x)[[0, (rows - 1) % 7]])


@pytest.mark.parametrize("T", DTYPES)
def test_rows_that_do_not_lie_in_a_row(T: torch.dtype, device: str) -> None:
    x = normal(40, 96, device=device, dtype=T)
    assert_right(LayerNormFwdOp(40), x.t())
    assert_right(LayerNormFwdOp(48), x[:, ::2])
    assert_right(LayerNormFwdOp(47), x[1::3, 1::2][:, :47])
    assert_right(LayerNormFwdOp((40, 96)), x.t().contiguous().t())


def test_what_lies_beside_a_view_is_not_touched(device: str) -> None:
    buffer = normal(5, 96, device=device)
    buffer[:, 64:] = NAN
    before = buffer.clone()
    op, x = LayerNormFwdOp(64), buffer[:, :64]
    assert torch.equal(assert_right(op, x), op(x.contiguous()))
    assert torch.equal(buffer.view(torch.int16), before.view(torch.int16))


@pytest.mark.semantics("LayerNormFwdOp", "batch-invariant")
@pytest.mark.parametrize("N", [128, 4096, 5120, 100_003])
def test_a_row_alone_has_the_bits_it_has_in_a_batch(N: int, device: str) -> None:
    x = normal(300 if N < 5000 else 17, N, device=device)
    weight, bias = (normal(N, device=device, seed=s) for s in (1, 2))
    op = LayerNormFwdOp(N, return_stats=True)
    whole = op(x, weight, bias)
    for rows in (slice(0, 1), slice(3, 5), slice(-1, None), slice(2, 2)):
        for got, expected in zip(op(x[rows], weight, bias), whole, strict=True):
            assert torch.equal(got, expected[rows])


@pytest.mark.semantics("LayerNormFwdOp", "row-isolation")
def test_a_bad_row_leaves_the_others_alone(device: str) -> None:
    x, op = normal(5, 1000, device=device), LayerNormFwdOp(1000)
    clean = op(x)
    x[2, 7] = NAN
    y = op(x)
    assert torch.equal(y[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])
    assert y[2].isnan().all()


@pytest.mark.semantics("LayerNormFwdOp", "constant")
@pytest.mark.parametrize("N", [256, 1000, 1536])
def test_rows_of_large_equal_and_nearly_equal_values(N: int, device: str) -> None:
    bias = normal(N, device=device, dtype=torch.float32)
    for value in (1234.0, 1e15):
        y = LayerNormFwdOp(N)(torch.full((3, N), value, device=device), None, bias)
        assert torch.equal(y, bias.expand(3, -1))
    assert not LayerNormFwdOp(N, eps=1e-12)(torch.full((3, N), 3.0, device=device).half()).any()
    x = torch.tensor([[40000.0, 40001.0, 40002.0, 40003.0], [8e4, 8e4 + 1, 8e4 + 2, 8e4 + 3]], device=device)
    assert_right(LayerNormFwdOp(4), x)


@pytest.mark.parametrize("shape", [(0, 8), (0,), (2, 0, 8), (0, 0, 8)])
@pytest.mark.parametrize("return_stats", [False, True])
def test_no_rows(shape: tuple[int, ...], return_stats: bool, device: str) -> None:
    if shape == (0,):
        with pytest.raises(CheckError, match=r"normalized_shape = \[0\], expected at least one axis"):
            LayerNormFwdOp(0, return_stats=return_stats)(normal(0, device=device))
    else:
        run_case(case_of(LayerNormFwdOp(8, return_stats=return_stats).bind(shape, T=torch.bfloat16), "empty"), device)


@pytest.mark.parametrize(("shape", "axes"), [((33, 96), 1), ((500, 8, 16), 2), ((6,), 1), ((0, 16), 1)])
@pytest.mark.parametrize("given", ["weight bias", "weight", "bias", ""])
def test_autograd(shape: tuple[int, ...], axes: int, given: str, device: str) -> None:
    """As torch's in float64, each gradient there exactly where its input is."""
    names = ("x", *given.split())
    sizes = {"x": shape, "weight": shape[-axes:], "bias": shape[-axes:]}
    ours = {n: normal(*sizes[n], device=device, dtype=torch.float32, seed=i) for i, n in enumerate(names)}
    dy = normal(*shape, device=device, dtype=torch.float32, seed=9)
    for t in ours.values():
        t.requires_grad_()
    y = LayerNormFwdOp(shape[-axes:])(**ours)
    y.backward(dy)
    wide = {n: t.detach().double().requires_grad_() for n, t in ours.items()}
    F.layer_norm(wide["x"], shape[-axes:], wide.get("weight"), wide.get("bias")).backward(dy.double())
    for name in names:
        torch.testing.assert_close(ours[name].grad.double(), wide[name].grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("return_stats", [False, True])
def test_statistics_have_no_gradient(return_stats: bool, device: str) -> None:
    x = normal(3, 8, device=device).requires_grad_()
    returned = LayerNormFwdOp(8, return_stats=return_stats)(x)
    y, *statistics = returned if return_stats else (returned,)
    assert y.requires_grad
    assert len(statistics) == 2 * return_stats
    assert not any(s.requires_grad for s in statistics)


@pytest.mark.parametrize(
    ("params", "x", "weight", "message"),
    [
        ({"normalized_shape": 8}, (3, 7), None, r"x: got shape \(3, 7\), expected .*8"),
        ({"normalized_shape": (4, 8)}, (8,), None, r"x: got rank 1, shape \(8,\)"),
        ({"normalized_shape": 8}, (3, 8), (7,), r"weight: got shape \(7,\), expected .*8"),
        ({"normalized_shape": ()}, (3, 8), None, r"expected at least one axis to normalize over"),
        ({"normalized_shape": 8, "eps": -1.0}, (3, 8), None, r"eps = -1.0, expected an eps that is not negative"),
    ],
)
def test_calls_that_do_not_fit(
    params: dict[str, Any], x: tuple[int, ...], weight: tuple[int, ...] | None, message: str, device: str
) -> None:
    with pytest.raises(CheckError, match=message):
        LayerNormFwdOp(**params)(normal(*x, device=device), normal(*weight, device=device) if weight else None)


@pytest.mark.parametrize(
    ("x", "bias", "message"),
    [
        (torch.float64, torch.float64, r"x: got float64, expected float32 or float16 or bfloat16"),
        (torch.float16, torch.bfloat16, r"bias: got bfloat16, expected float16.* or float32"),
        (torch.float32, torch.float16, r"bias: got float16, expected float32"),
    ],
)
def test_dtypes_that_do_not_fit(x: torch.dtype, bias: torch.dtype, message: str, device: str) -> None:
    with pytest.raises(CheckError, match=message):
        LayerNormFwdOp(8)(normal(3, 8, device=device, dtype=x), None, normal(8, device=device, dtype=bias))
