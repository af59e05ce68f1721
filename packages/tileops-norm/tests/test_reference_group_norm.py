"""The GroupNorm and InstanceNorm references, held to hand-written numbers, to torch in float64 and to bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tileops.norm.reference import group_norm, instance_norm

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NAN = float("nan")


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def group(x: Tensor, weight: Any = None, bias: Any = None, num_groups: int = 1, **params: Any) -> Tensor:
    return group_norm(x, weight, bias, num_groups=num_groups, **{"eps": 1e-5, "T": x.dtype, **params})


def instance(x: Tensor, *others: Any, **params: Any) -> Tensor:
    call = {"use_input_stats": True, "momentum": 0.1, "eps": 1e-5, "T": x.dtype, **params}
    return instance_norm(x, *others, **call)


def assert_rounded_once(y: Tensor, exact: Tensor) -> None:
    """``y`` is ``exact`` (float64) rounded to y's dtype: to the bit nearly everywhere, next to a tie an ulp away."""
    rounded = exact.to(y.dtype)
    if y.dtype == torch.float32:
        torch.testing.assert_close(y, rounded, rtol=1e-5, atol=1e-6)
    else:
        assert (y == rounded).double().mean() > 0.995
        torch.testing.assert_close(y, rounded, rtol=2 * torch.finfo(y.dtype).eps, atol=2**-20)


@pytest.mark.semantics("GroupNormFwdOp", "definition")
def test_two_groups_by_hand() -> None:
    """Of the first group mean and variance are 2 and 2, of the second 20 and 100."""
    x = torch.tensor([[[0.0, 2.0], [2.0, 4.0], [10.0, 10.0], [30.0, 30.0]]])
    y = group(x, torch.tensor([1.0, 2.0, 1.0, -1.0]), torch.tensor([0.0, 1.0, 0.0, 5.0]), 2, eps=2.0)
    far = 10 / 102**0.5
    torch.testing.assert_close(y, torch.tensor([[[-1.0, 0.0], [1.0, 3.0], [-far, -far], [5 - far, 5 - far]]]))


@pytest.mark.semantics("InstanceNormFwdOp", "definition")
def test_two_channels_by_hand() -> None:
    x = torch.tensor([[[1.0, 3.0], [0.0, 8.0]]])
    y = instance(x, None, None, torch.tensor([1.0, 2.0]), torch.tensor([0.0, 1.0]), eps=0.0)
    torch.testing.assert_close(y, torch.tensor([[[-1.0, 1.0], [-1.0, 3.0]]]))
    running = torch.tensor([1.0, 2.0]), torch.tensor([4.0, 9.0])
    y = instance(x, *running, use_input_stats=False, eps=0.0)
    torch.testing.assert_close(y, torch.tensor([[[0.0, 1.0], [-2 / 3, 2.0]]]))
    assert running[0].tolist() == [1.0, 2.0]


@pytest.mark.semantics("GroupNormFwdOp", "definition", "rounding")
@pytest.mark.parametrize("T", DTYPES)
@pytest.mark.parametrize("affine_dtype", ["T", torch.float32])
@pytest.mark.parametrize(("shape", "groups"), [((3, 8), 2), ((2, 12, 49), 4), ((2, 6, 5, 7), 6), ((2, 8, 3, 4, 5), 1)])
def test_group_norm_equals_torch_in_float64(shape: Any, groups: int, affine_dtype: Any, T: torch.dtype) -> None:
    own = T if affine_dtype == "T" else affine_dtype
    x, w, b = normal(*shape, dtype=T), normal(shape[1], dtype=own, seed=1), normal(shape[1], dtype=own, seed=2)
    for weight, bias in ((w, b), (w, None), (None, b), (None, None)):
        exact = F.group_norm(x.double(), groups, *(t if t is None else t.double() for t in (weight, bias)))
        y = group(x, weight, bias, groups)
        assert y.dtype == T
        torch.testing.assert_close(y.double(), exact, rtol=torch.finfo(T).eps, atol=1e-6)
    large = normal(8, 32, 64, dtype=T)
    assert_rounded_once(group(large, num_groups=8), F.group_norm(large.double(), 8))


