"""The SM90 kernel of FusedQKNormRoPE: dispatch, how a head is dealt, and, on a GPU, right and nothing else written."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tileops.core import accuracy, program
from tileops.core.backend import cuda, gpu
from tileops.core.check import Call
from tileops.core.errors import NoKernelError
from tileops.core.inputs import make_inputs
from tileops.core.kernel import H200
from tileops.core.testing.programs import recipes as kit_recipes
from tileops.core.torch_ops import checker_of
from tileops.core.workloads import cases, scaled
from tileops.norm import FusedQKNormRoPEFwdOp
from tileops.norm.kernels.fused_qk_norm_rope import Config, FusedQKNormRoPEHeads, Head, excluded

DEVICE = "cuda"
F32, F16, BF16, I64 = torch.float32, torch.float16, torch.bfloat16, torch.int64
NAN, INF = float("nan"), float("inf")
BITS = {2: torch.int16, 4: torch.int32}
HEADS = [
    (64, 64),
    (128, 128),
    (256, 256),
    (512, 512),
    (128, 64),
    (256, 64),
    (96, 96),
    (80, 20),
    (72, 16),
    (7, 4),
    (2, 2),
]
each_layout = pytest.mark.parametrize("rope_layout", ["neox", "interleaved"])


def meta(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def call_of(D: int, R: int, qkv: Tensor | None = None, dtype: torch.dtype = BF16, **params: Any) -> Call:
    """Of two query heads, and a key head."""
    op = FusedQKNormRoPEFwdOp(2, 1, **params)
    qkv = meta(5, 4 * D, dtype=dtype) if qkv is None else qkv
    return op.bind(qkv, meta(D, dtype=dtype), meta(D, dtype=dtype), meta(9, R, dtype=F32), meta(5, dtype=I64))


@pytest.mark.parametrize(
    ("call", "copies"),
    [
        (call_of(128, 128), ()),
        (call_of(128, 64, meta(5, 600)[:, :512]), ()),
        (call_of(128, 64, meta(5, 513)[:, 1:]), ()),
        (call_of(128, 128, meta(512, 5).t()), ("qkv",)),
        (call_of(2048, 2048), ()),
    ],
)
def test_what_is_copied(call: Call, copies: tuple[str, ...]) -> None:
    choice = gpu.choose(call, H200)
    assert (type(choice.kernel).__name__, choice.copies) == ("FusedQKNormRoPEHeads", copies)


def test_a_head_too_long_for_a_warp_is_refused() -> None:
    with pytest.raises(NoKernelError, match="a head of 2050 elements is more than a warp's registers hold"):
        gpu.choose(call_of(2050, 64), H200)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("D", "R"), HEADS)
@each_layout
def test_every_element_is_one_threads(
    D: int, R: int, dtype: str, rope_layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And that thread has the other of its pair, and their angle."""
    monkeypatch.setattr("tilelang.language.if_then_else", lambda test, then, other: then if test else other)
    head = Head.of(D, R, dtype, rope_layout)
    seen = []
    for j in range(head.pairs):
        own = [head.element(j, k) + v for k in range(2) if head.has(j, k) for v in range(head.vec)]
        seen += own
        for v in range(head.vec) if head.turns(j) else ():
            first, second = (own[place] for place in head.pair(v))
            angle = j * head.vec + v
            assert (first, second) == ((angle, angle + R // 2) if head.neox else (2 * angle, 2 * angle + 1))
    assert sorted(seen) == list(range(D))
    assert sum(bool(head.turns(j)) for j in range(head.pairs)) * head.vec == R // 2


@pytest.mark.semantics("FusedQKNormRoPEFwdOp", "batch-invariant")
@pytest.mark.parametrize(("D", "R"), HEADS)
def test_the_order_of_a_sum_is_that_of_the_head(D: int, R: int) -> None:
    deals = {(c.lanes, c.chunks) for c in FusedQKNormRoPEHeads().configs(call_of(D, R), H200)}
    deals |= {
        (c.lanes, c.chunks) for c in FusedQKNormRoPEHeads().configs(call_of(D, R, meta(5, 4 * D + 1)[:, 1:]), H200)
    }
    assert len(deals) == 1


@pytest.mark.parametrize(
    ("config", "held", "reason"),
    [
        (Config(8, 1, 256, 9), 16, "more threads"),
        (Config(8, 1, 256, 8), 16, "more registers"),
        (Config(32, 4, 512, 1), 64, "more registers"),
        (Config(8, 1, 256, 2), 16, None),
    ],
)
def test_what_is_left_out_and_why(config: Config, held: int, reason: str | None) -> None:
    said = excluded(config, held)
    assert said is None if reason is None else reason in (said or "")


@pytest.mark.parametrize(
    "call",
    [
        call_of(128, 128),
        call_of(128, 64, rope_layout="interleaved"),
        call_of(256, 64, dtype=F32),
        call_of(80, 20, meta(5, 323)[:, :320]),
        call_of(7, 4),
    ],
    ids=["whole", "interleaved", "partial", "pitch", "odd"],
)
def test_it_compiles(call: Call, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEOPS_CACHE_DIR", str(tmp_path))
    recipe = gpu.recipe(cuda, call, H200)
    assert recipe is not None
    assert program.compile_only(recipe).exists()


def test_the_cases_of_the_kit_need_few_programs() -> None:
    """Each is compiled, so a suite stays affordable."""
    assert len(kit_recipes(FusedQKNormRoPEFwdOp.entry, cuda, H200)) <= 80


def normal(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=DEVICE).to(dtype)


def operands(D: int, R: int, tokens: int, dtype: torch.dtype = BF16, cache: torch.dtype = F32) -> list[Tensor]:
    """What a call takes behind qkv."""
    positions = torch.arange(tokens, device=DEVICE) * 7 % 64
    return [
        normal(D, dtype=dtype, seed=1),
        normal(D, dtype=dtype, seed=2),
        normal(64, R, dtype=cache, seed=3),
        positions,
    ]


def held(op: FusedQKNormRoPEFwdOp, qkv: Tensor, *given: Any) -> Tensor:
    """Its qkv after the call, right and with v to the bit."""
    before = qkv.clone()
    assert op(qkv, *given) is None
    call = op.bind(before, *given)
    inputs = dict(zip(call.inputs, (before, *given), strict=True))
    verdict = accuracy.verify(call, inputs, {"qkv": qkv})
    assert verdict.ok, str(verdict)
    return qkv


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("row", "case"),
    [
        pytest.param(row, case, id="-".join([row.label, *case.values()]))
        for row in FusedQKNormRoPEFwdOp.entry.workloads
        for case in cases(row)
    ],
)
def test_rows(row: Any, case: Any) -> None:
    call = scaled(checker_of(FusedQKNormRoPEFwdOp.entry), row, case, math.inf, 2**30)
    held(FusedQKNormRoPEFwdOp(**call.params), *make_inputs(call, DEVICE).values())


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize(("D", "R"), HEADS)
@each_layout
def test_any_head(D: int, R: int, rope_layout: str, dtype: torch.dtype) -> None:
    op = FusedQKNormRoPEFwdOp(5, 2, rope_layout=rope_layout)
    for cache in (F32, dtype):
        held(op, normal(33, 9 * D, dtype=dtype), *operands(D, R, 33, dtype, cache))


@pytest.mark.cuda
@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 133, 65537])
@pytest.mark.parametrize(("heads", "heads_kv"), [(1, 1), (7, 1), (32, 8), (33, 11)])
def test_any_number_of_tokens_and_heads(tokens: int, heads: int, heads_kv: int) -> None:
    op = FusedQKNormRoPEFwdOp(heads, heads_kv)
    held(op, normal(min(tokens, 4000), (heads + 2 * heads_kv) * 64), *operands(64, 64, min(tokens, 4000)))
    if tokens > 4000:  # the oracle takes several times the memory
        qkv, given = normal(4000, (heads + 2 * heads_kv) * 64), operands(64, 64, tokens)
        many = qkv.repeat(tokens // 4000 + 1, 1)[:tokens]
        given[3] %= 1
        op(many, *given)
        op(qkv, *given[:3], given[3][:4000])
        assert torch.equal(many[-(tokens % 4000) :], qkv[: tokens % 4000])


@pytest.mark.cuda
@pytest.mark.semantics("FusedQKNormRoPEFwdOp", "in-place")
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("pitch", [0, 1, 3, 4, 8])
@pytest.mark.parametrize("first", [0, 1, 8])
@pytest.mark.parametrize(("D", "R"), [(128, 128), (80, 20)])
def test_nothing_else_is_written(D: int, R: int, dtype: torch.dtype, pitch: int, first: int) -> None:
    """v, rows that are not the call's, and what lies between rows, all of it NaN; ``first`` misaligns the address."""
    width = 4 * D
    buffer = torch.full((19, first + width + pitch), NAN, device=DEVICE, dtype=dtype)
    own, written = slice(first, first + width), slice(first, first + 3 * D)
    buffer[1:18, written] = normal(17, 3 * D, dtype=dtype)
    before, op, given = buffer.clone(), FusedQKNormRoPEFwdOp(2, 1), operands(D, R, 17, dtype)
    op(buffer[1:18, own], *given)
    packed = before[1:18, own].contiguous()
    op(packed, *given)
    bits = BITS[dtype.itemsize]
    assert torch.equal(buffer[1:18, own].contiguous().view(bits), packed.view(bits))
    assert buffer[1:18, written].isfinite().all()
    buffer[1:18, written] = before[1:18, written]
    assert torch.equal(buffer.view(bits), before.view(bits))


@pytest.mark.cuda
@pytest.mark.parametrize("layout", [lambda x: x.t().contiguous().t(), lambda x: x.repeat_interleave(2, 1)[:, ::2]])
def test_elements_that_do_not_lie_side_by_side(layout: Any) -> None:
    qkv, op = normal(33, 4 * 128), FusedQKNormRoPEFwdOp(2, 1)
    odd = layout(qkv)
    for x in (qkv, odd):
        op(x, *operands(128, 128, 33))
    assert torch.equal(odd, qkv)


@pytest.mark.cuda
@pytest.mark.semantics("FusedQKNormRoPEFwdOp", "batch-invariant", "row-isolation")
@pytest.mark.parametrize("dtype", [BF16, F32])
@each_layout
def test_a_token_alone_has_the_bits_it_has_in_a_batch(dtype: torch.dtype, rope_layout: str) -> None:
    op, given = FusedQKNormRoPEFwdOp(8, 2, rope_layout=rope_layout), operands(128, 64, 300, dtype)
    qkv = normal(300, 12 * 128, dtype=dtype)
    whole = qkv.clone()
    op(whole, *given)
    for rows in (slice(0, 1), slice(17, 20), slice(299, 300)):
        alone = qkv[rows].clone()
        op(alone, *given[:3], given[3][rows])
        assert torch.equal(alone, whole[rows])
    for bad in (NAN, INF):
        spoilt = qkv.clone()
        spoilt[4, 3 * 128 + 7] = bad
        op(spoilt, *given)
        others = torch.ones(300, 12, dtype=torch.bool, device=DEVICE)
        others[4, 3] = False
        assert torch.equal(spoilt.unflatten(1, (12, 128))[others], whole.unflatten(1, (12, 128))[others])
        assert spoilt[4, 3 * 128 + 7].isnan()


@pytest.mark.cuda
def test_one_program_serves_all_numbers_of_tokens_and_positions() -> None:
    op = FusedQKNormRoPEFwdOp(4, 1)
    held(op, normal(3, 6 * 96), *operands(96, 96, 3))
    before = program.compilations, len(program._programs)
    for tokens, P in ((1, 64), (5, 1), (700, 9), (133, 5000)):
        q_weight, k_weight, _, _ = operands(96, 96, tokens)
        positions = torch.arange(tokens, device=DEVICE) % P
        held(op, normal(tokens, 6 * 96), q_weight, k_weight, normal(P, 96, dtype=F32, seed=3), positions)
    assert (program.compilations, len(program._programs)) == before
