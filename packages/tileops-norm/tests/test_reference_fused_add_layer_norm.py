"""The reference of FusedAddLayerNorm, held to hand-written numbers, to torch in float64 and to bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tileops.norm.reference import fused_add_layer_norm

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NAN, INF = float("nan"), float("inf")
Results = tuple[Tensor, Tensor, Tensor, Tensor]


def norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, **params: Any) -> Results:
    """The reference with the entry's defaults; always with statistics."""
    call = {"eps": 1e-5, "return_stats": True, "T": x.dtype, **params}
    y, residual_out, mean, rstd = fused_add_layer_norm(x, residual, weight, bias, **call)
    assert mean is not None
    assert rstd is not None
    return y, residual_out, mean, rstd


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    shapes = (shape, shape, shape[-1:], shape[-1:])
    return [normal(*s, dtype=dtype, seed=i) for i, s in enumerate(shapes)]


@pytest.mark.semantics("FusedAddLayerNormFwdOp", "definition", "residual")
def test_a_row_by_hand() -> None:
    """The sum is 1, 3, 5, 7: mean 4, variance 5, and 1 / sqrt(5 + 11) is a quarter."""
    x, residual = torch.tensor([[1.0, 2.0, 0.0, 9.0]]), torch.tensor([[0.0, 1.0, 5.0, -2.0]])
    weight, bias = torch.tensor([4.0, 4.0, 8.0, -4.0]), torch.tensor([0.0, 1.0, 0.0, 0.0])
    y, residual_out, mean, rstd = norm(x, residual, weight, bias, eps=11.0)
    assert residual_out.tolist() == [[1.0, 3.0, 5.0, 7.0]]
    assert (mean.item(), rstd.item()) == (4.0, 0.25)
    assert y.tolist() == [[-3.0, 0.0, 2.0, -3.0]]


@pytest.mark.semantics("FusedAddLayerNormFwdOp", "definition", "residual")
@pytest.mark.parametrize("T", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (0, 8), (3, 1), (9, 127), (2, 3, 1000), (4, 1536), (5, 4097)])
def test_any_shape_equals_torch_in_float64(shape: tuple[int, ...], T: torch.dtype) -> None:
    x, residual, weight, bias = random(*shape, dtype=T)
    y, residual_out, mean, rstd = norm(x, residual, weight, bias)
    assert (y.dtype, residual_out.dtype, mean.dtype, rstd.dtype) == (T, T, torch.float32, torch.float32)
    assert mean.shape == rstd.shape == shape[:-1]
    rows = (x.double() + residual.double()).to(T)
    assert torch.equal(residual_out, rows)
    exact = F.layer_norm(rows.double(), shape[-1:], weight.double(), bias.double())
    torch.testing.assert_close(y.double(), exact, rtol=torch.finfo(T).eps, atol=2**-19)
    centre = rows.double().mean(-1)
    variance = (rows.double() - centre[..., None]).square().mean(-1)
    torch.testing.assert_close(mean.double(), centre, rtol=0, atol=2**-20)
    torch.testing.assert_close(rstd.double(), (variance + 1e-5).rsqrt(), rtol=2**-18, atol=0)


@pytest.mark.semantics("FusedAddLayerNormFwdOp", "residual", "definition")
def test_what_is_normalized_is_the_rounded_sum() -> None:
    """256 + 0.75 is 256 in bfloat16, so the row is constant and y the bias."""
    x, residual = torch.tensor([[256.0, 256.0]]).bfloat16(), torch.tensor([[0.75, 0.0]]).bfloat16()
    y, residual_out, _, rstd = norm(x, residual, torch.ones(2), torch.tensor([3.0, 4.0]), eps=2.0**-20)
    assert residual_out.tolist() == [[256.0, 256.0]]
    assert rstd.item() == 2.0**10
    assert y.tolist() == [[3.0, 4.0]]


@pytest.mark.semantics("FusedAddLayerNormFwdOp", "rounding")
def test_only_y_is_rounded() -> None:
    """Weight and bias are added up before bfloat16 could drop the bias: (x - mean) * rstd is 1 and -1."""
    x, weight = torch.tensor([[2.0, -2.0]]).bfloat16(), torch.full((2,), 1.0078125).bfloat16()
    y, *_ = norm(x, torch.zeros_like(x), weight, torch.tensor([2.0**-8 + 2.0**-14, 0.0]), eps=0.0)
    assert y.tolist() == [[1.015625, -1.0078125]]


@pytest.mark.semantics("FusedAddLayerNormFwdOp", "variance")
@pytest.mark.parametrize(
    ("row", "std"),
    [
        ([40000.0, 40001.0, 40002.0, 40003.0], 1.25**0.5),
        ([80000.0, 80001.0, 80002.0, 80003.0], 1.25**0.5),
        ([1234.0] * 256, 0.0),
    ],
    ids=["4e4", "8e4", "1234"],
)
def test_a_large_mean_cancels_nothing(row: list[float], std: float) -> None:
    """The mean of squares less the square of the mean is 0 or negative here, in float32."""
    x = torch.tensor([row])
    y, _, mean, rstd = norm(x, torch.zeros_like(x), torch.ones(len(row)), torch.zeros(len(row)))
    assert mean.item() == sum(row) / len(row)
    assert rstd.item() == pytest.approx((std**2 + 1e-5) ** -0.5)
    torch.testing.assert_close(y, (x - mean[:, None]) / (std**2 + 1e-5) ** 0.5)


@pytest.mark.semantics("FusedAddLayerNormFwdOp", "batch-invariant")
@pytest.mark.parametrize("N", [128, 5120, 100_003])
def test_a_row_alone_has_the_bits_it_has_in_a_batch(N: int) -> None:
    x, residual, weight, bias = random(17, N)
    whole = norm(x, residual, weight, bias)
    for rows in (slice(0, 1), slice(5, 9), slice(16, 17)):
        for alone, batched in zip(norm(x[rows].clone(), residual[rows].clone(), weight, bias), whole, strict=True):
            assert torch.equal(alone, batched[rows])


@pytest.mark.semantics("FusedAddLayerNormFwdOp", "row-isolation")
@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("where", [0, 1])
def test_a_bad_row_leaves_the_others_alone(bad: float, where: int) -> None:
    inputs = random(5, 64)
    clean = norm(*inputs)
    inputs[where][2, 7] = bad
    for result, before in zip(norm(*inputs), clean, strict=True):
        assert torch.equal(result[[0, 1, 3, 4]], before[[0, 1, 3, 4]])
    assert norm(*inputs)[0][2].isnan().all()


@pytest.mark.parametrize("T", DTYPES)
def test_inputs_stay_as_they_are(T: torch.dtype) -> None:
    inputs = random(4, 8, dtype=T)
    before = [t.clone() for t in inputs]
    for result in norm(*inputs):
        result.zero_()
    assert all(map(torch.equal, inputs, before))


def test_float64_operands_give_a_float64_oracle_of_the_rounded_sum() -> None:
    x, residual, weight, bias = random(3, 50, dtype=torch.float64)
    y, residual_out, mean, rstd = norm(x, residual, weight, bias, T=torch.bfloat16)
    assert mean.dtype == rstd.dtype == torch.float64
    assert torch.equal(residual_out, (x + residual).bfloat16().double())
    torch.testing.assert_close(y, F.layer_norm(residual_out, (50,), weight, bias), rtol=1e-12, atol=1e-14)


def test_statistics_only_when_asked() -> None:
    x = normal(2, 4)
    assert fused_add_layer_norm(x, x, x[0], x[0], eps=1e-5, return_stats=False, T=x.dtype)[2:] == (None, None)
