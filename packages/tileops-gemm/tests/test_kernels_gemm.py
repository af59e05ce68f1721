"""The SM90 kernels of GEMMFwdOp: what each refuses, which configs are legal, and, on a GPU, that they are right."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tileops.core import program, workloads
from tileops.core.backend import cuda, gpu
from tileops.core.check import Call, TensorMeta
from tileops.core.errors import BackendError
from tileops.core.kernel import H200, Kernel, static_of
from tileops.core.testing.programs import compile_all
from tileops.core.testing.programs import recipes as kit_recipes
from tileops.core.torch_ops import checker_of
from tileops.gemm import GEMMFwdOp
from tileops.gemm.kernels import common, gemm_general, gemm_persistent, gemm_skinny, gemv

GENERAL, PERSISTENT = gemm_general.GEMMGeneral(), gemm_persistent.GEMMPersistent()
SKINNY, VECTOR = gemm_skinny.GEMMSkinny(), gemv.GEMV()
MODULES = {GENERAL: gemm_general, PERSISTENT: gemm_persistent, SKINNY: gemm_skinny, VECTOR: gemv}
LAYOUTS = list(itertools.product((False, True), (True, False)))  # trans_a, trans_b
HALVES = (torch.bfloat16, torch.float16)
SM90A = {"kind": "cuda", "arch": "sm_90a"}
NAN = float("nan")


def shapes(M: int, N: int, K: int, trans_a: bool, trans_b: bool) -> tuple[tuple[int, int], tuple[int, int]]:
    return ((K, M) if trans_a else (M, K)), ((N, K) if trans_b else (K, N))


def call_of(
    M: int, N: int, K: int, trans_a: bool = False, trans_b: bool = True, T: torch.dtype = torch.bfloat16, **strides: Any
) -> Call:
    """A call; ``a`` and ``b`` give the strides of an operand that is not packed."""
    a, b = shapes(M, N, K, trans_a, trans_b)
    dtype = str(T).removeprefix("torch.")
    metas = [
        TensorMeta(s, dtype, strides[n]) if n in strides else TensorMeta(s, dtype) for n, s in (("a", a), ("b", b))
    ]
    return GEMMFwdOp(trans_a, trans_b).bind(*metas)


def row_calls() -> Iterator[Call]:
    entry = GEMMFwdOp.entry
    for row in entry.workloads:
        for case in workloads.cases(row):
            yield workloads.row_call(checker_of(entry), row, case)


@pytest.mark.parametrize(
    ("kernel", "call", "reason"),
    [
        (VECTOR, call_of(3, 64, 64), "more than 2 rows"),
        (VECTOR, call_of(1, 64, 64, trans_a=True), r"a is stored \[K, M\]"),
        (VECTOR, call_of(1, 64, 64, trans_b=False), r"b is stored \[K, N\]"),
        (VECTOR, call_of(2, 64, 64, b=(65, 1)), "b's rows are 130 bytes apart"),
        (VECTOR, call_of(2, 64, 65), "rows of 65 elements don't end with"),
        (VECTOR, call_of(1, 64, 65, a=(72, 1), b=(72, 1)), "rows of 65 elements don't end with"),
        (VECTOR, call_of(2, 17, 1001, a=(1008, 1), b=(1008, 1)), "rows of 1001 elements don't end with"),
        (SKINNY, call_of(129, 64, 64), "more than 128 rows"),
        (SKINNY, call_of(16, 64, 64, trans_a=True), r"a is stored \[K, M\]"),
        (SKINNY, call_of(16, 64, 63), "a's rows are 126 bytes apart"),
        (SKINNY, call_of(16, 2**23, 64), "more blocks of columns"),
        (SKINNY, call_of(128, 7168, 2048), "no gain from splitting K"),
        (PERSISTENT, call_of(512, 65, 64, trans_b=False), "b's rows are 130 bytes apart"),
        (PERSISTENT, call_of(65, 64, 64, trans_a=True), "a's rows are 130 bytes apart"),
        (PERSISTENT, call_of(512, 64, 64, a=(1, 512)), "the elements of a's rows are 512 apart"),
        (PERSISTENT, call_of(512, 64, 64, b=(65, 1)), "b's rows are 130 bytes apart"),
        (PERSISTENT, call_of(512, 64, 64, a=(0, 1)), "a's rows are one and the same"),
        (PERSISTENT, call_of(512, 64, 64, trans_a=True, a=(0, 1)), "a's rows are one and the same"),
        (GENERAL, call_of(512, 64, 64, a=(64, 2)), "the elements of a's rows are 2 apart"),
        (GENERAL, call_of(512, 64, 64, a=(65, 1)), "a has a pitch of its own"),
    ],
)
def test_a_kernel_says_why_it_does_not_serve(kernel: Kernel, call: Call, reason: str) -> None:
    assert re.search(reason, kernel.refuse(call, H200) or "")


@pytest.mark.parametrize(
    ("kernel", "call"),
    [
        (VECTOR, call_of(2, 17, 1000)),
        (SKINNY, call_of(96, 17, 8)),
        (SKINNY, call_of(16, 64, 65, trans_b=False, a=(72, 1))),
        (PERSISTENT, call_of(4096, 4097, 7168)),
        (PERSISTENT, call_of(512, 64, 65, a=(72, 1), b=(128, 1))),
        (PERSISTENT, call_of(2, 8, 1, trans_b=False, a=(8, 1))),
        (PERSISTENT, call_of(64, 8, 8, trans_a=True, trans_b=False)),
        (GENERAL, call_of(512, 64, 65, a=(100, 1))),
        (GENERAL, call_of(16, 64, 64, a=(65, 1), b=(0, 1))),
        (GENERAL, call_of(1, 1, 1, trans_a=True)),
    ],
)
def test_a_kernel_takes(kernel: Kernel, call: Call) -> None:
    assert kernel.refuse(call, H200) is None
    assert next(iter(kernel.configs(call, H200)))


@pytest.mark.parametrize(
    ("M", "pitch"), [(20, 24), (1000, 1016), (1500, 1528), (3600, 3800), (3600, 4096), (5000, 5008), (72, 8)]
)
def test_a_slice_of_a_is_read_where_it_lies(M: int, pitch: int) -> None:
    """A bucket's end may be beyond the pitch, which is this call's; overlapping rows are read like any others."""
    choice = gpu.choose(gpu.bucketed(call_of(M, 4096, 1024, True, False, a=(pitch, 1))), H200)
    assert (type(choice.kernel), choice.copies) == (gemm_persistent.GEMMPersistent, ())


@pytest.mark.parametrize(
    ("module", "config", "call", "reason"),
    [
        (gemm_persistent, (2, 256, 5), call_of(4096, 4096, 4096), "more shared memory"),
        (gemm_persistent, (3, 256, 2), call_of(4096, 4096, 4096), "three consumers have 160 registers"),
        (gemm_persistent, (2, 176, 4), call_of(4096, 4096, 4096, trans_b=False), "boxes of 64"),
        (gemm_persistent, (1, 64, 4, 8, 2), call_of(64, 4096, 4096), "a cluster taller than d"),
        (gemm_skinny, (128, 128, 8, 1), call_of(128, 4096, 4096), "more shared memory"),
        (gemm_skinny, (64, 16, 8, 8), call_of(16, 4096, 1024), "parts of K shorter"),
        (gemm_skinny, (64, 16, 8, 2), call_of(16, 64 * 264, 4096), "more splits than it takes"),
        (gemv, (1, 8), call_of(2, 64, 4096), "b read twice"),
        (gemv, (2, 8), call_of(1, 64, 4096), "rows that are not there"),
        (gemv, (1, 8), call_of(1, 64, 1024), "more loads in flight than K has"),
        (gemm_general, (256, 256, 256, 256), call_of(512, 512, 65), "more shared memory"),
    ],
)
def test_what_is_left_out_and_why(module: Any, config: tuple[int, ...], call: Call, reason: str) -> None:
    assert reason in (module.excluded(module.Config(*config), call, H200) or "")


def test_widths_that_a_compiler_splits_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    call = call_of(96, 2112, 7168)
    cases = {gemm_persistent: (2, 192, 4), gemm_skinny: (64, 96, 6, 4)}
    for module, config in cases.items():
        monkeypatch.setattr(module, "ANY_WGMMA_WIDTH", False)
        assert "splits a wgmma" in (module.excluded(module.Config(*config), call, H200) or "")
        monkeypatch.setattr(module, "ANY_WGMMA_WIDTH", True)
        assert module.excluded(module.Config(*config), call, H200) is None


@pytest.mark.parametrize("wide", [True, False])
def test_every_config_of_every_row_is_legal(monkeypatch: pytest.MonkeyPatch, wide: bool) -> None:
    for module in (gemm_persistent, gemm_skinny):
        monkeypatch.setattr(module, "ANY_WGMMA_WIDTH", wide)
    for call in row_calls():
        kind = gpu.bucketed(call)
        serving = [k for k in MODULES if k.refuse(kind, H200) is None]
        assert serving, call
        for kernel in serving:
            configs = list(kernel.configs(kind, H200))
            assert configs
            assert len(set(configs)) == len(configs)
            for config in configs:
                assert getattr(config, "shared_bytes", 0) <= H200.shared_bytes
                assert config.threads <= 1024
                assert sum(4 * torch.Size(s.shape).numel() for s in kernel.workspace(kind, config)) < 2**26


def test_the_rows_are_served_by_the_kernels_made_for_them() -> None:
    served = {c.id: type(gpu.choose(gpu.bucketed(c), H200).kernel).__name__ for c in row_calls()}
    vectors = {c.id for c in row_calls() if c["M"] <= 2}
    skinny = {c.id for c in row_calls() if 2 < c["M"] <= 96 or (c["M"] == 128 and c["N"] == 2112)}
    for name, kernel in served.items():
        assert kernel == ("GEMV" if name in vectors else "GEMMSkinny" if name in skinny else "GEMMPersistent"), name


SIZES = (1, 2, 3, 7, 8, 16, 17, 63, 64, 65, 127, 128, 129, 257, 1000, 4097)


@pytest.mark.parametrize(("trans_a", "trans_b"), LAYOUTS)
def test_every_size_is_served(trans_a: bool, trans_b: bool) -> None:
    for M, N, K in itertools.product(SIZES, repeat=3):
        gpu.choose(gpu.bucketed(call_of(M, N, K, trans_a, trans_b)), H200)


def test_pitches_that_a_copy_mends_are_copied_only_where_it_pays() -> None:
    big = gpu.choose(call_of(4096, 4096, 1024, b=(1025, 1)), H200)
    assert (type(big.kernel), big.copies) == (gemm_persistent.GEMMPersistent, ("b",))
    small = gpu.choose(call_of(16, 4096, 1024, b=(1025, 1)), H200)
    assert (type(small.kernel), small.copies) == (gemm_general.GEMMGeneral, ())
    transposed = gpu.choose(call_of(16, 4096, 1024, b=(1, 4096)), H200)
    assert (type(transposed.kernel), transposed.copies) == (gemm_skinny.GEMMSkinny, ("b",))


@pytest.mark.parametrize(
    ("kernel", "call"),
    [
        (VECTOR, call_of(2, 17, 1000)),
        (SKINNY, call_of(16, 256, 1024)),
        (PERSISTENT, call_of(512, 512, 1024, trans_a=True, trans_b=False)),
        (GENERAL, call_of(64, 63, 65)),
    ],
    ids=["gemv", "skinny", "persistent", "general"],
)
def test_a_kernel_compiles(kernel: Kernel, call: Call, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEOPS_CACHE_DIR", str(tmp_path))
    assert kernel.refuse(call, H200) is None
    config = next(iter(kernel.configs(call, H200)))
    static = static_of(checker_of(call.entry), call)
    assert program.compile_only(program.Recipe(kernel, static, config, H200, SM90A)).is_file()


def test_the_cases_of_the_kit_need_few_programs() -> None:
    """Each is compiled, so a suite stays affordable."""
    assert len(kit_recipes(GEMMFwdOp.entry, cuda, H200)) <= 200


MS = (1, 2, 3, 16, 17, 63, 64, 65, 127, 128, 129, 257, 1000)
ODD = ((1, 1), (3, 17), (65, 63), (129, 127), (257, 1000))
EVEN = ((8, 8), (264, 1000), (1000, 64))
CASES = [(N, K, *layout) for N, K in ODD + EVEN for layout in LAYOUTS]
LONG = (2112, 7168)
PLACES = {
    "packed": lambda rows, columns: ((columns, 1), 0),
    "sliced": lambda rows, columns: ((columns + 24, 1), 16),
    "odd pitch": lambda rows, columns: ((columns + 1, 1), 0),
    "misaligned": lambda rows, columns: ((columns, 1), 1),
    "transposed": lambda rows, columns: ((1, rows), 0),
    "every other": lambda rows, columns: ((2 * columns, 2), 0),
    "overlapping": lambda rows, columns: ((8, 1), 0),
    "one row": lambda rows, columns: ((0, 1), 0),
    "one column": lambda rows, columns: ((1, 0), 0),
}  # strides and offset of an operand
PLACED = [(M, *layout) for M in (16, 300) for layout in ((False, True), (True, False))]
TAILS = (
    (1, 40, 72),
    (1, 40, 65),
    (2, 40, 65),
    (2, 17, 1001),
    (13, 40, 72),
    (13, 40, 65),
    (130, 136, 200),
    (130, 136, 65),
)
WIDE = 1024
SLICES = [(rows, pitch, offset) for rows in (1, 2, 3) for pitch, offset in ((200, 0), (200, 8), (101, 0), (101, 1))]
MANY = (264, 2048)
CHOSEN = [
    (VECTOR, gemv.Config(2, 8), (1, 2, 3, 7)),
    (SKINNY, gemm_skinny.Config(64, 32, 6, 2), (1, 16, 31, 32, 33, 100)),
    (PERSISTENT, gemm_persistent.Config(2, 128, 4), (1, 63, 129, 1000, 4096, 20000)),
    (GENERAL, gemm_general.Config(64, 64, 64, 128), (1, 63, 129, 1000, 4096)),
]
SPLIT = gemm_skinny.Config(64, 32, 6, 4)


def dtype_of(N: int, K: int, trans_a: bool, trans_b: bool) -> torch.dtype:
    """Both dtypes in turn."""
    return HALVES[(N + K + trans_a + trans_b) % 2]


def calls() -> Iterator[Call]:
    """What the GPU tests call, so that it can be compiled ahead; any that is missing here is compiled when called."""
    for N, K, trans_a, trans_b in CASES:
        for M in MS:
            yield call_of(M, N, K, trans_a, trans_b, dtype_of(N, K, trans_a, trans_b))
    for T in HALVES:
        for M in (1, 2, 16, 33, 128, 300):
            yield call_of(M, *LONG, T=T)
    for M, trans_a, trans_b in PLACED:
        for x, y in placements():
            sa, sb = shapes(M, 72, 136, trans_a, trans_b)
            yield call_of(M, 72, 136, trans_a, trans_b, a=PLACES[x](*sa)[0], b=PLACES[y](*sb)[0])
    for M, N, K in TAILS:
        yield call_of(M, N, K, a=(WIDE, 1), b=(WIDE, 1))
    for rows, pitch, _ in SLICES:
        yield call_of(rows, 40, 72, a=(pitch, 1))
    yield call_of(4096, *MANY)


def placements() -> Iterator[tuple[str, str]]:
    """One operand packed, the other anyhow; and both in slices."""
    yield from ((x, y) for x, y in itertools.product(PLACES, repeat=2) if "packed" in (x, y) or x == y == "sliced")


def recipe(kernel: Kernel, config: Any, call: Call, device: Any = H200) -> program.Recipe:
    return program.Recipe(kernel, static_of(checker_of(call.entry), call), config, device, SM90A)


def recipes(device: Any) -> Iterator[program.Recipe]:
    """Of all that the tests below run."""
    yield from (made for call in calls() if (made := gpu.recipe(cuda, call, device)))
    yield from (recipe(kernel, config, call_of(2, *MANY), device) for kernel, config, _ in CHOSEN)
    yield recipe(SKINNY, SPLIT, call_of(24, 256, 4096), device)
    for kernel, M, N, K, trans_a, trans_b in sampled():
        call = call_of(M, N, K, trans_a, trans_b, torch.float16)
        yield from (recipe(kernel, config, call, device) for config in kernel.configs(call, device))


@pytest.fixture(scope="module")
def built() -> None:
    """All programs, compiled in parallel."""
    compile_all(recipes(cuda.device(0)))


def integers(*shape: int, T: torch.dtype, seed: int = 0) -> Tensor:
    """Small integers, whose products and sums are exact in float32."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randint(-3, 4, shape, device="cuda", generator=generator).to(T)


