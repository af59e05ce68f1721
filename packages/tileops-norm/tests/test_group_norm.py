"""GroupNormFwdOp through its front door: every case that its entry gives, layouts, and inputs that broke others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tileops.core.errors import CheckError
from tileops.core.testing import Case, TorchCase, assert_right, run_case, run_torch_case
from tileops.norm import GroupNormFwdOp

pytestmark = pytest.mark.op("GroupNormFwdOp")

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NAN = float("nan")


def test_rows(workload_case: Case, device: str) -> None:
    run_case(workload_case, device)


def test_edges(edge_case: Case, device: str) -> None:
    run_case(edge_case, device)


def test_torch(torch_case: TorchCase, device: str) -> None:
    run_torch_case(torch_case, device)


def normal(*shape: int, device: str = "cpu", dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


@pytest.mark.parametrize("T", DTYPES)
@pytest.mark.parametrize(("C", "groups"), [(32, 32), (32, 8), (48, 4), (15, 5), (96, 1), (6, 6)])
@pytest.mark.parametrize("L", [(2,), (49,), (16, 16), (3, 5, 7)])
def test_any_shape(C: int, groups: int, L: tuple[int, ...], T: torch.dtype, device: str) -> None:
    weight, bias = normal(C, device=device, dtype=T, seed=1), normal(C, device=device, seed=2, dtype=torch.float32)
    assert_right(GroupNormFwdOp(groups), normal(3, C, *L, device=device, dtype=T), weight, bias)


@pytest.mark.semantics("GroupNormFwdOp", "layout")
@pytest.mark.parametrize("groups", [1, 8, 32])
def test_channels_last_stays_channels_last(groups: int, device: str) -> None:
    x = normal(2, 32, 6, 10, device=device).to(memory_format=torch.channels_last)
    y = assert_right(GroupNormFwdOp(groups), x, normal(32, device=device, seed=1), None)
    assert y.stride() == x.stride()
    half = x[:, :16]  # every other run of 16 channels: as empty_like does, y lies without gaps
    y = assert_right(GroupNormFwdOp(min(groups, 16)), half)
    assert y.stride() == torch.empty_like(half).stride()


@pytest.mark.semantics("GroupNormFwdOp", "batch-invariant")
@pytest.mark.parametrize("shape", [(9, 32, 31, 7), (5, 16, 4096), (4, 8, 70_001)])
def test_an_instance_alone_has_the_bits_it_has_in_a_batch(shape: tuple[int, ...], device: str) -> None:
    x, op = normal(*shape, device=device), GroupNormFwdOp(4)
    y = op(x, normal(shape[1], device=device, seed=1))
    for some in (slice(0, 1), slice(1, 3), slice(-1, None), slice(2, 2)):
        assert torch.equal(op(x[some], normal(shape[1], device=device, seed=1)), y[some])


@pytest.mark.semantics("GroupNormFwdOp", "row-isolation")
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_bad_group_leaves_the_others_alone(memory_format: torch.memory_format, device: str) -> None:
    x, op = normal(3, 32, 5, 7, device=device).to(memory_format=memory_format), GroupNormFwdOp(8)
    clean = op(x)
    x[1, 13, 2, 2] = NAN
    y = op(x)
    assert y[1, 12:16].isnan().all()
    y[1, 12:16] = clean[1, 12:16]
    assert torch.equal(y, clean)


@pytest.mark.semantics("GroupNormFwdOp", "safe-variance")
def test_values_far_from_zero(device: str) -> None:
    x = torch.tensor([[40000.0, 40001.0, 40002.0, 40003.0], [8e4, 8e4 + 1, 8e4 + 2, 8e4 + 3]], device=device)
    assert_right(GroupNormFwdOp(1), x)
    y = GroupNormFwdOp(2)(torch.full((2, 4, 64), 1234.0, device=device), None, torch.arange(4.0, device=device))
    assert torch.equal(y, torch.arange(4.0, device=device)[:, None].expand(2, 4, 64))


def test_the_input_is_still_what_it_was(device: str) -> None:
    x = normal(2, 8, 9, device=device, dtype=torch.float32)
    before = x.clone()
    GroupNormFwdOp(2)(x, x[0, :, 0].clone()).zero_()
    assert torch.equal(x, before)


@pytest.mark.parametrize(
    ("params", "x", "weight", "message"),
    [
        ({"num_groups": 3}, (2, 8, 4), None, r"num_groups = 3.*divides into groups evenly"),
        ({"num_groups": 0}, (2, 8, 4), None, r"num_groups = 0.*at least one group"),
        ({"num_groups": 2}, (8,), None, r"x: got rank 1"),
        ({"num_groups": 2}, (2, 8, 4), (4,), r"weight: got shape \(4,\), expected .*8"),
        ({"num_groups": 2, "eps": -1.0}, (2, 8, 4), None, r"eps = -1.0, expected an eps that is not negative"),
    ],
)
def test_calls_that_do_not_fit(
    params: dict[str, Any], x: tuple[int, ...], weight: tuple[int, ...] | None, message: str, device: str
) -> None:
    with pytest.raises(CheckError, match=message):
        GroupNormFwdOp(**params)(normal(*x, device=device), normal(*weight, device=device) if weight else None)
