"""Work and time bound of calls, against numbers counted by hand."""

import subprocess
import sys
from collections.abc import Callable, Mapping
from itertools import accumulate, pairwise
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tileops.core.check.call import Call, TensorMeta
from tileops.core.errors import SpecError
from tileops.core.roofline import Figure, Work, bound, content_of, distinct_bytes, profile, work
from tileops.core.spec.diagnostics import Place
from tileops.core.spec.expr import parse, visible
from tileops.core.spec.model import Entry, FuncRef, Predicate, Roofline, Signature, TensorDecl, Text

PLACE = Place("specs/toy.yaml", 7, 3)
T = TensorMeta


def text(source: str) -> Text:
    return Text(parse(source), source, place=PLACE)


def rule(counted: str | Callable[..., Any] | None) -> Any:
    """An expression, or a function of this file as a spec would name it."""
    if callable(counted):
        return FuncRef(f"{__name__}:{counted.__name__}", place=PLACE)
    return counted if counted is None else text(counted)


def requires(name: str, *args: str) -> Predicate:
    return Predicate(name, tuple(map(parse, args)), f"{name}({', '.join(args)})")


def toy(
    inputs: Mapping[str, TensorMeta | None],
    outputs: Mapping[str, TensorMeta | None] = {},
    *,
    flops: str | Callable[..., Any] = "0",
    bytes: str | Callable[..., Any] | None = None,
    unit: Any = "tensor_core",
    dtype: str | None = "bfloat16",
    mutated: Mapping[str, Text] = {},
    metadata: Mapping[str, Predicate] = {},
    content: Mapping[str, Any] | None = None,
    **indices: Any,
) -> Call:
    """A call of an entry made for it."""
    any_text = text("M")
    declared = {n: TensorDecl(n, any_text, any_text, mutated=mutated.get(n), requires=metadata.get(n)) for n in inputs}
    entry = Entry(
        "ToyFwdOp", "toy", "", "implemented",
        Signature({}, {}, {}, {}, declared, {n: TensorDecl(n, any_text, any_text) for n in outputs}),
        roofline=Roofline(rule(flops), rule(bytes), unit, dtype, place=PLACE),
        place=PLACE,
    )  # fmt: skip
    return Call(entry, {}, indices, inputs, outputs, content=content)


def gemm(m: int, n: int, k: int, dtype: str = "bfloat16") -> Call:
    return toy(
        {"a": T((m, k), dtype), "b": T((n, k), dtype)},
        {"d": T((m, n), dtype)},
        flops="2 * M * N * K",
        dtype="T",
        M=m,
        N=n,
        K=k,
        T=dtype,
    )


def test_gemm() -> None:
    assert work(gemm(4096, 4096, 7168)) == Work(240_518_168_576, 150_994_944, exact=True)
    b = bound(gemm(4096, 4096, 7168), profile("h200"))
    assert b.seconds == b.compute_seconds == pytest.approx(243.095e-6, rel=1e-5)
    assert b.memory_seconds == pytest.approx(31.4573e-6, rel=1e-5)
    assert (b.by, b.unit, b.dtype, b.reason) == ("compute", "tensor_core", "bfloat16", None)
    assert b.intensity == pytest.approx(1592.8889)
    assert (b.peak.confidence, b.bandwidth.confidence) == ("datasheet", "datasheet")


def test_where_no_figure_is_known_a_calibrated_one_bounds() -> None:
    """Which a better program may pass."""
    h200, unknown = profile("h200"), Figure(None, "unknown", "not published")
    peaks = {unit: {d: attrs.evolve(p, theoretical=unknown) for d, p in by.items()} for unit, by in h200.peak.items()}
    board = attrs.evolve(h200, peak=peaks)
    b = bound(gemm(4096, 4096, 7168), board)
    assert b.seconds == pytest.approx(293.315e-6, rel=1e-5)
    assert (b.peak.value, b.peak.confidence, b.bandwidth.confidence) == (820e12, "measured", "datasheet")
    assert not b.exact
    assert bound(gemm(4096, 4096, 7168), h200).exact


