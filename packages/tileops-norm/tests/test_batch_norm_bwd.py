"""BatchNormBwdOp through its front door: every case that its entry gives, layouts, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tileops.core.errors import CheckError
from tileops.core.testing import Case, TorchCase, assert_right, run_case, run_torch_case
from tileops.norm import BatchNormBwdOp, BatchNormFwdOp

pytestmark = pytest.mark.op("BatchNormBwdOp")

NAN = float("nan")


def test_rows(workload_case: Case, device: str) -> None:
    run_case(workload_case, device)


def test_edges(edge_case: Case, device: str) -> None:
    run_case(edge_case, device)


def test_torch(torch_case: TorchCase, device: str) -> None:
    run_torch_case(torch_case, device)


def normal(*shape: int, device: str = "cpu", dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def calls(*shape: int, device: str, dtype: torch.dtype = torch.bfloat16, **memory: Any) -> list[Tensor]:
    """dy, x, weight, the forward's mean and rstd, and a bias of another dtype."""
    x, weight = normal(*shape, device=device, dtype=dtype).to(**memory), normal(shape[1], device=device, dtype=dtype)
    _, mean, rstd = BatchNormFwdOp(training=True, return_stats=True)(x)
    return [normal(*shape, device=device, dtype=dtype, seed=1).to(**memory), x, weight, mean, rstd, weight.float()]


@pytest.mark.semantics("BatchNormBwdOp", "layout")
def test_channels_last_stays_channels_last(device: str) -> None:
    given = calls(2, 32, 6, 10, device=device, memory_format=torch.channels_last)
    dx, _, _ = assert_right(BatchNormBwdOp(), *given)
    assert dx.stride() == given[1].stride()
    given[0] = given[0].contiguous()
    assert assert_right(BatchNormBwdOp(), *given)[0].stride() == given[1].stride()


@pytest.mark.semantics("BatchNormBwdOp", "deterministic")
@pytest.mark.parametrize("shape", [(32, 64), (64, 16, 31, 7), (4, 3, 30_001)])
def test_the_same_bits_each_time(shape: tuple[int, ...], device: str) -> None:
    given = calls(*shape, device=device)
    expected = assert_right(BatchNormBwdOp(), *given)
    for _ in range(20):
        assert all(map(torch.equal, BatchNormBwdOp()(*given), expected))


@pytest.mark.semantics("BatchNormBwdOp", "row-isolation")
def test_a_bad_channel_leaves_the_others_alone(device: str) -> None:
    given = calls(3, 32, 5, 7, device=device)
    clean = BatchNormBwdOp()(*given)
    given[0][1, 13, 2, 2] = NAN
    others = [c for c in range(32) if c != 13]
    dx, dweight, dbias = BatchNormBwdOp()(*given)
    assert torch.equal(dx[:, others], clean[0][:, others])
    assert torch.equal(dweight[others], clean[1][others])
    assert torch.equal(dbias[others], clean[2][others])
    assert dx[:, 13].isnan().all()


@pytest.mark.semantics("BatchNormBwdOp", "rounding")
@pytest.mark.parametrize("weight", [None, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bias", [None, torch.bfloat16, torch.float32])
def test_each_gradient_is_like_what_it_is_of(weight: Any, bias: Any, device: str) -> None:
    dy, x, _, mean, rstd, _ = calls(64, 16, 9, device=device)
    given = [None if dtype is None else normal(16, device=device, dtype=dtype) for dtype in (weight, bias)]
    got = assert_right(BatchNormBwdOp(), dy, x, given[0], mean, rstd, given[1])
    got = (got,) if weight is bias is None else got
    assert [g.dtype for g in got] == [torch.bfloat16, *(t.dtype for t in given if t is not None)]
    leaf = torch.zeros(16, device=device, requires_grad=True)  # whose gradient is rounded to nothing narrower
    BatchNormFwdOp(training=True)(x, None, None, given[0], leaf).backward(dy)
    torch.testing.assert_close(leaf.grad, dy.float().sum((0, 2)), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([(1, 8), (1, 8), None, (8,), (8,)], r"expected more than one value per channel"),
        ([(2, 8), (3, 8), None, (8,), (8,)], r"x: got shape \(3, 8\)"),
        ([(2, 8), (2, 8), (7,), (8,), (8,)], r"weight: got shape \(7,\)"),
        ([(2, 8), (2, 8), None, (8,), (2,)], r"rstd: got shape \(2,\)"),
    ],
)
def test_calls_that_do_not_fit(shapes: list[Any], message: str) -> None:
    with pytest.raises(CheckError, match=message):
        BatchNormBwdOp().bind(*shapes, T="float16", weight="float16")
