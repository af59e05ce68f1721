"""The SM90 kernels of group, instance and batch normalization: dispatch, how sets lie, and that they work on a GPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tileops.core import accuracy, program
from tileops.core.backend import cuda, gpu
from tileops.core.check import Call
from tileops.core.kernel import H200, static_of
from tileops.core.op import Op
from tileops.core.testing.programs import recipes as kit_recipes
from tileops.core.torch_ops import checker_of
from tileops.core.workloads import cases, scaled
from tileops.norm import BatchNormBwdOp, BatchNormFwdOp, GroupNormFwdOp, InstanceNormFwdOp
from tileops.norm.kernels import set_norm
from tileops.norm.kernels.group_norm import GroupNormHeld, GroupNormWalk, sets_in
from tileops.norm.kernels.rows import MAX_CLUSTER, WARP
from tileops.norm.kernels.sets import Sets, sets_of

DEVICE = "cuda"
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
NAN = float("nan")
LAST = torch.channels_last
OPS = [GroupNormFwdOp, BatchNormFwdOp, BatchNormBwdOp, InstanceNormFwdOp]


def meta(
    *shape: int, dtype: torch.dtype = BF16, memory_format: torch.memory_format = torch.contiguous_format
) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta").to(memory_format=memory_format)


def group(x: Tensor, groups: int, weight: torch.dtype | None = BF16) -> Call:
    scale = None if weight is None else meta(x.shape[1], dtype=weight)
    return GroupNormFwdOp(groups).bind(x, scale, scale)


def running(C: int) -> tuple[Tensor, Tensor]:
    return meta(C, dtype=F32), meta(C, dtype=F32)


def instance(x: Tensor, use_input_stats: bool = True) -> Call:
    return InstanceNormFwdOp(use_input_stats=use_input_stats).bind(x, *running(x.shape[1]), None, None)


def batch(x: Tensor, training: bool = True) -> Call:
    scale = meta(x.shape[1], dtype=F32)
    op = BatchNormFwdOp(training=training, return_stats=training)
    return op.bind(x, *running(x.shape[1]), scale, scale)


def batch_bwd(x: Tensor, dy: Tensor | None = None) -> Call:
    return BatchNormBwdOp().bind(x if dy is None else dy, x, meta(x.shape[1]), *running(x.shape[1]))


@pytest.mark.parametrize(
    ("call", "kernel", "copies"),
    [
        (group(meta(8, 128, 32, 32), 32), "GroupNormHeld", ()),
        (group(meta(8, 128, 32, 32, memory_format=LAST), 32), "GroupNormHeld", ()),
        (group(meta(2, 512, 128, 128, memory_format=LAST), 32), "GroupNormHeld", ()),
        (group(meta(2, 512, 128, 128), 2), "GroupNormWalk", ()),
        (group(meta(8, 256, 32, 32)[:, 64:192], 32), "GroupNormHeld", ()),
        (group(meta(8, 128, 32, 40)[..., :32], 32), "GroupNormHeld", ("x",)),
        (group(meta(128, 8, 32, 32).transpose(0, 1), 32), "GroupNormHeld", ("x",)),
        (group(meta(1, 128, 32, 32).expand(8, 128, 32, 32), 32), "GroupNormHeld", ()),
        (instance(meta(8, 128, 32, 32)), "GroupNormHeld", ()),
        (instance(meta(2, 512, 128, 128, memory_format=LAST)), "GroupNormHeld", ()),
        (instance(meta(128, 8, 32, 32).transpose(0, 1)), "GroupNormHeld", ()),
        (instance(meta(1, 3, 2048, 2048)), "GroupNormWalk", ()),
        (instance(meta(8, 128, 32, 32), use_input_stats=False), "BatchNorm", ()),
        (batch(meta(32, 64)), "BatchNorm", ()),
        (batch(meta(64, 32).t()), "BatchNorm", ()),
        (batch(meta(8, 64, 56, 56)), "BatchNorm", ()),
        (batch(meta(8, 64, 56, 56, memory_format=LAST)), "BatchNorm", ()),
        (batch(meta(8, 64, 60, 56, memory_format=LAST)[:, :, :56]), "BatchNorm", ()),
        (batch(meta(8, 64, 56, 60)[..., :56], training=False), "BatchNorm", ("x",)),
        (batch_bwd(meta(8, 64, 56, 56)), "BatchNormBwd", ()),
        (batch_bwd(meta(8, 64, 56, 56, memory_format=LAST)), "BatchNormBwd", ()),
        (batch_bwd(meta(8, 64, 56, 56, memory_format=LAST), meta(8, 64, 56, 56)), "BatchNormBwd", ("x",)),
    ],
)
def test_which_kernel_serves_and_what_is_copied(call: Call, kernel: str, copies: tuple[str, ...]) -> None:
    choice = gpu.choose(call, H200)
    assert (type(choice.kernel).__name__, choice.copies) == (kernel, copies)


def lie(x: Tensor, groups: int | None) -> Any:
    """The sets of a tensor, as programs see them."""
    call = batch(x) if groups is None else group(x, groups)
    form = static_of(checker_of(call.entry), call).tensor("x")
    assert form is not None
    return sets_of({"x": form}, groups)


@pytest.mark.parametrize(
    ("x", "groups", "expected"),
    [
        # vec, run, runs, span, channels, count, stats, split, and of x: instance, step, pitch, unit
        (meta(8, 128, 32, 32), 32, (8, 512, (1,), 1024, 4, 32, 1, None, 131072, 4096, 0, 8)),
        (meta(8, 128, 30, 30), 16, (4, 1800, (1,), 900, 8, 16, 1, None, 115200, 7200, 0, 4)),
        (meta(8, 128, 7, 7), 16, (8, 49, (1,), 49, 8, 16, 1, None, 6272, 392, 0, 8)),
        (meta(8, 128, 32, 32, memory_format=LAST), 32, (16, 1, (1024,), 1, 16, 8, 4, None, 131072, 16, 128, 8)),
        (meta(8, 512, 8, 8, memory_format=LAST), 16, (8, 4, (64,), 1, 32, 16, 1, None, 32768, 32, 512, 8)),
        (meta(8, 48), 4, (4, 3, (1,), 1, 12, 4, 1, None, 48, 12, 0, 4)),
        (meta(8, 64, 56, 56), None, (8, 392, ("B",), 3136, 1, 64, 1, None, 0, 3136, 200704, 8)),
        (meta(8, 64, 9, 9, memory_format=LAST), None, (16, 1, ("B", 81), 1, 16, 4, 16, None, 0, 16, 64, 8)),
        (meta(8, 64, 9, 9, memory_format=LAST)[:, :, :8], None,
         (16, 1, ("B", 72), 1, 16, 4, 16, 72, 5184, 16, 64, 8)),
        (meta(32, 66)[:, :64], None, (16, 1, ("B", 1), 1, 16, 4, 16, None, 0, 16, 66, 2)),
    ],
)  # fmt: skip
def test_how_sets_lie(x: Tensor, groups: int | None, expected: Any) -> None:
    s = lie(x, groups)
    assert isinstance(s, Sets)
    place = s.lies["x"]
    found = (s.vec, s.run, s.runs, s.span, s.channels, s.count, s.stats, s.split)
    assert (*found, place.instance, place.step, place.pitch, place.unit) == expected


@pytest.mark.parametrize(
    ("x", "groups", "reason"),
    [
        (meta(8, 128, 32, 40)[..., :32], 32, "the positions of an instance do not lie at one stride"),
        (meta(128, 8, 32, 32).transpose(0, 1), 32, "the channels of a group do not lie side by side"),
        (meta(8, 128, 64)[..., ::2], None, "neither positions nor channels lie side by side"),
    ],
)
def test_what_is_copied_first_and_why(x: Tensor, groups: int | None, reason: str) -> None:
    assert lie(x, groups) == reason


@pytest.mark.semantics("GroupNormFwdOp", "batch-invariant")
@pytest.mark.semantics("InstanceNormFwdOp", "batch-invariant")
@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize(("C", "groups"), [(32, 32), (32, 2), (15, 3), (512, 32)])
@pytest.mark.parametrize("L", [(1, 2), (7, 7), (32, 32), (30, 30), (128, 128)])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, LAST])
def test_the_order_of_a_sum_is_that_of_the_shape(
    C: int, groups: int, L: tuple[int, int], dtype: torch.dtype, memory_format: torch.memory_format
) -> None:
    """Every config deals a set alike, whatever the batch and the weight, and deals all of it."""
    deals = set()
    for B, weight in ((2, None), (300, F32)):
        call = group(meta(B, C, *L, dtype=dtype, memory_format=memory_format), groups, weight)
        s = sets_in(call)
        assert isinstance(s, Sets)
        assert s.held is not None
        assert s.held * s.vec * s.count == C * math.prod(L) or s.runs != (1,)
        kernel = GroupNormHeld() if GroupNormHeld().refuse(call, H200) is None else GroupNormWalk()
        assert kernel.refuse(call, H200) is None
        for config in kernel.configs(call, H200):
            deals.add((config.lanes, config.chunks, config.cluster))
            assert isinstance(kernel, GroupNormWalk) or config.lanes * config.chunks * config.cluster >= s.held
            assert config.threads % config.lanes == 0
            assert config.lanes == config.threads or config.lanes == WARP
            assert config.threads <= 1024
            assert config.cluster <= MAX_CLUSTER
            assert config.cluster == 1 or config.lanes > WARP
    assert len(deals) == 1


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (set_norm.Config(512, 4, threads=512, resident=5), "more threads"),
        (set_norm.Config(1024, 16, threads=1024), "more registers"),
        (set_norm.Config(32, 1, 2, threads=32), "a cluster of single warps"),
        (set_norm.Config(256, 4, threads=256, resident=1), None),
    ],
)
def test_what_is_left_out_and_why(config: set_norm.Config, reason: str | None) -> None:
    said = set_norm.excluded(config, lie(meta(8, 128, 32, 32), 32), "bfloat16")
    assert said is None if reason is None else reason in (said or "")


@pytest.mark.parametrize("call", [batch(meta(2, 4)), batch(meta(4, 128, 1024, 1024)), batch_bwd(meta(8, 64, 56, 56))])
def test_channels_of_the_batch_have_configs(call: Call) -> None:
    configs = list(gpu.choose(call, H200).kernel.configs(call, H200))
    assert len(configs) == len(set(configs)) > 0
    assert all(c.lanes == c.threads and c.threads % WARP == 0 and c.cluster <= MAX_CLUSTER for c in configs)


@pytest.mark.parametrize(
    "call",
    [
        group(meta(8, 16, 7, 7), 4),
        group(meta(8, 128, 32, 32, memory_format=LAST), 32, F32),
        group(meta(2, 512, 128, 128), 16),
        group(meta(2, 512, 128, 128, dtype=F32), 16, None),
        instance(meta(8, 128, 32, 32)),
        batch(meta(8, 64, 56, 56)),
        batch(meta(8, 64, 60, 56, memory_format=LAST)[:, :, :56]),
        batch(meta(32, 64, dtype=F32), training=False),
        batch_bwd(meta(8, 64, 56, 56)),
    ],
    ids=["warps", "bundles", "cluster", "walk", "running", "batch", "channels-last", "eval", "bwd"],
)
def test_it_compiles(call: Call, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEOPS_CACHE_DIR", str(tmp_path))
    recipe = gpu.recipe(cuda, call, H200)
    assert recipe is not None
    assert program.compile_only(recipe).exists()


@pytest.mark.parametrize("op", OPS)
def test_the_cases_of_the_kit_need_few_programs(op: type[Op]) -> None:
    """Each is compiled, so a suite stays affordable."""
    assert len(kit_recipes(op.entry, cuda, H200)) <= 200


def normal(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=DEVICE).to(dtype)


def held(op: Op, *tensors: Tensor | None) -> Any:
    """The op's results, right, and those of tensors that it mutates too."""
    before = [None if t is None else t.clone() for t in tensors]
    returned = op(*tensors)  # type: ignore[operator]
    call = op.bind(*tensors)
    results = accuracy.collect(call, returned, dict(zip(call.inputs, tensors, strict=True)))
    verdict = accuracy.verify(call, dict(zip(call.inputs, before, strict=True)), results)
    assert verdict.ok, str(verdict)
    return returned


