"""The GEMM reference, held to integer arithmetic and to hand-written numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tileops.gemm.reference import gemm

HALVES = [torch.float16, torch.bfloat16]
INF, NAN = float("inf"), float("nan")


def integers(*shape: int, dtype: torch.dtype = torch.float16, most: int = 3, seed: int = 0) -> Tensor:
    """Small integers: their products and sums are exact in float32."""
    return torch.randint(-most, most + 1, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exact(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` of integer values, in int64."""
    return torch.einsum("mk,kn->mn", a.long(), b.long())


def nn(a: Tensor, b: Tensor) -> Tensor:
    return gemm(a, b, trans_a=False, trans_b=False, T=a.dtype)


@pytest.mark.semantics("GEMMFwdOp", "product")
def test_a_product_by_hand() -> None:
    a = torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.float16)
    b = torch.tensor([[7, 8], [9, 10], [11, 12]], dtype=torch.float16)
    expected = torch.tensor([[58, 64], [139, 154]], dtype=torch.float16)
    assert torch.equal(nn(a, b), expected)
    assert torch.equal(gemm(a, b.T.contiguous(), trans_a=False, trans_b=True, T=torch.float16), expected)
    assert torch.equal(gemm(a.T.contiguous(), b, trans_a=True, trans_b=False, T=torch.float16), expected)
    assert torch.equal(gemm(a.T.contiguous(), b.T.contiguous(), trans_a=True, trans_b=True, T=torch.float16), expected)


@pytest.mark.parametrize("T", HALVES)
@pytest.mark.parametrize("K", range(1, 41))
def test_no_tail_of_k_is_dropped(K: int, T: torch.dtype) -> None:
    a, b = integers(65, K, dtype=T), integers(K, 63, dtype=T, seed=1)
    assert torch.equal(nn(a, b), exact(a, b).to(T))


@pytest.mark.parametrize("N", [1, 2, 4, 6, 9, 100])
@pytest.mark.parametrize("M", [1, 7, 130])
def test_no_tail_of_m_or_n_is_dropped(M: int, N: int) -> None:
    a, b = integers(M, 24), integers(24, N, seed=1)
    assert torch.equal(nn(a, b), exact(a, b).half())


@pytest.mark.semantics("GEMMFwdOp", "accumulate")
@pytest.mark.parametrize("T", HALVES)
def test_sums_are_wider_than_the_operands(T: torch.dtype) -> None:
    """2**11 + 1 - 2**11: a sum kept in float16 or bfloat16 loses the 1."""
    a = torch.tensor([[2048.0, 1.0, -2048.0]], dtype=T)
    assert nn(a, torch.ones(3, 1, dtype=T)).item() == 1.0


@pytest.mark.semantics("GEMMFwdOp", "accumulate")
def test_a_sum_may_pass_through_what_the_dtype_cannot_hold() -> None:
    """60000 + 60000 - 60000 passes float16's 65504 on the way."""
    a = torch.tensor([[60000.0, 60000.0, -60000.0]], dtype=torch.float16)
    assert nn(a, torch.ones(3, 1, dtype=torch.float16)).item() == 60000.0


@pytest.mark.semantics("GEMMFwdOp", "accumulate")
@pytest.mark.parametrize(("T", "half_ulp"), [(torch.float16, 2.0**-11), (torch.bfloat16, 2.0**-8)])
def test_one_rounding_however_long_k_is(T: torch.dtype, half_ulp: float) -> None:
    """Partial sums kept in bfloat16 were off by 0.4 at this K; one rounding is half an ulp."""
    rng = torch.Generator().manual_seed(0)
    a = (torch.rand(32, 14336, generator=rng) * 2 - 1).to(T)
    b = (torch.rand(14336, 48, generator=rng) * 2 - 1).to(T)
    oracle = a.double() @ b.double()
    error = (nn(a, b).double() - oracle).abs() / oracle.abs()
    assert error[oracle.abs() > 1].max() < 1.01 * half_ulp


def test_float64_operands_give_a_float64_oracle() -> None:
    a, b = torch.tensor([[1.0, 2.0**-40]], dtype=torch.float64), torch.ones(2, 1, dtype=torch.float64)
    d = gemm(a, b, trans_a=False, trans_b=False, T=torch.bfloat16)
    assert d.dtype == torch.float64
    assert d.item() == 1 + 2.0**-40


