"""The RMSNorm backward's reference, held to hand-written numbers, to torch's autograd in float64 and to bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tileops.core.errors import CheckError
from tileops.norm import RMSNormBwdOp
from tileops.norm.reference import rms_norm, rms_norm_bwd

NAN = float("nan")


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def gradients(dy: Tensor, x: Tensor, weight: Tensor | None = None, axes: int = 1, **params: Any) -> Any:
    """The reference's, with the rstd of its forward."""
    call = {"normalized_shape": tuple(x.shape[-axes:]), "weight_offset": params.get("weight_offset", 0.0), "T": x.dtype}
    _, rstd = rms_norm(x, weight, eps=params.get("eps"), return_rstd=True, **call)
    assert rstd is not None
    return rms_norm_bwd(dy, x, weight, rstd, **call)


@pytest.mark.semantics("RMSNormBwdOp", "definition")
def test_a_row_by_hand() -> None:
    """The row's rms is 5, so xhat is 0.2, 1.4, 1, 1; g is 5, 0, 0, 0, and the mean of g * xhat is 0.25."""
    x = torch.tensor([[1.0, 7.0, 5.0, 5.0]])
    dx, dweight = gradients(
        torch.tensor([[1.0, 0.0, 0.0, 0.0]]), x, torch.tensor([4.0, 1.0, 1.0, 1.0]), eps=0.0, weight_offset=1.0
    )
    torch.testing.assert_close(dx, torch.tensor([[0.99, -0.07, -0.05, -0.05]]))
    torch.testing.assert_close(dweight, torch.tensor([0.2, 0.0, 0.0, 0.0]))


@pytest.mark.semantics("RMSNormBwdOp", "definition")
@pytest.mark.parametrize(("shape", "axes"), [((6,), 1), ((7, 96), 1), ((2, 3, 8, 16), 2), ((4, 5, 6), 3), ((0, 16), 1)])
@pytest.mark.parametrize("weighted", [True, False])
def test_it_is_the_gradient_of_the_forward(shape: tuple[int, ...], axes: int, weighted: bool) -> None:
    dy, x = normal(*shape, dtype=torch.float64, seed=2), normal(*shape, dtype=torch.float64)
    weight = normal(*shape[-axes:], dtype=torch.float64, seed=1) if weighted else None
    leaves = [t.clone().requires_grad_() for t in (x, weight) if t is not None]
    scale = leaves[1] + 1.0 if weighted else None
    F.rms_norm(leaves[0], shape[-axes:], scale, eps=1e-5).backward(dy)
    got = gradients(dy, x, weight, axes, eps=1e-5, weight_offset=1.0 if weighted else 0.0)
    for ours, leaf in zip(got, leaves, strict=False):
        torch.testing.assert_close(ours, leaf.grad, rtol=1e-12, atol=1e-13)
    assert weighted or got[1] is None


@pytest.mark.semantics("RMSNormBwdOp", "rounding")
@pytest.mark.parametrize("T", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("weight_dtype", ["T", torch.float32])
def test_only_the_gradients_are_rounded(T: torch.dtype, weight_dtype: Any) -> None:
    dy, x = normal(64, 256, dtype=T, seed=2), normal(64, 256, dtype=T)
    weight = normal(256, dtype=T if weight_dtype == "T" else weight_dtype, seed=1)
    dx, dweight = gradients(dy, x, weight)
    exact = gradients(dy.double(), x.double(), weight.double())
    assert (dx.dtype, dweight.dtype) == (T, weight.dtype)
    assert (dx == exact[0].to(T)).double().mean() > 0.995
    close = 1e-5 if weight.dtype == torch.float32 else torch.finfo(T).eps
    torch.testing.assert_close(dweight.double(), exact[1], rtol=close, atol=close)


@pytest.mark.semantics("RMSNormBwdOp", "batch-invariant", "row-isolation", "deterministic")
@pytest.mark.parametrize("N", [128, 5120, 32768])
def test_a_row_of_dx_is_its_own(N: int) -> None:
    dy, x, weight = normal(9, N, seed=2), normal(9, N), normal(N, seed=1)
    dx, dweight = gradients(dy, x, weight)
    assert torch.equal(gradients(dy[4:5].clone(), x[4:5].clone(), weight)[0], dx[4:5])
    assert torch.equal(gradients(dy, x, weight)[1], dweight)
    x[2, 7] = NAN
    others = [0, 1, *range(3, 9)]
    assert torch.equal(gradients(dy, x, weight)[0][others], dx[others])


@pytest.mark.parametrize("layout", [lambda x: x.t().contiguous().t(), lambda x: x.repeat_interleave(2, 1)[:, ::2]])
def test_any_strides(layout: Any) -> None:
    dy, x, weight = normal(6, 40, seed=2), normal(6, 40), normal(40, seed=1)
    for got, expected in zip(gradients(layout(dy), layout(x), weight), gradients(dy, x, weight), strict=True):
        assert torch.equal(got, expected)
        assert got.is_contiguous()


@pytest.mark.parametrize(
    ("params", "shapes", "said"),
    [
        ({"normalized_shape": ()}, [(3, 4), (3, 4), None, (3, 4)], "at least one axis"),
        ({"normalized_shape": (4,)}, [(3, 4), (2, 4), None, (3,)], "x: got"),
        ({"normalized_shape": (4,)}, [(3, 4), (3, 4), None, (4,)], "rstd: got"),
        ({"normalized_shape": (4,), "weight_offset": 1.0}, [(3, 4), (3, 4), None, (3,)], "a weight for weight_offset"),
    ],
)
def test_calls_outside_the_signature_say_what_is_wrong(params: dict[str, Any], shapes: list[Any], said: str) -> None:
    with pytest.raises(CheckError, match=said):
        RMSNormBwdOp(**params).bind(*shapes, T="float16")