def test_decode_gemm_is_bound_by_memory() -> None:
    b = bound(gemm(1, 2112, 7168), profile("h200"))
    assert b.bytes == 2 * (7168 + 2112 * 7168 + 2112) == 30_296_192
    assert (b.by, b.seconds) == ("memory", pytest.approx(6.31171e-6, rel=1e-5))


def test_an_optional_tensor_counts_where_it_is_present() -> None:
    x, w = T((32, 128), "float16"), T((128,), "float32")
    assert work(toy({"x": x, "weight": w}, {"y": x, "rstd": None})).bytes == 2 * 8192 + 512
    assert work(toy({"x": x, "weight": None}, {"y": x, "rstd": T((32,), "float32")})).bytes == 2 * 8192 + 128


def test_a_mutated_tensor_is_read_and_written() -> None:
    x, mean = T((4, 8), "float32"), T((8,), "float32")
    assert work(toy({"x": x}, mutated={"x": text("True")})).bytes == 256
    running = {"mean": text("training")}
    for training, moved in ((True, 128 + 2 * 32), (False, 128 + 32)):
        assert work(toy({"x": x, "mean": mean}, mutated=running, training=training)).bytes == moved
    assert work(toy({"x": x, "mean": None}, mutated=running, training=True)).bytes == 128


def test_an_expanded_tensor_counts_its_distinct_elements() -> None:
    assert work(toy({"x": T((64, 128), "float16", (0, 1))})).bytes == 256
    assert work(toy({"x": T((64, 128), "float16", (0, 0))})).bytes == 2
    assert work(toy({"x": T((64, 128), "float16", (256, 1))})).bytes == 64 * 128 * 2
    assert distinct_bytes(T((0, 128), "float16", (0, 1))) == 0


def test_fp8_and_packed_carriers_count_one_byte() -> None:
    assert work(toy({"q": T((16, 32), "float8_e4m3fn"), "w": T((16, 16), "uint8")})).bytes == 768


def test_zero_flops_need_no_peak() -> None:
    copy = toy({"x": T((1024,), "float32")}, {"y": T((1024,), "float32")}, unit="cuda_core", dtype="float32")
    b = bound(copy, profile("s5000"))
    assert (b.seconds, b.by, b.intensity) == (pytest.approx(8192 / 1600e9), "memory", 0)


def test_an_empty_call() -> None:
    b = bound(gemm(0, 0, 64), profile("h200"))
    assert (b.flops, b.bytes, b.seconds, b.intensity, b.reason) == (0, 0, 0.0, None, None)


def test_an_unknown_figure_gives_no_bound_but_its_reason() -> None:
    norm = toy({"x": T((1024,), "float16")}, flops="4 * N", unit="cuda_core", dtype="float32", N=1024)
    b = bound(norm, profile("s5000"))
    assert (b.seconds, b.by, b.compute_seconds) == (None, None, None)
    assert b.memory_seconds == pytest.approx(2048 / 1600e9)
    assert b.reason == "no peak of cuda_core float32: not published"


def test_a_dtype_that_the_profile_lacks() -> None:
    b = bound(gemm(8, 8, 8, "float32"), profile("h200"))
    assert (b.seconds, b.reason) == (None, "no peak of tensor_core float32: the profile lists none")


def test_an_entry_without_unit() -> None:
    b = bound(toy({"a": T((8,), "float16")}, flops="8", unit=None, dtype=None), profile("h200"))
    assert b.seconds is None
    assert b.reason is not None
    assert b.reason.endswith("the entry names no unit or no dtype")


def test_without_a_profile_only_the_work_is_known() -> None:
    b = bound(gemm(8, 8, 8), None)
    assert (b.flops, b.bytes, b.seconds, b.peak.value) == (1024, 384, None, None)
    assert b.reason is not None
    assert "no profile of this device" in b.reason