def normal(*shape: int, T: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)).to(T)


def product(a: Tensor, b: Tensor, trans_a: bool, trans_b: bool) -> Tensor:
    """In float64."""
    return (a.mT if trans_a else a).double() @ (b.mT if trans_b else b).double()


def run(kernel: Kernel, config: Any, a: Tensor, b: Tensor, trans_a: bool = False, trans_b: bool = True) -> Tensor:
    """One launch of a kernel, with a config of our choice; the output and the workspace start as NaN."""
    call = GEMMFwdOp(trans_a, trans_b).bind(a, b)
    device = cuda.device(0)
    assert kernel.refuse(call, device) is None
    assert MODULES[kernel].excluded(config, call, device) is None
    loaded = program.load(recipe(kernel, config, call, device))
    d = torch.full((call["M"], call["N"]), NAN, dtype=a.dtype, device=a.device)
    scratch = [torch.full(s.shape, NAN, device=a.device) for s in kernel.workspace(call, config)]
    loaded.main(a, b, d, *scratch)
    return d


def assert_close(d: Tensor, oracle: Tensor, K: int) -> None:
    """Within one rounding, and the float32 sums' share of what was added up."""
    ulp = 2.0 ** (-8 if d.dtype == torch.bfloat16 else -11)
    bound = ulp * oracle.abs() + 2.0**-20 * K**0.5 + (2.0**-24 if d.dtype == torch.float16 else 0)
    assert (d.double() - oracle).abs().le(bound).all()