@pytest.mark.semantics("InstanceNormFwdOp", "definition", "rounding", "running-statistics")
@pytest.mark.parametrize("T", DTYPES)
@pytest.mark.parametrize("use_input_stats", [True, False])
@pytest.mark.parametrize("shape", [(8, 32, 64), (2, 6, 5, 7), (2, 8, 3, 4, 5), (1, 3, 2)])
def test_instance_norm_equals_torch_in_float64(shape: Any, use_input_stats: bool, T: torch.dtype) -> None:
    C = shape[1]
    x, weight, bias = normal(*shape, dtype=T), normal(C, dtype=T, seed=1), normal(C, dtype=T, seed=2)
    running = normal(C, seed=3), normal(C, seed=4).exp()
    exact = [t.double() for t in running]
    y = instance(x, *running, weight, bias, use_input_stats=use_input_stats, momentum=0.3)
    expected = F.instance_norm(x.double(), *exact, weight.double(), bias.double(), use_input_stats, 0.3, 1e-5)
    torch.testing.assert_close(y.double(), expected, rtol=2 * torch.finfo(T).eps, atol=1e-5)
    for got, wanted in zip(running, exact, strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.semantics("GroupNormFwdOp", "safe-variance")
@pytest.mark.semantics("InstanceNormFwdOp", "safe-variance")
@pytest.mark.parametrize("start", [40000.0, 80000.0])
def test_values_far_from_zero(start: float) -> None:
    """Their squares differ by less than float32 can tell: the mean of squares less the squared mean is no variance."""
    x = start + torch.tensor([[[0.0, 1.0, 2.0, 3.0]]])
    expected = torch.tensor([[[-1.5, -0.5, 0.5, 1.5]]]) / (1.25 + 1e-5) ** 0.5
    torch.testing.assert_close(group(x), expected)
    torch.testing.assert_close(instance(x), expected)
    assert group(torch.full((1, 4, 64), 1234.0)).abs().max() == 0


@pytest.mark.semantics("GroupNormFwdOp", "layout")
@pytest.mark.semantics("InstanceNormFwdOp", "layout")
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
    for y, plain in ((group(x, num_groups=2), group(x.contiguous(), num_groups=2)), (instance(x), instance(x.clone()))):
        assert y.stride() == torch.empty_like(x).stride()
        torch.testing.assert_close(y, plain, rtol=1e-6, atol=1e-6)


@pytest.mark.semantics("GroupNormFwdOp", "batch-invariant", "row-isolation")
@pytest.mark.semantics("InstanceNormFwdOp", "batch-invariant", "row-isolation")
def test_an_instance_is_its_own() -> None:
    x = normal(7, 4, 10_001)
    for norm in (lambda x: group(x, num_groups=2), instance):
        y = norm(x)
        assert torch.equal(norm(x[3:4].clone()), y[3:4])
        spoilt = x.clone()
        spoilt[2, 1, 7] = NAN
        others = [0, 1, *range(3, 7)]
        assert torch.equal(norm(spoilt)[others], y[others])
        assert norm(spoilt)[2, 1].isnan().all()
        assert torch.equal(norm(spoilt)[2, 2:], y[2, 2:])


@pytest.mark.semantics("InstanceNormFwdOp", "running-statistics", "deterministic")
def test_running_statistics_by_hand() -> None:
    """Instances 1, 3 and 0, 8: means 2 and 4, unbiased variances 2 and 32."""
    for _ in range(3):
        mean, var = torch.tensor([1.0]), torch.tensor([1.0])
        instance(torch.tensor([[[1.0, 3.0]], [[0.0, 8.0]]]), mean, var, momentum=0.5)
        assert (mean.item(), var.item()) == (2.0, 9.0)


def test_float64_operands_give_a_float64_oracle() -> None:
    x = normal(2, 4, 9, dtype=torch.float64)
    torch.testing.assert_close(group(x, num_groups=2, T=torch.bfloat16), F.group_norm(x, 2), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(instance(x, T=torch.bfloat16), F.instance_norm(x), rtol=1e-12, atol=1e-12)
