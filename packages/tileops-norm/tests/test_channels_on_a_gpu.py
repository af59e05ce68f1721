"""Group, instance and batch normalization on a GPU: right for every size and layout, and the same bits each time."""

from __future__ import annotations

import math
from itertools import zip_longest
from typing import Any

import pytest
import torch
from torch import Tensor

from tileops.core import accuracy, program
from tileops.core.op import Op
from tileops.core.torch_ops import checker_of
from tileops.core.workloads import cases, scaled
from tileops.norm import BatchNormBwdOp, BatchNormFwdOp, GroupNormFwdOp, InstanceNormFwdOp

pytestmark = pytest.mark.cuda

DEVICE = "cuda"
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
NAN = float("nan")
LAST = torch.channels_last


def normal(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=DEVICE).to(dtype)


def held(op: Op, *tensors: Tensor | None) -> Any:
    """The op's results, right, and those of tensors that it mutates too."""
    before = [None if t is None else t.clone() for t in tensors]
    returned = op(*tensors)
    call = op.bind(*tensors)
    results = accuracy.collect(call, returned, dict(zip_longest(call.inputs, tensors)))
    verdict = accuracy.verify(call, dict(zip_longest(call.inputs, before)), results)
    assert verdict.ok, str(verdict)
    return returned


def statistics(C: int) -> tuple[Tensor, Tensor]:
    return normal(C, dtype=F32, seed=5), normal(C, dtype=F32, seed=6).exp()


def steps(x: Tensor) -> list[int]:
    """The strides that say something."""
    return [stride for stride, n in zip(x.stride(), x.shape, strict=True) if n > 1]


def held_all(x: Tensor, groups: int) -> None:
    """All operators on x, and the backward with a gradient that lies as x does."""
    C = x.shape[1]
    weight, bias = normal(C, dtype=x.dtype, seed=1), normal(C, dtype=F32, seed=2)
    assert steps(held(GroupNormFwdOp(groups), x, weight, bias)) == steps(torch.empty_like(x))
    if math.prod(x.shape[2:]) > 1:
        held(InstanceNormFwdOp(), x, *statistics(C), weight, bias)
        held(InstanceNormFwdOp(), x, None, None, None, bias)
    held(InstanceNormFwdOp(use_input_stats=False), x, *statistics(C), weight, bias)
    held(BatchNormFwdOp(), x, *statistics(C), weight, bias)
    _, mean, rstd = held(BatchNormFwdOp(training=True, return_stats=True), x, *statistics(C), weight, bias)
    dy = torch.empty_like(x).copy_(normal(*x.shape, dtype=x.dtype, seed=3))
    dx, _, _ = held(BatchNormBwdOp(), dy, x, weight, mean, rstd, bias)
    assert steps(dx) == steps(torch.empty_like(x))


def rows_of(op: type[Op]) -> list[Any]:
    return [
        pytest.param(op, row, case, id="-".join([op.__name__, row.label, *case.values()]))
        for row in op.entry.workloads
        for case in cases(row)
    ]


@pytest.mark.parametrize(
    ("op", "row", "case"), [p for op in (GroupNormFwdOp, BatchNormFwdOp, InstanceNormFwdOp) for p in rows_of(op)]
)
def test_rows_of_both_layouts(op: Any, row: Any, case: Any) -> None:
    call = scaled(checker_of(op.entry), row, case, math.inf, 2**29)
    tensors = [
        None if m is None else normal(*m.shape, dtype=getattr(torch, m.dtype), seed=i)
        for i, m in enumerate(call.inputs.values())
    ]
    var = list(call.inputs).index("running_var") if call.inputs.get("running_var") else None
    if var is not None:
        tensors[var] = tensors[var].exp()
    held(op(**call.params), *tensors)
    if tensors[0].dim() == 4:
        held(op(**call.params), tensors[0].to(memory_format=LAST), *tensors[1:])