@pytest.mark.semantics("GEMMFwdOp", "empty-k")
@pytest.mark.parametrize("T", [*HALVES, torch.float64])
@pytest.mark.parametrize(("trans_a", "trans_b"), [(False, False), (False, True), (True, False), (True, True)])
def test_an_empty_sum_is_zero(T: torch.dtype, trans_a: bool, trans_b: bool) -> None:
    torch.full((64, 64), NAN)  # what an allocator that reuses memory would hand out
    a = torch.empty((0, 64) if trans_a else (64, 0), dtype=T)
    b = torch.empty((64, 0) if trans_b else (0, 64), dtype=T)
    assert torch.equal(gemm(a, b, trans_a=trans_a, trans_b=trans_b, T=T), torch.zeros(64, 64, dtype=T))


@pytest.mark.parametrize(("M", "N", "K"), [(0, 8, 4), (8, 0, 4), (0, 0, 4), (0, 0, 0)])
def test_empty_outputs_keep_their_shape(M: int, N: int, K: int) -> None:
    d = nn(torch.empty(M, K, dtype=torch.float16), torch.empty(K, N, dtype=torch.float16))
    assert (d.shape, d.dtype) == ((M, N), torch.float16)


@pytest.mark.semantics("GEMMFwdOp", "non-finite")
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_bad_value_stays_in_its_row_or_column(bad: float) -> None:
    a, b = integers(5, 7), integers(7, 6, seed=1)
    clean = exact(a, b).half()
    a[2, 3] = bad
    d = nn(a, b)
    assert not d[2].isfinite().any()  # bad * 0 is NaN
    assert torch.equal(d[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])
    a, b = integers(5, 7), integers(7, 6, seed=1)
    b[6, 4] = bad
    d = nn(a, b)
    assert not d[:, 4].isfinite().any()
    assert torch.equal(d[:, [0, 1, 2, 3, 5]], clean[:, [0, 1, 2, 3, 5]])


@pytest.mark.semantics("GEMMFwdOp", "non-finite")
def test_what_does_not_fit_becomes_infinity() -> None:
    a = torch.tensor([[65504.0, 65504.0], [-65504.0, -65504.0]], dtype=torch.float16)
    d = nn(a, torch.ones(2, 1, dtype=torch.float16))
    assert d.flatten().tolist() == [INF, -INF]
    assert nn(a.bfloat16(), torch.ones(2, 1, dtype=torch.bfloat16)).isfinite().all()


def test_a_leading_dimension_of_one() -> None:
    """A vector transposed: its strides are those of a contiguous row, or not, and both are right."""
    a, b = integers(2, 1).t(), integers(2, 32, seed=1)
    assert torch.equal(nn(a, b), exact(a, b).half())


@pytest.mark.parametrize("pitch", [65, 67, 72, 128])
def test_rows_of_any_pitch(pitch: int) -> None:
    """130-byte rows are not 16-byte aligned; what lies between rows is never read."""
    base = torch.full((64 * pitch,), NAN, dtype=torch.bfloat16)
    a = base.as_strided((64, 64), (pitch, 1))
    a.copy_(integers(64, 64))
    b = integers(64, 32, dtype=torch.bfloat16, seed=1)
    assert torch.equal(nn(a, b), exact(a, b).bfloat16())
    assert torch.equal(gemm(b, a, trans_a=True, trans_b=False, T=torch.bfloat16), exact(b.T, a).bfloat16())


@pytest.mark.parametrize("offset", [1, 3, 8])
def test_any_storage_offset(offset: int) -> None:
    buffer = torch.full((offset + 64 * 64 + 5,), NAN, dtype=torch.float16)
    a = buffer[offset : offset + 64 * 64].view(64, 64)
    a.copy_(integers(64, 64))
    b = integers(64, 64, seed=1)
    assert torch.equal(nn(a, b), exact(a, b).half())


@pytest.mark.parametrize("axis", [0, 1])
def test_expanded_operands(axis: int) -> None:
    thin = integers(*((1, 6) if axis == 0 else (6, 1)))
    wide, b = thin.expand(6, 6), integers(6, 6, seed=1)
    assert 0 in wide.stride()
    assert torch.equal(nn(wide, b), exact(wide, b).half())
    assert torch.equal(nn(b, wide), exact(b, wide).half())
    assert torch.equal(nn(wide.double(), b.double()), exact(wide, b).double())


def test_operands_stay_as_they_are() -> None:
    a, b = integers(3, 4), integers(4, 5, seed=1)
    before = a.clone(), b.clone()
    nn(a, b)
    assert torch.equal(a, before[0])
    assert torch.equal(b, before[1])


def test_shapes_alone_are_enough() -> None:
    a = torch.empty(3, 4, dtype=torch.bfloat16, device="meta")
    b = torch.empty(5, 4, dtype=torch.bfloat16, device="meta")
    d = gemm(a, b, trans_a=False, trans_b=True, T=torch.bfloat16)
    assert (d.device.type, d.shape, d.dtype) == ("meta", (3, 5), torch.bfloat16)
