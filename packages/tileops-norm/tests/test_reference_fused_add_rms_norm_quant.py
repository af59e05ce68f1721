"""The reference of FusedAddRMSNormQuant, held to hand-written numbers, to torch in float64 and to bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tileops.norm.reference import fused_add_rms_norm_quant

FP8, INT8 = torch.float8_e4m3fn, torch.int8
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NAN, INF = float("nan"), float("inf")
LARGEST = {FP8: 448.0, INT8: 127.0}
LEAST = 2.0**-126


def norm(
    x: Tensor, weight: Tensor, residual: Tensor | None = None, scale_in: float | None = None, **params: Any
) -> tuple[Tensor, Any, Any]:
    """The reference with the entry's defaults, and no eps."""
    quant = "per_token" if scale_in is None else "per_tensor"
    call = {"quant": quant, "quant_dtype": FP8, "eps": 0.0, "scale_ub": None, "T": x.dtype, **params}
    return fused_add_rms_norm_quant(x, residual, weight, None if scale_in is None else torch.tensor([scale_in]), **call)


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


ONES = torch.tensor([[1.0, -1.0, 1.0, -1.0]])  # y is the weight, with these signs


@pytest.mark.semantics("FusedAddRMSNormQuantFwdOp", "definition", "scale")
@pytest.mark.parametrize(("dtype", "codes"), [(INT8, [127, -64, 32, 0]), (FP8, [448.0, -224.0, 112.0, 0.0])])
def test_a_row_by_hand(dtype: torch.dtype, codes: list[float]) -> None:
    """int8's 63.5 goes to the even 64, and 31.75 to 32; a float8 code halves as y does."""
    q, scale, residual_out = norm(ONES, torch.tensor([2.0, 1.0, 0.5, 0.0]), quant_dtype=dtype)
    assert q.dtype == dtype
    assert q.double().tolist() == [codes]
    assert scale.tolist() == [[torch.tensor(2.0 / LARGEST[dtype]).item()]]
    assert residual_out is None


@pytest.mark.semantics("FusedAddRMSNormQuantFwdOp", "residual")
def test_what_is_normalized_is_the_rounded_sum() -> None:
    """256 + 0.75 is 256 in bfloat16, so both codes are the largest; and without a residual x counts."""
    x, residual = torch.tensor([[256.0, 256.0]]).bfloat16(), torch.tensor([[0.75, 0.0]]).bfloat16()
    q, scale, residual_out = norm(x, torch.ones(2), residual, quant_dtype=INT8)
    assert residual_out.tolist() == [[256.0, 256.0]]
    assert residual_out.dtype == torch.bfloat16
    assert q.tolist() == [[127, 127]]
    assert torch.equal(norm(x, torch.ones(2), quant_dtype=INT8)[1], scale)


@pytest.mark.semantics("FusedAddRMSNormQuantFwdOp", "rounding")
def test_codes_come_from_y_before_any_rounding() -> None:
    """The largest y is 3 * (1 + 2**-8), which bfloat16 rounds to 3.015625."""
    x = torch.tensor([[3.0, 2.0, 1.0, 1.0, 1.0, *[0.0] * 11]], dtype=torch.bfloat16)
    _, scale, _ = norm(x, torch.full((16,), 1 + 2.0**-8), quant_dtype=INT8)
    assert scale.item() == pytest.approx(3 * (1 + 2.0**-8) / 127, rel=2**-22)
    assert scale.item() != pytest.approx(3.015625 / 127, rel=2**-12)


@pytest.mark.semantics("FusedAddRMSNormQuantFwdOp", "scale")
def test_a_scale_for_each_128_elements() -> None:
    weight = torch.cat([torch.full((128,), 2.0), torch.full((128,), 0.5), torch.full((3,), 8.0)])
    q, scale, _ = norm(torch.ones(2, 259), weight, quant="block128", quant_dtype=INT8)
    assert scale.shape == (2, 3)
    assert scale.tolist() == [[torch.tensor(w / 127).item() for w in (2.0, 0.5, 8.0)]] * 2
    assert (q == 127).all()