def statistics(C: int) -> tuple[Tensor, Tensor]:
    return normal(C, dtype=F32, seed=5), normal(C, dtype=F32, seed=6).exp()


def held_all(x: Tensor, groups: int) -> None:
    """All operators on x, and the backward with a gradient that lies as x does."""
    C = x.shape[1]
    weight, bias = normal(C, dtype=x.dtype, seed=1), normal(C, dtype=F32, seed=2)
    assert held(GroupNormFwdOp(groups), x, weight, bias).stride() == torch.empty_like(x).stride()
    if math.prod(x.shape[2:]) > 1:
        held(InstanceNormFwdOp(), x, *statistics(C), weight, bias)
        held(InstanceNormFwdOp(), x, None, None, None, bias)
    held(InstanceNormFwdOp(use_input_stats=False), x, *statistics(C), weight, bias)
    held(BatchNormFwdOp(), x, *statistics(C), weight, bias)
    _, mean, rstd = held(BatchNormFwdOp(training=True, return_stats=True), x, *statistics(C), weight, bias)
    dy = torch.empty_like(x).copy_(normal(*x.shape, dtype=x.dtype, seed=3))
    dx, _, _ = held(BatchNormBwdOp(), dy, x, weight, mean, rstd)
    assert dx.stride() == torch.empty_like(x).stride()