@pytest.mark.cuda
@pytest.mark.parametrize(("N", "K", "trans_a", "trans_b"), CASES)
def test_integer_products_are_exact(built: None, N: int, K: int, trans_a: bool, trans_b: bool) -> None:
    T = dtype_of(N, K, trans_a, trans_b)
    op = GEMMFwdOp(trans_a, trans_b)
    for M in MS:
        a, b = (integers(*s, T=T, seed=i) for i, s in enumerate(shapes(M, N, K, trans_a, trans_b)))
        assert torch.equal(op(a, b), product(a, b, trans_a, trans_b).to(T)), M


@pytest.mark.cuda
@pytest.mark.semantics("GEMMFwdOp", "accumulate")
@pytest.mark.parametrize("T", HALVES)
@pytest.mark.parametrize("M", [1, 2, 16, 33, 128, 300])
def test_sums_are_rounded_once(built: None, M: int, T: torch.dtype) -> None:
    N, K = LONG
    a, b = normal(M, K, T=T), normal(N, K, T=T, seed=1) / K**0.5
    assert_close(GEMMFwdOp()(a, b), product(a, b, False, True), K)


@pytest.mark.cuda
@pytest.mark.parametrize(("M", "trans_a", "trans_b"), PLACED)
def test_operands_may_lie_anyhow(built: None, M: int, trans_a: bool, trans_b: bool) -> None:
    N, K, T = 72, 136, torch.bfloat16
    op = GEMMFwdOp(trans_a, trans_b)
    for x, y in placements():
        operands = []
        for seed, (place, shape) in enumerate(zip((x, y), shapes(M, N, K, trans_a, trans_b), strict=True)):
            strides, offset = PLACES[place](*shape)
            operands.append(integers(100_000, T=T, seed=seed).as_strided(shape, strides, offset))
        assert torch.equal(op(*operands), product(*operands, trans_a, trans_b).to(T)), (x, y)


