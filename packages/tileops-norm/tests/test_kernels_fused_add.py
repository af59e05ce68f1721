"""The SM90 kernels that add a residual: dispatch, how rows are dealt, and, on a GPU, that they are right."""

from __future__ import annotations

import random
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from tileops.core import accuracy, program
from tileops.core.backend import cuda, gpu
from tileops.core.check import Call
from tileops.core.kernel import H200
from tileops.core.op import Op
from tileops.core.testing.programs import recipes as kit_recipes
from tileops.norm import FusedAddLayerNormFwdOp, FusedAddRMSNormFwdOp, FusedAddRMSNormQuantFwdOp
from tileops.norm.kernels import fused_add
from tileops.norm.kernels.rows import MAX_CLUSTER, WARP, vector

DEVICE = "cuda"
F32, F16, BF16, FP8, INT8 = torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8
NAN, INF = float("nan"), float("inf")
LENGTHS = [1, 3, 7, 8, 100, 127, 190, 1000, 1001, 1536, 4095, 8192, 16384, 65536, 131072, 262144, 300001]

RMS, LN = FusedAddRMSNormFwdOp(return_rstd=True), FusedAddLayerNormFwdOp(return_stats=True)
TOKEN, BLOCK, TENSOR = (FusedAddRMSNormQuantFwdOp(quant) for quant in ("per_token", "block128", "per_tensor"))
INT_BLOCK, CAPPED = FusedAddRMSNormQuantFwdOp("block128", INT8), FusedAddRMSNormQuantFwdOp("per_token", INT8, 1e-6, 1.5)
OPS: dict[str, Op] = {
    "rms": RMS, "rms-plain": FusedAddRMSNormFwdOp(weight_offset=1.0), "ln": LN, "ln-plain": FusedAddLayerNormFwdOp(),
    "per-token": TOKEN, "block128": BLOCK, "per-tensor": TENSOR, "block128-int8": INT_BLOCK, "capped-int8": CAPPED,
}  # fmt: skip
QUANT = FusedAddRMSNormQuantFwdOp


def inputs_of(op: Op, x: Any, residual: Any, made: Any) -> list[Any]:
    """All inputs of a call; ``made(n, seed)`` gives a vector."""
    n, scale_in = x.shape[-1], torch.full((1,), 0.03, device=x.device)
    vectors = [made(n, 2)] if not isinstance(op, FusedAddLayerNormFwdOp) else [made(n, 2), made(n, 3)]
    return [x, residual, *vectors, *([scale_in if op.quant == "per_tensor" else None] if isinstance(op, QUANT) else [])]


