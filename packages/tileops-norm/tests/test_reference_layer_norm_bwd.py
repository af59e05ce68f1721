"""The LayerNorm backward's reference, held to hand-written numbers, to torch's autograd in float64 and to bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tileops.core import accuracy
from tileops.core.errors import CheckError
from tileops.core.reference import arguments
from tileops.norm import BatchNormBwdOp, LayerNormBwdOp
from tileops.norm.reference import layer_norm, layer_norm_bwd

NAN = float("nan")


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def gradients(
    dy: Tensor, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, axes: int = 1, eps: float = 1e-5
) -> Any:
    """The reference's, with the statistics of its forward."""
    call = {"normalized_shape": tuple(x.shape[-axes:]), "T": x.dtype}
    _, mean, rstd = layer_norm(x, eps=eps, return_stats=True, **call)
    assert mean is not None
    assert rstd is not None
    return layer_norm_bwd(dy, x, weight, mean, rstd, bias, **call)


@pytest.mark.semantics("LayerNormBwdOp", "definition")
def test_a_row_by_hand() -> None:
    """The mean is 6 and the deviation 5, so xhat is -1, -0.6, 0.6, 1; g is 8, 0, 0, 0: its mean 2, by xhat -2."""
    x, weight = torch.tensor([[1.0, 3.0, 9.0, 11.0]]), torch.tensor([4.0, 1.0, 1.0, 1.0])
    dx, dweight, dbias = gradients(torch.tensor([[2.0, 0.0, 0.0, 0.0]]), x, weight, torch.zeros(4), eps=8.0)
    torch.testing.assert_close(dx, torch.tensor([[0.8, -0.64, -0.16, 0.0]]))
    torch.testing.assert_close(dweight, torch.tensor([-2.0, 0.0, 0.0, 0.0]))
    torch.testing.assert_close(dbias, torch.tensor([2.0, 0.0, 0.0, 0.0]))


@pytest.mark.semantics("LayerNormBwdOp", "definition")
@pytest.mark.parametrize(("shape", "axes"), [((6,), 1), ((7, 96), 1), ((2, 3, 8, 16), 2), ((4, 5, 6), 3), ((0, 16), 1)])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_it_is_the_gradient_of_the_forward(shape: tuple[int, ...], axes: int, weighted: bool, biased: bool) -> None:
    wide = torch.float64
    dy, x = normal(*shape, dtype=wide, seed=2), normal(*shape, dtype=wide)
    affine = [
        normal(*shape[-axes:], dtype=wide, seed=s) if given else None for s, given in ((1, weighted), (3, biased))
    ]
    leaves = [None if t is None else t.clone().requires_grad_() for t in (x, *affine)]
    F.layer_norm(leaves[0], shape[-axes:], *leaves[1:]).backward(dy)
    for got, leaf in zip(gradients(dy, x, *affine, axes=axes), leaves, strict=True):
        assert (got is None) == (leaf is None)
        if leaf is not None:
            torch.testing.assert_close(got, leaf.grad, rtol=1e-12, atol=1e-13)


@pytest.mark.semantics("LayerNormBwdOp", "rounding")
@pytest.mark.parametrize("T", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("weight_dtype", "bias_dtype"), [("T", "T"), (torch.float32, "T"), ("T", torch.float32)])
def test_only_the_gradients_are_rounded(T: torch.dtype, weight_dtype: Any, bias_dtype: Any) -> None:
    dy, x = normal(64, 256, dtype=T, seed=2), normal(64, 256, dtype=T)
    weight, bias = (normal(256, dtype=T if d == "T" else d, seed=s) for s, d in ((1, weight_dtype), (3, bias_dtype)))
    got = gradients(dy, x, weight, bias)
    exact = gradients(dy.double(), x.double(), weight.double(), bias.double())
    assert [g.dtype for g in got] == [T, weight.dtype, bias.dtype]
    assert (got[0] == exact[0].to(T)).double().mean() > 0.99
    for summed, true in zip(got[1:], exact[1:], strict=True):
        close = 1e-5 if summed.dtype == torch.float32 else torch.finfo(T).eps
        torch.testing.assert_close(summed.double(), true, rtol=close, atol=close)


