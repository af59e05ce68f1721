"""BatchNormFwdOp through its front door: every case that its entry gives, running statistics, layouts, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tileops.core.errors import CheckError
from tileops.core.testing import Case, TorchCase, assert_right, run_case, run_torch_case
from tileops.norm import BatchNormFwdOp

pytestmark = pytest.mark.op("BatchNormFwdOp")

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


@pytest.mark.semantics("BatchNormFwdOp", "deterministic")
@pytest.mark.parametrize("shape", [(32, 64), (64, 16, 31, 7), (4, 3, 30_001)])
def test_running_statistics_are_the_same_bits_each_time(shape: tuple[int, ...], device: str) -> None:
    """Where several threads move one running statistic, it comes out different now and then."""
    x, op = normal(*shape, device=device), BatchNormFwdOp(training=True)
    expected = running(shape[1], device)
    y = assert_right(op, x, *expected)
    for _ in range(20):
        got = running(shape[1], device)
        assert torch.equal(op(x, *got), y)
        assert torch.equal(got[0], expected[0])
        assert torch.equal(got[1], expected[1])


@pytest.mark.semantics("BatchNormFwdOp", "running-statistics")
def test_running_statistics_move_in_training_only(device: str) -> None:
    x, (mean, var) = normal(8, 4, 5, device=device), running(4, device)
    before = mean.clone(), var.clone()
    BatchNormFwdOp()(x, mean, var)
    assert torch.equal(mean, before[0])
    assert torch.equal(var, before[1])
    BatchNormFwdOp(training=True, momentum=1.0)(x, mean, var)
    wide = x.double().transpose(0, 1).flatten(1)
    torch.testing.assert_close(mean.double(), wide.mean(1), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(var.double(), wide.var(1), rtol=1e-5, atol=1e-6)


@pytest.mark.semantics("BatchNormFwdOp", "layout")
@pytest.mark.parametrize("training", [True, False])
def test_channels_last_stays_channels_last(training: bool, device: str) -> None:
    x = normal(2, 32, 6, 10, device=device).to(memory_format=torch.channels_last)
    y = assert_right(BatchNormFwdOp(training=training), x, *running(32, device), normal(32, device=device), None)
    assert y.stride() == x.stride()


@pytest.mark.semantics("BatchNormFwdOp", "row-isolation")
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_bad_channel_leaves_the_others_alone(memory_format: torch.memory_format, device: str) -> None:
    x, op = normal(3, 32, 5, 7, device=device).to(memory_format=memory_format), BatchNormFwdOp(training=True)
    clean = op(x)
    x[1, 13, 2, 2] = NAN
    y, others = op(x), [c for c in range(32) if c != 13]
    assert torch.equal(y[:, others], clean[:, others])
    assert y[:, 13].isnan().all()


@pytest.mark.semantics("BatchNormFwdOp", "safe-variance")
def test_values_far_from_zero(device: str) -> None:
    x = torch.tensor([[4e4, 8e4], [4e4 + 1, 8e4 + 1], [4e4 + 2, 8e4 + 2], [4e4 + 3, 8e4 + 3]], device=device)
    assert_right(BatchNormFwdOp(training=True), x)
    y = BatchNormFwdOp(training=True)(torch.full((64, 4), 1234.0, device=device), None, None, None, x[:, 0].clone())
    assert torch.equal(y, x[:, 0].expand(64, 4))


def test_autograd_in_training(device: str) -> None:
    leaves = [normal(*s, device=device, dtype=torch.float32, seed=i) for i, s in enumerate([(9, 4, 5), (4,), (4,)])]
    dy = normal(9, 4, 5, device=device, dtype=torch.float32, seed=9)
    ours, wide = (
        [t.detach().to(d, copy=True).requires_grad_() for t in leaves] for d in (torch.float32, torch.float64)
    )
    statistics = running(4, device)
    BatchNormFwdOp(training=True)(ours[0], *statistics, *ours[1:]).backward(dy)
    torch.nn.functional.batch_norm(wide[0], None, None, *wide[1:], training=True).backward(dy.double())
    for got, exact in zip(ours, wide, strict=True):
        torch.testing.assert_close(got.grad.double(), exact.grad, rtol=1e-4, atol=1e-5)
    assert not torch.equal(statistics[0], running(4, device)[0])


@pytest.mark.parametrize(
    ("params", "x", "statistics", "message"),
    [
        ({}, (2, 8, 4), False, r"expected running statistics, or training"),
        ({"training": True}, (1, 8), False, r"expected more than one value per channel"),
        ({"training": True}, (1, 8, 1, 1), True, r"expected more than one value per channel"),
        ({"training": True}, (0, 8, 4), True, r"expected more than one value per channel"),
        ({"eps": -1.0}, (2, 8, 4), True, r"eps = -1.0, expected an eps that is not negative"),
        ({}, (8,), True, r"x: got rank 1"),
    ],
)
def test_calls_that_do_not_fit(
    params: dict[str, Any], x: tuple[int, ...], statistics: bool, message: str, device: str
) -> None:
    with pytest.raises(CheckError, match=message):
        BatchNormFwdOp(**params)(normal(*x, device=device), *(running(8, device) if statistics else ()))


def test_running_statistics_come_together(device: str) -> None:
    x, (mean, var) = normal(2, 8, device=device), running(8, device)
    with pytest.raises(CheckError, match=r"running_var: got None"):
        BatchNormFwdOp()(x, mean)
    with pytest.raises(CheckError, match=r"running_var: got .*expected None"):
        BatchNormFwdOp(training=True)(x, None, var)
