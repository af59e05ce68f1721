"""The SM90 kernels of GQADenseFwdOp: what each refuses, which configs are legal, and, on a GPU, that they are right."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from tileops.attention import GQADenseFwdOp
from tileops.attention.kernels import common, gqa_decode, gqa_general, gqa_prefill
from tileops.core import program, workloads
from tileops.core.accuracy import collect, verify
from tileops.core.backend import cuda, gpu
from tileops.core.check import Call, TensorMeta
from tileops.core.choice import Choice
from tileops.core.inputs import make_inputs
from tileops.core.kernel import H200, Device, Kernel, static_of
from tileops.core.testing.programs import compile_all
from tileops.core.testing.programs import recipes as kit_recipes
from tileops.core.torch_ops import checker_of
from tileops.core.tune.measure import launch_of

DECODE, PREFILL, GENERAL = gqa_decode.GQADecode(), gqa_prefill.GQAPrefill(), gqa_general.GQAGeneral()
KERNELS = (DECODE, PREFILL, GENERAL)
INF, NAN = float("inf"), float("nan")


@attrs.frozen
class Kind:
    """Calls that differ in B, S_q and S_kv only. ``extra`` names the optional inputs that are given."""

    H: int = 8
    H_kv: int = 2
    D: int = 128
    D_v: int = 0  # 0: D
    T: str = "bfloat16"  # of q, k and v; float8 has scales
    extra: tuple[str, ...] = ()
    params: dict[str, Any] = attrs.field(factory=dict, kw_only=True)

    @property
    def op(self) -> GQADenseFwdOp:
        return GQADenseFwdOp(**self.params)

    def call(self, B: int, S_q: int, S_kv: int, **strides: tuple[int, ...]) -> Call:
        shapes = {
            "q": (S_q, self.H, self.D),
            "k": (S_kv, self.H_kv, self.D),
            "v": (S_kv, self.H_kv, self.D_v or self.D),
        }
        metas: list[TensorMeta | None] = []
        for name, shape in shapes.items():
            given = {"strides": strides[name]} if name in strides else {}
            metas.append(TensorMeta((B, *shape), self.T, **given))
        for name in ("sinks", "alibi_slopes"):
            given = {"strides": strides[name]} if name in strides else {}
            metas.append(TensorMeta((self.H,), "float32", **given) if name in self.extra else None)
        scale = TensorMeta((B, self.H_kv), "float32") if self.T.startswith("float8") else None
        return self.op.bind(*metas, scale, scale, scale)


EVERYTHING = Kind(
    extra=("sinks", "alibi_slopes"),
    params={"is_causal": True, "window_size_left": 70, "softcap": 20.0, "softmax_scale": 0.2, "return_lse": True},
)
WIDE = attrs.evolve(EVERYTHING, params={**EVERYTHING.params, "window_size_left": 3000})
SINK = ("sinks",)
SLOPES = ("alibi_slopes",)
SHORT = [
    (2, 65, 65),
    (1, 127, 200),
    (3, 128, 128),
    (1, 129, 257),
    (2, 200, 129),
    (1, 257, 1),
    (2, 90, 31),
    (1, 600, 700),
]
STEPS = [(1, 1, 1), (3, 1, 5), (2, 1, 127), (70, 1, 129), (1, 1, 4095), (200, 1, 300)]
FEW = [(2, 5, 3), (3, 8, 8), (2, 13, 1000), (50, 16, 129)]
# name -> kind, and the sizes (B, S_q, S_kv) that it runs
CASES: dict[str, tuple[Kind, list[tuple[int, int, int]]]] = {
    "causal": (Kind(params={"is_causal": True}), [*SHORT, *STEPS, *FEW]),
    "full-fp16": (Kind(4, 4, 64, T="float16"), [*SHORT, *STEPS]),
    "lse": (Kind(3, 3, 64, params={"is_causal": True, "return_lse": True}), [*SHORT, *STEPS, *FEW]),
    "everything": (EVERYTHING, [*SHORT, *STEPS, *FEW]),
    "everything-split": (WIDE, [(1, 1, 4095), (3, 1, 4095), (3, 1, 2000), (2, 13, 3500)]),
    "sinks": (Kind(16, 2, 64, extra=SINK, params={"window_size_left": 0, "is_causal": True}), [*SHORT, *STEPS]),
    "alibi": (Kind(4, 4, extra=SLOPES, params={"window_size_right": 5}), SHORT),
    "softcap": (Kind(4, 2, T="float16", params={"softcap": 5.0}), [*SHORT, (2, 1, 300)]),
    "softcap-1e6": (Kind(4, 2, T="float16", params={"softcap": 1e6}), [*SHORT, (2, 1, 300)]),
    "window-1": (Kind(params={"is_causal": True, "window_size_left": 1}), [*SHORT, *STEPS]),
    "window-both": (
        Kind(4, 2, params={"window_size_left": 64, "window_size_right": 30, "return_lse": True}),
        [*SHORT, *FEW],
    ),
    "window-huge": (
        Kind(params={"window_size_left": 10**12, "window_size_right": 10**12}),
        [(2, 90, 200), (2, 1, 200)],
    ),
    "group-5": (Kind(5, 1), [(2, 70, 70), *STEPS]),
    "group-7": (Kind(28, 4, 64, params={"is_causal": True}), [(2, 70, 70), *STEPS, (2, 9, 100)]),
    "group-64": (Kind(64, 1, params={"return_lse": True}), [(2, 3, 70), *STEPS]),
    "heads-48": (Kind(48, 48, 64), [(1, 1, 3000), (2, 1, 200)]),
    "d96": (Kind(D=96, params={"is_causal": True}), [*SHORT, (2, 1, 100)]),
    "d192-128": (Kind(4, 4, 192, 128, params={"is_causal": True}), SHORT),
    "d256": (Kind(4, 2, 256, T="float16", params={"is_causal": True}), SHORT),
    "d40": (Kind(4, 2, 40, params={"is_causal": True, "window_size_left": 20, "return_lse": True}), [*SHORT, *STEPS]),
    "d1": (Kind(2, 1, 1), [(2, 65, 65), (1, 1, 1)]),
    "d17-33": (attrs.evolve(EVERYTHING, D=17, D_v=33, T="float16"), [*SHORT, (2, 1, 100)]),
    "d64-256": (Kind(2, 1, 64, 256), [(2, 65, 65), (1, 1, 300)]),
    "d576-512": (Kind(4, 1, 576, 512, params={"return_lse": True}), [(2, 65, 65), (1, 1, 300)]),
    "d257-300": (attrs.evolve(EVERYTHING, D=257, D_v=300), [(2, 65, 65), (2, 1, 100)]),
    "fp8": (Kind(T="float8_e4m3fn", params={"is_causal": True}), [*SHORT, *STEPS, *FEW]),
    "fp8-everything": (attrs.evolve(EVERYTHING, D=40, D_v=33, T="float8_e4m3fn"), [*SHORT, (2, 1, 100)]),
}


def recipes(calls: Iterable[Call], device: Device) -> dict[str, program.Recipe]:
    """What the programs are made from that serve calls."""
    made = (gpu.recipe(cuda, call, device) for call in calls)
    return {r.key: r for r in made if r is not None}


def case_calls() -> Iterator[Call]:
    for kind, sizes in CASES.values():
        yield from (kind.call(*s) for s in sizes)


def row_calls() -> list[Call]:
    """The rows, small enough for the float64 reference."""
    entry = GQADenseFwdOp.entry
    return [
        workloads.scaled(checker_of(entry), row, case, 4e9, 2**28)
        for row in entry.workloads
        for case in workloads.cases(row)
    ]


CAUSAL = CASES["causal"][0]
PADDED = CAUSAL.call(2, 100, 100, q=(100 * 1032, 1032, 129, 1))


def strided_calls() -> list[Call]:
    """Inputs that are not packed and need no copy."""
    fused = dict.fromkeys(("q", "k", "v"), (1536, 128, 1))  # views of one [B, S, 12 heads, 128]
    by_head = (2 * 4096 * 128, 128, 4096 * 128, 1)  # a cache of up to 4096 rows a head
    by_row = (1024 * 256, 256, 128, 1)  # of up to 1024 rows
    calls = []
    for S_q, S_kv in ((1, 300), (70, 300)):
        calls.append(
            CAUSAL.call(2, S_q, S_kv, **{n: (w[0] * (S_q if n == "q" else S_kv), *w) for n, w in fused.items()})
        )
        calls.append(CAUSAL.call(2, S_q, S_kv, k=by_head, v=by_head))
        calls.append(CAUSAL.call(2, S_q, S_kv, k=by_row, v=by_row))
    return calls


@pytest.mark.parametrize(
    ("kernel", "call", "reason"),
    [
        (DECODE, Kind().call(2, 17, 100), "96 query rows"),
        (DECODE, Kind(65, 1).call(2, 1, 100), "65 query rows"),
        (DECODE, Kind(D=256).call(2, 1, 100), "heads of 64, 96 or 128"),
        (DECODE, Kind(D=64, D_v=128).call(2, 1, 100), "heads of 64, 96 or 128"),
        (DECODE, Kind().call(2, 1, 100, k=(25600, 256, 128, 2)), "k's heads are not contiguous"),
        (DECODE, Kind().call(2, 1, 100, v=(25800, 258, 129, 1)), "whole 16 bytes.* of v"),
        (DECODE, Kind().call(2, 1, 4097, k=(2 * 4097 * 128, 128, 4097 * 128, 1)), "k has a step of 4097 rows"),
        (PREFILL, Kind(D=40).call(2, 100, 100), "serves head sizes 64/64"),
        (PREFILL, PADDED, "whole 16 bytes.* of q"),
        (PREFILL, Kind().call(2, 100, 100, k=(0, 256, 128, 1)), "whole 16 bytes.* of k"),
        (DECODE, Kind(T="float8_e4m3fn").call(2, 1, 100), "16-bit inputs only"),
        (PREFILL, Kind(T="float8_e4m3fn").call(2, 100, 100), "16-bit inputs only"),
        (GENERAL, PADDED, "a packed copy serves a faster kernel"),
        (GENERAL, Kind(D=40).call(2, 1, 100, k=(8000, 40, 4000, 1)), "k has a step of 100 rows"),
        (GENERAL, Kind(D=40).call(2, 1, 100, v=(8000, 1, 4000, 100)), "v has a step of 100 rows"),
    ],
)
def test_a_kernel_says_why_it_does_not_serve(kernel: Kernel, call: Call, reason: str) -> None:
    assert re.search(reason, kernel.refuse(gpu.bucketed(call), H200) or "")


@pytest.mark.parametrize(
    ("kernel", "call"),
    [
        (DECODE, Kind().call(65536, 1, 1)),
        (DECODE, Kind().call(2, 16, 100)),
        (DECODE, Kind(12, 1).call(2, 5, 100)),
        (DECODE, Kind(5, 1).call(2, 9, 100)),
        (DECODE, Kind(4, 2).call(2, 23, 100)),
        (DECODE, Kind(2, 2).call(2, 64, 100)),
        (PREFILL, Kind().call(2, 17, 100)),
        (PREFILL, Kind(D=192, D_v=128).call(2, 100, 100)),
        *((DECODE if call["S_q"] == 1 else PREFILL, call) for call in strided_calls()),
        (GENERAL, Kind(D=40).call(1, 1, 1)),
        (GENERAL, Kind(D=1, D_v=256).call(2, 100, 100)),
        (GENERAL, Kind(D=64, D_v=128).call(2, 1, 100)),
        (GENERAL, Kind(D=576, D_v=512).call(2, 1, 100)),
        (GENERAL, Kind(T="float8_e4m3fn").call(2, 100, 100)),
        (GENERAL, Kind(4, 2, 17, extra=SINK).call(2, 5, 9, sinks=(2,))),
        (GENERAL, Kind(4, 2, 40).call(2, 5, 9, q=(0, 161, 40, 1), k=(9 * 100, 100, 50, 1), v=(9 * 160, 160, 80, 2))),
        (GENERAL, Kind(4, 2, 40).call(2, 1, 100, k=(2 * 4096 * 40, 40, 4096 * 40, 1))),
        (DECODE, Kind(D=96).call(2, 1, 100)),
    ],
)
def test_a_kernel_takes(kernel: Kernel, call: Call) -> None:
    choice = gpu.choose(gpu.bucketed(call), H200)
    assert (type(choice.kernel), choice.copies) == (type(kernel), ())


@pytest.mark.parametrize("call", [PADDED, Kind().call(2, 1, 100, v=(12800, 128, 12800 * 2, 1))])
def test_what_tma_can_not_walk_is_copied_for_it(call: Call) -> None:
    choice = gpu.choose(gpu.bucketed(call), H200)
    assert choice.copies
    assert type(choice.kernel) in (gqa_decode.GQADecode, gqa_prefill.GQAPrefill)


@pytest.mark.parametrize(
    ("S_kv", "room"), [(300, 4096), (256, 256), (2500, 3072), (2500, 4096), (4097, 5120), (33000, 40960)]
)
@pytest.mark.parametrize("S_q", [1, 100])
def test_a_cache_stored_head_by_head_is_read_where_it_lies(S_q: int, S_kv: int, room: int) -> None:
    """However far it is filled."""
    stored = (2 * room * 128, 128, room * 128, 1)
    assert gpu.choose(gpu.bucketed(CAUSAL.call(2, S_q, S_kv, k=stored, v=stored)), H200).copies == ()


def test_tensors_packed_head_by_head_need_few_programs() -> None:
    """A sixteenth of the bucket's end at a time; the others are copied."""
    calls = []
    for S in range(1025, 4097, 3):
        stored = (2 * S * 128, 128, S * 128, 1)
        calls.append(CAUSAL.call(2, 1, S, k=stored, v=stored))
    assert len(recipes(calls, H200)) <= 17


