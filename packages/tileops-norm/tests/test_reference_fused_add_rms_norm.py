"""The reference of FusedAddRMSNorm, held to hand-written numbers, to torch in float64 and to bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tileops.norm.reference import fused_add_rms_norm

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NAN, INF = float("nan"), float("inf")


def norm(x: Tensor, residual: Tensor, weight: Tensor, **params: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The reference with the entry's defaults; always with rstd."""
    call = {"eps": 1e-6, "weight_offset": 0.0, "return_rstd": True, "T": x.dtype, **params}
    y, residual_out, rstd = fused_add_rms_norm(x, residual, weight, **call)
    assert rstd is not None
    return y, residual_out, rstd


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.semantics("FusedAddRMSNormFwdOp", "definition", "residual")
def test_a_row_by_hand() -> None:
    """The sum is 1, 7, 5, 5, whose mean of squares is 25."""
    x, residual = torch.tensor([[1.0, 3.0, 7.0, 5.0]]), torch.tensor([[0.0, 4.0, -2.0, 0.0]])
    y, residual_out, rstd = norm(x, residual, torch.tensor([5.0, 5.0, 10.0, -5.0]), eps=0.0)
    assert residual_out.tolist() == [[1.0, 7.0, 5.0, 5.0]]
    torch.testing.assert_close(rstd, torch.tensor([0.2]))
    torch.testing.assert_close(y, torch.tensor([[1.0, 7.0, 10.0, -5.0]]))


@pytest.mark.semantics("FusedAddRMSNormFwdOp", "definition")
def test_the_offset_is_added_to_the_weight_and_eps_to_the_mean() -> None:
    y, _, rstd = norm(
        torch.tensor([[3.0, -3.0]]), torch.zeros(1, 2), torch.tensor([0.0, 1.0]), eps=7.0, weight_offset=1.0
    )
    assert rstd.item() == 0.25
    assert y.tolist() == [[0.75, -1.5]]


@pytest.mark.semantics("FusedAddRMSNormFwdOp", "definition", "residual")
@pytest.mark.parametrize("T", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (0, 8), (3, 1), (9, 127), (2, 3, 1000), (5, 4097)])
def test_any_shape_equals_torch_in_float64(shape: tuple[int, ...], T: torch.dtype) -> None:
    x, residual, weight = normal(*shape, dtype=T), normal(*shape, dtype=T, seed=1), normal(shape[-1], dtype=T, seed=2)
    y, residual_out, rstd = norm(x, residual, weight)
    assert (y.dtype, residual_out.dtype, rstd.dtype, rstd.shape) == (T, T, torch.float32, shape[:-1])
    assert torch.equal(residual_out, (x.double() + residual.double()).to(T))
    exact = F.rms_norm(residual_out.double(), shape[-1:], weight.double(), eps=1e-6)
    torch.testing.assert_close(y.double(), exact, rtol=max(torch.finfo(T).eps, 4 * 2**-23), atol=2**-24)


@pytest.mark.semantics("FusedAddRMSNormFwdOp", "residual", "definition")
def test_what_is_normalized_is_the_rounded_sum() -> None:
    """256 + 0.75 is 256 in bfloat16, so the row is constant; in float32 it would not be."""
    x, residual = torch.tensor([[256.0, 256.0]]).bfloat16(), torch.tensor([[0.75, 0.0]]).bfloat16()
    y, residual_out, rstd = norm(x, residual, torch.tensor([1.0, 1.0]), eps=0.0)
    assert residual_out.tolist() == [[256.0, 256.0]]
    assert rstd.item() == 1 / 256
    assert y.tolist() == [[1.0, 1.0]]


@pytest.mark.semantics("FusedAddRMSNormFwdOp", "residual")
@pytest.mark.parametrize("T", [torch.float16, torch.bfloat16])
def test_the_sum_is_what_torch_adds(T: torch.dtype) -> None:
    x, residual = normal(64, 512, dtype=T), (normal(64, 512, seed=1) * 2.0 ** normal(64, 512, seed=2).mul(6)).to(T)
    assert torch.equal(norm(x, residual, torch.ones(512))[1], x + residual)


@pytest.mark.semantics("FusedAddRMSNormFwdOp", "rounding")
def test_the_weight_is_offset_before_any_rounding() -> None:
    """The row's mean of squares is 1, so y is x * (1 + 2**-8): a sum that bfloat16 rounds to 1, and 3 times it to 3."""
    x = torch.tensor([[3.0, 2.0, 1.0, 1.0, 1.0, *[0.0] * 11]], dtype=torch.bfloat16)
    weight = torch.full((16,), 2.0**-8, dtype=torch.bfloat16)
    y, _, rstd = norm(x, torch.zeros_like(x), weight, eps=0.0, weight_offset=1.0)
    assert rstd.item() == 1.0
    assert y[0, 0].item() == 3.015625


@pytest.mark.semantics("FusedAddRMSNormFwdOp", "batch-invariant")
@pytest.mark.parametrize("N", [128, 5120, 100_003])
def test_a_row_alone_has_the_bits_it_has_in_a_batch(N: int) -> None:
    x, residual, weight = normal(17, N), normal(17, N, seed=1), normal(N, seed=2)
    whole = norm(x, residual, weight)
    for rows in (slice(0, 1), slice(5, 9), slice(16, 17)):
        for alone, batched in zip(norm(x[rows].clone(), residual[rows].clone(), weight), whole, strict=True):
            assert torch.equal(alone, batched[rows])


@pytest.mark.semantics("FusedAddRMSNormFwdOp", "row-isolation")
@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("where", ["x", "residual"])
def test_a_bad_row_leaves_the_others_alone(bad: float, where: str) -> None:
    inputs = {"x": normal(5, 64), "residual": normal(5, 64, seed=1), "weight": normal(64, seed=2)}
    clean = norm(**inputs)
    inputs[where][2, 7] = bad
    for result, before in zip(norm(**inputs), clean, strict=True):
        assert torch.equal(result[[0, 1, 3, 4]], before[[0, 1, 3, 4]])
    assert norm(**inputs)[0][2, 7].isnan()


@pytest.mark.parametrize("T", DTYPES)
def test_inputs_stay_as_they_are(T: torch.dtype) -> None:
    """Where ``x.float()`` is x itself, work in place would reach the caller's residual."""
    inputs = [normal(4, 8, dtype=T), normal(4, 8, dtype=T, seed=1), normal(8, dtype=T, seed=2)]
    before = [t.clone() for t in inputs]
    for result in norm(*inputs):
        result.zero_()
    assert all(map(torch.equal, inputs, before))


def test_float64_operands_give_a_float64_oracle_of_the_rounded_sum() -> None:
    x, residual, weight = (normal(*s, dtype=torch.float64, seed=i) for i, s in enumerate([(3, 50), (3, 50), (50,)]))
    y, residual_out, rstd = norm(x, residual, weight, T=torch.bfloat16)
    assert rstd.dtype == torch.float64
    assert torch.equal(residual_out, (x + residual).bfloat16().double())
    torch.testing.assert_close(y, F.rms_norm(residual_out, (50,), weight, eps=1e-6), rtol=1e-14, atol=0)


def test_rstd_only_when_asked() -> None:
    x = normal(2, 4)
    outputs = fused_add_rms_norm(x, x, x[0], eps=1e-6, weight_offset=0.0, return_rstd=False, T=x.dtype)
    assert outputs[2] is None
