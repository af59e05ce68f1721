"""The RMSNorm reference, held to hand-written numbers, to torch in float64 and to bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tileops.core.errors import CheckError
from tileops.norm import RMSNormFwdOp
from tileops.norm.reference import rms_norm

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
INF, NAN = float("inf"), float("nan")


def norm(x: Tensor, weight: Tensor | None = None, axes: int = 1, **params: Any) -> tuple[Tensor, Tensor]:
    """The reference with the entry's defaults over the last ``axes`` axes; always with rstd."""
    call = {"eps": None, "weight_offset": 0.0, "return_rstd": True, "T": x.dtype, **params}
    y, rstd = rms_norm(x, weight, normalized_shape=tuple(x.shape[-axes:]), **call)
    assert rstd is not None
    return y, rstd


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_rounded_once(y: Tensor, exact: Tensor) -> None:
    """``y`` is ``exact`` (float64) rounded to y's dtype: to the bit nearly everywhere, next to a tie an ulp away."""
    rounded = exact.to(y.dtype)
    if y.dtype == torch.float32:
        torch.testing.assert_close(y, rounded, rtol=4 * 2**-23, atol=0)  # rstd and three products, half an ulp each
    else:
        assert (y == rounded).double().mean() > 0.999
        torch.testing.assert_close(y, rounded, rtol=2 * torch.finfo(y.dtype).eps, atol=0)


@pytest.mark.semantics("RMSNormFwdOp", "definition")
def test_a_row_by_hand() -> None:
    """The mean of squares of 1, 7, 5, 5 is 25."""
    x = torch.tensor([[1.0, 7.0, 5.0, 5.0]])
    y, rstd = norm(x, torch.tensor([5.0, 5.0, 10.0, -5.0]), eps=0.0)
    torch.testing.assert_close(rstd, torch.tensor([0.2]))
    torch.testing.assert_close(y, torch.tensor([[1.0, 7.0, 10.0, -5.0]]))
    y, _ = norm(x, eps=0.0)
    torch.testing.assert_close(y, torch.tensor([[0.2, 1.4, 1.0, 1.0]]))


@pytest.mark.semantics("RMSNormFwdOp", "definition")
def test_the_offset_is_added_to_the_weight_and_eps_to_the_mean() -> None:
    x = torch.tensor([[3.0, -3.0]])
    y, rstd = norm(x, torch.tensor([0.0, 1.0]), eps=7.0, weight_offset=1.0)
    assert rstd.item() == 0.25
    assert y.tolist() == [[0.75, -1.5]]


@pytest.mark.semantics("RMSNormFwdOp", "definition")
@pytest.mark.parametrize("T", DTYPES)
@pytest.mark.parametrize("N", [1, 3, 128, 1000, 1536, 3000, 4097, 5120])
@pytest.mark.parametrize("weighted", [True, False])
def test_any_length_equals_torch_in_float64(N: int, weighted: bool, T: torch.dtype) -> None:
    x, weight = normal(9, N, dtype=T), normal(N, dtype=T, seed=1) if weighted else None
    y, rstd = norm(x, weight, eps=1e-6)
    exact = F.rms_norm(x.double(), (N,), None if weight is None else weight.double(), eps=1e-6)
    assert (y.dtype, rstd.dtype) == (T, torch.float32)
    assert_rounded_once(y, exact)
    torch.testing.assert_close(rstd.double(), (x.double().square().sum(-1) / N + 1e-6).rsqrt(), rtol=4 * 2**-23, atol=0)


@pytest.mark.semantics("RMSNormFwdOp", "definition")
@pytest.mark.parametrize(
    ("shape", "axes"), [((6,), 1), ((2, 3, 8, 16), 2), ((4, 5, 6), 3), ((0, 16), 1), ((3, 0, 4), 1)]
)
def test_any_number_of_axes(shape: tuple[int, ...], axes: int) -> None:
    x, weight = normal(*shape), normal(*shape[-axes:], seed=1)
    y, rstd = norm(x, weight, axes=axes, eps=1e-6)
    exact = F.rms_norm(x.double(), shape[-axes:], weight.double(), eps=1e-6)
    assert rstd.shape == shape[:-axes]
    assert_rounded_once(y, exact)


@pytest.mark.parametrize("N", [8192, 16384, 32768, 65536])
def test_rows_longer_than_shared_memory(N: int) -> None:
    x, weight = normal(2, N, dtype=torch.bfloat16), normal(N, dtype=torch.bfloat16, seed=1)
    assert_rounded_once(norm(x, weight, eps=1e-6)[0], F.rms_norm(x.double(), (N,), weight.double(), eps=1e-6))


