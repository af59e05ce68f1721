"""The BatchNorm references, held to hand-written numbers, to torch in float64 and to bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tileops.norm.reference import batch_norm, batch_norm_bwd

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NAN = float("nan")


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def norm(x: Tensor, *others: Any, **params: Any) -> Any:
    call = {"training": True, "momentum": 0.1, "eps": 1e-5, "return_stats": True, "T": x.dtype, **params}
    return batch_norm(x, *others, **call)


def gradients(
    dy: Tensor, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Any:
    _, mean, rstd = norm(x, eps=eps)
    return batch_norm_bwd(dy, x, weight, mean, rstd, bias, T=x.dtype)


def assert_rounded_once(y: Tensor, exact: Tensor) -> None:
    """``y`` is ``exact`` (float64) rounded to y's dtype: to the bit nearly everywhere, next to a tie an ulp away."""
    rounded = exact.to(y.dtype)
    if y.dtype == torch.float32:
        torch.testing.assert_close(y, rounded, rtol=1e-5, atol=1e-6)
    else:
        assert (y == rounded).double().mean() > 0.995
        torch.testing.assert_close(y, rounded, rtol=2 * torch.finfo(y.dtype).eps, atol=2**-20)


@pytest.mark.semantics("BatchNormFwdOp", "definition")
def test_two_channels_by_hand() -> None:
    x = torch.tensor([[1.0, 0.0], [3.0, 8.0]])
    y, mean, rstd = norm(x, None, None, torch.tensor([1.0, 2.0]), torch.tensor([0.0, 1.0]), eps=0.0)
    torch.testing.assert_close(y, torch.tensor([[-1.0, -1.0], [1.0, 3.0]]))
    assert (mean.tolist(), rstd.tolist()) == ([2.0, 4.0], [1.0, 0.25])
    y, mean, rstd = norm(x, torch.tensor([1.0, 2.0]), torch.tensor([4.0, 9.0]), training=False, eps=7.0)
    torch.testing.assert_close(y, torch.tensor([[0.0, -0.5], [2 / 11**0.5, 1.5]]))
    assert (mean.tolist(), rstd[1].item()) == ([1.0, 2.0], 0.25)


@pytest.mark.semantics("BatchNormFwdOp", "running-statistics")
def test_running_statistics_by_hand() -> None:
    """Of 1, 3 and 0, 8 the unbiased variances are 2 and 32."""
    mean, var = torch.tensor([1.0, 0.0]), torch.tensor([1.0, 0.0])
    norm(torch.tensor([[1.0, 0.0], [3.0, 8.0]]), mean, var, momentum=0.5)
    assert (mean.tolist(), var.tolist()) == ([1.5, 2.0], [1.5, 16.0])


@pytest.mark.semantics("BatchNormFwdOp", "definition", "rounding", "running-statistics")
@pytest.mark.parametrize("T", DTYPES)
@pytest.mark.parametrize("affine_dtype", ["T", torch.float32])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", [(32, 64), (8, 32, 64), (2, 6, 5, 7), (1, 8, 3, 4, 5)])
def test_it_equals_torch_in_float64(shape: Any, training: bool, affine_dtype: Any, T: torch.dtype) -> None:
    C, own = shape[1], T if affine_dtype == "T" else affine_dtype
    x, weight, bias = normal(*shape, dtype=T), normal(C, dtype=own, seed=1), normal(C, dtype=own, seed=2)
    running = normal(C, seed=3), normal(C, seed=4).exp()
    exact = [t.double() for t in running]
    y, _, _ = norm(x, *running, weight, bias, training=training, momentum=0.3)
    expected = F.batch_norm(x.double(), *exact, weight.double(), bias.double(), training, 0.3, 1e-5)
    assert y.dtype == T
    torch.testing.assert_close(y.double(), expected, rtol=torch.finfo(T).eps, atol=1e-5)
    for got, wanted in zip(running, exact, strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-6, atol=1e-6)
    if training:
        assert_rounded_once(norm(x)[0], F.batch_norm(x.double(), None, None, training=True))


@pytest.mark.semantics("BatchNormFwdOp", "safe-variance")
@pytest.mark.parametrize("start", [40000.0, 80000.0])
def test_values_far_from_zero(start: float) -> None:
    x = start + torch.tensor([[0.0], [1.0], [2.0], [3.0]])
    torch.testing.assert_close(norm(x)[0], torch.tensor([[-1.5], [-0.5], [0.5], [1.5]]) / (1.25 + 1e-5) ** 0.5)