@pytest.mark.parametrize(("i", "L"), [*enumerate([(2,), (3, 3), (7, 7), (30, 30), (33, 35), (64, 64), (257, 255)])])
@pytest.mark.parametrize(("j", "C", "groups"), [(0, 1, 1), (1, 15, 5), (2, 32, 8), (3, 96, 4), (4, 48, 48)])
def test_any_size(i: int, j: int, C: int, groups: int, L: tuple[int, ...]) -> None:
    dtype = (F32, F16, BF16)[(i + j) % 3]
    held_all(normal(3, C, *L, dtype=dtype), groups)
    if len(L) == 2:
        held_all(normal(3, C, *L, dtype=dtype).to(memory_format=LAST), groups)


@pytest.mark.parametrize(
    ("B", "C", "groups"),
    [(2, 3, 1), (31, 66, 11), (32, 64, 8), (33, 64, 16), (64, 64, 4), (70_000, 20, 5), (3, 4096, 32)],
)
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_without_positions(B: int, C: int, groups: int, dtype: torch.dtype) -> None:
    held_all(normal(B, C, dtype=dtype), groups)


def _spread(x: Tensor) -> Tensor:
    buffer = torch.full((x.shape[0] + 1, x.shape[1] + 5, *x.shape[2:]), NAN, dtype=x.dtype, device=x.device)
    view = buffer[1:, 2:-3]
    return view.copy_(x)


LAYOUTS = {
    "channels-sliced": _spread,
    "channels-last-sliced": lambda x: _spread(x.to(memory_format=LAST)).to(memory_format=LAST),
    "channels-last-cropped": lambda x: torch.cat([x, x], 2).to(memory_format=LAST)[:, :, : x.shape[2]],
    "permuted": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "transposed": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "expanded": lambda x: x[:1].expand(x.shape),
    "every-other": lambda x: x.repeat_interleave(2, dim=-1)[..., ::2],
    "misaligned": lambda x: torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides(layout: str) -> None:
    held_all(LAYOUTS[layout](normal(4, 32, 9, 14)), 8)


def test_one_program_serves_all_batches_of_a_bucket() -> None:
    x = normal(16, 32, 9, 9)
    held_all(x[:3], 8)
    before = program.compilations, len(program._programs)
    for B in (2, 5, 11, 16):
        held_all(x[:B], 8)
    assert (program.compilations, len(program._programs)) == before


@pytest.mark.semantics("GroupNormFwdOp", "batch-invariant", "row-isolation")
@pytest.mark.semantics("InstanceNormFwdOp", "batch-invariant", "row-isolation")
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, LAST])
@pytest.mark.parametrize("L", [(7, 7), (32, 32), (128, 128), (512, 520)])
def test_an_instance_alone_has_the_bits_it_has_in_a_batch(
    L: tuple[int, int], memory_format: torch.memory_format
) -> None:
    x = normal(9, 32, *L).to(memory_format=memory_format)
    for op in (GroupNormFwdOp(8), InstanceNormFwdOp()):
        y = op(x)
        for some in (slice(0, 1), slice(4, 7), slice(8, 9)):
            assert torch.equal(op(x[some].clone(memory_format=memory_format)), y[some])
        spoilt = x.clone()
        spoilt[3, 5, 2, 3] = NAN
        others = [0, 1, 2, *range(4, 9)]
        assert torch.equal(op(spoilt)[others], y[others])
        assert torch.equal(op(spoilt)[3, 8:], y[3, 8:])
        assert op(spoilt)[3, 5].isnan().all()


@pytest.mark.semantics("BatchNormFwdOp", "deterministic")
@pytest.mark.semantics("BatchNormBwdOp", "deterministic")
@pytest.mark.semantics("InstanceNormFwdOp", "deterministic")
@pytest.mark.parametrize("shape", [(64, 64), (8, 64, 56, 56), (4, 16, 512, 512)])
def test_the_same_bits_each_time(shape: tuple[int, ...]) -> None:
    """Running statistics too, which a race would change now and then."""
    x, dy, C = normal(*shape), normal(*shape, seed=1), shape[1]
    ops: list[Any] = [BatchNormFwdOp(training=True)] + ([InstanceNormFwdOp()] if len(shape) > 2 else [])
    for op in ops:
        expected = statistics(C)
        y = held(op, x, *expected)
        for _ in range(20):
            got = statistics(C)
            assert torch.equal(op(x, *got), y)
            assert torch.equal(got[0], expected[0])
            assert torch.equal(got[1], expected[1])
    _, mean, rstd = BatchNormFwdOp(training=True, return_stats=True)(x)
    one = torch.ones_like(mean)
    gradients = held(BatchNormBwdOp(), dy, x, one, mean, rstd, one)
    for _ in range(20):
        assert all(map(torch.equal, BatchNormBwdOp()(dy, x, one, mean, rstd, one), gradients))


