"""The SM90 kernels of GatedRMSNorm: dispatch, how rows are dealt, and, on a GPU, that they are right."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tileops.core import accuracy, program
from tileops.core.backend import cuda, gpu
from tileops.core.check import Call
from tileops.core.kernel import H200
from tileops.core.testing.programs import recipes as kit_recipes
from tileops.core.torch_ops import checker_of
from tileops.core.workloads import cases, scaled
from tileops.norm import GatedRMSNormFwdOp
from tileops.norm.kernels.gated_rms_norm import GatedRMSNormStream
from tileops.norm.kernels.rows import MAX_CLUSTER, WARP, vector

DEVICE = "cuda"
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
NAN, INF = float("nan"), float("inf")
both_orders = pytest.mark.parametrize("norm_before_gate", [True, False])


def meta(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def call_of(x: Tensor, gate: Tensor, weight: torch.dtype = BF16, norm_before_gate: bool = True) -> Call:
    op = GatedRMSNormFwdOp(norm_before_gate=norm_before_gate)
    return op.bind(x, gate, meta(x.shape[-1], dtype=weight))


@pytest.mark.parametrize(
    ("call", "kernel", "copies"),
    [
        (call_of(meta(8, 5120), meta(8, 5120)), "GatedRMSNormRows", ()),
        (call_of(*meta(8, 10240).chunk(2, 1)), "GatedRMSNormRows", ()),
        (call_of(meta(8, 4, 128), meta(8, 128).unsqueeze(1).expand(8, 4, 128)), "GatedRMSNormRows", ()),
        (call_of(meta(8, 5120), meta(5120, 8).t()), "GatedRMSNormRows", ("gate",)),
        (call_of(meta(3, 262144), meta(3, 262144)), "GatedRMSNormRows", ()),
        (call_of(meta(3, 262152), meta(3, 262152)), "GatedRMSNormStream", ()),
        (call_of(meta(3, 300001), meta(3, 300001), norm_before_gate=False), "GatedRMSNormStream", ()),
    ],
)
def test_which_kernel_serves_and_what_is_copied(call: Call, kernel: str, copies: tuple[str, ...]) -> None:
    choice = gpu.choose(call, H200)
    assert (type(choice.kernel).__name__, choice.copies) == (kernel, copies)


@pytest.mark.semantics("GatedRMSNormFwdOp", "batch-invariant")
@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("n", [1, 3, 7, 100, 128, 1001, 5120, 8192, 65536, 262144])
def test_the_order_of_a_sum_is_that_of_the_length(n: int, dtype: torch.dtype) -> None:
    """Whatever a tuner may choose deals a row alike, whatever the batch, the pitch, the weight and the gate's place."""
    many, few = meta(70000, n, dtype=dtype), meta(3, 5, n + 1, dtype=dtype)[..., :n]
    deals = set()
    for call in (call_of(many, many, F32), call_of(few, few, dtype, norm_before_gate=False)):
        for choice in gpu.candidates(call, H200):
            config = choice.config
            if isinstance(choice.kernel, GatedRMSNormStream):
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
    "call",
    [
        call_of(meta(4, 5120), meta(4, 5120), F32),
        call_of(*meta(4, 10240).chunk(2, 1), norm_before_gate=False),
        call_of(meta(2, 3, 129)[..., :128], meta(2, 3, 128)),
        call_of(meta(2, 65536), meta(2, 65536)),
        call_of(meta(2, 131072, dtype=F16), meta(2, 131072, dtype=F16), F16, norm_before_gate=False),
        call_of(meta(2, 300001), meta(2, 300001)),
        call_of(meta(2, 300001), meta(2, 300001), norm_before_gate=False),
    ],
    ids=["block", "block-gate-first", "lanes", "cluster", "cluster-gate-first", "stream", "stream-gate-first"],
)
def test_it_compiles(call: Call, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEOPS_CACHE_DIR", str(tmp_path))
    recipe = gpu.recipe(cuda, call, H200)
    assert recipe is not None
    assert program.compile_only(recipe).exists()


def test_the_cases_of_the_kit_need_few_programs() -> None:
    """Each is compiled, so a suite stays affordable."""
    assert len(kit_recipes(GatedRMSNormFwdOp.entry, cuda, H200)) <= 80


def normal(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=DEVICE).to(dtype)


def operands(rows: int, n: int, dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor, Tensor]:
    return normal(rows, n, dtype=dtype), normal(rows, n, dtype=dtype, seed=1), normal(n, dtype=dtype, seed=2)


def held(norm_before_gate: bool, *tensors: Tensor) -> Tensor:
    """The op's result, right."""
    op = GatedRMSNormFwdOp(norm_before_gate=norm_before_gate)
    returned = op(*tensors)
    call = op.bind(*tensors)
    inputs = dict(zip(call.inputs, tensors, strict=True))
    verdict = accuracy.verify(call, inputs, accuracy.collect(call, returned, inputs))
    assert verdict.ok, str(verdict)
    return returned


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("row", "case"),
    [
        pytest.param(row, case, id="-".join([row.label, *case.values()]))
        for row in GatedRMSNormFwdOp.entry.workloads
        for case in cases(row)
    ],
)
def test_rows(row: Any, case: Any) -> None:
    call = scaled(checker_of(GatedRMSNormFwdOp.entry), row, case, math.inf, 2**30)
    metas = [m for m in call.inputs.values() if m is not None]
    tensors = [normal(*m.shape, dtype=getattr(torch, m.dtype), seed=i) for i, m in enumerate(metas)]
    held(call.params["norm_before_gate"], *tensors)