@pytest.mark.parametrize(
    ("left", "split"), [(-1, True), (127, False), (1023, True), (10**12, True)], ids=["none", "128", "1024", "huge"]
)
def test_a_decode_is_split_by_the_keys_that_its_window_sees(left: int, split: bool) -> None:
    call = Kind(32, 4, params={"is_causal": True, "window_size_left": left}).call(1, 1, 131072)
    assert next(DECODE.configs(gpu.bucketed(call), H200)).split is split


@pytest.mark.parametrize(
    ("params", "exact"),
    [({}, False), ({"softcap": 50.0}, False), ({"softcap": 1e6}, True), ({"softcap": 5.0, "return_lse": True}, True)],
)
def test_scores_are_exact_near_zero_where_it_shows(params: dict[str, Any], exact: bool) -> None:
    call = Kind(params=params).call(1, 1, 1)
    assert common.Scores.of(static_of(checker_of(call.entry), call)).exact is exact


@pytest.mark.parametrize("kernel", [DECODE, PREFILL])
def test_no_field_of_a_config_is_always_the_same(kernel: Kernel) -> None:
    kinds = [gpu.bucketed(call) for call in (*row_calls(), *case_calls())]
    configs = [c for kind in kinds if kernel.refuse(kind, H200) is None for c in kernel.configs(kind, H200)]
    for field in attrs.fields(type(configs[0])):
        assert len({getattr(c, field.name) for c in configs}) > 1, field.name