@pytest.mark.cuda
@pytest.mark.parametrize(("rows", "pitch", "offset"), SLICES)
def test_a_few_rows_of_a_slice(built: None, rows: int, pitch: int, offset: int) -> None:
    """A row's stride says nothing where there is one row."""
    a = integers(1000, T=torch.bfloat16).as_strided((rows, 72), (pitch, 1), offset)
    b = integers(40, 72, T=torch.bfloat16, seed=1)
    assert torch.equal(GEMMFwdOp()(a, b), product(a, b, False, True).to(torch.bfloat16))


def sampled() -> list[tuple[Kernel, int, int, int, bool, bool]]:
    """Kernels and calls whose configs are all run."""
    return [
        (VECTOR, 2, 40, 1032, False, True),
        (SKINNY, 13, 200, 2056, False, True),
        (SKINNY, 100, 200, 2056, False, False),
        (PERSISTENT, 300, 520, 200, False, True),
        (PERSISTENT, 304, 520, 200, True, False),
        (GENERAL, 130, 131, 133, False, True),
    ]


@pytest.mark.cuda
@pytest.mark.full
@pytest.mark.parametrize(("kernel", "M", "N", "K", "trans_a", "trans_b"), sampled())
def test_every_config_is_right(
    built: None, kernel: Kernel, M: int, N: int, K: int, trans_a: bool, trans_b: bool
) -> None:
    T = torch.float16
    a, b = (integers(*s, T=T, seed=i) for i, s in enumerate(shapes(M, N, K, trans_a, trans_b)))
    oracle = product(a, b, trans_a, trans_b).to(T)
    for config in kernel.configs(GEMMFwdOp(trans_a, trans_b).bind(a, b), cuda.device(0)):
        assert torch.equal(run(kernel, config, a, b, trans_a, trans_b), oracle), config


