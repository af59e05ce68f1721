"""The references of the conditioned layer normalizations, held to hand-written numbers, to torch and to bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tileops.norm.reference import ada_layer_norm, ada_layer_norm_zero

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NAN, INF = float("nan"), float("inf")


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def condition(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """scale, shift and gate."""
    scale, shift, gate = (normal(*shape, dtype=dtype, seed=seed) for seed in (1, 2, 3))
    return scale, shift, gate


def both(x: Tensor, scale: Tensor, shift: Tensor, gate: Tensor, eps: float = 1e-5) -> tuple[Tensor, Tensor]:
    """What the op without and the op with the gate give."""
    options: dict[str, Any] = {"eps": eps, "T": x.dtype}
    return ada_layer_norm(x, scale, shift, **options), ada_layer_norm_zero(x, scale, shift, gate, **options)


def exact(x: Tensor, scale: Tensor, shift: Tensor, gate: Tensor, eps: float = 1e-5) -> tuple[Tensor, Tensor]:
    """By torch's layer_norm in float64."""
    y = F.layer_norm(x.double(), x.shape[-1:], eps=eps) * (1 + scale.double()) + shift.double()
    return y, y * gate.double()


def assert_rounded_once(y: Tensor, truth: Tensor) -> None:
    if y.dtype == torch.float32:
        torch.testing.assert_close(y.double(), truth, rtol=4 * 2**-23, atol=2**-19)  # terms that cancel are up to 8
    else:
        assert (y == truth.to(y.dtype)).double().mean() > 0.998
        torch.testing.assert_close(y.double(), truth, rtol=torch.finfo(y.dtype).eps, atol=2**-19)


@pytest.mark.semantics("AdaLayerNormFwdOp", "definition")
@pytest.mark.semantics("AdaLayerNormZeroFwdOp", "definition")
def test_a_row_by_hand() -> None:
    """The mean of 1, 3, 5, 7 is 4 and its variance 5; with eps 4 the deviation is 3."""
    x = torch.tensor([[1.0, 3.0, 5.0, 7.0]])
    scale, shift = torch.tensor([0.0, 1.0, 2.0, -1.0]), torch.tensor([0.0, 1.0, 0.0, 5.0])
    y, gated = both(x, scale, shift, torch.tensor([1.0, 3.0, 0.0, -1.0]), eps=4.0)
    torch.testing.assert_close(y, torch.tensor([[-1.0, 1 / 3, 1.0, 5.0]]))
    torch.testing.assert_close(gated, torch.tensor([[-1.0, 1.0, 0.0, -5.0]]))


@pytest.mark.semantics("AdaLayerNormFwdOp", "definition", "rounding")
@pytest.mark.semantics("AdaLayerNormZeroFwdOp", "definition", "rounding")
@pytest.mark.parametrize("T", DTYPES)
@pytest.mark.parametrize("N", [1, 3, 1000, 1152, 1536, 3000, 5120])
def test_any_length_equals_torch_in_float64(N: int, T: torch.dtype) -> None:
    tensors = normal(9, N, dtype=T), *condition(9, N, dtype=T)
    for y, truth in zip(both(*tensors), exact(*tensors), strict=True):
        assert y.dtype == T
        assert_rounded_once(y, truth)


@pytest.mark.semantics("AdaLayerNormFwdOp", "rounding")
@pytest.mark.semantics("AdaLayerNormZeroFwdOp", "rounding")
def test_one_plus_scale_is_not_rounded() -> None:
    """The row is its own norm; 1 + 2**-9 is 1 in bfloat16, and then y would be the shift's 2**-9 and the gate's 0."""
    x = torch.tensor([[1.0, -1.0]], dtype=torch.bfloat16)
    scale = torch.full((2,), 2.0**-9, dtype=torch.bfloat16)
    shift = torch.tensor([-1.0, 1.0], dtype=torch.bfloat16)
    y, gated = both(x, scale, shift, torch.full((2,), 512.0, dtype=torch.bfloat16), eps=0.0)
    assert y.tolist() == [[2.0**-9, -(2.0**-9)]]
    assert gated.tolist() == [[1.0, -1.0]]