def test_every_config_of_every_row_is_legal() -> None:
    for call in (*row_calls(), *case_calls()):
        kind = gpu.bucketed(call)
        serving = [k for k in KERNELS if k.refuse(kind, H200) is None]
        assert serving, call
        for kernel in serving:
            configs = list(kernel.configs(kind, H200))
            assert configs
            assert len(set(configs)) == len(configs)
            for config in configs:
                assert config.shared_bytes(call["D"], call["D_v"]) <= H200.shared_bytes
                assert sum(4 * torch.Size(s.shape).numel() for s in kernel.workspace(kind, config)) < 2**26


def test_the_cases_of_the_kit_need_few_programs() -> None:
    """Each is compiled, so a suite stays affordable."""
    assert len(kit_recipes(GQADenseFwdOp.entry, cuda, H200)) <= 200


def test_one_program_serves_every_length() -> None:
    lengths = (65, 100, 1000, 4096, 100_000)
    assert len(recipes((CAUSAL.call(b, s, s) for s in lengths for b in (1, 7, 300)), H200)) == 1
    assert len(recipes((CAUSAL.call(b, 1, s) for s in lengths if s > 256 for b in (1, 7)), H200)) == 1


@pytest.mark.parametrize("name", ["everything", "d40", "fp8-everything", "d576-512"])
def test_programs_compile_without_a_gpu(name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEOPS_CACHE_DIR", str(tmp_path))
    kind = CASES[name][0]
    for recipe in recipes((kind.call(2, s, 600) for s in (1, 100)), H200).values():
        assert program.compile_only(recipe).is_file()


def test_a_program_for_odd_strides_compiles(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEOPS_CACHE_DIR", str(tmp_path))
    odd = {"q": (0, 161, 40, 1), "k": (9 * 100, 100, 50, 1), "v": (9 * 160, 160, 80, 2), "sinks": (3,)}
    (recipe,) = recipes([Kind(4, 2, 40, extra=SINK).call(2, 5, 9, **odd)], H200).values()
    assert program.compile_only(recipe).is_file()


@pytest.fixture(scope="module")
def built() -> None:
    """All programs, compiled in parallel."""
    compile_all(recipes([*case_calls(), *row_calls(), *strided_calls()], cuda.device(0)).values())


def check(call: Call, inputs: dict[str, Tensor | None]) -> Any:
    """Run a call's op on these inputs and hold it to the reference; returns what it gave."""
    returned = GQADenseFwdOp(**call.params)(*inputs.values())
    verdict = verify(call, inputs, collect(call, returned, inputs))
    assert verdict, str(verdict)
    return returned


@pytest.mark.cuda
@pytest.mark.parametrize("name", CASES)
def test_cases(built: None, name: str) -> None:
    kind, sizes = CASES[name]
    before = program.compilations
    for i, size in enumerate(sizes):
        call = kind.call(*size)
        check(call, make_inputs(call, "cuda", seed=i))
    assert program.compilations == before


@pytest.mark.cuda
def test_fifty_new_lengths_compile_nothing(built: None) -> None:
    """Prefill and decode, whole and split, were met before."""
    for size in ((2, 300, 300), *((B, S_q, 300) for B in (2, 200) for S_q in (1, 3))):
        check(CAUSAL.call(*size), make_inputs(CAUSAL.call(*size), "cuda"))
    before, rng = program.compilations, random.Random(0)
    for i in range(50):
        size = (rng.randint(1, 9), rng.choice([1, 3, rng.randint(17, 900)]), rng.randint(1, 900))
        call = CAUSAL.call(*size)
        check(call, make_inputs(call, "cuda", seed=i))
    assert program.compilations == before


@pytest.mark.cuda
@pytest.mark.full
@pytest.mark.parametrize("call", row_calls(), ids=lambda call: call.id)
def test_rows(built: None, call: Call) -> None:
    check(call, make_inputs(call, "cuda"))


def inputs_of(call: Call, seed: int = 0, **given: Tensor) -> dict[str, Tensor | None]:
    return {**make_inputs(call, "cuda", seed=seed), **given}


@pytest.mark.cuda
@pytest.mark.semantics("GQADenseFwdOp", "max-exact")
def test_logits_far_below_zero_have_their_softmax(built: None) -> None:
    """A19, A20: no running maximum that starts at a finite number, no finite stand-in for -inf."""
    for S_q, S_kv in ((1, 300), (128, 300), (257, 257)):
        call = CAUSAL.call(2, S_q, S_kv)
        q = torch.full(call.inputs["q"].shape, 448.0, device="cuda", dtype=torch.bfloat16)
        k = torch.full(call.inputs["k"].shape, -1880.0, device="cuda", dtype=torch.bfloat16)
        check(call, inputs_of(call, q=q, k=k))
        k[:, ::3] = -1872.0
        check(call, inputs_of(call, q=q, k=k))


@pytest.mark.cuda
@pytest.mark.semantics("GQADenseFwdOp", "masked-values")
@pytest.mark.parametrize("name", ["sinks", "window-1", "everything", "window-both", "d40"])
def test_what_no_query_sees_has_no_influence(built: None, name: str) -> None:
    kind = CASES[name][0]
    left = kind.params["window_size_left"]
    for S_q, S_kv in ((1, 300), (9, 300), (90, 700), (257, 1000)):
        call = kind.call(2, S_q, S_kv)
        inputs = make_inputs(call, "cuda")
        clean = check(call, inputs)
        hidden = max(0, S_kv - S_q - left)
        assert hidden or left > 200
        inputs["k"][:, :hidden] = NAN
        inputs["v"][:, :hidden] = INF
        again = kind.op(*inputs.values())
        for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (clean, again)), strict=True):
            assert torch.equal(a, b)


