"""InstanceNormFwdOp through its front door: every case that its entry gives, running statistics, layouts, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tileops.core.errors import CheckError
from tileops.core.testing import Case, TorchCase, assert_right, run_case, run_torch_case
from tileops.norm import InstanceNormFwdOp

pytestmark = pytest.mark.op("InstanceNormFwdOp")

NAN = float("nan")


def test_rows(workload_case: Case, device: str) -> None:
    run_case(workload_case, device)


def test_edges(edge_case: Case, device: str) -> None:
    run_case(edge_case, device)


def test_torch(torch_case: TorchCase, device: str) -> None:
    run_torch_case(torch_case, device)


def normal(*shape: int, device: str = "cpu", dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def running(C: int, device: str) -> tuple[Tensor, Tensor]:
    return normal(C, device=device, dtype=torch.float32, seed=3), normal(C, device=device, dtype=torch.float32).exp()


@pytest.mark.semantics("InstanceNormFwdOp", "deterministic")
@pytest.mark.parametrize("shape", [(64, 16, 31, 7), (4, 3, 30_001)])
def test_running_statistics_are_the_same_bits_each_time(shape: tuple[int, ...], device: str) -> None:
    x, op = normal(*shape, device=device), InstanceNormFwdOp()
    expected = running(shape[1], device)
    y = assert_right(op, x, *expected)
    for _ in range(20):
        got = running(shape[1], device)
        assert torch.equal(op(x, *got), y)
        assert torch.equal(got[0], expected[0])
        assert torch.equal(got[1], expected[1])


@pytest.mark.semantics("InstanceNormFwdOp", "running-statistics")
def test_running_statistics_move_with_those_of_x_only(device: str) -> None:
    x, (mean, var) = normal(8, 4, 5, device=device), running(4, device)
    before = mean.clone(), var.clone()
    InstanceNormFwdOp(use_input_stats=False)(x, mean, var)
    assert torch.equal(mean, before[0])
    assert torch.equal(var, before[1])
    InstanceNormFwdOp(momentum=1.0)(x, mean, var)
    torch.testing.assert_close(mean.double(), x.double().mean(-1).mean(0), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(var.double(), x.double().var(-1).mean(0), rtol=1e-5, atol=1e-6)


@pytest.mark.semantics("InstanceNormFwdOp", "layout")
@pytest.mark.parametrize("use_input_stats", [True, False])
def test_channels_last_stays_channels_last(use_input_stats: bool, device: str) -> None:
    x = normal(2, 32, 6, 10, device=device).to(memory_format=torch.channels_last)
    op = InstanceNormFwdOp(use_input_stats=use_input_stats)
    assert assert_right(op, x, *running(32, device), normal(32, device=device), None).stride() == x.stride()


@pytest.mark.semantics("InstanceNormFwdOp", "batch-invariant")
@pytest.mark.parametrize("shape", [(9, 32, 31, 7), (5, 16, 4096), (4, 8, 70_001)])
def test_an_instance_alone_has_the_bits_it_has_in_a_batch(shape: tuple[int, ...], device: str) -> None:
    x, op = normal(*shape, device=device), InstanceNormFwdOp()
    y = op(x)
    for some in (slice(0, 1), slice(1, 3), slice(-1, None), slice(2, 2)):
        assert torch.equal(op(x[some]), y[some])
    assert torch.equal(op(x[1:3], *running(shape[1], device)), y[1:3])


@pytest.mark.semantics("InstanceNormFwdOp", "row-isolation")
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_bad_channel_leaves_the_others_alone(memory_format: torch.memory_format, device: str) -> None:
    x, op = normal(3, 32, 5, 7, device=device).to(memory_format=memory_format), InstanceNormFwdOp()
    clean = op(x)
    x[1, 13, 2, 2] = NAN
    y = op(x)
    assert y[1, 13].isnan().all()
    y[1, 13] = clean[1, 13]
    assert torch.equal(y, clean)


@pytest.mark.semantics("InstanceNormFwdOp", "safe-variance")
def test_values_far_from_zero(device: str) -> None:
    x = torch.tensor([[[4e4, 4e4 + 1, 4e4 + 2, 4e4 + 3], [8e4, 8e4 + 1, 8e4 + 2, 8e4 + 3]]], device=device)
    assert_right(InstanceNormFwdOp(), x)
    y = InstanceNormFwdOp()(torch.full((2, 3, 64), 1234.0, device=device))
    assert torch.equal(y, torch.zeros(2, 3, 64, device=device))


@pytest.mark.parametrize(
    ("params", "x", "statistics", "message"),
    [
        ({"use_input_stats": False}, (2, 8, 4), False, r"expected running statistics, or use_input_stats"),
        ({}, (2, 8), False, r"expected more than one value per channel"),
        ({}, (2, 8, 1, 1), True, r"expected more than one value per channel"),
        ({}, (0, 8, 4), True, r"expected values to take the new running statistics of"),
        ({"eps": -1.0}, (2, 8, 4), True, r"eps = -1.0, expected an eps that is not negative"),
    ],
)
def test_calls_that_do_not_fit(
    params: dict[str, Any], x: tuple[int, ...], statistics: bool, message: str, device: str
) -> None:
    with pytest.raises(CheckError, match=message):
        InstanceNormFwdOp(**params)(normal(*x, device=device), *(running(8, device) if statistics else ()))