@pytest.mark.semantics("FusedAddRMSNormQuantFwdOp", "scale", "codes")
@pytest.mark.parametrize(("dtype", "codes"), [(INT8, [127, -127, 64, 0]), (FP8, [448.0, -448.0, 224.0, 0.0])])
def test_beyond_scale_ub_codes_saturate(dtype: torch.dtype, codes: list[float]) -> None:
    q, scale, _ = norm(ONES, torch.tensor([2.0, 1.0, 0.5, 0.0]), scale_ub=1.0, quant_dtype=dtype)
    assert scale.item() == torch.tensor(1.0 / LARGEST[dtype]).item()
    got = q.double().tolist()[0]
    assert (got[0], got[1:]) == (codes[0], codes[1:])


@pytest.mark.semantics("FusedAddRMSNormQuantFwdOp", "scale", "codes")
def test_a_scale_that_is_given() -> None:
    """Half to even: 0.5, -1.5, 2.5 and -3.5 times 1; and -200 is beyond -128."""
    weight = torch.tensor([0.5, 1.5, 2.5, 3.5])
    q, scale, _ = norm(ONES, weight, scale_in=1.0, quant_dtype=INT8)
    assert q.tolist() == [[0, -2, 2, -4]]
    assert scale is None
    assert norm(ONES, torch.full((4,), 200.0), scale_in=1.0, quant_dtype=INT8)[0].tolist() == [[127, -128, 127, -128]]
    assert norm(ONES, torch.full((4,), 17.0), scale_in=1.0)[0].double().tolist() == [[16.0, -16.0, 16.0, -16.0]]
    assert norm(ONES, torch.full((4,), 1e6), scale_in=1.0)[0].double().tolist() == [[448.0, -448.0, 448.0, -448.0]]


@pytest.mark.semantics("FusedAddRMSNormQuantFwdOp", "least-scale")
@pytest.mark.parametrize("quant", ["per_token", "block128"])
@pytest.mark.parametrize("dtype", [FP8, INT8])
def test_a_row_of_zeros(quant: str, dtype: torch.dtype) -> None:
    x = torch.zeros(2, 130)
    x[1] = 1.0
    q, scale, _ = norm(x, torch.ones(130), eps=1e-6, quant=quant, quant_dtype=dtype)
    assert (scale[0] == LEAST).all()
    assert not q[0].double().any()
    assert (q[1].double() == LARGEST[dtype]).all()


@pytest.mark.semantics("FusedAddRMSNormQuantFwdOp", "least-scale")
def test_a_scale_below_the_least() -> None:
    """2**-127 is no normal float32 and would not be inverted: it divides as 2**-126."""
    weight = torch.full((4,), 2.0**-120)
    q, scale, _ = norm(ONES, weight, quant_dtype=INT8)
    assert scale.item() == LEAST
    assert q.tolist() == [[64, -64, 64, -64]]
    assert torch.equal(norm(ONES, weight, scale_in=2.0**-127, quant_dtype=INT8)[0], q)


@pytest.mark.semantics("FusedAddRMSNormQuantFwdOp", "codes")
@pytest.mark.parametrize("quant", ["per_token", "block128"])
@pytest.mark.parametrize("bad", [NAN, INF])
def test_nan_reaches_all_that_its_scale_divides(quant: str, bad: float) -> None:
    """Of an infinite x the root mean square is infinite, too: y is NaN there and 0 beside it."""
    x = torch.ones(2, 256)
    x[1, 200] = bad
    q, scale, _ = norm(x, torch.ones(256), quant=quant)
    first = 0 if quant == "per_token" or bad != bad else 128
    assert q[1, first:].double().isnan().all()
    assert not q[1, :first].double().any()
    assert scale[1, -1].isnan()
    codes, _, _ = norm(x, torch.ones(256), quant=quant, quant_dtype=INT8)
    assert not codes[1].any()
    assert (codes[0] == 127).all()