@pytest.mark.cuda
@pytest.mark.semantics("GQADenseFwdOp", "masked-values")
def test_rows_behind_the_last_key_are_not_read(built: None) -> None:
    """A21: keys and values as a slice of a longer cache that holds NaN behind them."""
    for S_q, S_kv in ((1, 129), (1, 1000), (130, 201)):
        call = CAUSAL.call(3, S_q, S_kv)
        inputs = make_inputs(call, "cuda")
        for name in ("k", "v"):
            cache = torch.full((3, 1024, 2, 128), NAN, device="cuda", dtype=torch.bfloat16)
            cache[:, :S_kv] = inputs[name]
            inputs[name] = cache[:, :S_kv]
        check(call, inputs)


@pytest.mark.cuda
@pytest.mark.semantics("GQADenseFwdOp", "empty-row")
def test_rows_that_see_no_key_are_zero(built: None) -> None:
    for name in ("lse", "everything"):
        kind = CASES[name][0]
        call = kind.call(2, 300, 100)
        inputs = make_inputs(call, "cuda")
        o, lse = check(call, inputs)
        assert not o[:, :200].any()
        expected = inputs["sinks"][:, None] if "sinks" in kind.extra else torch.tensor(-INF, device="cuda")
        torch.testing.assert_close(lse[..., :200], expected.expand_as(lse[..., :200]), rtol=3e-7, atol=0)


