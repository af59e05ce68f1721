"""FusedQKNormRoPEFwdOp through its front door: every case that its entry gives, and what it may not touch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tileops.core.errors import CheckError, TileOpsError
from tileops.core.testing import Case, TorchCase, case_of, run_case, run_torch_case
from tileops.norm import FusedQKNormRoPEFwdOp

pytestmark = pytest.mark.op("FusedQKNormRoPEFwdOp")

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
BITS = {2: torch.int16, 4: torch.int32}


def test_rows(workload_case: Case, device: str) -> None:
    run_case(workload_case, device)


def test_edges(edge_case: Case, device: str) -> None:
    run_case(edge_case, device)


def test_torch(torch_case: TorchCase, device: str) -> None:
    run_torch_case(torch_case, device)


def normal(*shape: int, device: str = "cpu", dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def operands(D: int, R: int, tokens: int, device: str, dtype: torch.dtype = torch.bfloat16, P: int = 64) -> list[Any]:
    """What a call takes behind qkv."""
    weights = [normal(D, device=device, dtype=dtype, seed=seed) for seed in (1, 2)]
    table = normal(P, R, device=device, dtype=torch.float32, seed=3)
    return [*weights, table, torch.arange(tokens, device=device) * 7 % P]


@pytest.mark.parametrize("T", DTYPES)
@pytest.mark.parametrize(
    ("D", "R"), [(64, 64), (128, 128), (256, 256), (128, 64), (256, 64), (96, 96), (128, 96), (80, 20), (72, 6), (3, 2)]
)
@pytest.mark.parametrize("rope_layout", ["neox", "interleaved"])
def test_any_head(D: int, R: int, rope_layout: str, T: torch.dtype, device: str) -> None:
    """Heads of any size, of which all or part is rotated, in halves that need not be multiples of 16 bytes."""
    op = FusedQKNormRoPEFwdOp(3, 2, rope_layout=rope_layout)
    call = op.bind((5, 7 * D), (D,), (D,), (64, R), (5,), T=T, q_weight=T, cos_sin_cache=torch.float32)
    run_case(case_of(call, f"D={D},R={R},{rope_layout}"), device)


@pytest.mark.parametrize("heads", [1, 5, 7, 33, 64])
@pytest.mark.parametrize("heads_kv", [1, 8])
def test_any_number_of_heads(heads: int, heads_kv: int, device: str) -> None:
    op = FusedQKNormRoPEFwdOp(heads, heads_kv)
    shapes = (3, (heads + 2 * heads_kv) * 64), (64,), (64,), (9, 64), (3,)
    run_case(case_of(op.bind(*shapes, T=torch.float16), f"heads={heads},{heads_kv}"), device)


@pytest.mark.parametrize("T", DTYPES)
@pytest.mark.parametrize("pitch", [0, 3, 8])
def test_nothing_else_is_written(T: torch.dtype, pitch: int, device: str) -> None:
    """v, a last row that is not the call's, and what lies between rows, all of it NaN."""
    width = 4 * 64
    buffer = torch.full((6, width + pitch), float("nan"), device=device, dtype=T)
    buffer[:5, : 3 * 64] = normal(5, 3 * 64, device=device, dtype=T)
    before = buffer.clone()
    qkv = buffer[:5, :width]
    FusedQKNormRoPEFwdOp(2, 1)(qkv, *operands(64, 32, 5, device, T))
    bits = BITS[T.itemsize]
    assert torch.equal(buffer.view(bits)[:, 3 * 64 :], before.view(bits)[:, 3 * 64 :])
    assert torch.equal(buffer.view(bits)[5], before.view(bits)[5])
    assert qkv[:, : 3 * 64].isfinite().all()
    packed = before[:5, :width].contiguous()
    FusedQKNormRoPEFwdOp(2, 1)(packed, *operands(64, 32, 5, device, T))
    assert torch.equal(packed.view(bits), qkv.contiguous().view(bits))


@pytest.mark.parametrize("layout", [lambda x: x.t().contiguous().t(), lambda x: x.repeat_interleave(2, 1)[:, ::2]])
def test_elements_that_do_not_lie_side_by_side(layout: Any, device: str) -> None:
    qkv = normal(5, 4 * 64, device=device)
    odd = layout(qkv)
    for x in (qkv, odd):
        FusedQKNormRoPEFwdOp(2, 1)(x, *operands(64, 64, 5, device))
    assert torch.equal(odd, qkv)