@pytest.mark.semantics("FusedAddRMSNormQuantFwdOp", "definition", "residual", "scale")
@pytest.mark.parametrize("T", DTYPES)
@pytest.mark.parametrize("dtype", [FP8, INT8])
@pytest.mark.parametrize("quant", ["per_token", "block128", "per_tensor"])
@pytest.mark.parametrize("shape", [(1,), (0, 8), (9, 127), (2, 3, 1000), (4, 1536)])
def test_any_shape_equals_torch_in_float64(
    shape: tuple[int, ...], quant: str, dtype: torch.dtype, T: torch.dtype
) -> None:
    x, residual, weight = normal(*shape, dtype=T), normal(*shape, dtype=T, seed=1), normal(shape[-1], seed=2)
    given = 0.02 if quant == "per_tensor" else None
    q, scale, residual_out = norm(x, weight, residual, given, eps=1e-6, quant_dtype=dtype, quant=quant)
    assert torch.equal(residual_out, x + residual)
    y = F.rms_norm(residual_out.double(), shape[-1:], weight.double(), eps=1e-6)
    blocks = y.split(128, -1) if quant == "block128" else [y]
    amax = torch.stack([b.abs().amax(-1) for b in blocks], -1)
    if given is None:
        assert scale.dtype == torch.float32
        torch.testing.assert_close(scale.double(), amax / LARGEST[dtype], rtol=2**-20, atol=0)
        step = torch.cat([b.abs().amax(-1, keepdim=True).expand_as(b) for b in blocks], -1) / LARGEST[dtype]
    else:
        assert scale is None
        step = torch.full_like(y, torch.tensor(given).item())
    quotient = (y / step).clamp(-LARGEST[dtype] - (dtype == INT8), LARGEST[dtype])
    exact = quotient.round() if dtype == INT8 else quotient.to(FP8).double()
    assert q.dtype == dtype
    assert ((q.double() - exact).abs() <= (1 if dtype == INT8 else exact.abs() / 8 + 2.0**-9)).all()
    assert (q.double() != exact).sum() <= max(1, q.numel() / 1000)


@pytest.mark.semantics("FusedAddRMSNormQuantFwdOp", "batch-invariant")
@pytest.mark.parametrize("quant", ["per_token", "block128"])
@pytest.mark.parametrize("N", [128, 5120, 100_003])
def test_a_row_alone_has_the_bits_it_has_in_a_batch(N: int, quant: str) -> None:
    x, residual, weight = normal(17, N), normal(17, N, seed=1), normal(N, seed=2)
    whole = norm(x, weight, residual, quant=quant, quant_dtype=INT8)
    for rows in (slice(0, 1), slice(5, 9), slice(16, 17)):
        alone = norm(x[rows].clone(), weight, residual[rows].clone(), quant=quant, quant_dtype=INT8)
        for a, b in zip(alone, whole, strict=True):
            assert torch.equal(a, b[rows])


@pytest.mark.semantics("FusedAddRMSNormQuantFwdOp", "row-isolation")
@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_bad_row_leaves_the_others_alone(bad: float) -> None:
    x, residual, weight = normal(5, 64), normal(5, 64, seed=1), normal(64, seed=2)
    clean = norm(x, weight, residual)
    residual[2, 7] = bad
    for result, before in zip(norm(x, weight, residual), clean, strict=True):
        assert torch.equal(result.double()[[0, 1, 3, 4]], before.double()[[0, 1, 3, 4]])


def test_float64_operands_give_a_float64_oracle_of_the_rounded_sum() -> None:
    x, residual, weight = (normal(*s, dtype=torch.float64, seed=i) for i, s in enumerate([(3, 50), (3, 50), (50,)]))
    q, scale, residual_out = norm(x, weight, residual, T=torch.bfloat16, quant_dtype=INT8)
    assert torch.equal(residual_out, (x + residual).bfloat16().double())
    amax = F.rms_norm(residual_out, (50,), weight, eps=0.0).abs().amax(-1, keepdim=True)
    torch.testing.assert_close(scale, amax / 127, rtol=1e-14, atol=0)
    assert q.dtype == INT8


@pytest.mark.parametrize("T", DTYPES)
def test_inputs_stay_as_they_are(T: torch.dtype) -> None:
    x, residual, weight = normal(4, 8, dtype=T), normal(4, 8, dtype=T, seed=1), normal(8, dtype=T, seed=2)
    before = x.clone(), residual.clone(), weight.clone()
    norm(x, weight, residual)[2].zero_()
    assert all(map(torch.equal, (x, residual, weight), before))