def meta(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def call_of(op: Op, x: Tensor, residual: Tensor | None = None, weight: torch.dtype = BF16, added: bool = True) -> Call:
    residual = (torch.empty_like(x).contiguous() if residual is None else residual) if added else None
    return op.bind(*inputs_of(op, x, residual, lambda n, seed: meta(n, dtype=weight)))


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
@pytest.mark.parametrize(
    ("x", "residual", "copies"),
    [
        (meta(8, 4096), None, ()),
        (meta(8, 6144)[:, :4096], meta(8, 4097)[:, :4096], ()),
        (meta(1, 4096).expand(8, 4096), meta(5, 8, 4096)[3], ()),
        (meta(5, 8, 3, 128).transpose(1, 2), None, ()),
        (meta(4096, 8).t(), None, ("x",)),
        (meta(8, 4096), meta(8, 8192)[:, ::2], ("residual",)),
        (meta(3, 300001), None, ()),
        (meta(3, 1), None, ()),
    ],
)
def test_every_call_is_served_and_few_are_copied(op: Op, x: Tensor, residual: Any, copies: tuple[str, ...]) -> None:
    choice = gpu.choose(call_of(op, x, residual), H200)
    assert choice.copies == copies
    assert choice.config.steps == (1 if x.shape[-1] < 300001 else choice.config.steps)


@pytest.mark.semantics("FusedAddRMSNormFwdOp", "batch-invariant")
@pytest.mark.semantics("FusedAddLayerNormFwdOp", "batch-invariant")
@pytest.mark.semantics("FusedAddRMSNormQuantFwdOp", "batch-invariant")
@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("n", [*LENGTHS, 128, 3584, 5120, 32768, 524288])
def test_the_order_of_a_sum_is_that_of_the_length(n: int, dtype: torch.dtype) -> None:
    """Whatever a tuner may choose deals a row alike, whatever the batch, the pitch and the weight."""
    for op in (RMS, LN, BLOCK):
        deals = set()
        for x, weight in ((meta(n, dtype=dtype), dtype), (meta(70000, n + 1, dtype=dtype)[:, :n], F32)):
            call = call_of(op, x, weight=weight)
            for choice in gpu.candidates(call, H200):
                config = choice.config
                deals.add((config.lanes, config.chunks, config.cluster, config.steps))
                deal = config.deal(n, vector(n, call["T"]))
                assert n <= deal.lanes * deal.held * deal.parts
                assert config.cluster == 1 or config.steps == 1
                assert config.cluster <= MAX_CLUSTER
                assert config.threads % WARP == 0
                assert config.lanes == config.threads <= 512 or config.lanes in (1, 2, 4, 8, 16, 32)
                assert config.steps == 1 or not config.early
        assert len(deals) == 1


@pytest.mark.parametrize("n", [1000, 8192, 16384, 131072])
def test_few_rows_have_their_weights_early_and_are_summed_as_many_are(n: int) -> None:
    """What a bucket's largest call says holds for all of it."""
    few = [(1,), (1, 1), (64,), (16, 1), (1, 64)]
    many = [(65,), (70000,), (16, 16), (2, 70000), (3, 5, 7)]
    for op in (RMS, LN, BLOCK):
        found = {lead: gpu.choose(call_of(op, meta(*lead, n, dtype=BF16)), H200).config for lead in few + many}
        assert len({found[lead] for lead in few}) == len({found[lead] for lead in many}) == 1
        assert found[1,].early
        assert attrs.evolve(found[65,], early=True, resident=1) == found[1,]


@pytest.mark.parametrize("n", [129, 130, 132, 136, 192, 1001, 1002, 1004, 1008, 5120, 65537, 131072, 300001])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_blocks_of_128_are_whole_in_each_turn_of_the_lanes(n: int, dtype: torch.dtype) -> None:
    call = call_of(BLOCK, meta(2, n, dtype=dtype), weight=F32)
    config, vec = gpu.choose(call, H200).config, vector(n, call["T"])
    assert config.lanes * vec % 128 == 0


@pytest.mark.parametrize(
    ("config", "n", "reason"),
    [
        (fused_add.Config(256, 4, threads=256, unroll=2), 8192, "a block would sum one by one"),
        (fused_add.Config(256, 4, threads=256, resident=9), 8192, "more threads"),
        (fused_add.Config(512, 8, threads=512, resident=2), 32768, "more registers"),
        (fused_add.Config(512, 16, steps=37, threads=512), 300001, "one step alone"),
    ],
)
def test_what_is_left_out_and_why(config: fused_add.Config, n: int, reason: str) -> None:
    assert reason in (fused_add.excluded(config, n, "bfloat16") or "")


@pytest.mark.parametrize(
    ("op", "x", "weight", "added"),
    [
        (RMS, meta(4, 8192), BF16, True),
        (RMS, meta(2, 3, 6144)[..., :128], F32, True),
        (FusedAddRMSNormFwdOp(weight_offset=1.0), meta(2, 131072, dtype=F16), F16, True),
        (RMS, meta(2, 300001), BF16, True),
        (LN, meta(4, 8192), BF16, True),
        (LN, meta(2, 3, 6144)[..., :128], F32, True),
        (FusedAddLayerNormFwdOp(), meta(2, 131072, dtype=F16), F16, True),
        (LN, meta(2, 300001), BF16, True),
        (TOKEN, meta(4, 8192), BF16, True),
        (CAPPED, meta(4, 1), BF16, False),
        (BLOCK, meta(4, 192), F32, False),
        (INT_BLOCK, meta(4, 1001), BF16, True),
        (TOKEN, meta(2, 131072), BF16, True),
        (BLOCK, meta(2, 300001), BF16, False),
        (TENSOR, meta(4, 4097)[:, :4096], BF16, True),
        (TENSOR, meta(4, 4096, dtype=F32), F32, False),
    ],
)
def test_it_compiles(op: Op, x: Tensor, weight: Any, added: bool, tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("TILEOPS_CACHE_DIR", str(tmp_path))
    recipe = gpu.recipe(cuda, call_of(op, x, weight=weight, added=added), H200)
    assert recipe is not None
    assert program.compile_only(recipe).exists()


@pytest.mark.parametrize("op", [FusedAddRMSNormFwdOp, FusedAddLayerNormFwdOp, FusedAddRMSNormQuantFwdOp])
def test_the_cases_of_the_kit_need_few_programs(op: type[Op]) -> None:
    """Each is compiled, so a suite stays affordable."""
    assert len(kit_recipes(op.entry, cuda, H200)) <= 250


def normal(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=DEVICE).to(dtype)


def held(op: Op, x: Tensor, residual: Tensor | None, weight: torch.dtype | None = None) -> list[Tensor]:
    """The op's results, right."""
    tensors = inputs_of(op, x, residual, lambda n, seed: normal(n, dtype=weight or x.dtype, seed=seed))
    returned = op(*tensors)
    call = op.bind(*tensors)
    inputs = dict(zip(call.inputs, tensors, strict=True))
    results = accuracy.collect(call, returned, inputs)
    verdict = accuracy.verify(call, inputs, results)
    assert verdict.ok, str(verdict)
    return [t for t in results.values() if t is not None]


def same(a: Tensor, b: Tensor) -> bool:
    """Equal to the bit."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


EACH_OP = pytest.mark.parametrize("op", OPS.values(), ids=OPS)


@pytest.mark.cuda
@EACH_OP
@pytest.mark.parametrize("n", LENGTHS)
def test_any_length(n: int, op: Op) -> None:
    for dtype in (BF16, F32) if op in (RMS, LN, BLOCK) else (BF16,):
        held(op, normal(7, n, dtype=dtype), normal(7, n, dtype=dtype, seed=1))


@pytest.mark.cuda
@pytest.mark.parametrize("n", [8, 130, 1000, 8192, 131072, 300001])
@pytest.mark.parametrize("op", [TOKEN, BLOCK, TENSOR, INT_BLOCK], ids=lambda op: f"{op.quant}-{op.quant_dtype}")
def test_codes_without_a_residual(n: int, op: FusedAddRMSNormQuantFwdOp) -> None:
    held(op, normal(5, n), None, F32)


@pytest.mark.cuda
@EACH_OP
@pytest.mark.parametrize("rows", [1, 2, 133, 65535, 65536, 65537])
@pytest.mark.parametrize("n", [64, 520])
def test_any_number_of_rows(rows: int, n: int, op: Op) -> None:
    held(op, normal(rows, n), normal(rows, n, seed=1))


@pytest.mark.cuda
@EACH_OP
def test_one_program_serves_all_numbers_of_rows(op: Op) -> None:
    held(op, normal(3, 640), normal(3, 640, seed=1))
    before = program.compilations, len(program._programs)
    for rows in random.Random(0).sample(range(1, 5000), 20):
        held(op, normal(rows, 640), normal(rows, 640, seed=1))
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
    "misaligned": lambda x: torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape),
}


@pytest.mark.cuda
@pytest.mark.parametrize("op", [RMS, LN, BLOCK], ids=["rms", "ln", "block128"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("n", [1024, 131072])
def test_any_strides_and_the_same_bits(layout: str, n: int, op: Op) -> None:
    x, residual = LAYOUTS[layout](normal(5, 3, n)), normal(5, 3, n, seed=1)
    plain = held(op, x.contiguous(), residual)
    assert all(map(same, held(op, x, residual), plain))
    swapped = held(op, residual, x)
    assert all(map(same, swapped, plain)), "x and residual are alike"


@pytest.mark.cuda
@pytest.mark.semantics("FusedAddRMSNormFwdOp", "batch-invariant")
@pytest.mark.semantics("FusedAddLayerNormFwdOp", "batch-invariant")
@pytest.mark.semantics("FusedAddRMSNormQuantFwdOp", "batch-invariant")
@EACH_OP
@pytest.mark.parametrize("n", [100, 128, 1001, 5120, 65536, 131072, 300001])
def test_a_row_alone_has_the_bits_it_has_in_a_batch(n: int, op: Op) -> None:
    x, residual = normal(100, n), normal(100, n, seed=1)
    whole = held(op, x, residual)
    for rows in (slice(0, 1), slice(17, 20), slice(99, 100)):
        alone = held(op, x[rows].clone(), residual[rows].clone())
        assert all(same(a, b[rows]) for a, b in zip(alone, whole, strict=True))


@pytest.mark.cuda
@pytest.mark.semantics("FusedAddRMSNormFwdOp", "row-isolation")
@pytest.mark.semantics("FusedAddLayerNormFwdOp", "row-isolation")
@pytest.mark.semantics("FusedAddRMSNormQuantFwdOp", "row-isolation", "codes")
@EACH_OP
@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("n", [64, 1024, 16384, 131072])
def test_a_bad_row_leaves_the_others_alone(bad: float, n: int, op: Op) -> None:
    x, residual = normal(9, n), normal(9, n, seed=1)
    clean = held(op, x, residual)
    residual[4, n // 2] = bad
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    for spoilt, before in zip(held(op, x, residual), clean, strict=True):
        assert same(spoilt.view(torch.uint8)[others], before.view(torch.uint8)[others])


@pytest.mark.cuda
@EACH_OP
@pytest.mark.parametrize("n", [12, 256, 3000, 16384, 300001])
@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_constant_and_large_rows(n: int, dtype: torch.dtype, op: Op) -> None:
    rows = [0.0, 1234.1, 20000.0, 1e-7] + ([1e15, 5e16] if dtype != F16 and n < 300001 else [])  # squares add up
    x = torch.tensor(rows, device=DEVICE).to(dtype)[:, None].expand(-1, n).contiguous()
    # Weights of float32, since codes of a constant times a bfloat16 may all be halfway between two.
    held(op, x, torch.zeros_like(x), F32)
    held(op, x, x, F32)


@pytest.mark.cuda
def test_autograd() -> None:
    x, residual = (normal(33, 1536, dtype=F32, seed=i).requires_grad_() for i in (0, 1))
    weight, dy, ds = (normal(*s, dtype=F32, seed=2 + i) for i, s in enumerate([(1536,), (33, 1536), (33, 1536)]))
    weight.requires_grad_()
    torch.autograd.backward(FusedAddRMSNormFwdOp(weight_offset=1.0)(x, residual, weight), [dy, ds])
    exact = [t.detach().double().requires_grad_() for t in (x, residual, weight)]
    total = exact[0] + exact[1]
    y = torch.nn.functional.rms_norm(total, (1536,), exact[2] + 1.0, eps=1e-6)
    torch.autograd.backward([y, total], [dy.double(), ds.double()])
    for got, expected in zip((x, residual, weight), exact, strict=True):
        assert got.grad is not None
        torch.testing.assert_close(got.grad.double(), expected.grad, rtol=1e-5, atol=1e-5)