def test_it_returns_nothing(device: str) -> None:
    qkv = normal(2, 4 * 64, device=device)
    assert FusedQKNormRoPEFwdOp(2, 1)(qkv, *operands(64, 64, 2, device)) is None


def test_a_token_alone_has_the_bits_it_has_in_a_batch(device: str) -> None:
    op, given = FusedQKNormRoPEFwdOp(8, 2), operands(128, 128, 300, device)
    qkv = normal(300, 12 * 128, device=device)
    whole = qkv.clone()
    op(whole, *given)
    for rows in (slice(0, 1), slice(17, 20), slice(299, 300), slice(4, 4)):
        alone = qkv[rows].clone()
        op(alone, *given[:3], given[3][rows])
        assert torch.equal(alone, whole[rows])


def test_no_tokens(device: str) -> None:
    shapes = (0, 4 * 64), (64,), (64,), (9, 64), (0,)
    run_case(case_of(FusedQKNormRoPEFwdOp(2, 1).bind(*shapes, T=torch.bfloat16), "empty"), device)


def test_a_gradient_is_refused(device: str) -> None:
    qkv = normal(2, 4 * 64, device=device).requires_grad_()
    with pytest.raises(TileOpsError, match="no gradient"):
        FusedQKNormRoPEFwdOp(2, 1)(qkv, *operands(64, 64, 2, device))


@pytest.mark.parametrize("bad", [-1, 64])
def test_positions_beyond_the_cache_are_found_on_demand(bad: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEOPS_DEBUG", "1")
    given = operands(64, 64, 2, device)
    given[3][1] = bad
    with pytest.raises(CheckError, match=r"positions.*indices from 0 to"):
        FusedQKNormRoPEFwdOp(2, 1, eps=3e-6)(normal(2, 4 * 64, device=device), *given)  # an op that has no plans yet


@pytest.mark.parametrize(
    ("params", "shapes", "message"),
    [
        ({}, [(3, 255), (64,), (64,), (9, 64), (3,)], r"qkv: got shape \(3, 255\)"),
        ({}, [(3, 256), (64,), (32,), (9, 64), (3,)], r"k_weight: got shape \(32,\)"),
        ({}, [(3, 256), (64,), (64,), (9, 64), (4,)], r"positions: got shape \(4,\)"),
        ({}, [(3, 256), (64,), (64,), (9, 63), (3,)], r"expected an even number of rotated elements"),
        ({}, [(3, 256), (64,), (64,), (9, 66), (3,)], r"expected an even number of rotated elements"),
        ({}, [(3, 256), (64,), (64,), (9, 0), (3,)], r"expected an even number of rotated elements"),
        ({}, [(3, 256), (64,), (64,), (0, 64), (3,)], r"expected at least one position"),
        ({"heads": 0}, [(3, 128), (64,), (64,), (9, 64), (3,)], r"expected at least one query head"),
        ({"eps": -1.0}, [(3, 256), (64,), (64,), (9, 64), (3,)], r"expected an eps that is not negative"),
        ({"rope_layout": "gptj"}, [(3, 256), (64,), (64,), (9, 64), (3,)], r"rope_layout.*gptj.*neox"),
    ],
)
def test_calls_that_do_not_fit(params: dict[str, Any], shapes: list[tuple[int, ...]], message: str) -> None:
    with pytest.raises(CheckError, match=message):
        FusedQKNormRoPEFwdOp(**{"heads": 2, "heads_kv": 1, **params}).bind(*shapes, T="bfloat16")


def test_dtypes_that_do_not_fit(device: str) -> None:
    qkv, given = normal(2, 4 * 64, device=device), operands(64, 64, 2, device)
    with pytest.raises(CheckError, match=r"positions: got int32, expected int64"):
        FusedQKNormRoPEFwdOp(2, 1)(qkv, *given[:3], given[3].int())
    with pytest.raises(CheckError, match=r"k_weight: got float32, expected bfloat16"):
        FusedQKNormRoPEFwdOp(2, 1)(qkv, given[0], given[1].float(), *given[2:])