@pytest.mark.semantics("LayerNormBwdOp", "batch-invariant", "row-isolation", "deterministic")
@pytest.mark.parametrize("N", [128, 5120, 32768])
def test_a_row_of_dx_is_its_own(N: int) -> None:
    dy, x, weight, bias = normal(9, N, seed=2), normal(9, N), normal(N, seed=1), normal(N, seed=3)
    whole = gradients(dy, x, weight, bias)
    assert torch.equal(gradients(dy[4:5].clone(), x[4:5].clone(), weight, bias)[0], whole[0][4:5])
    assert all(torch.equal(a, b) for a, b in zip(gradients(dy, x, weight, bias), whole, strict=True))
    x[2, 7] = NAN
    others = [0, 1, *range(3, 9)]
    assert torch.equal(gradients(dy, x, weight, bias)[0][others], whole[0][others])


@pytest.mark.parametrize("layout", [lambda x: x.t().contiguous().t(), lambda x: x.repeat_interleave(2, 1)[:, ::2]])
def test_any_strides(layout: Any) -> None:
    dy, x, weight, bias = normal(6, 40, seed=2), normal(6, 40), normal(40, seed=1), normal(40, seed=3)
    expected = gradients(dy, x, weight, bias)
    for got, true in zip(gradients(layout(dy), layout(x), weight, bias), expected, strict=True):
        assert torch.equal(got, true)
        assert got.is_contiguous()


def test_a_constant_row_has_the_gradient_of_its_dy_less_the_mean() -> None:
    dx, *_ = gradients(torch.tensor([[1.0, 3.0]]), torch.full((1, 2), 1e6), eps=4.0)
    assert dx.tolist() == [[-0.5, 0.5]]


@pytest.mark.parametrize(
    ("params", "shapes", "said"),
    [
        ({"normalized_shape": ()}, [(3, 4), (3, 4), None, (3, 4), (3, 4)], "at least one axis"),
        ({"normalized_shape": (4,)}, [(3, 4), (2, 4), None, (3,), (3,)], "x: got"),
        ({"normalized_shape": (4,)}, [(3, 4), (3, 4), None, (4,), (3,)], "mean: got"),
        ({"normalized_shape": (4,)}, [(3, 4), (3, 4), None, (3,), (4,)], "rstd: got"),
        ({"normalized_shape": (4,)}, [(3, 4), (3, 4), None, (3,), (3,), (5,)], "bias: got"),
    ],
)
def test_calls_outside_the_signature_say_what_is_wrong(params: dict[str, Any], shapes: list[Any], said: str) -> None:
    with pytest.raises(CheckError, match=said):
        LayerNormBwdOp(**params).bind(*shapes, T="float16")


@pytest.mark.parametrize("op", [LayerNormBwdOp((40,)), BatchNormBwdOp()], ids=lambda op: type(op).__name__)
def test_a_gradient_of_nothing_but_roundings_is_held_to_its_terms(op: Any) -> None:
    """That of ``y.sum()``: dx is 0, and what is left of it depends on the order of every sum."""
    x = normal(64, 40)
    mean, rstd = x.mean(1), (x.var(1, correction=0) + 1e-5).rsqrt()
    dy = torch.full((64, 1), 0.7).expand(64, 40)
    dy, x = (dy, x) if isinstance(op, LayerNormBwdOp) else (dy.t(), x.t())
    call, given = op.bind(dy, x, None, mean, rstd), (dy, x, None, mean, rstd, None)
    inputs = dict(zip(call.inputs, given, strict=True))
    results = accuracy.collect(call, call.entry.reference.load()(**inputs, **arguments(call)), inputs)
    right = dict(results)
    right["dx"] = results["dx"] + 1e-7 * torch.randn_like(results["dx"])
    assert accuracy.verify(call, inputs, right)
    wrong = dict(results)
    wrong["dx"] = results["dx"] + 1e-5 * torch.randn_like(results["dx"])
    assert not accuracy.verify(call, inputs, wrong)
