"""The LayerNorm reference, held to hand-written numbers, to torch in float64 and to bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tileops.core.errors import CheckError
from tileops.norm import LayerNormFwdOp
from tileops.norm.reference import layer_norm

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
INF, NAN = float("inf"), float("nan")


def norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, axes: int = 1, **params: Any) -> Any:
    """The reference with the entry's defaults over the last ``axes`` axes; always with the statistics."""
    call = {"eps": 1e-5, "return_stats": True, "T": x.dtype, **params}
    return layer_norm(x, weight, bias, normalized_shape=tuple(x.shape[-axes:]), **call)


def exact(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, axes: int = 1, eps: float = 1e-5) -> Any:
    """Torch's in float64."""
    wide = (None if t is None else t.double() for t in (weight, bias))
    return F.layer_norm(x.double(), tuple(x.shape[-axes:]), *wide, eps=eps)


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_rounded_once(y: Tensor, exact: Tensor) -> None:
    """``y`` is ``exact`` (float64) rounded to y's dtype: to the bit nearly everywhere, next to a tie an ulp away."""
    if y.dtype == torch.float32:
        size = exact.abs().amax(-1, keepdim=True) if y.numel() else exact
        assert ((y.double() - exact).abs() <= 8 * 2**-24 * size).all()
    else:
        assert (y == exact.to(y.dtype)).double().mean() > 0.995
        torch.testing.assert_close(y, exact.to(y.dtype), rtol=2 * torch.finfo(y.dtype).eps, atol=1e-6)


@pytest.mark.semantics("LayerNormFwdOp", "definition")
def test_a_row_by_hand() -> None:
    """The mean of 1, 3, 9, 11 is 6, and that of the squares of -5, -3, 3, 5 is 17."""
    x = torch.tensor([[1.0, 3.0, 9.0, 11.0]])
    y, mean, rstd = norm(x, torch.tensor([5.0, 5.0, 10.0, -5.0]), torch.tensor([0.0, 1.0, 2.0, 3.0]), eps=8.0)
    assert mean.tolist() == [6.0]
    torch.testing.assert_close(rstd, torch.tensor([0.2]))
    torch.testing.assert_close(y, torch.tensor([[-5.0, -2.0, 8.0, -2.0]]))
    torch.testing.assert_close(norm(x, eps=8.0)[0], torch.tensor([[-1.0, -0.6, 0.6, 1.0]]))
    torch.testing.assert_close(norm(x, None, torch.ones(4), eps=8.0)[0], torch.tensor([[0.0, 0.4, 1.6, 2.0]]))


@pytest.mark.semantics("LayerNormFwdOp", "definition")
@pytest.mark.parametrize("T", DTYPES)
@pytest.mark.parametrize("N", [1, 3, 128, 1000, 1536, 3000, 4097, 5120, 65536])
@pytest.mark.parametrize("affine", [True, False])
def test_any_length_equals_torch_in_float64(N: int, affine: bool, T: torch.dtype) -> None:
    x = normal(9, N, dtype=T)
    weight, bias = (normal(N, dtype=T, seed=s) if affine else None for s in (1, 2))
    y, mean, rstd = norm(x, weight, bias)
    assert (y.dtype, mean.dtype, rstd.dtype) == (T, torch.float32, torch.float32)
    assert_rounded_once(y, exact(x, weight, bias))
    variance, true = torch.var_mean(x.double(), -1, correction=0)
    torch.testing.assert_close(mean.double(), true, rtol=0, atol=8 * 2**-24)
    torch.testing.assert_close(rstd.double(), (variance + 1e-5).rsqrt(), rtol=8 * 2**-24, atol=0)


@pytest.mark.semantics("LayerNormFwdOp", "definition")
@pytest.mark.parametrize(
    ("shape", "axes"), [((6,), 1), ((2, 3, 8, 16), 2), ((4, 5, 6), 3), ((0, 16), 1), ((3, 0, 4), 1)]
)
def test_any_number_of_axes(shape: tuple[int, ...], axes: int) -> None:
    x, weight, bias = normal(*shape), normal(*shape[-axes:], seed=1), normal(*shape[-axes:], seed=2)
    y, mean, rstd = norm(x, weight, bias, axes=axes)
    assert mean.shape == rstd.shape == shape[:-axes]
    assert_rounded_once(y, exact(x, weight, bias, axes))