@pytest.mark.cuda
@pytest.mark.parametrize("n", [1, 3, 7, 8, 100, 1000, 1001, 1536, 4095, 8192, 16384, 65536, 131072, 262144, 300001])
@pytest.mark.parametrize("dtype", [BF16, F32])
@both_orders
def test_any_length(n: int, dtype: torch.dtype, norm_before_gate: bool) -> None:
    held(norm_before_gate, *operands(7, n, dtype))


@pytest.mark.cuda
@pytest.mark.parametrize("rows", [1, 2, 133, 65535, 65536, 65537])
@pytest.mark.parametrize("n", [64, 512])
@both_orders
def test_any_number_of_rows(rows: int, n: int, norm_before_gate: bool) -> None:
    held(norm_before_gate, *operands(rows, n))


@pytest.mark.cuda
@both_orders
def test_one_program_serves_all_numbers_of_rows(norm_before_gate: bool) -> None:
    held(norm_before_gate, *operands(3, 640))
    before = program.compilations, len(program._programs)
    for rows in (1, 5, 132, 4097):
        held(norm_before_gate, *operands(rows, 640))
    assert (program.compilations, len(program._programs)) == before


def _padded(x: Tensor, more: int) -> Tensor:
    buffer = torch.full((*x.shape[:-1], x.shape[-1] + more), NAN, dtype=x.dtype, device=x.device)
    buffer[..., : x.shape[-1]] = x
    return buffer[..., : x.shape[-1]]


LAYOUTS = {
    "pitch-16-bytes": lambda x: _padded(x, 8),
    "pitch-8-bytes": lambda x: _padded(x, 4),
    "pitch-2-bytes": lambda x: _padded(x, 3),
    "expanded": lambda x: x[:1].expand(x.shape),
    "transposed": lambda x: x.t().contiguous().t(),
    "every-other": lambda x: x.repeat_interleave(2, dim=-1)[..., ::2],
    "misaligned": lambda x: torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape),
}


@pytest.mark.cuda
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("n", [1024, 131072])
@both_orders
def test_any_strides_and_the_same_bits(layout: str, n: int, norm_before_gate: bool) -> None:
    x, gate, weight = operands(9, n)
    x, gate = LAYOUTS[layout](x), LAYOUTS[layout](gate)
    op = GatedRMSNormFwdOp(norm_before_gate=norm_before_gate)
    assert torch.equal(held(norm_before_gate, x, gate, weight), op(x.contiguous(), gate.contiguous(), weight))


@pytest.mark.cuda
@pytest.mark.semantics("GatedRMSNormFwdOp", "batch-invariant")
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("n", [100, 128, 5120, 65536, 131072, 300001])
@both_orders
def test_a_row_alone_has_the_bits_it_has_in_a_batch(n: int, dtype: torch.dtype, norm_before_gate: bool) -> None:
    x, gate, weight = operands(300, n, dtype)
    op = GatedRMSNormFwdOp(norm_before_gate=norm_before_gate)
    whole = op(x, gate, weight)
    for rows in (slice(0, 1), slice(17, 20), slice(299, 300)):
        assert torch.equal(op(x[rows].clone(), gate[rows].clone(), weight), whole[rows])
    for _ in range(5):
        assert torch.equal(op(x, gate, weight), whole)


@pytest.mark.cuda
@pytest.mark.semantics("GatedRMSNormFwdOp", "row-isolation")
@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("n", [64, 1024, 16384, 131072])
@both_orders
def test_a_bad_row_leaves_the_others_alone(bad: float, n: int, norm_before_gate: bool) -> None:
    x, gate, weight = operands(9, n)
    y = GatedRMSNormFwdOp(norm_before_gate=norm_before_gate)(x, gate, weight)
    x[4, n // 2] = gate[6, n // 3] = bad
    others = [0, 1, 2, 3, 5, 7, 8]
    spoilt = held(norm_before_gate, x, gate, weight)
    assert torch.equal(spoilt[others], y[others])
    assert spoilt[4, n // 2].isnan()


@pytest.mark.cuda
@both_orders
def test_gates_of_any_size(norm_before_gate: bool) -> None:
    x, gate, weight = operands(64, 1024, F32)
    held(norm_before_gate, x, gate * 40, weight)
    gate = torch.tensor([-1e30, -1e4, -100.0, -0.0, 0.0, 100.0, 1e4, 1e10], device=DEVICE).repeat(64, 128)
    assert held(norm_before_gate, x, gate, weight).isfinite().all()