@pytest.mark.cuda
@pytest.mark.semantics("GQADenseFwdOp", "empty-row")
@pytest.mark.parametrize("name", ["lse", "everything", "d40", "fp8-everything"])
def test_rows_that_see_no_key_are_zero_beside_a_nan(built: None, name: str) -> None:
    """Of a value that other rows of their tile see."""
    for S_q, S_kv in ((300, 100), (90, 31), (8, 3)):
        call = CASES[name][0].call(2, S_q, S_kv)
        inputs = make_inputs(call, "cuda")
        inputs["v"][:, -1] = NAN
        o, _ = check(call, inputs)
        assert not o[:, : S_q - S_kv].any()


@pytest.mark.cuda
def test_a_large_batch_of_short_sequences(built: None) -> None:
    """A25: more batch elements than a grid's y axis has."""
    kind = CASES["full-fp16"][0]
    call = kind.call(65536, 4, 4)
    inputs = make_inputs(call, "cuda")
    o = kind.op(*inputs.values())
    few = [0, 65534, 65535]
    call = kind.call(3, 4, 4)
    inputs = {n: None if x is None else x[few] for n, x in inputs.items()}
    assert verify(call, inputs, {"o": o[few], "lse": None})


@pytest.mark.cuda
def test_strides_that_tma_walks(built: None) -> None:
    before = program.compilations
    for call in strided_calls():
        check(call, make_inputs(call, "cuda"))
    assert program.compilations == before