@pytest.mark.cuda
@pytest.mark.parametrize(("kernel", "config", "ms"), CHOSEN)
def test_one_program_serves_any_number_of_rows(
    built: None, monkeypatch: pytest.MonkeyPatch, kernel: Kernel, config: Any, ms: tuple[int, ...]
) -> None:
    monkeypatch.setattr(MODULES[kernel], "excluded", lambda *_: None)
    monkeypatch.setattr(type(kernel), "refuse", lambda *_: None)
    (N, K), T = MANY, torch.bfloat16
    b = integers(N, K, T=T, seed=1)
    a = integers(max(ms), K, T=T)
    oracle = product(a, b, False, True).to(T)
    run(kernel, config, a[:2], b)
    compiled = program.compilations
    for M in ms:
        assert torch.equal(run(kernel, config, a[:M], b), oracle[:M]), M
    assert program.compilations == compiled


@pytest.mark.cuda
def test_fifty_new_lengths_compile_nothing() -> None:
    """Once each bucket of M has been met."""
    (N, K), T = MANY, torch.bfloat16
    op, b = GEMMFwdOp(), integers(N, K, T=T, seed=1)
    a = integers(4096, K, T=T)
    oracle = product(a, b, False, True).to(T)
    ends = op.buckets["M"]
    op.warmup(*(op.bind((M, K), (N, K), T=T) for M in ends))
    compiled = program.compilations
    for M in random.Random(0).sample(sorted(set(range(1, 4097)) - set(ends)), 50):
        assert torch.equal(op(a[:M], b), oracle[:M]), M
    assert program.compilations == compiled