@pytest.mark.semantics("GroupNormFwdOp", "safe-variance")
@pytest.mark.semantics("BatchNormFwdOp", "safe-variance")
@pytest.mark.semantics("InstanceNormFwdOp", "safe-variance")
@pytest.mark.parametrize("n", [64, 1000, 40_000])
def test_values_far_from_zero(n: int) -> None:
    x = 80_000 + normal(4, 8, n, dtype=F32)
    held(GroupNormFwdOp(2), x, None, None)
    held(InstanceNormFwdOp(), x, *statistics(8), None, None)
    held(BatchNormFwdOp(training=True), x, *statistics(8), None, None)
    same, bias = torch.full((4, 8, n), 1234.0, device=DEVICE), normal(8, dtype=F32)
    for op in (GroupNormFwdOp(2), InstanceNormFwdOp(), BatchNormFwdOp(training=True)):
        given = (None, bias) if isinstance(op, GroupNormFwdOp) else (None, None, None, bias)
        assert torch.equal(op(same, *given), bias[:, None].expand(4, 8, n))
    assert GroupNormFwdOp(2)(torch.full((2, 8, n), 1e30, device=DEVICE)).abs().max() == 0


@pytest.mark.parametrize("n", [2, 12, 3000, 40_000])
@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, LAST])
def test_equal_values_are_their_own_mean(n: int, dtype: torch.dtype, memory_format: torch.memory_format) -> None:
    """A rounding of the mean would be divided by the root of eps."""
    values = torch.tensor([1234.1, -0.1, 0.0, 1276.0, 3.98, 2.0, 1.0, -1000.1], device=DEVICE).to(dtype)
    x = values[:, None, None].expand(3, 8, n, 1).to(memory_format=memory_format, copy=True)
    running = statistics(8)
    blended = 0.9 * running[0] + 0.1 * values.float()
    for op in (GroupNormFwdOp(8), InstanceNormFwdOp(), BatchNormFwdOp(training=True)):
        given = running if isinstance(op, BatchNormFwdOp) else [None] * (2 - 2 * isinstance(op, GroupNormFwdOp))
        assert held(op, x, *given, None, None).abs().max() == 0
    torch.testing.assert_close(running[0], blended, rtol=1e-6, atol=1e-6)


def test_inputs_stay_as_they_are() -> None:
    x, weight = normal(5, 12, 33), normal(12, seed=1)
    before = x.clone(), weight.clone()
    held_all(x, 3)
    held(GroupNormFwdOp(3), x, weight, weight)
    assert torch.equal(x, before[0])
    assert torch.equal(weight, before[1])


def test_autograd_in_training() -> None:
    leaves = [normal(9, 48, 35, dtype=F32), normal(48, dtype=F32, seed=1), normal(48, dtype=F32, seed=2)]
    dy = normal(9, 48, 35, dtype=F32, seed=3)
    ours, wide = ([t.detach().to(d, copy=True).requires_grad_() for t in leaves] for d in (F32, torch.float64))
    BatchNormFwdOp(training=True)(ours[0], *statistics(48), *ours[1:]).backward(dy)
    torch.nn.functional.batch_norm(wide[0], None, None, *wide[1:], training=True).backward(dy.double())
    for got, exact in zip(ours, wide, strict=True):
        torch.testing.assert_close(got.grad.double(), exact.grad, rtol=1e-4, atol=1e-4)