@pytest.mark.cuda
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_any_other_strides(built: None, which: str) -> None:
    """A26: an input stored head by head, with odd pitches, misaligned, or expanded over the batch: it is copied."""
    before = program.compilations
    for S_q, S_kv in ((70, 62), (1, 300)):
        call = CAUSAL.call(2, S_q, S_kv)
        plain = make_inputs(call, "cuda")
        x = plain[which]
        by_head = x.transpose(1, 2).contiguous().transpose(1, 2)
        misaligned = torch.cat([x.new_zeros(1).flatten(), x.flatten()])[1:].view(x.shape)
        for strided in (by_head, wider(x, 3), misaligned, x[:1].expand_as(x)):
            inputs = {**plain, which: strided}
            check(CAUSAL.op.bind(*inputs.values()), inputs)
    assert which == "q" or program.compilations == before


def wider(x: Tensor, by: int) -> Tensor:
    """The tensor as a slice of one with longer heads, which hold NaN."""
    return torch.nn.functional.pad(x, (0, by), value=NAN)[..., : x.shape[3]]


@pytest.mark.cuda
@pytest.mark.parametrize("turn", range(3))
def test_strides_that_only_the_general_kernel_reads(turn: int) -> None:
    """Pitches that are whole 16 bytes beside heads that are none, odd ones, and one for all of the batch."""
    call = CASES["d17-33"][0].call(2, 70, 62)
    inputs = make_inputs(call, "cuda")
    layouts = [lambda x: wider(x, 24 - x.shape[3] % 8), lambda x: wider(x, 2), lambda x: x[:1].expand_as(x)]
    for i, name in enumerate("qkv"):
        inputs[name] = layouts[(i + turn) % 3](inputs[name])
    call = GQADenseFwdOp(**call.params).bind(*inputs.values())
    assert gpu.choose(gpu.bucketed(call), cuda.device(0)).copies == ()
    check(call, inputs)


