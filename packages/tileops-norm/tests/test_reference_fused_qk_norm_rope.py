"""The FusedQKNormRoPE reference, held to hand-written numbers, to complex numbers, to torch and to bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tileops.norm.reference import fused_qk_norm_rope

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NAN, INF = float("nan"), float("inf")
LAYOUTS = ["neox", "interleaved"]


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def cache(P: int, R: int) -> Tensor:
    """The cosines and sines of real angles."""
    angle = torch.arange(P).double()[:, None] * 10000.0 ** -(torch.arange(0, R, 2).double() / R)
    return torch.cat((angle.cos(), angle.sin()), -1)


def fused(
    qkv: Tensor, weights: Any, table: Tensor, positions: Tensor, heads: int, heads_kv: int, **options: Any
) -> Tensor:
    """A copy of qkv after the call."""
    out = qkv.clone()
    call = {"eps": 1e-6, "rope_layout": "neox", "T": qkv.dtype, **options}
    assert fused_qk_norm_rope(out, *weights, table, positions, heads=heads, heads_kv=heads_kv, **call) is None
    return out


def exact(
    qkv: Tensor, weights: Any, table: Tensor, positions: Tensor, heads: int, heads_kv: int, rope_layout: str
) -> Tensor:
    """In float64 by torch's rms_norm, and by products of complex numbers."""
    D, R = weights[0].shape[0], table.shape[1]
    q, k, v = qkv.double().unflatten(1, (-1, D)).split([heads, heads_kv, heads_kv], 1)
    x = torch.cat([F.rms_norm(h, (D,), w.double(), eps=1e-6) for h, w in zip((q, k), weights, strict=True)], 1)
    turned = x[..., :R]
    if rope_layout == "neox":
        turned = turned.unflatten(-1, (2, R // 2)).transpose(-1, -2).flatten(-2)
    turn = torch.complex(*table[positions].double().unsqueeze(1).chunk(2, -1))
    turned = torch.view_as_real(torch.view_as_complex(turned.unflatten(-1, (-1, 2)).contiguous()) * turn)
    turned = (turned.transpose(-1, -2) if rope_layout == "neox" else turned).flatten(-2)
    return torch.cat((torch.cat((turned, x[..., R:]), -1), v), 1).flatten(1)


@pytest.mark.semantics("FusedQKNormRoPEFwdOp", "definition", "layout", "partial", "in-place")
@pytest.mark.parametrize(
    ("rope_layout", "q", "k"),
    [
        # The rms is 5 everywhere; cosine 0 and sine 1 turn (a, b) into (-b, a), cosine -1 and sine 0 into (-a, -b).
        ("neox", [-1.0, -1.4, 0.2, -1.0, 1.0, 1.0], [-2.0, -2.8, 0.4, -2.0, 2.0, -2.0]),
        ("interleaved", [-1.4, 0.2, -1.0, -1.0, 1.0, 1.0], [-2.8, 0.4, -2.0, -2.0, 2.0, -2.0]),
    ],
)
def test_a_token_by_hand(rope_layout: str, q: list[float], k: list[float]) -> None:
    """Of six elements, of which the mean of squares is 25, four are rotated; the position is the cache's second row."""
    head = [1.0, 7.0, 5.0, 5.0, 5.0, 5.0]
    qkv = torch.tensor([[*head, *head[:5], -5.0, 1.0, 2.0, 3.0, 4.0, 5.0, NAN]])
    table = torch.tensor([[9.0, 9.0, 9.0, 9.0], [0.0, -1.0, 1.0, 0.0]])
    weights = torch.ones(6), torch.full((6,), 2.0)
    y = fused(qkv, weights, table, torch.tensor([1]), 1, 1, eps=0.0, rope_layout=rope_layout)
    torch.testing.assert_close(y[0, :12], torch.tensor([*q, *k]))
    assert torch.equal(y[0, 12:].view(torch.int32), qkv[0, 12:].view(torch.int32))


@pytest.mark.semantics("FusedQKNormRoPEFwdOp", "definition", "rounding", "partial")
@pytest.mark.parametrize("T", DTYPES)
@pytest.mark.parametrize(("D", "R"), [(128, 128), (128, 64), (96, 96), (7, 4), (2, 2), (80, 20)])
@pytest.mark.parametrize("rope_layout", LAYOUTS)
def test_any_head_equals_complex_products_in_float64(D: int, R: int, rope_layout: str, T: torch.dtype) -> None:
    heads, heads_kv = 3, 2
    qkv = normal(11, (heads + 2 * heads_kv) * D, dtype=T)
    weights = normal(D, dtype=T, seed=1), normal(D, dtype=T, seed=2)
    table, positions = cache(50, R).float(), torch.randint(50, (11,), generator=torch.Generator().manual_seed(3))
    y = fused(qkv, weights, table, positions, heads, heads_kv, rope_layout=rope_layout)
    truth = exact(qkv, weights, table, positions, heads, heads_kv, rope_layout)
    if T is torch.float32:
        torch.testing.assert_close(y.double(), truth, rtol=4 * 2**-23, atol=2**-19)  # products that cancel are up to 8
    else:
        assert (y == truth.to(T)).double().mean() > 0.998
        torch.testing.assert_close(y.double(), truth, rtol=torch.finfo(T).eps, atol=2**-19)


@pytest.mark.semantics("FusedQKNormRoPEFwdOp", "rounding")
@pytest.mark.parametrize("rope_layout", LAYOUTS)
def test_the_normalized_head_is_not_rounded_before_its_rotation(rope_layout: str) -> None:
    """Rounding it to bfloat16 first, as a model of two separate ops does, changes a value in ten."""
    qkv, weights = normal(64, 3 * 64, dtype=torch.bfloat16), (normal(64, seed=1), normal(64, seed=2))
    table, positions = cache(64, 64), torch.arange(64)
    truth = exact(qkv, weights, table, positions, 1, 1, rope_layout)
    y = fused(qkv, weights, table.float(), positions, 1, 1, rope_layout=rope_layout)
    still = torch.cat((torch.ones(1, 32), torch.zeros(1, 32)), 1)
    normed = fused(qkv, weights, still, torch.zeros(64, dtype=torch.int64), 1, 1, rope_layout=rope_layout)
    ones = torch.ones(64), torch.ones(64)
    first = normed.double().unflatten(1, (3, 64))
    size = first.square().mean(-1, keepdim=True).sqrt()
    twice = exact(normed, ones, table, positions, 1, 1, rope_layout).unflatten(1, (3, 64))[:, :2] * size[:, :2]
    expected = truth.unflatten(1, (3, 64))[:, :2].to(torch.bfloat16)
    assert (y.unflatten(1, (3, 64))[:, :2] == expected).double().mean() > 0.998
    assert (twice.to(torch.bfloat16) == expected).double().mean() < 0.95


@pytest.mark.semantics("FusedQKNormRoPEFwdOp", "in-place")
@pytest.mark.parametrize("T", DTYPES)
def test_v_and_what_lies_beside_rows_keep_every_bit(T: torch.dtype) -> None:
    buffer = torch.full((5, 70), NAN, dtype=T)
    qkv = buffer[:, 3:67]  # 2 + 2 * 1 heads of 16
    qkv[:, :48] = normal(5, 48, dtype=T)
    before = buffer.clone()
    call: dict[str, Any] = {"heads": 2, "heads_kv": 1, "eps": 1e-6, "rope_layout": "neox", "T": T}
    weights = torch.ones(16, dtype=T), torch.ones(16, dtype=T)
    fused_qk_norm_rope(qkv, *weights, cache(8, 16).float(), torch.arange(5), **call)
    bits = torch.int32 if T is torch.float32 else torch.int16
    for columns in (slice(0, 3), slice(51, 70)):
        assert torch.equal(buffer.view(bits)[:, columns], before.view(bits)[:, columns])
    packed = fused(before[:, 3:67].contiguous(), weights, cache(8, 16).float(), torch.arange(5), 2, 1)
    assert torch.equal(qkv[:, :48], packed[:, :48])
    assert qkv[:, :48].isfinite().all()


@pytest.mark.semantics("FusedQKNormRoPEFwdOp", "batch-invariant", "row-isolation")
@pytest.mark.parametrize("rope_layout", LAYOUTS)
def test_a_head_is_its_own(rope_layout: str) -> None:
    D, options = 64, {"rope_layout": rope_layout}
    qkv, weights = normal(9, 4 * D), (normal(D, seed=1), normal(D, seed=2))
    table, positions = cache(9, D).float(), torch.arange(9)
    y = fused(qkv, weights, table, positions, 2, 1, **options)
    assert torch.equal(fused(qkv[3:5], weights, table, positions[3:5], 2, 1, **options), y[3:5])
    for bad in (NAN, INF):
        spoilt = qkv.clone()
        spoilt[4, D + 7] = bad
        y_spoilt = fused(spoilt, weights, table, positions, 2, 1, **options)
        heads, clean = y_spoilt.unflatten(1, (4, D)), y.unflatten(1, (4, D))
        others = torch.ones(9, 4, dtype=torch.bool)
        others[4, 1] = False
        assert torch.equal(heads[others], clean[others])
        assert heads[4, 1, 7].isnan()


def test_float64_operands_give_a_float64_oracle() -> None:
    qkv, weights = normal(5, 64).double(), (normal(16, seed=1).double(), normal(16, seed=2).double())
    table, positions = cache(8, 16), torch.arange(5)
    y = fused(qkv, weights, table, positions, 2, 1, T=torch.bfloat16)
    torch.testing.assert_close(y, exact(qkv, weights, table, positions, 2, 1, "neox"), rtol=1e-12, atol=1e-14)