@pytest.mark.parametrize("rows", [65535, 65536, 65537])
def test_more_rows_than_a_grid_axis(rows: int) -> None:
    x = normal(7, 16).repeat(rows // 7 + 1, 1)[:rows]
    y, _ = norm(x)
    assert torch.equal(y[-1], y[(rows - 1) % 7])


@pytest.mark.semantics("RMSNormFwdOp", "default-eps")
@pytest.mark.parametrize("T", DTYPES)
def test_the_default_eps_is_float32s_whatever_the_dtype(T: torch.dtype) -> None:
    """On zeros rstd is 1 / sqrt(eps); with bfloat16's own epsilon it would be 11 and not 2896."""
    _, rstd = norm(torch.zeros(1, 8, dtype=T))
    assert rstd.item() == torch.tensor(2.0**23, dtype=torch.float32).sqrt().item()


@pytest.mark.semantics("RMSNormFwdOp", "rounding")
def test_the_weight_is_offset_before_any_rounding() -> None:
    """The row's mean of squares is 1, so y is x * (1 + 2**-8): a sum that bfloat16 rounds to 1, and 3 times it to 3."""
    x = torch.tensor([[3.0, 2.0, 1.0, 1.0, 1.0, *[0.0] * 11]], dtype=torch.bfloat16)
    y, rstd = norm(x, torch.full((16,), 2.0**-8, dtype=torch.bfloat16), eps=0.0, weight_offset=1.0)
    assert rstd.item() == 1.0
    assert y[0, 0].item() == 3.015625


@pytest.mark.semantics("RMSNormFwdOp", "rounding")
@pytest.mark.parametrize("T", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("weight_dtype", ["T", torch.float32])
def test_only_y_is_rounded(T: torch.dtype, weight_dtype: Any) -> None:
    """Rounding x * rstd to T before the weight, as some models do, changes a value in four."""
    x, weight = normal(64, 256, dtype=T), normal(256, dtype=T if weight_dtype == "T" else weight_dtype, seed=1)
    y, _ = norm(x, weight, eps=1e-6)
    exact = F.rms_norm(x.double(), (256,), weight.double(), eps=1e-6)
    assert y.dtype == T
    assert_rounded_once(y, exact)
    twice = F.rms_norm(x.double(), (256,), eps=1e-6).to(T).double() * weight.double()
    assert (twice.to(T) == exact.to(T)).double().mean() < 0.9


@pytest.mark.semantics("RMSNormFwdOp", "rounding")
@pytest.mark.parametrize(("T", "value"), [(torch.float16, 2.0**-24), (torch.float16, 60000.0), (torch.bfloat16, 1e15)])
def test_squares_may_leave_the_range_of_the_dtype(T: torch.dtype, value: float) -> None:
    x = torch.full((2, 32), value, dtype=T)
    y, rstd = norm(x, eps=0.0)
    torch.testing.assert_close(y, torch.ones_like(y))
    torch.testing.assert_close(rstd.double(), 1 / x[:, 0].double())


@pytest.mark.parametrize(
    "row",
    [[40000.0, 40001.0, 40002.0, 40003.0], [80000.0, 80001.0, 80002.0, 80003.0], [1234.0] * 256],
    ids=["4e4", "8e4", "1234"],
)
def test_large_and_constant_rows_stay_finite(row: list[float]) -> None:
    x = torch.tensor([row])
    y, _ = norm(x, eps=1e-5)
    assert_rounded_once(y, F.rms_norm(x.double(), (len(row),), eps=1e-5))


def test_a_constant_row_with_a_tiny_eps() -> None:
    """An eps of 1e-12 is 0 in float16, which would divide the row of zeros by zero."""
    x = torch.tensor([[0.0] * 8, [3.0] * 8], dtype=torch.float16)
    assert norm(x, eps=1e-12)[0].tolist() == [[0.0] * 8, [1.0] * 8]


@pytest.mark.semantics("RMSNormFwdOp", "batch-invariant")
@pytest.mark.parametrize("T", DTYPES)
@pytest.mark.parametrize("N", [128, 5120, 32768, 100_003])
def test_a_row_alone_has_the_bits_it_has_in_a_batch(N: int, T: torch.dtype) -> None:
    x, weight = normal(17, N, dtype=T), normal(N, dtype=T, seed=1)
    y, rstd = norm(x, weight)
    for rows in (slice(0, 1), slice(3, 4), slice(5, 9), slice(16, 17)):
        alone = norm(x[rows].clone(), weight)
        assert torch.equal(alone[0], y[rows])
        assert torch.equal(alone[1], rstd[rows])
    assert torch.equal(norm(x[3].clone(), weight)[0], y[3])


@pytest.mark.semantics("RMSNormFwdOp", "row-isolation")
@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_bad_row_leaves_the_others_alone(bad: float) -> None:
    x = normal(5, 64)
    clean, _ = norm(x)
    x[2, 7] = bad
    y, rstd = norm(x)
    assert torch.equal(y[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])
    assert y[2, 7].isnan()
    assert rstd[2].isnan() if bad != bad else rstd[2] == 0


def _transposed(x: Tensor) -> Tensor:
    return x.t().contiguous().t()


def _every_other(x: Tensor) -> Tensor:
    return x.repeat_interleave(2, dim=1)[:, ::2]


def _padded_rows(x: Tensor) -> Tensor:
    buffer = torch.full((x.shape[0], x.shape[1] + 3), NAN, dtype=x.dtype)
    buffer[:, 1:-2] = x
    return buffer[:, 1:-2]


def _one_row_expanded(x: Tensor) -> Tensor:
    return x[:1].expand(x.shape)


@pytest.mark.parametrize("layout", [_transposed, _every_other, _padded_rows, _one_row_expanded])
@pytest.mark.parametrize("T", [torch.float32, torch.bfloat16])
def test_any_strides(layout: Any, T: torch.dtype) -> None:
    x = layout(normal(6, 40, dtype=T))
    assert not x.is_contiguous()
    y, rstd = norm(x, eps=1e-6)
    assert y.is_contiguous()
    expected = norm(x.contiguous(), eps=1e-6)
    assert torch.equal(y, expected[0])
    assert torch.equal(rstd, expected[1])
    assert_rounded_once(y, F.rms_norm(x.double(), (40,), eps=1e-6))


def test_heads_split_from_qkv() -> None:
    """They are views into qkv; what lies beside them, here NaN, is not theirs."""
    heads, heads_kv, D = 4, 2, 16
    qkv = normal(5, (heads + 2 * heads_kv) * D, dtype=torch.bfloat16)
    qkv[:, (heads + heads_kv) * D :] = NAN
    q, k, _ = qkv.split([heads * D, heads_kv * D, heads_kv * D], dim=1)
    for x in (q.view(5, heads, D), k.view(5, heads_kv, D)):
        assert_rounded_once(norm(x, eps=1e-6)[0], F.rms_norm(x.double(), (D,), eps=1e-6))


@pytest.mark.parametrize("T", DTYPES)
def test_inputs_stay_as_they_are(T: torch.dtype) -> None:
    """Where ``x.float()`` is x itself, work in place would reach the caller's tensor."""
    x, weight = normal(4, 8, dtype=T), normal(8, dtype=T, seed=1)
    before = x.clone(), weight.clone()
    y, _ = norm(x, weight, weight_offset=1.0)
    y.zero_()
    assert torch.equal(x, before[0])
    assert torch.equal(weight, before[1])


def test_float64_operands_give_a_float64_oracle() -> None:
    x, weight = normal(3, 50, dtype=torch.float64), normal(50, dtype=torch.float64, seed=1)
    y, rstd = norm(x, weight, eps=1e-6, T=torch.bfloat16)
    assert rstd.dtype == torch.float64
    torch.testing.assert_close(y, F.rms_norm(x, (50,), weight, eps=1e-6), rtol=1e-14, atol=0)


def test_rstd_only_when_asked() -> None:
    x = normal(2, 4)
    assert rms_norm(x, normalized_shape=(4,), eps=None, weight_offset=0.0, return_rstd=False, T=x.dtype)[1] is None


def test_shapes_alone_are_enough() -> None:
    x = torch.empty(3, 5, 8, dtype=torch.bfloat16, device="meta")
    y, rstd = norm(x, torch.empty(8, device="meta"))
    assert (y.shape, y.dtype, rstd.shape, rstd.dtype) == ((3, 5, 8), torch.bfloat16, (3, 5), torch.float32)


@pytest.mark.parametrize(
    ("params", "shapes", "said"),
    [
        ({"normalized_shape": ()}, [(3, 4)], "at least one axis"),
        ({"normalized_shape": (0,)}, [(3, 0)], "none of size 0"),
        ({"normalized_shape": (5,)}, [(3, 4)], r"x: got shape \(3, 4\)"),
        ({"normalized_shape": (4,)}, [(3, 4), (3, 4)], "weight: got rank 2"),
        ({"normalized_shape": (4,), "eps": -1.0}, [(3, 4)], "eps = -1.0"),
        ({"normalized_shape": (4,), "weight_offset": 1.0}, [(3, 4)], "a weight for weight_offset"),
    ],
)
def test_calls_outside_the_signature_say_what_is_wrong(
    params: dict[str, Any], shapes: list[tuple[int, ...]], said: str
) -> None:
    with pytest.raises(CheckError, match=said):
        RMSNormFwdOp(**params).bind(*shapes, T="float16")