def test_a_dtype_index_without_dtype_is_an_error() -> None:
    call = toy({"a": T((8,), "float16")}, dtype="out_dtype", out_dtype=None)
    with pytest.raises(SpecError, match="roofline dtype of ToyFwdOp, 'out_dtype', is None in this call, no dtype"):
        bound(call, profile("h200"))


LENGTHS = {"lens": requires("lengths", "W * 64")}


def paged(content: Mapping[str, Any] | None, flops: str = "4 * sum(lens)") -> Call:
    return toy({"lens": T((3,), "int32")}, flops=flops, bytes="2 * sum(lens)", metadata=LENGTHS, content=content, W=2)


def test_content_is_read() -> None:
    assert work(paged({"lens": (1, 100, 0)})) == Work(404, 202, exact=True)
    assert work(paged({"lens": (5, 7, 9)}, "sum(n * n for n in lens if n > 5)")).flops == 130


def test_absent_content_makes_an_upper_bound() -> None:
    assert work(paged(None)) == Work(4 * 3 * 128, 2 * 3 * 128, exact=False)
    assert not bound(paged(None), profile("h200")).exact


def test_content_that_nothing_reads_leaves_the_count_exact() -> None:
    call = toy({"lens": T((3,), "int32")}, flops="2 * M", metadata=LENGTHS, M=8, W=2)
    assert work(call) == Work(16, 12, exact=True)


@pytest.mark.parametrize(
    ("predicate", "shape", "content"),
    [
        (requires("lengths", "M"), (3,), (7, 7, 7)),
        (requires("sizes", "M"), (3,), (7, 0, 0)),
        (requires("sizes", "M"), (0,), ()),
        (requires("offsets", "M"), (3,), (0, 7, 7)),
        (requires("offsets", "M"), (1,), (0,)),
        (requires("index", "M"), (2, 2), ((6, 6), (6, 6))),
        (requires("index", "0"), (1,), (0,)),
        (requires("index", "M"), (), 6),
    ],
)
def test_assumed_content(predicate: Predicate, shape: tuple[int, ...], content: Any) -> None:
    assert content_of(toy({"x": T(shape, "int32")}, metadata={"x": predicate}, M=7), "x") == content
    given_content = toy({"x": T(shape, "int32")}, metadata={"x": predicate}, M=7, content={"x": "given"})
    assert content_of(given_content, "x") == "given"


def test_content_that_cannot_be_assumed_is_an_error() -> None:
    tables = {"table": requires("page_ids", "9", "lens", "64"), **LENGTHS}
    call = toy({"table": T((3, 2), "int32"), "lens": T((3,), "int32")}, flops="len(table)", metadata=tables, W=2)
    with pytest.raises(SpecError, match=r"'len\(table\)', reads 'table', which has no value in this call"):
        work(call)
    absent = toy({"lens": None}, flops="sum(lens)", metadata=LENGTHS, W=2)
    with pytest.raises(SpecError, match="reads 'lens'"):
        work(absent)


def visible_pairs(call: Call) -> int:
    """A roofline function that reads content."""
    lengths = ([b - a for a, b in pairwise(content_of(call, name))] for name in ("cu_q", "cu_kv"))
    return sum(visible(m, n, call["causal"], call["left"], call["right"]) for m, n in zip(*lengths, strict=True))


@given(
    sequences=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=5),
    left=st.integers(-1, 4),
    right=st.integers(-1, 4),
    causal=st.booleans(),
)
def test_assumed_offsets_bound_every_packed_attention(
    sequences: list[tuple[int, int]], left: int, right: int, causal: bool
) -> None:
    cu_q, cu_kv = ((0, *accumulate(s[side] for s in sequences)) for side in (0, 1))
    row = toy(
        {"cu_q": T((len(cu_q),), "int32"), "cu_kv": T((len(cu_kv),), "int32")},
        flops=visible_pairs,
        metadata={"cu_q": requires("offsets", "T_q"), "cu_kv": requires("offsets", "T_kv")},
        content={"cu_q": cu_q, "cu_kv": cu_kv},
        T_q=cu_q[-1],
        T_kv=cu_kv[-1],
        left=left,
        right=right,
        causal=causal,
    )
    live = attrs.evolve(row, content=None)
    assert work(row).flops <= work(live).flops
    assert (work(row).exact, work(live).exact) == (True, False)