@pytest.mark.semantics("BatchNormFwdOp", "layout")
@pytest.mark.semantics("BatchNormBwdOp", "layout")
@pytest.mark.parametrize(
    "layout",
    [
        lambda x: x.to(memory_format=torch.channels_last),
        lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
        lambda x: x.to(memory_format=torch.channels_last)[:, :4],
        lambda x: x[:1].expand(x.shape),
    ],
    ids=["channels-last", "permuted", "sliced", "expanded"],
)
def test_outputs_are_laid_out_as_empty_like_would_be(layout: Any) -> None:
    x = layout(normal(3, 8, 5, 6))
    dy, wanted = normal(*x.shape, seed=1), torch.empty_like(x).stride()
    for got, plain in ((norm(x), norm(x.contiguous())), (gradients(dy, x), gradients(dy, x.contiguous()))):
        assert got[0].stride() == wanted
        torch.testing.assert_close(got[0], plain[0], rtol=1e-5, atol=1e-5)


@pytest.mark.semantics("BatchNormFwdOp", "row-isolation", "deterministic")
@pytest.mark.semantics("BatchNormBwdOp", "row-isolation", "deterministic")
def test_a_channel_is_its_own() -> None:
    dy, x, one = normal(7, 4, 1001, seed=1), normal(7, 4, 1001), torch.ones(4)
    y, backward = norm(x)[0], gradients(dy, x, one, one)
    assert torch.equal(norm(x)[0], y)
    assert all(map(torch.equal, gradients(dy, x, one, one), backward))
    x[3, 2, 7] = NAN
    others = [0, 1, 3]
    assert torch.equal(norm(x)[0][:, others], y[:, others])
    spoilt = gradients(dy, x, one, one)
    assert torch.equal(spoilt[0][:, others], backward[0][:, others])
    assert torch.equal(spoilt[1][others], backward[1][others])
    assert spoilt[0][:, 2].isnan().all()


@pytest.mark.semantics("BatchNormBwdOp", "definition")
def test_gradients_by_hand() -> None:
    """The values of xhat are -1, 1, -1, 1; the mean of dy is 1, that of dy * xhat 0.5."""
    x, dy = torch.tensor([[0.0], [2.0], [0.0], [2.0]]), torch.tensor([[0.0], [2.0], [1.0], [1.0]])
    dx, dweight, dbias = gradients(dy, x, torch.tensor([3.0]), torch.tensor([7.0]), eps=0.0)
    assert dx.flatten().tolist() == [-1.5, 1.5, 1.5, -1.5]
    assert (dweight.item(), dbias.item()) == (2.0, 4.0)


@pytest.mark.semantics("BatchNormBwdOp", "definition")
@pytest.mark.parametrize("shape", [(32, 64), (8, 3, 49), (2, 6, 5, 7)])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_it_is_the_gradient_of_the_forward(shape: tuple[int, ...], weighted: bool, biased: bool) -> None:
    dy, x = normal(*shape, dtype=torch.float64, seed=2), normal(*shape, dtype=torch.float64)
    ones = torch.ones(shape[1], dtype=torch.float64)
    weight = normal(shape[1], dtype=torch.float64, seed=1) if weighted else ones
    leaves = [t.clone().requires_grad_() for t in (x, weight, 0 * ones)]
    F.batch_norm(leaves[0], None, None, *leaves[1:], training=True).backward(dy)
    found = gradients(dy, x, weight if weighted else None, ones if biased else None)
    assert [g is not None for g in found] == [True, weighted, biased]
    for got, leaf in zip(found, leaves, strict=True):
        if got is not None:
            torch.testing.assert_close(got, leaf.grad, rtol=1e-10, atol=1e-11)


@pytest.mark.semantics("BatchNormBwdOp", "rounding")
@pytest.mark.parametrize("T", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("weight_dtype", ["T", torch.float32])
@pytest.mark.parametrize("bias_dtype", ["T", torch.float32])
def test_only_the_gradients_are_rounded(T: torch.dtype, weight_dtype: Any, bias_dtype: Any) -> None:
    dy, x = normal(64, 16, 9, dtype=T, seed=2), normal(64, 16, 9, dtype=T)
    weight, bias = (normal(16, dtype=T if d == "T" else d, seed=1) for d in (weight_dtype, bias_dtype))
    exact = gradients(dy.double(), x.double(), weight.double(), bias.double())
    dx, *others = gradients(dy, x, weight, bias)
    assert dx.dtype == T
    assert_rounded_once(dx, exact[0])
    for got, like, true in zip(others, (weight, bias), exact[1:], strict=True):
        assert got.dtype == like.dtype
        close = 1e-5 if like.dtype == torch.float32 else torch.finfo(T).eps
        torch.testing.assert_close(got.double(), true, rtol=close, atol=1e-4)


def test_float64_operands_give_a_float64_oracle() -> None:
    x = normal(5, 4, 9, dtype=torch.float64)
    y, mean, rstd = norm(x, T=torch.bfloat16)
    assert mean.dtype == rstd.dtype == torch.float64
    torch.testing.assert_close(y, F.batch_norm(x, None, None, training=True), rtol=1e-12, atol=1e-12)