def rows_of(op: type[Op]) -> list[Any]:
    return [
        pytest.param(op, row, case, id="-".join([op.__name__, row.label, *case.values()]))
        for row in op.entry.workloads
        for case in cases(row)
    ]


@pytest.mark.cuda
@pytest.mark.parametrize(("op", "row", "case"), [p for op in OPS if op is not BatchNormBwdOp for p in rows_of(op)])
def test_rows_of_both_layouts(op: Any, row: Any, case: Any) -> None:
    call = scaled(checker_of(op.entry), row, case, math.inf, 2**29)
    tensors = [
        None if m is None else normal(*m.shape, dtype=getattr(torch, m.dtype), seed=i)
        for i, m in enumerate(call.inputs.values())
    ]
    var = list(call.inputs).index("running_var") if call.inputs.get("running_var") else None
    if var is not None:
        tensors[var] = tensors[var].exp()  # type: ignore[union-attr]
    held(op(**call.params), *tensors)
    if tensors[0].dim() == 4:  # type: ignore[union-attr]
        held(op(**call.params), tensors[0].to(memory_format=LAST), *tensors[1:])  # type: ignore[union-attr]


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("L", [(2,), (3, 3), (7, 7), (30, 30), (33, 35), (64, 64), (257, 255)])
@pytest.mark.parametrize(("C", "groups"), [(1, 1), (15, 5), (32, 8), (96, 4), (48, 48)])
def test_any_size(C: int, groups: int, L: tuple[int, ...], dtype: torch.dtype) -> None:
    held_all(normal(3, C, *L, dtype=dtype), groups)
    if len(L) == 2:
        held_all(normal(3, C, *L, dtype=dtype).to(memory_format=LAST), groups)