def both(call: Call) -> tuple[int, int]:
    return 10 * call["M"], call["M"]


def nothing(call: Call) -> None:
    return None


def broken(call: Call) -> int:
    raise RuntimeError("no formula")


def test_one_function_may_give_both() -> None:
    assert work(toy({}, flops=both, bytes=both, M=3)) == Work(30, 3, exact=True)


def test_a_function_without_content_is_not_trusted_to_be_exact() -> None:
    def call(predicate: Predicate, content: Mapping[str, Any] | None = None) -> Call:
        return toy({"x": T((2,), "int32")}, flops=both, bytes=both, metadata={"x": predicate}, content=content, M=3)

    assert not work(call(requires("index", "M"))).exact
    assert work(call(requires("index", "M"), {"x": (0, 1)})).exact
    assert work(call(requires("positive"))).exact


@pytest.mark.parametrize(
    ("flops", "bytes", "said"),
    [
        (both, None, "gives (10, 1), not a count"),
        (nothing, None, "gives None, not a count"),
        (nothing, nothing, "gives None, not a pair (flops, bytes)"),
        (broken, None, "fails: RuntimeError: no formula"),
        (broken, "8", "fails: RuntimeError: no formula"),
    ],
)
def test_a_function_that_fails(flops: Any, bytes: Any, said: str) -> None:
    with pytest.raises(SpecError) as e:
        work(toy({}, flops=flops, bytes=bytes, M=1))
    assert f"of ToyFwdOp, '{__name__}:{flops.__name__}', {said}" in str(e.value)


def test_a_function_that_is_not_there() -> None:
    call = toy({}, flops=both)
    gone = Roofline(FuncRef("tileops.perf.formulas:gemm"), unit="tensor_core", dtype="bfloat16")
    with pytest.raises(SpecError, match=r"'tileops\.perf\.formulas:gemm', fails: ModuleNotFoundError"):
        work(attrs.evolve(call, entry=attrs.evolve(call.entry, roofline=gone)))


@pytest.mark.parametrize(
    ("flops", "said"),
    [
        ("M // (M - 4)", "divides by zero"),
        ("M % 0", "divides by zero"),
        ("2 * Q", "reads 'Q', which has no value in this call"),
        ("0 - M", "gives -4, not a count"),
        ("M > 3", "gives True, not a count"),
        ("min(x for x in [])", "fails: ValueError"),
    ],
)
def test_an_expression_that_fails(flops: str, said: str) -> None:
    with pytest.raises(SpecError) as e:
        work(toy({"a": T((4, 4), "float16")}, flops=flops, M=4))
    assert str(e.value).startswith(f"specs/toy.yaml:7:3: error[S401] roofline flops of ToyFwdOp, '{flops}', {said}")
    assert str(e.value).endswith("; the call is ToyFwdOp(a=float16[4, 4])")


def test_a_mutation_condition_that_fails() -> None:
    with pytest.raises(SpecError, match="mutated of a of ToyFwdOp, '1 // M == 1', divides by zero"):
        work(toy({"a": T((4,), "float16")}, mutated={"a": text("1 // M == 1")}, M=0))


def test_an_entry_without_roofline() -> None:
    call = gemm(1, 1, 1)
    with pytest.raises(SpecError, match="ToyFwdOp has no roofline"):
        work(attrs.evolve(call, entry=attrs.evolve(call.entry, roofline=None)))


def test_no_torch_is_imported() -> None:
    subprocess.run(
        [sys.executable, "-c", "import sys, tileops.core.roofline; assert 'torch' not in sys.modules"], check=True
    )