@pytest.mark.parametrize("rows", [65535, 65536, 65537])
def test_more_rows_than_a_grid_axis(rows: int) -> None:
    x = normal(7, 16).repeat(rows // 7 + 1, 1)[:rows]
    y = norm(x)[0]
    assert torch.equal(y[-1], y[(rows - 1) % 7])


@pytest.mark.semantics("LayerNormFwdOp", "constant")
@pytest.mark.parametrize("N", [1, 3, 256, 1000, 100_003])
@pytest.mark.parametrize("value", [0.0, 3.0, 1234.0, -0.1, 1e15])
def test_a_constant_row_is_its_mean(N: int, value: float) -> None:
    """By E[x**2] - E[x]**2 the variance of many of these is negative, and y NaN."""
    x, bias = torch.full((2, N), value), normal(N)
    y, mean, rstd = norm(x, normal(N, seed=1), bias, eps=1e-12)
    assert torch.equal(y, bias.expand(2, -1))
    assert torch.equal(mean, x[:, 0])
    torch.testing.assert_close(rstd, torch.full((2,), 1e6))


@pytest.mark.semantics("LayerNormFwdOp", "constant")
@pytest.mark.parametrize("start", [40000.0, 80000.0, 2.0**23])
def test_rows_far_from_zero_keep_their_digits(start: float) -> None:
    x = start + torch.arange(4.0).expand(3, 4)
    assert_rounded_once(norm(x)[0], exact(x))


def test_a_constant_row_in_float16_with_a_tiny_eps() -> None:
    """An eps of 1e-12 is 0 in float16, which would divide zeros by zero."""
    x = torch.tensor([[0.0] * 8, [3.0] * 8], dtype=torch.float16)
    assert norm(x, eps=1e-12)[0].tolist() == [[0.0] * 8, [0.0] * 8]


@pytest.mark.semantics("LayerNormFwdOp", "rounding")
@pytest.mark.parametrize("T", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("affine_dtype", ["T", torch.float32])
def test_only_y_is_rounded(T: torch.dtype, affine_dtype: Any) -> None:
    """Rounding the normalized value to T before the weight changes a value in four."""
    x = normal(64, 256, dtype=T)
    weight, bias = (normal(256, dtype=T if affine_dtype == "T" else affine_dtype, seed=s) for s in (1, 2))
    y = norm(x, weight, bias)[0]
    true = exact(x, weight, bias)
    assert y.dtype == T
    assert_rounded_once(y, true)
    twice = exact(x).to(T).double() * weight.double() + bias.double()
    assert (twice.to(T) == true.to(T)).double().mean() < 0.9


@pytest.mark.semantics("LayerNormFwdOp", "rounding")
@pytest.mark.parametrize(("T", "value"), [(torch.float16, 2.0**-24), (torch.float16, 60000.0), (torch.bfloat16, 1e15)])
def test_squares_may_leave_the_range_of_the_dtype(T: torch.dtype, value: float) -> None:
    x = torch.tensor([[value, -value] * 16], dtype=T)
    y, mean, rstd = norm(x, eps=0.0)
    torch.testing.assert_close(y, torch.tensor([[1.0, -1.0] * 16], dtype=T))
    assert mean.item() == 0.0
    torch.testing.assert_close(rstd.double(), 1 / x[:, 0].double())


@pytest.mark.semantics("LayerNormFwdOp", "batch-invariant")
@pytest.mark.parametrize("T", DTYPES)
@pytest.mark.parametrize("N", [128, 5120, 32768, 100_003])
def test_a_row_alone_has_the_bits_it_has_in_a_batch(N: int, T: torch.dtype) -> None:
    x, weight, bias = (normal(*shape, dtype=T, seed=s) for s, shape in enumerate([(17, N), (N,), (N,)]))
    whole = norm(x, weight, bias)
    for rows in (slice(0, 1), slice(3, 4), slice(5, 9), slice(16, 17)):
        for got, expected in zip(norm(x[rows].clone(), weight, bias), whole, strict=True):
            assert torch.equal(got, expected[rows])
    assert torch.equal(norm(x[3].clone(), weight, bias)[0], whole[0][3])


@pytest.mark.semantics("LayerNormFwdOp", "row-isolation")
@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("place", [0, 7])
def test_a_bad_row_leaves_the_others_alone(bad: float, place: int) -> None:
    x = normal(5, 64)
    clean = norm(x)[0]
    x[2, place] = bad
    y, mean, rstd = norm(x)
    others = [0, 1, 3, 4]
    assert torch.equal(y[others], clean[others])
    assert y[2].isnan().all()
    assert not mean[2].isfinite()
    assert rstd[2].isnan()


LAYOUTS = {
    "transposed": lambda x: x.t().contiguous().t(),
    "every-other": lambda x: x.repeat_interleave(2, dim=1)[:, ::2],
    "padded": lambda x: F.pad(x, (1, 2), value=NAN)[:, 1:-2],
    "expanded": lambda x: x[:1].expand(x.shape),
    "permuted": lambda x: x.unflatten(0, (2, 3)).transpose(0, 1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("T", [torch.float32, torch.bfloat16])
def test_any_strides(layout: str, T: torch.dtype) -> None:
    x = LAYOUTS[layout](normal(6, 40, dtype=T))
    assert not x.is_contiguous()
    got, expected = norm(x), norm(x.contiguous())
    assert all(t.is_contiguous() for t in got)
    assert all(torch.equal(g, e) for g, e in zip(got, expected, strict=True))
    assert_rounded_once(got[0], exact(x))


@pytest.mark.parametrize("T", DTYPES)
def test_inputs_stay_as_they_are(T: torch.dtype) -> None:
    """Where ``x.float()`` is x itself, work in place would reach the caller's tensor."""
    given = normal(4, 8, dtype=T), normal(8, dtype=T, seed=1), normal(8, dtype=T, seed=2)
    before = [t.clone() for t in given]
    norm(*given)[0].zero_()
    assert all(torch.equal(t, b) for t, b in zip(given, before, strict=True))


def test_float64_operands_give_a_float64_oracle() -> None:
    x, weight, bias = (normal(*s, dtype=torch.float64, seed=i) for i, s in enumerate([(3, 50), (50,), (50,)]))
    y, mean, rstd = norm(x, weight, bias, T=torch.bfloat16)
    assert mean.dtype == rstd.dtype == torch.float64
    torch.testing.assert_close(y, F.layer_norm(x, (50,), weight, bias), rtol=1e-13, atol=1e-14)


def test_statistics_only_when_asked() -> None:
    assert norm(normal(2, 4), return_stats=False)[1:] == (None, None)


def test_shapes_alone_are_enough() -> None:
    x = torch.empty(3, 5, 8, dtype=torch.bfloat16, device="meta")
    y, mean, rstd = norm(x, torch.empty(8, device="meta"), torch.empty(8, device="meta"))
    assert (y.shape, y.dtype, mean.shape, rstd.shape, rstd.dtype) == (
        (3, 5, 8),
        torch.bfloat16,
        (3, 5),
        (3, 5),
        torch.float32,
    )


@pytest.mark.parametrize(
    ("params", "shapes", "said"),
    [
        ({"normalized_shape": ()}, [(3, 4)], "at least one axis"),
        ({"normalized_shape": (0,)}, [(3, 0)], "none of size 0"),
        ({"normalized_shape": (5,)}, [(3, 4)], r"x: got shape \(3, 4\)"),
        ({"normalized_shape": (4,)}, [(3, 4), (3, 4)], "weight: got rank 2"),
        ({"normalized_shape": (4,)}, [(3, 4), None, (5,)], r"bias: got shape \(5,\)"),
        ({"normalized_shape": (4,), "eps": -1.0}, [(3, 4)], "eps = -1.0"),
    ],
)
def test_calls_outside_the_signature_say_what_is_wrong(params: dict[str, Any], shapes: list[Any], said: str) -> None:
    with pytest.raises(CheckError, match=said):
        LayerNormFwdOp(**params).bind(*shapes, T="float16")