@pytest.mark.cuda
@pytest.mark.parametrize(("B", "C", "groups"), [(2, 3, 1), (32, 64, 8), (70_000, 20, 5), (3, 4096, 32)])
def test_without_positions(B: int, C: int, groups: int) -> None:
    held_all(normal(B, C), groups)


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


@pytest.mark.cuda
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides(layout: str) -> None:
    held_all(LAYOUTS[layout](normal(4, 32, 9, 14)), 8)


@pytest.mark.cuda
def test_one_program_serves_all_batches() -> None:
    x = normal(40, 32, 9, 9)
    held_all(x[:3], 8)
    before = program.compilations, len(program._programs)
    for B in (2, 5, 17, 40):
        held_all(x[:B], 8)
    assert (program.compilations, len(program._programs)) == before


@pytest.mark.cuda
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


@pytest.mark.cuda
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
    gradients = held(BatchNormBwdOp(), dy, x, None, mean, rstd)
    for _ in range(20):
        assert all(map(torch.equal, BatchNormBwdOp()(dy, x, None, mean, rstd), gradients))


@pytest.mark.cuda
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


@pytest.mark.cuda
def test_inputs_stay_as_they_are() -> None:
    x, weight = normal(5, 12, 33), normal(12, seed=1)
    before = x.clone(), weight.clone()
    held_all(x, 3)
    held(GroupNormFwdOp(3), x, weight, weight)
    assert torch.equal(x, before[0])
    assert torch.equal(weight, before[1])


@pytest.mark.cuda
def test_autograd_in_training() -> None:
    leaves = [normal(9, 48, 35, dtype=F32), normal(48, dtype=F32, seed=1), normal(48, dtype=F32, seed=2)]
    dy = normal(9, 48, 35, dtype=F32, seed=3)
    ours, wide = ([t.detach().to(d, copy=True).requires_grad_() for t in leaves] for d in (F32, torch.float64))
    BatchNormFwdOp(training=True)(ours[0], *statistics(48), *ours[1:]).backward(dy)
    torch.nn.functional.batch_norm(wide[0], None, None, *wide[1:], training=True).backward(dy.double())
    for got, exact in zip(ours, wide, strict=True):
        torch.testing.assert_close(got.grad.double(), exact.grad, rtol=1e-4, atol=1e-4)
