"""What every normalization makes of values that are far from one, far from zero, or all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tileops.core.testing import assert_right
from tileops.norm import (
    AdaLayerNormFwdOp,
    AdaLayerNormZeroFwdOp,
    BatchNormFwdOp,
    FusedAddLayerNormFwdOp,
    FusedAddRMSNormFwdOp,
    FusedAddRMSNormQuantFwdOp,
    FusedQKNormRoPEFwdOp,
    GatedRMSNormFwdOp,
    GroupNormFwdOp,
    InstanceNormFwdOp,
    LayerNormFwdOp,
    RMSNormFwdOp,
)

N, C = 1000, 32
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16

# By operator: the shape of x, the op, and its other inputs: as long as a row, as many as channels, like x, or zeros.
OPS: dict[str, tuple[tuple[int, ...], Any, str]] = {
    "RMSNormFwdOp": ((6, N), RMSNormFwdOp(N, return_rstd=True), "row"),
    "LayerNormFwdOp": ((6, N), LayerNormFwdOp(N, return_stats=True), "row row"),
    "FusedAddRMSNormFwdOp": ((6, N), FusedAddRMSNormFwdOp(return_rstd=True), "zeros row"),
    "FusedAddLayerNormFwdOp": ((6, N), FusedAddLayerNormFwdOp(return_stats=True), "zeros row row"),
    "FusedAddRMSNormQuantFwdOp": ((6, N), FusedAddRMSNormQuantFwdOp(), "zeros row"),
    "AdaLayerNormFwdOp": ((6, N), AdaLayerNormFwdOp(), "like like"),
    "AdaLayerNormZeroFwdOp": ((6, N), AdaLayerNormZeroFwdOp(), "like like like"),
    "GatedRMSNormFwdOp": ((6, N), GatedRMSNormFwdOp(), "like row"),
    "GroupNormFwdOp": ((6, C, 50), GroupNormFwdOp(C // 4), "channels channels"),
    "InstanceNormFwdOp": ((6, C, 50), InstanceNormFwdOp(), "none none channels channels"),
    "BatchNormFwdOp": ((6, C, 50), BatchNormFwdOp(training=True, return_stats=True), "none none channels channels"),
}
pytestmark = pytest.mark.op(*OPS, "FusedQKNormRoPEFwdOp")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def others(shape: tuple[int, ...], kinds: str, T: torch.dtype, device: str) -> list[Tensor | None]:
    made: dict[str, Callable[[int], Tensor | None]] = {
        "row": lambda i: normal(N, seed=i),
        "channels": lambda i: normal(C, seed=i),
        "like": lambda i: normal(*shape, seed=i),
        "zeros": lambda i: torch.zeros(shape),
        "none": lambda i: None,
    }
    tensors = [made[kind](i) for i, kind in enumerate(kinds.split(), 1)]
    return [None if t is None else t.to(device, T) for t in tensors]


VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "at-the-end-of-float16": lambda x: x.sign() * (60000 + 1000 * x.abs().clamp(max=5)),
    "of-mean-1e4": lambda x: 1e4 + 0.1 * x,
    "of-mean-1000": lambda x: 1000 + 0.3 * x,
    "far-from-their-first": lambda x: x.index_fill(1, torch.tensor([0]), 30000.0),
    "the-same-1234": lambda x: torch.full_like(x, 1234.0),
    "the-same-3.3": lambda x: torch.full_like(x, 3.3),
    "the-same-1e-7": lambda x: torch.full_like(x, 1e-7),
}


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("T", [F32, F16, BF16])
@pytest.mark.parametrize("name", OPS)
def test_values(name: str, T: torch.dtype, values: str, device: str) -> None:
    shape, op, kinds = OPS[name]
    x = VALUES[values](normal(*shape)).to(device, T)
    returned = assert_right(op, x, *others(shape, kinds, T, device))
    for y in returned if isinstance(returned, tuple) else (returned,):
        assert y.double().isfinite().all()


@pytest.mark.parametrize("values", ["of-mean-1000", "far-from-their-first", "the-same-3.3"])
@pytest.mark.parametrize("op", [LayerNormFwdOp(300001, return_stats=True), AdaLayerNormFwdOp()], ids=str)
def test_values_of_rows_that_no_cluster_holds(op: Any, values: str, device: str) -> None:
    x = VALUES[values](normal(2, 300001)).to(device)
    assert_right(op, x, *(normal(300001, seed=i).to(device) for i in (1, 2)))


@pytest.mark.semantics("RMSNormFwdOp", "range")
@pytest.mark.semantics("LayerNormFwdOp", "range")
@pytest.mark.semantics("FusedAddRMSNormFwdOp", "range")
@pytest.mark.semantics("FusedAddLayerNormFwdOp", "range")
@pytest.mark.semantics("FusedAddRMSNormQuantFwdOp", "range")
@pytest.mark.semantics("AdaLayerNormFwdOp", "range")
@pytest.mark.semantics("AdaLayerNormZeroFwdOp", "range")
@pytest.mark.semantics("GatedRMSNormFwdOp", "range")
@pytest.mark.semantics("GroupNormFwdOp", "range")
@pytest.mark.semantics("InstanceNormFwdOp", "range")
@pytest.mark.semantics("BatchNormFwdOp", "range")
@pytest.mark.parametrize("T", [F32, BF16])
@pytest.mark.parametrize("name", OPS)
def test_squares_beyond_float32(name: str, T: torch.dtype, device: str) -> None:
    shape, op, kinds = OPS[name]
    x = (1e30 * normal(*shape)).to(device, T)
    results, zeros = (op(t, *others(shape, kinds, T, device)) for t in (x, torch.zeros_like(x)))
    if "rstd" in op.entry.signature.outputs:
        assert results[-1].eq(0).all()
    if isinstance(results, tuple):
        results, zeros = results[0], zeros[0]
    assert torch.equal(results.double(), zeros.double())


@pytest.mark.semantics("FusedQKNormRoPEFwdOp", "range")
@pytest.mark.parametrize("T", [F32, BF16])
def test_squares_beyond_float32_in_heads(T: torch.dtype, device: str) -> None:
    op, (weight, table) = FusedQKNormRoPEFwdOp(2, 1), (normal(64), normal(9, 64))
    before = (1e30 * normal(5, 4 * 64)).to(device, T)
    qkv = before.clone()
    op(qkv, *(t.to(device, T) for t in (weight, weight, table)), torch.arange(5, device=device))
    assert (qkv[:, : 3 * 64] == 0).all()
    assert torch.equal(qkv[:, 3 * 64 :], before[:, 3 * 64 :])