@pytest.mark.semantics("AdaLayerNormFwdOp", "broadcast")
@pytest.mark.semantics("AdaLayerNormZeroFwdOp", "broadcast")
@pytest.mark.parametrize(
    ("B", "S"),
    [((), ()), ((5,), ()), ((5,), (1,)), ((5,), (5,)), ((2, 3), (3,)), ((2, 3), (2, 1)), ((2, 3), (1, 3)),
     ((2, 3, 4), (3, 1)), ((2, 3, 4), (2, 1, 4)), ((0, 4), (1, 4))],
)  # fmt: skip
def test_each_row_has_the_condition_that_broadcasts_to_it(B: tuple[int, ...], S: tuple[int, ...]) -> None:
    x, given = normal(*B, 8), condition(*S, 8)
    full = [t.expand(*B, 8).reshape(-1, 8) for t in given]
    for y, truth in zip(both(x, *given), exact(x.reshape(-1, 8), *full), strict=True):
        assert y.shape == x.shape
        assert_rounded_once(y.reshape(-1, 8), truth)


@pytest.mark.semantics("AdaLayerNormFwdOp", "stable")
@pytest.mark.semantics("AdaLayerNormZeroFwdOp", "stable")
@pytest.mark.parametrize("offset", [40000.0, 80000.0, 1e6])
def test_rows_far_from_zero_keep_their_variance(offset: float) -> None:
    """In float32 the mean of squares of offset + 0, 1, 2, 3 less the square of the mean is no variance at all."""
    x = torch.tensor([[0.0, 1.0, 2.0, 3.0]]) + offset
    y, gated = both(x, torch.zeros(4), torch.zeros(4), torch.full((4,), 2.0), eps=0.0)
    expected = torch.tensor([[-1.5, -0.5, 0.5, 1.5]]) / 1.25**0.5
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(gated, 2 * expected)


@pytest.mark.parametrize("T", DTYPES)
def test_constant_rows_give_the_shift(T: torch.dtype) -> None:
    """An eps of 1e-12 is 0 in float16, which would divide zero by zero."""
    x = torch.tensor([[1234.0] * 256, [0.0] * 256]).to(T)
    scale, shift, gate = condition(256, dtype=T)
    y, gated = both(x, scale, shift, gate, eps=1e-12)
    assert torch.equal(y, shift.expand(2, 256))
    assert torch.equal(gated, (shift.float() * gate.float()).to(T).expand(2, 256))


@pytest.mark.semantics("AdaLayerNormFwdOp", "batch-invariant", "row-isolation")
@pytest.mark.semantics("AdaLayerNormZeroFwdOp", "batch-invariant", "row-isolation")
@pytest.mark.parametrize("N", [128, 5120, 100_003])
def test_a_row_is_its_own(N: int) -> None:
    x, given = normal(9, N), condition(N)
    whole = both(x, *given)
    for rows in (slice(0, 1), slice(3, 5)):
        for alone, y in zip(both(x[rows].clone(), *given), whole, strict=True):
            assert torch.equal(alone, y[rows])
    for bad in (NAN, INF):
        x[2, 7] = bad
        for spoilt, y in zip(both(x, *given), whole, strict=True):
            assert torch.equal(spoilt[[0, 1, *range(3, 9)]], y[[0, 1, *range(3, 9)]])
            assert spoilt[2].isnan().all()


@pytest.mark.parametrize("layout", [lambda x: x.t().contiguous().t(), lambda x: x.repeat_interleave(2, 1)[:, ::2]])
def test_any_strides(layout: Any) -> None:
    tensors = normal(6, 40), *condition(6, 40)
    for y, plain in zip(both(*map(layout, tensors)), both(*tensors), strict=True):
        assert y.is_contiguous()
        assert torch.equal(y, plain)


def test_float64_operands_give_a_float64_oracle() -> None:
    tensors = [t.double() for t in (normal(3, 50), *condition(3, 50))]
    y = ada_layer_norm_zero(*tensors, eps=1e-5, T=torch.bfloat16)
    torch.testing.assert_close(y, exact(*tensors)[1], rtol=1e-12, atol=1e-14)
