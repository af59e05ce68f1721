"""The SM90 kernels of AdaLayerNorm with and without a gate: dispatch, where rows lie, and, on a GPU, right results."""

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
from tileops.norm import AdaLayerNormFwdOp, AdaLayerNormZeroFwdOp
from tileops.norm.kernels import operands
from tileops.norm.kernels.ada_layer_norm import AdaLayerNormStream
from tileops.norm.kernels.operands import Broadcast
from tileops.norm.kernels.rows import MAX_CLUSTER, WARP, vector

DEVICE = "cuda"
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
NAN, INF = float("nan"), float("inf")
OPS: Any = [(AdaLayerNormFwdOp, 2), (AdaLayerNormZeroFwdOp, 3)]  # and how many tensors condition them
each_op = pytest.mark.parametrize(("cls", "count"), OPS, ids=["scale-shift", "gate"])


def meta(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def call_of(x: Tensor, *given: Tensor) -> Call:
    op: Op = AdaLayerNormFwdOp() if len(given) == 2 else AdaLayerNormZeroFwdOp()
    return op.bind(x, *given)


@pytest.mark.parametrize(
    ("call", "kernel", "copies"),
    [
        (call_of(meta(2, 8, 1152), *[meta(2, 1, 1152)] * 2), "AdaLayerNormRows", ()),
        (call_of(meta(2, 8, 1152), *meta(2, 6, 1, 1152).unbind(1)[:3]), "AdaLayerNormRows", ()),
        (call_of(meta(8, 1153)[:, :1152], *[meta(1152)] * 3), "AdaLayerNormRows", ()),
        (call_of(meta(8, 1152), *[meta(1, 1152).expand(8, 1152)] * 2), "AdaLayerNormRows", ()),
        (call_of(meta(8, 1152), meta(1152, 8).t(), meta(8, 1152)), "AdaLayerNormRows", ("scale",)),
        (call_of(meta(1152, 8).t(), meta(1152), meta(2304)[::2]), "AdaLayerNormRows", ("x", "shift")),
        (call_of(meta(3, 524288), *[meta(524288)] * 3), "AdaLayerNormRows", ()),
        (call_of(meta(3, 524296), *[meta(524296)] * 3), "AdaLayerNormStream", ()),
        (call_of(meta(3, 300001), *[meta(300001)] * 2), "AdaLayerNormStream", ()),
    ],
)
def test_which_kernel_serves_and_what_is_copied(call: Call, kernel: str, copies: tuple[str, ...]) -> None:
    choice = gpu.choose(call, H200)
    assert (type(choice.kernel).__name__, choice.copies) == (kernel, copies)


@pytest.mark.semantics("AdaLayerNormFwdOp", "batch-invariant")
@pytest.mark.semantics("AdaLayerNormZeroFwdOp", "batch-invariant")
@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("n", [1, 3, 7, 100, 1001, 1152, 8192, 65536, 262144, 524288])
def test_the_order_of_a_sum_is_that_of_the_length(n: int, dtype: torch.dtype) -> None:
    """Whatever a tuner may choose deals a row alike, whatever the batch, the pitch and what conditions it."""
    row = meta(n, dtype=dtype)
    calls = [
        call_of(row, row, row),
        call_of(meta(70000, n, dtype=dtype), *[meta(70000, n, dtype=dtype)] * 3),
        call_of(meta(3, 5, n + 1, dtype=dtype)[..., :n], row, row, row),
    ]
    deals = set()
    for call in calls:
        for choice in gpu.candidates(call, H200):
            config = choice.config
            if isinstance(choice.kernel, AdaLayerNormStream):
                deals.add(config)
                continue
            deals.add((config.lanes, config.chunks, config.cluster))
            assert n <= config.lanes * config.chunks * config.cluster * vector(n, call["T"])
            assert config.threads % config.lanes == config.threads % WARP == 0
            assert config.threads <= 1024
            assert config.cluster <= MAX_CLUSTER
            assert config.lanes == config.threads or config.lanes in (1, 2, 4, 8, 16, 32)
    assert len(deals) == 1


@pytest.mark.parametrize(
    ("config", "registers", "reason"),
    [
        (operands.Config(256, 4, 1, 256, True, 9), 16, "more threads"),
        (operands.Config(1024, 8, 1, 1024, True, 1), 96, "more registers"),
        (operands.Config(256, 4, 1, 256, True, 4), 64, "more registers"),
        (operands.Config(256, 4, 1, 256, True, 2), 64, None),
    ],
)
def test_what_is_left_out_and_why(config: operands.Config, registers: int, reason: str | None) -> None:
    said = operands.excluded(config, registers)
    assert said is None if reason is None else reason in (said or "")


@pytest.mark.parametrize(
    ("scale", "axes", "outermost", "unit"),
    [
        (meta(64), (), False, 8),
        (meta(5, 64), (("S[0]", None, "B[1]"),), False, 8),
        (meta(4, 1, 64), (("S[0]", None, "B[0]"), ("S[1]", None, "B[1]")), True, 8),
        (meta(4, 6, 1, 64)[:, 2], (("S[0]", 384, "B[0]"), ("S[1]", None, "B[1]")), True, 8),
        (meta(5, 66)[:, :64], (("S[0]", 66, "B[1]"),), False, 2),
        (meta(1, 64).expand(5, 64), (("S[0]", 0, "B[1]"),), False, 8),
    ],
)
def test_where_rows_lie_that_broadcast(scale: Tensor, axes: Any, outermost: bool, unit: int) -> None:
    call = call_of(meta(4, 5, 64), scale, scale)
    form = static_of(checker_of(call.entry), call).tensor("scale")
    assert form is not None
    assert Broadcast.of(form, ("B[0]", "B[1]"), 8) == Broadcast(64, axes, outermost, unit)


@pytest.mark.parametrize(
    "call",
    [
        call_of(meta(2, 8, 1152), *meta(2, 6, 1, 1152).unbind(1)[:3]),
        call_of(meta(2, 8, 3, 100)[..., :96], meta(8, 1, 97)[..., :96], meta(8, 1, 96)),
        call_of(meta(2, 32768), *[meta(2, 32768)] * 3),
        call_of(meta(2, 131072, dtype=F16), *[meta(131072, dtype=F16)] * 2),
        call_of(meta(2, 300001, dtype=F32), *[meta(300001, dtype=F32)] * 3),
    ],
    ids=["block", "lanes", "late", "cluster", "stream"],
)
def test_it_compiles(call: Call, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEOPS_CACHE_DIR", str(tmp_path))
    recipe = gpu.recipe(cuda, call, H200)
    assert recipe is not None
    assert program.compile_only(recipe).exists()


@each_op
def test_the_cases_of_the_kit_need_few_programs(cls: Any, count: int) -> None:
    """Each is compiled, so a suite stays affordable."""
    assert len(kit_recipes(cls.entry, cuda, H200)) <= 80


def normal(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=DEVICE).to(dtype)


def condition(count: int, *shape: int, dtype: torch.dtype = BF16) -> list[Tensor]:
    return [normal(*shape, dtype=dtype, seed=seed) for seed in range(1, count + 1)]


def held(op: Any, *tensors: Tensor) -> Tensor:
    """The op's result, right."""
    returned: Tensor = op(*tensors)
    call = op.bind(*tensors)
    inputs = dict(zip(call.inputs, tensors, strict=True))
    verdict = accuracy.verify(call, inputs, accuracy.collect(call, returned, inputs))
    assert verdict.ok, str(verdict)
    return returned


def rows_of(cls: Any) -> list[Any]:
    return [
        pytest.param(cls, row, case, id=f"{cls.__name__}-{'-'.join([row.label, *case.values()])}")
        for row in cls.entry.workloads
        for case in cases(row)
    ]


@pytest.mark.cuda
@pytest.mark.parametrize(("cls", "row", "case"), [p for cls, _ in OPS for p in rows_of(cls)])
def test_rows(cls: Any, row: Any, case: Any) -> None:
    call = scaled(checker_of(cls.entry), row, case, math.inf, 2**30)
    metas = [m for m in call.inputs.values() if m is not None]
    held(cls(**call.params), *(normal(*m.shape, dtype=getattr(torch, m.dtype), seed=i) for i, m in enumerate(metas)))


@pytest.mark.cuda
@pytest.mark.parametrize("n", [1, 3, 7, 8, 100, 1000, 1001, 1536, 4095, 8192, 16384, 65536, 131072, 262144, 300001])
@pytest.mark.parametrize("dtype", [BF16, F32])
@each_op
def test_any_length(cls: Any, count: int, n: int, dtype: torch.dtype) -> None:
    held(cls(), normal(7, n, dtype=dtype), *condition(count, 7, n, dtype=dtype))


@pytest.mark.cuda
@pytest.mark.parametrize("rows", [1, 2, 133, 65535, 65536, 65537])
@pytest.mark.parametrize("n", [64, 512])
@each_op
def test_any_number_of_rows(cls: Any, count: int, rows: int, n: int) -> None:
    held(cls(), normal(rows, n), *condition(count, n))
    held(cls(), normal(rows, n), *condition(count, rows, n))


@pytest.mark.cuda
@pytest.mark.semantics("AdaLayerNormFwdOp", "broadcast")
@pytest.mark.semantics("AdaLayerNormZeroFwdOp", "broadcast")
@pytest.mark.parametrize("S", [(), (1,), (7,), (3, 1), (1, 7), (3, 7), (1, 3, 1), (2, 1, 7), (2, 3, 7), (2, 1, 1)])
@pytest.mark.parametrize("n", [40, 1152])
@each_op
def test_every_way_to_broadcast(cls: Any, count: int, S: tuple[int, ...], n: int) -> None:
    x, given = normal(2, 3, 7, n), condition(count, *S, n)
    y = held(cls(), x, *given)
    assert torch.equal(y, cls()(x, *(t.expand(2, 3, 7, n).contiguous() for t in given)))


@pytest.mark.cuda
def test_one_program_serves_all_sizes_and_ways_to_broadcast() -> None:
    op = AdaLayerNormFwdOp()
    held(op, normal(2, 3, 640), *condition(2, 2, 1, 640))
    before = program.compilations, len(program._programs)
    for B, S in (((5, 7), (5, 1)), ((5, 7), (1, 7)), ((5, 7), (5, 7)), ((1, 900), (1, 1)), ((64, 1), (64, 1))):
        held(op, normal(*B, 640), *condition(2, *S, 640))
    assert (program.compilations, len(program._programs)) == before


def _padded(x: Tensor, more: int) -> Tensor:
    buffer = torch.full((*x.shape[:-1], x.shape[-1] + more), NAN, dtype=x.dtype, device=x.device)
    buffer[..., : x.shape[-1]] = x
    return buffer[..., : x.shape[-1]]


LAYOUTS = {
    "pitch-16-bytes": lambda x: _padded(x, 8),
    "pitch-8-bytes": lambda x: _padded(x, 4),
    "pitch-2-bytes": lambda x: _padded(x, 3),
    "permuted": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "expanded": lambda x: x[:1].expand(x.shape),
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "every-other": lambda x: x.repeat_interleave(2, dim=-1)[..., ::2],
    "misaligned": lambda x: torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape),
}


@pytest.mark.cuda
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("n", [1152, 131072])
@each_op
def test_any_strides_and_the_same_bits(cls: Any, count: int, layout: str, n: int) -> None:
    tensors = [LAYOUTS[layout](t) for t in (normal(5, 3, n), *condition(count, 5, 3, n))]
    assert torch.equal(held(cls(), *tensors), cls()(*(t.contiguous() for t in tensors)))


@pytest.mark.cuda
@pytest.mark.semantics("AdaLayerNormFwdOp", "batch-invariant")
@pytest.mark.semantics("AdaLayerNormZeroFwdOp", "batch-invariant")
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("n", [100, 1152, 65536, 131072, 300001])
@each_op
def test_a_row_alone_has_the_bits_it_has_in_a_batch(cls: Any, count: int, n: int, dtype: torch.dtype) -> None:
    x, given = normal(300, n, dtype=dtype), condition(count, n, dtype=dtype)
    whole = cls()(x, *given)
    for rows in (slice(0, 1), slice(17, 20), slice(299, 300)):
        assert torch.equal(cls()(x[rows].clone(), *given), whole[rows])
    for _ in range(5):
        assert torch.equal(cls()(x, *given), whole)


@pytest.mark.cuda
@pytest.mark.semantics("AdaLayerNormFwdOp", "row-isolation")
@pytest.mark.semantics("AdaLayerNormZeroFwdOp", "row-isolation")
@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("n", [64, 1152, 16384, 131072])
@each_op
def test_a_bad_row_leaves_the_others_alone(cls: Any, count: int, bad: float, n: int) -> None:
    x, given, others = normal(9, n), condition(count, n), [0, 1, 2, 3, 5, 6, 7, 8]
    y = cls()(x, *given)
    x[4, n // 2] = bad
    spoilt = held(cls(), x, *given)
    assert torch.equal(spoilt[others], y[others])
    assert spoilt[4].isnan().all()


@pytest.mark.cuda
@pytest.mark.semantics("AdaLayerNormFwdOp", "stable")
@pytest.mark.semantics("AdaLayerNormZeroFwdOp", "stable")
@pytest.mark.parametrize("n", [4, 256, 16384, 131072, 300001])
@each_op
def test_rows_far_from_zero(cls: Any, count: int, n: int) -> None:
    x = torch.arange(n, device=DEVICE).remainder(4).float() + torch.tensor([[40000.0], [80000.0]], device=DEVICE)
    held(cls(), x, *condition(count, n, dtype=F32))
    for dtype in (F32, F16, BF16):
        constant = torch.full((3, n), 1234.1, device=DEVICE, dtype=dtype)
        assert held(cls(eps=1e-12), constant, *condition(count, n, dtype=dtype)).isfinite().all()