@pytest.mark.cuda
def test_a_launch_that_the_driver_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    T = torch.bfloat16
    a, b = integers(300, 264, T=T), integers(392, 264, T=T, seed=1)
    op = GEMMFwdOp()
    hungry = gemm_persistent.Config(warpgroups=2, block_n=256, stages=9)
    with monkeypatch.context() as m:
        m.setattr(gemm_persistent.GEMMPersistent, "configs", lambda *_: iter([hungry]))
        with pytest.raises(BackendError, match=r"GEMMFwdOp: the driver refused to launch GEMMPersistent with Config\("):
            op(a, b)
    op._state.forget()
    assert torch.equal(op(a, b), product(a, b, False, True).to(T))


@pytest.mark.cuda
def test_split_sums_are_the_same_bits_each_time(built: None) -> None:
    N, K = 256, 4096
    a, b = normal(24, K, T=torch.bfloat16), normal(N, K, T=torch.bfloat16, seed=1)
    first = run(SKINNY, SPLIT, a, b)
    assert_close(first, product(a, b, False, True), K * K)
    for _ in range(20):
        assert torch.equal(run(SKINNY, SPLIT, a, b), first)


@pytest.mark.cuda
@pytest.mark.semantics("GEMMFwdOp", "non-finite")
@pytest.mark.parametrize(("trans_a", "trans_b"), LAYOUTS)
@pytest.mark.parametrize(("N", "K"), [(264, 1000), (65, 63)])
def test_nan_stays_in_its_row_and_column(built: None, N: int, K: int, trans_a: bool, trans_b: bool) -> None:
    T = dtype_of(N, K, trans_a, trans_b)
    op = GEMMFwdOp(trans_a, trans_b)
    for M in (1, 2, 16, 64, 129, 257):
        a, b = (integers(*s, T=T, seed=i) for i, s in enumerate(shapes(M, N, K, trans_a, trans_b)))
        expected = product(a, b, trans_a, trans_b).to(T)
        m, n = M // 2, N // 3
        (a.mT if trans_a else a)[m, K - 1] = NAN
        (b.mT if trans_b else b)[0, n] = NAN
        d = op(a, b)
        assert d[m].isnan().all()
        assert d[:, n].isnan().all()
        d[m], d[:, n], expected[m], expected[:, n] = 0, 0, 0, 0
        assert torch.equal(d, expected), M