@pytest.mark.cuda
def test_splits_do_not_depend_on_timing(built: None) -> None:
    kind = CASES["everything-split"][0]
    call = kind.call(3, 1, 4095)
    assert next(DECODE.configs(gpu.bucketed(call), cuda.device(0))).split
    inputs = make_inputs(call, "cuda")
    first = kind.op(*inputs.values())
    for _ in range(20):
        for a, b in zip(first, kind.op(*inputs.values()), strict=True):
            assert torch.equal(a, b)


def in_other_orders(call: Call, device: Device) -> list[gqa_prefill.Config]:
    """The default, and the configs that differ from it in nothing but which tile is next."""
    best, *others = PREFILL.configs(call, device)
    orders = ("static", False), ("static", True), ("counter", False)
    wanted = [attrs.evolve(best, schedule=schedule, by_head=by_head) for schedule, by_head in orders]
    return [best, *(c for c in others if c in wanted)]


def test_programs_of_other_orders_compile(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEOPS_CACHE_DIR", str(tmp_path))
    call = CAUSAL.call(4, 4096, 4096)
    _, *others = in_other_orders(call, H200)
    assert {(c.schedule, c.by_head) for c in others} == {("static", True), ("counter", False)}
    for config in others:
        recipe = gpu.recipe_of(Choice(PREFILL, config, {}, ()), call, H200, cuda.target(H200))
        assert program.compile_only(recipe).is_file()


def test_every_shipped_choice_is_taken() -> None:
    calls = [gpu.bucketed(call) for call in workloads.calls(GQADenseFwdOp.entry)]
    choices = [gpu.choose(call, H200, (), "h200") for call in calls]
    assert not [c.ignored for c in choices if c.ignored]
    assert {c.source for c in choices} == {"default", "shipped table h200"}


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("batch", "heads", "heads_kv", "s_q", "s_kv"),
    [(4, 40, 20, 200, 4096), (1, 8, 8, 3000, 16384), (3, 6, 2, 129, 700), (1, 16, 16, 4096, 8192)],
    ids=["uneven", "no-groups", "few-tiles", "many-tiles"],
)
@pytest.mark.parametrize("is_causal", [True, False])
def test_any_order_of_tiles_gives_the_same_bits(
    batch: int, heads: int, heads_kv: int, s_q: int, s_kv: int, is_causal: bool
) -> None:
    """What is next changes no tile; each of them is done once, and none is left out."""
    op = GQADenseFwdOp(is_causal=is_causal, return_lse=True)
    shapes = (batch, s_q, heads, 128), (batch, s_kv, heads_kv, 128), (batch, s_kv, heads_kv, 128)
    inputs = [torch.randn(shape, device="cuda").bfloat16() for shape in shapes]
    call = op.bind(*inputs)

    def run(config: gqa_prefill.Config) -> list[Tensor]:
        launch = launch_of(cuda, call, Choice(PREFILL, config, {}, ()), 0, poisoned=True)
        return [x.view(torch.uint8) for x in launch(*inputs, None, None, None, None, None)]

    best, *others = in_other_orders(gpu.bucketed(call), cuda.device(0))
    assert len(others) == 2
    expected = run(best)
    for config in others:
        assert all(map(torch.equal, run(config), expected)), config
