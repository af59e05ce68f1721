"""The SM90 kernels of group, instance and batch normalization: dispatch, how sets lie, what compiles."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tileops.core import program
from tileops.core.backend import cuda, gpu
from tileops.core.check import Call
from tileops.core.kernel import H200, static_of
from tileops.core.op import Op
from tileops.core.testing.programs import recipes as kit_recipes
from tileops.core.torch_ops import checker_of
from tileops.norm import BatchNormBwdOp, BatchNormFwdOp, GroupNormFwdOp, InstanceNormFwdOp
from tileops.norm.kernels import set_norm
from tileops.norm.kernels.group_norm import GroupNormWalk, sets_in
from tileops.norm.kernels.rows import MAX_CLUSTER, WARP
from tileops.norm.kernels.sets import Sets, locate, sets_of

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
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
    return BatchNormBwdOp().bind(x if dy is None else dy, x, meta(C := x.shape[1]), *running(C), meta(C, dtype=F32))


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


@pytest.mark.parametrize("op", [BatchNormFwdOp(), InstanceNormFwdOp(use_input_stats=False), InstanceNormFwdOp()])
@pytest.mark.parametrize("name", ["running_mean", "running_var", "weight", "bias"])
def test_values_of_channels_that_have_gaps_are_copied(op: Op, name: str) -> None:
    inputs: dict[str, Any] = {"x": meta(8, 12, 32)}
    inputs |= {n: meta(12, dtype=F32) for n in ("running_mean", "running_var", "weight", "bias")}
    inputs[name] = meta(24, dtype=F32)[::2]
    assert gpu.choose(op.bind(*inputs.values()), H200).copies == (name,)
    grouped, scale = GroupNormFwdOp(3), meta(24, dtype=F32)[::2]
    assert gpu.choose(grouped.bind(inputs["x"], scale, None), H200).copies == ("weight",)
    backward = BatchNormBwdOp().bind(inputs["x"], inputs["x"], None, scale, scale)
    assert gpu.choose(backward, H200).copies == ("mean", "rstd")


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
    ("x", "groups", "lanes", "steady"),
    [
        (meta(8, 64, 56, 56), None, 96, True),
        (meta(8, 128, 32, 32, memory_format=LAST), 32, 96, True),
        (meta(8, 512, 8, 8, memory_format=LAST), 16, 128, True),
        (meta(8, 96, 8, 8, memory_format=LAST), 4, 128, False),
        (meta(8, 128, 32, 32), 32, 256, False),
        (meta(8, 128), 4, 32, False),  # a thread beyond the last vector has no channel
    ],
)
def test_channels_that_are_a_threads_own(x: Tensor, groups: int | None, lanes: int, steady: bool) -> None:
    assert lie(x, groups).steady(lanes) is steady


@pytest.mark.parametrize(
    ("x", "groups"),
    [(meta(8, 128), 8), (meta(8, 128), 128), (meta(8, 48), 4), (meta(32, 64), None), (meta(8, 96, 8, 8), 4),
     *((meta(8, C, 8, 8, memory_format=LAST), groups) for C, groups in ((128, 32), (512, 16), (96, 4), (64, None)))],
)  # fmt: skip
@pytest.mark.parametrize("lanes", [32, 96, 128, 1024])
def test_no_thread_loads_its_channels_from_beyond_its_set(x: Tensor, groups: int | None, lanes: int) -> None:
    """Those of a thread whose channels are always the same are loaded once, beyond the last vector too."""
    s = lie(x, groups)
    if s.span > 1 or not s.steady(lanes):
        return
    for lane in range(lanes):
        at = [0] * 4
        locate.orig_func(at, lane, s)
        assert 0 <= int(at[0]) < s.run


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
    """Whatever a tuner may choose deals a set alike, whatever the batch and the weight, and deals all of it."""
    deals = set()
    for B, weight in ((2, None), (300, F32)):
        call = group(meta(B, C, *L, dtype=dtype, memory_format=memory_format), groups, weight)
        s = sets_in(call)
        assert isinstance(s, Sets)
        assert s.held is not None
        assert s.held * s.vec * s.count == C * math.prod(L) or s.runs != (1,)
        for choice in gpu.candidates(call, H200):
            kernel, config = choice.kernel, choice.config
            deals.add((type(kernel), config.lanes, config.chunks, config.cluster))
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
    ("call", "threads", "bundled"),
    [
        (batch(meta(32, 64)), 32, 8),
        (batch(meta(20, 64, dtype=F32), training=False), 32, 8),
        (batch_bwd(meta(33, 64)), 64, 8),
        (batch(meta(1, 64, 7, 7, memory_format=LAST)), 64, 8),
        (batch(meta(65, 64)), 256, 32),
        (batch(meta(8, 64, 2, 2)), 32, 32),
    ],
)
def test_channels_with_few_values_go_to_many_small_blocks(call: Call, threads: int, bundled: int) -> None:
    config = gpu.choose(gpu.bucketed(call), H200).config
    assert (config.threads, config.bundled) == (threads, bundled)


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
        batch(meta(32, 64)),
        batch_bwd(meta(32, 64)),
    ],
    ids=["warps", "bundles", "cluster", "walk", "running", "batch", "channels-last", "eval", "bwd", "2d", "2d-bwd"],
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