@pytest.mark.cuda
def test_a_tail_of_nan_in_memory_is_not_read(built: None) -> None:
    """What lies beyond the rows and columns of a slice is another's."""
    T = torch.bfloat16
    wide = torch.full((300, WIDE), NAN, dtype=T, device="cuda")
    weight = torch.full((200, WIDE), NAN, dtype=T, device="cuda")
    for M, N, K in TAILS:
        wide[:M, :K] = integers(M, K, T=T)
        weight[:N, :K] = integers(N, K, T=T, seed=1)
        a, b = wide[:M, :K], weight[:N, :K]
        assert torch.equal(GEMMFwdOp()(a, b), product(a, b, False, True).to(T)), (M, N, K)
        wide.fill_(NAN)
        weight.fill_(NAN)


@pytest.mark.cuda
@pytest.mark.nightly
@pytest.mark.parametrize(("M", "N", "K"), [(70000, 40000, 64), (66000, 33001, 65), (1, 300000, 8192)])
def test_more_elements_than_an_int32_counts(M: int, N: int, K: int) -> None:
    T = torch.bfloat16
    a, b = integers(M, K, T=T), integers(N, K, T=T, seed=1)
    d = GEMMFwdOp()(a, b)
    for rows in (slice(0, 1000), slice(max(0, M - 1000), M)):
        assert torch.equal(d[rows], (a[rows].float() @ b.float().mT).to(T))


def test_the_version_rule_is_asked_once() -> None:
    import tilelang

    wide = tuple(int(n) for n in tilelang.__version__.split("+")[0].split(".")[:3]) >= (0, 1, 15)
    assert common.ANY_WGMMA_WIDTH is wide
