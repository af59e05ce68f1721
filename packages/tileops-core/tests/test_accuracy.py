"""The accuracy rules, on numbers small enough to check by hand."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import attrs
import pytest
import torch

from tileops.core import accuracy
from tileops.core.accuracy import (
    absolute,
    collect,
    compare,
    full_precision,
    measure,
    oracle,
    ulp,
    verify,
    yardstick,
)
from tileops.core.check.call import Call, TensorMeta
from tileops.core.spec.dtypes import BITS
from tileops.core.spec.expr import parse
from tileops.core.spec.model import Entry, FuncRef, Index, Param, ParamType, Signature, TensorDecl, Text

FLOATS = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
PLAIN = ("float32", "float16", "bfloat16")
SEEN: dict[str, Any] = {}


# The references of the entries below; they are loaded by name.


def matmul(a, b, T):
    return (a @ b,)


def norm(x, T):
    rstd = (x.square().mean(-1) + 1e-6).rsqrt()
    return x * rstd[..., None], rstd


def append(x, pages, slot, T):
    pages[slot] = x


def spy(x, index, absent, out_dtype, size, T):
    settings = (
        torch.backends.cuda.matmul.fp32_precision,
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
    )
    SEEN.update(locals(), grad=torch.is_grad_enabled())
    return x.clone()


def failing(x, index, absent, out_dtype, size, T):
    raise RuntimeError("no")


def misshapen(x, index, absent, out_dtype, size, T):
    return x[:1]


def text(source: str) -> Text:
    return Text(parse(source), source)


def ref(name: str) -> FuncRef:
    return FuncRef(f"{__name__}:{name}")


def make(
    inputs: Mapping[str, Any],
    outputs: Mapping[str, tuple[str, tuple[int, ...]] | None],
    *,
    declared: Mapping[str, str] | None = None,
    mutated: Mapping[str, str] | None = None,
    params: Mapping[str, tuple[ParamType, Any]] | None = None,
    indices: Mapping[str, Any] | None = None,
    **fields: Any,
) -> Call:
    """A call whose tensors are of the index T unless ``declared`` says otherwise; shapes play no part."""
    declared, mutated, params, indices = declared or {}, mutated or {}, params or {}, indices or {"T": "float32"}

    def decl(name: str) -> TensorDecl:
        when = mutated.get(name)
        return TensorDecl(name, text(declared.get(name, "T")), text("[]"), mutated=text(when) if when else None)

    signature = Signature(
        indices={n: Index(n, "DType" if n == "T" else "Dim") for n in indices},
        params={n: Param(n, t, default) for n, (t, default) in params.items()},
        types={},
        let={},
        inputs={n: decl(n) for n in inputs},
        outputs={n: decl(n) for n in outputs},
    )
    entry = Entry("TestFwdOp", "test", "A test.", "implemented", signature, **fields)
    metas = {n: None if x is None else TensorMeta(tuple(x.shape), str(x.dtype)[6:]) for n, x in inputs.items()}
    out = {n: None if o is None else TensorMeta(o[1], o[0]) for n, o in outputs.items()}
    return Call(entry, {n: v for n, (_, v) in params.items()}, indices, metas, out)


def judge(
    dtype: str, truth: Any, model: Any, result: Any, rule: Mapping[str, Any] | None = None, **more: Any
) -> accuracy.Finding:
    """The finding about one output ``d``, from its values."""
    values = torch.as_tensor(truth, dtype=torch.float64)
    call = make({}, {"d": (dtype, tuple(values.shape))}, accuracy={"d": rule or {}}, **more)
    kind = getattr(torch, dtype)
    model = torch.as_tensor(model, dtype=torch.float64).to(kind)
    return compare(call, {"d": torch.as_tensor(result, dtype=torch.float64).to(kind)}, {"d": values}, {"d": model}, {})[
        "d"
    ]


@pytest.mark.parametrize("dtype", FLOATS)
def test_ulp_is_the_distance_to_the_next_number(dtype):
    kind = getattr(torch, dtype)
    bits, carrier = BITS[dtype], {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}[BITS[dtype]]
    if bits <= 16:
        codes = torch.arange(2 ** (bits - 1) - 1)  # all that are not negative
    else:
        codes = torch.randint(0, 2 ** (bits - 1) - 1, (10_000,), generator=torch.Generator().manual_seed(0))
        codes = torch.cat([codes, torch.arange(10)])
    here, above = (c.to(carrier).view(kind).double() for c in (codes, codes + 1))
    finite = above.isfinite()
    assert finite.sum() > 100
    torch.testing.assert_close(ulp(here, kind)[finite], (above - here)[finite], rtol=0, atol=0)
    torch.testing.assert_close(ulp(-here, kind)[finite], (above - here)[finite], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("dtype", "value", "expected"),
    [
        ("float32", 1.0, 2.0**-23),
        ("float32", 0.0, 2.0**-149),
        ("float32", 1e300, 2.0**104),
        ("float16", 65504.0, 32.0),
        ("float16", math.inf, 32.0),
        ("float16", 2.0**-20, 2.0**-24),
        ("bfloat16", 160.0, 1.0),
        ("bfloat16", 0.0, 2.0**-133),
        ("float8_e4m3fn", 448.0, 32.0),
        ("float8_e4m3fn", 0.001, 2.0**-9),
        ("float8_e5m2", 1.75, 0.25),
        ("float64", 0.0, 5e-324),
        ("int8", 100.0, 1.0),
        ("int64", 0.0, 1.0),
    ],
)
def test_ulp_known_values(dtype, value, expected):
    assert ulp(torch.tensor([value], dtype=torch.float64), getattr(torch, dtype)).item() == expected


def test_ulp_covers_every_dtype_of_the_language():
    for dtype in BITS:
        assert ulp(torch.ones(1), getattr(torch, dtype)).item() > 0


STRAY = {"float32": 1.5}  # one element may be off by so much more


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_one_ulp_at_the_largest_value_of_the_slice(dtype):
    unit, truth = torch.finfo(getattr(torch, dtype)).eps, torch.full((2, 64), 0.25, dtype=torch.float64)
    truth[0, 0], rule, stray = 1.5, {"rule": "slices"}, STRAY.get(dtype, 1)

    def off(by: float, *at: int) -> accuracy.Finding:
        result = truth.clone()
        result[at] += by
        return judge(dtype, truth, truth, result, rule)

    at_bound = off(unit, 0, 1)
    assert (at_bound.error, at_bound.index, at_bound.ok) == (1.0, (0, 1), True)
    above = off(2 * unit, 0, 1)
    assert (above.index, above.ok) == ((0, 1), False)
    assert above.error == pytest.approx(2.0 / stray, rel=0.01)
    other = off(unit, 1, 1)
    assert (other.metric, other.error, other.index) == ("slice", 4.0 / stray, (1, 1))
    assert (other.got, other.limit, other.expected, other.actual) == (unit, stray * unit / 4, 0.25, 0.25 + unit)


@pytest.mark.parametrize(("columns", "near"), [(1, 63), (7, 9), (32, 1), (63, 1), (64, 0)])
def test_short_slices_count_together_to_64_elements(columns, near):
    """The largest value is in row 0: its ulp is the bound of so many rows behind it, and no further."""
    truth, unit = torch.full((200, columns), 0.25, dtype=torch.float64), 2.0**-10
    truth[0, 0] = 1.5
    for row in (near, near + 1):
        result = truth.clone()
        result[row, -1] += unit
        assert judge("float16", truth, truth, result).ok is (row == near)


@pytest.mark.parametrize("dtype", PLAIN)
def test_twice_the_yardstick_in_its_own_slice(dtype):
    unit, truth = torch.finfo(getattr(torch, dtype)).eps, torch.ones(2, 64, dtype=torch.float64)
    model, stray = truth.clone(), STRAY.get(dtype, 1)
    model[0, 1] += 3 * unit  # in Frobenius norm all may be off by twice that, too

    def off(by: float, *at: int) -> accuracy.Finding:
        result = truth.clone()
        result[at] += by
        return judge(dtype, truth, model, result)

    assert off(6 * unit, 0, 0).error == 1.0
    assert not off(7 * unit, 0, 0).ok
    assert off(2 * unit, 1, 1).error == pytest.approx(2.0 / stray)


@pytest.mark.parametrize("dtype", PLAIN)
def test_frobenius_allows_half_an_ulp_each(dtype):
    unit, truth = torch.finfo(getattr(torch, dtype)).eps, torch.ones(1, 16)
    off = truth.double().clone()
    off[0, :4] += unit
    assert judge(dtype, truth, truth, off).error == 1.0
    off[0, 4] += unit
    assert (found := judge(dtype, truth, truth, off)).metric == "frobenius"
    assert found.error == pytest.approx(math.sqrt(5) / 2)


def test_frobenius_allows_twice_the_yardstick():
    truth, unit = torch.ones(1, 16, dtype=torch.float64), 2.0**-23
    model, result = truth + unit, truth + 2 * unit
    assert judge("float32", truth, model, result).error == 1.0
    model[0, 8:] = 1
    assert judge("float32", truth, model, result).error == pytest.approx(math.sqrt(2))


def test_factor_and_floor_can_be_overridden():
    truth, unit = [[1.0, 1.0]], 2.0**-23
    rule = {"floor": "3 if T == float32 else 1", "reason": "a test"}
    assert judge("float32", truth, truth, [[1 + unit, 1 + 3 * unit]], rule).error == 1.0
    shared = judge("float32", torch.ones(1, 16), torch.ones(1, 16), torch.full((1, 16), 1 + 3 * unit), rule)
    assert (shared.metric, shared.error) == ("frobenius", 3 / 2.5)
    assert not judge("float32", truth, truth, [[1.0, 1 + 4 * unit]], rule).ok
    model, rule = [[1.0, 1 + unit]], {"factor": 5, "reason": "a test"}
    assert judge("float32", truth, model, [[1.0, 1 + 5 * unit]], rule).error == 1.0
    assert not judge("float32", truth, model, [[1.0, 1 + 6 * unit]], rule).ok


@pytest.mark.parametrize("count", ["K", 16, text("K")])
def test_contraction_adds_its_share_of_the_absolute_product(count):
    call = make(
        {}, {"d": ("float32", (1, 64))}, indices={"T": "float32", "K": 16}, accuracy={"d": {"contraction": count}}
    )
    truth, product = torch.ones(1, 64, dtype=torch.float64), torch.zeros(1, 64, dtype=torch.float64)
    product[0, 3] = 2.0**10
    product[0, 4:] = 1.0

    def error(off: float, at: int) -> accuracy.Finding:
        result = truth.float()
        result[0, at] += off
        return compare(call, {"d": result}, {"d": truth}, {"d": truth.float()}, {}, {"d": product})["d"]

    # An element has K * 2**-24 of its product; all have half an ulp each and 2**-22 of the product and sqrt(K) * value.
    whole = 4 * 2.0**-23 + 2.0**-22 * math.sqrt(3 * 4**2 + (4 + 2.0**10) ** 2 + 60 * 5**2)
    assert error(2.0**-12, 3).error == pytest.approx(2.0**-12 / whole)
    assert error(2.0**-23 + 2.0**-20, 4).metric == "slice"
    assert error(2.0**-23 + 2.0**-20, 4).error == 1.0
    assert error(2.0**-22 + 2.0**-20, 4).ok  # the one that may stray
    assert error(2.0**-21 + 2.0**-20, 4).error == pytest.approx(12 / 9 / 1.5)
    assert error(2.0**-22, 1).error == 2.0 / 1.5


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("strays", "off", "ok"), [(1, 6, True), (2, 6, True), (3, 6, False), (1, 7, False), (0, 4, True)]
)
def test_in_float32_and_where_there_is_a_model_a_few_elements_may_stray(strays, off, ok):
    """Of 25 000 two, by 1.5 times their bound: here the yardstick is off by 2 units everywhere, so the bound is 4."""
    for dtype, model, right in (("float32", None, ok), ("float16", ref("matmul"), ok), ("float16", None, strays == 0)):
        unit, shape = torch.finfo(getattr(torch, dtype)).eps, (250, 100)
        truth = torch.ones(shape, dtype=getattr(torch, dtype))
        result = truth + 2 * unit
        result[:strays, 7] = 1 + off * unit
        call = make({}, {"d": (dtype, shape)}, accuracy={"d": {}}, model=model)
        yard = {"d": truth + 2 * unit}
        assert compare(call, {"d": result}, {"d": truth.double()}, yard, {})["d"].ok is right


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    ("truth", "model", "result", "ok"),
    [
        (NAN, NAN, NAN, True),
        (NAN, NAN, 1.0, False),
        (NAN, NAN, INF, False),
        (INF, INF, INF, True),
        (INF, INF, -INF, False),
        (INF, INF, NAN, False),
        (INF, INF, 6e4, False),
        (INF, NAN, NAN, True),
        (INF, NAN, INF, True),
        (INF, NAN, 0.0, False),
        (-INF, -INF, -INF, True),
        (1.0, 1.0, NAN, False),
        (1.0, 1.0, INF, False),
        (7e4, INF, INF, True),
        (7e4, INF, 1.0, True),
        (7e4, INF, NAN, True),
    ],
)
def test_non_finite(dtype, truth, model, result, ok):
    found = judge(dtype, [[1.0, truth]], [[1.0, model]], [[1.0, result]])
    assert found.ok is ok
    if not ok:
        assert (found.metric, found.error, found.index) == ("non-finite", INF, (0, 1))


def test_the_scale_of_a_slice_is_its_largest_finite_value():
    truth, unit = [[INF, 1.0, NAN]], 2.0**-10
    assert judge("float16", truth, truth, [[INF, 1 + unit, NAN]]).error == 1.0
    assert not judge("float16", truth, truth, [[INF, 1 + 2 * unit, NAN]]).ok


def test_a_float32_constant_is_a_statistic():
    truth, unit = [1.0, 1024.0], 2.0**-23
    more = {"declared": {"d": "float32"}}
    assert judge("float32", truth, truth, [1 + 4 * unit, 1024.0], **more).error == 1.0
    wrong = judge("float32", truth, truth, [1 + 5 * unit, 1024.0], **more)
    assert (wrong.metric, wrong.error, wrong.index) == ("element", 1.25, (0,))
    assert judge("float32", truth, [1 + 8 * unit, 1024.0], [1 + 5 * unit, 1024.0], **more).ok
    assert judge("float32", [-INF, 0.5], [-INF, 0.5], [-INF, 0.5], **more).ok
    assert judge("float32", [-INF, 0.5], [-INF, 0.5], [-1e30, 0.5], **more).metric == "non-finite"
    assert judge("float32", truth, truth, [1 + 8 * unit, 1024.0], {"rule": "slices"}, **more).ok


@pytest.mark.parametrize(("dtype", "up"), [("int8", 6.0), ("float8_e4m3fn", 5.5), ("float8_e5m2", 6.0)])
@pytest.mark.parametrize(("n", "allowed"), [(100, 2), (4000, 4)])
def test_codes(dtype, up, n, allowed):
    truth = torch.full((n,), 5.0, dtype=torch.float64)
    result = truth.clone()
    result[:allowed] = up
    assert judge(dtype, truth, truth, result).error == 1.0
    result[allowed] = up
    wrong = judge(dtype, truth, truth, result)
    assert (wrong.metric, wrong.got, wrong.limit) == ("codes", allowed + 1, allowed)
    result[:] = truth
    result[7] = 8.0  # at least two codes on
    wrong = judge(dtype, truth, truth, result)
    assert (wrong.metric, wrong.index, wrong.limit) == ("codes", (7,), 1)


def test_codes_at_zero_and_at_the_end():
    assert judge("float8_e4m3fn", [0.0, -(2.0**-9)], [0.0, 0.0], [-0.0, 2.0**-9]).error == 2.0
    assert judge("float8_e4m3fn", [0.0], [0.0], [-0.0]).error == 0.0
    assert judge("float8_e4m3fn", [448.0], [448.0], [NAN]).metric == "non-finite"
    assert judge("float8_e5m2", [57344.0], [57344.0], [INF]).metric == "non-finite"
    assert judge("float8_e4m3fn", [NAN], [NAN], [NAN]).error == 0.0


@pytest.mark.parametrize(
    ("dtype", "rule"), [("int64", {}), ("int32", {}), ("uint8", {}), ("bool", {}), ("float16", {"rule": "exact"})]
)
def test_exact(dtype, rule):
    assert judge(dtype, [[0.0, 1.0]], [[0.0, 0.0]], [[0.0, 1.0]], rule).error == 0.0
    wrong = judge(dtype, [[0.0, 1.0]], [[0.0, 1.0]], [[0.0, 0.0]], rule)
    assert (wrong.metric, wrong.error, wrong.index, wrong.expected, wrong.actual) == ("exact", INF, (0, 1), 1, 0)


def test_large_integers_are_compared_as_integers():
    call = make({}, {"d": ("int64", (1,))})
    truth = torch.tensor([2**60])
    assert not compare(call, {"d": truth + 1}, {"d": truth}, {"d": truth}, {}).ok


@pytest.mark.parametrize(
    ("result", "metric"),
    [
        (None, "presence"),
        ([1.0], "presence"),
        (torch.ones(2, 2, dtype=torch.float16), "dtype"),
        (torch.ones(2, 3), "shape"),
        (torch.ones(4), "shape"),
        (torch.ones(2, 2, device="meta"), "device"),
    ],
)
def test_misfits_are_named(result, metric):
    x = torch.ones(2, 2)
    call = make({"x": x}, {"d": ("float32", (2, 2))})
    wrong = compare(call, {"d": result}, {"d": x.double()}, {"d": x}, {"x": x})["d"]
    assert (wrong.metric, wrong.error) == (metric, INF)
    assert f"d: wrong {metric}: expected " in wrong.message


def test_absent_and_empty_outputs():
    call = make({}, {"d": ("float32", (0, 3)), "lse": None})
    empty = torch.empty(0, 3)
    truth = {"d": empty.double(), "lse": None}
    assert compare(call, {"d": empty, "lse": None}, truth, truth, {}).error == 0.0
    assert compare(call, {"d": empty, "lse": torch.ones(1)}, truth, truth, {})["lse"].metric == "presence"
    assert compare(call, {"d": torch.empty(0, 4), "lse": None}, truth, truth, {})["d"].metric == "shape"


@pytest.mark.parametrize("shape", [(), (1,), (3, 1), (2, 3, 4)])
def test_any_rank_and_layout(shape):
    truth = torch.arange(1.0, math.prod(shape) + 1, dtype=torch.float64).reshape(shape)
    call = make({}, {"d": ("float32", shape)})
    result = truth.float().mT.contiguous().mT if len(shape) > 1 else truth.float()
    assert compare(call, {"d": result}, {"d": truth}, {"d": truth.float()}, {}).error == 0.0
    last = tuple(n - 1 for n in shape)
    result[last] *= 1.01
    assert compare(call, {"d": result}, {"d": truth}, {"d": truth.float()}, {})["d"].index == last


@pytest.mark.parametrize(
    ("dtype", "rule"), [("float16", "slices"), ("float16", "statistic"), ("float16", "exact"), ("int8", "codes")]
)
def test_large_tensors_are_compared_in_pieces(monkeypatch, dtype, rule):
    truth = torch.arange(35.0, dtype=torch.float64).reshape(7, 5)
    result = truth.clone()
    result[5, 3] += 2
    whole = judge(dtype, truth, truth, result, {"rule": rule})
    assert (whole.ok, whole.index) == (False, (5, 3))
    monkeypatch.setattr(measure, "_PIECE", 11)
    assert judge(dtype, truth, truth, result, {"rule": rule}) == whole


def test_a_verdict_reads_well():
    call = make({}, {"d": ("float16", (1, 2)), "n": ("int32", (1,))})
    truth = {"d": torch.tensor([[1.0, 2.0]], dtype=torch.float64), "n": torch.tensor([3])}
    model = {"d": truth["d"].half(), "n": truth["n"].int()}
    right = compare(call, model, truth, model, {})
    assert right
    assert str(right) == "TestFwdOp(): right\nd: slice error 0 x its bound\nn: exact error 0 x its bound"
    wrong = compare(call, {"d": truth["d"].half() * 2, "n": model["n"]}, truth, model, {})
    assert not wrong
    assert str(wrong) == (
        "TestFwdOp(): wrong\n"
        "d: frobenius error 1.14e+03 x its bound at [0, 1]: expected 2, got 4\n"
        "  off by 2.24 in all, allowed 0.00195 (2 x the yardstick's or 1 ulp); the yardstick by 0"
    )


def spied(function: str, model: str | None = None) -> tuple[Call, dict[str, Any]]:
    inputs = {
        "x": torch.full((2, 2), 1.1, dtype=torch.bfloat16, requires_grad=True),
        "index": torch.tensor([1, 2]),
        "absent": None,
    }
    params = {"out_dtype": (ParamType("dtype", optional=True), None), "size": (ParamType("list[int]"), (2, 3))}
    call = make(
        inputs, {"y": ("bfloat16", (2, 2))}, params=params, indices={"T": "bfloat16", "M": 2},
        reference=ref(function), model=ref(model) if model else None,
    )  # fmt: skip
    return call, inputs


def test_a_reference_is_called_by_name_with_true_dtypes():
    call, inputs = spied("spy")
    result = oracle(call, inputs)
    assert SEEN["x"].dtype == torch.float64
    assert SEEN["index"] is not None
    assert SEEN["index"].dtype == torch.int64
    assert (SEEN["absent"], SEEN["out_dtype"], SEEN["size"], SEEN["T"]) == (None, None, (2, 3), torch.bfloat16)
    assert (SEEN["settings"], SEEN["grad"]) == (("ieee", False), False)
    assert torch.equal(result["y"], inputs["x"].detach().double())


def test_the_yardstick_is_the_model_else_float32():
    call, inputs = spied("spy")
    assert yardstick(call, inputs)["y"].dtype == torch.bfloat16
    assert SEEN["x"].dtype == torch.float32
    call, inputs = spied("failing", model="spy")
    assert yardstick(call, inputs)["y"].dtype == torch.bfloat16
    assert SEEN["x"].dtype == torch.bfloat16


def test_dtype_params_are_passed_as_dtypes():
    x = torch.ones(2, 2)
    params = {"out_dtype": (ParamType("dtype"), "float16"), "size": (ParamType("int"), 1)}
    call = make(
        {"x": x, "index": None, "absent": None}, {"y": ("float32", (2, 2))}, params=params, reference=ref("spy")
    )
    oracle(call, {"x": x})
    assert SEEN["out_dtype"] == torch.float16


def test_settings_are_restored():
    cublas = torch.backends.cuda.matmul
    before = cublas.fp32_precision, cublas.allow_bf16_reduced_precision_reduction
    call, inputs = spied("failing")
    with pytest.raises(RuntimeError, match="no"):
        oracle(call, inputs)
    assert (cublas.fp32_precision, cublas.allow_bf16_reduced_precision_reduction) == before
    torch.set_float32_matmul_precision("high")
    try:
        with full_precision():
            assert cublas.fp32_precision == "ieee"
        assert cublas.fp32_precision == "tf32"
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_a_reference_that_breaks_its_entry_is_an_error():
    call, inputs = spied("misshapen")
    with pytest.raises(ValueError, match=r"misshapen: y has shape \(1, 2\), TestFwdOp declares \(2, 2\)"):
        oracle(call, inputs)
    with pytest.raises(ValueError, match="TestFwdOp has no reference"):
        oracle(make({}, {}), {})


def test_collect_names_what_an_operator_returned():
    one, two = torch.ones(1), torch.ones(2)
    call = make({"x": one}, {"y": ("float32", (1,)), "lse": None, "z": ("float32", (2,))}, mutated={"x": "true"})
    expected = {"y": one, "lse": None, "z": two, "x": one}
    assert collect(call, (one, two), {"x": one}) == expected
    assert collect(call, [one, None, two], {"x": one}) == expected
    with pytest.raises(ValueError, match="TestFwdOp: got 1 outputs, expected y, z"):
        collect(call, one, {"x": one})
    assert collect(make({}, {}), None, {}) == {}
    assert collect(make({}, {"y": ("float32", (1,))}), one, {}) == {"y": one}


def product(dtype: str, m: int = 32, n: int = 64, k: int = 256) -> tuple[Call, dict[str, torch.Tensor], torch.Tensor]:
    """A matmul call, its inputs and its right result."""
    g, kind = torch.Generator().manual_seed(0), getattr(torch, dtype)
    a, b = torch.randn(m, k, generator=g).to(kind), torch.randn(k, n, generator=g).to(kind)
    call = make(
        {"a": a, "b": b}, {"d": (dtype, (m, n))}, indices={"T": dtype, "K": k},
        reference=ref("matmul"), accuracy={"d": {"contraction": "K"}},
    )  # fmt: skip
    return call, {"a": a, "b": b}, (a.double() @ b.double()).to(kind)


def set_at(value: float, *place: Any) -> Any:
    def change(d: torch.Tensor) -> torch.Tensor:
        d = d.clone()
        d[place] = value
        return d

    return change


CHEATS = {
    "zeros": torch.zeros_like,
    "one element": lambda d: set_at(d[3, 5].item() * 1.5 + 1, 3, 5)(d),
    "last column dropped": set_at(0.0, slice(None), -1),
    "last row dropped": set_at(0.0, -1),
    "stale poison": lambda d: torch.full_like(d, NAN),
    "stale tile": set_at(NAN, slice(16), slice(16)),
    "stale finite": lambda d: torch.full_like(d, 123.0),
    "NaN where finite": set_at(NAN, 0, 0),
    "Inf where finite": set_at(INF, 0, 0),
    "scaled": lambda d: d * 1.02,
    "rows swapped": lambda d: d.roll(1, 0),
}


@pytest.mark.parametrize("dtype", PLAIN)
@pytest.mark.parametrize("cheat", CHEATS)
def test_cheats_are_caught(dtype, cheat):
    call, inputs, right = product(dtype)
    assert verify(call, inputs, {"d": right}), str(verify(call, inputs, {"d": right}))
    assert not verify(call, inputs, {"d": CHEATS[cheat](right)})


@pytest.mark.parametrize("dtype", PLAIN)
def test_a_dropped_tail_of_the_contraction_is_caught(dtype):
    call, inputs, right = product(dtype)
    short = inputs["a"][:, :-1].double() @ inputs["b"][:-1].double()
    assert not verify(call, inputs, {"d": short.to(right.dtype)})


@pytest.mark.parametrize("dtype", PLAIN)
@pytest.mark.parametrize("data", ["normal", "positive", "cancelling"])
def test_float32_sums_in_steps_of_16_are_right(dtype, data):
    """As a matrix unit sums, one product after the other within 16 and one step after the other."""
    call, inputs, right = product(dtype, k=4096)
    if data != "normal":
        inputs = {name: x.abs() for name, x in inputs.items()}
    if data == "cancelling":
        inputs["a"][:, 2048:] = -inputs["a"][:, :2048]
        inputs["b"][2048:] = inputs["b"][:2048]
        inputs["a"][:, -1] += 0.5
    a, b = inputs["a"].float(), inputs["b"].float()
    total = torch.zeros(32, 64)
    for k in range(0, 4096, 16):
        total += a[:, k : k + 16] @ b[k : k + 16]
    assert verify(call, inputs, {"d": total.to(right.dtype)})
    halves = (a[:, :2048] @ b[:2048]).to(right.dtype), (a[:, 2048:] @ b[2048:]).to(right.dtype)
    if data == "cancelling" and dtype != "float32":
        assert not verify(call, inputs, {"d": halves[0] + halves[1]})


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_partial_sums_in_half_precision_are_caught(dtype):
    """Split-K whose partial sums are stored and added in the output's dtype, at the size of a real layer (case A08)."""
    m, n, k, kind = 16, 256, 14336, getattr(torch, dtype)
    g = torch.Generator().manual_seed(0)
    a, b = ((torch.rand(s, generator=g) * 2 - 1).to(kind) for s in ((m, k), (k, n)))
    call = make(
        {"a": a, "b": b}, {"d": (dtype, (m, n))}, indices={"T": dtype, "K": k},
        reference=ref("matmul"), accuracy={"d": {"contraction": "K"}},
    )  # fmt: skip
    inputs = {"a": a, "b": b}
    partial = [x.float() @ y.float() for x, y in zip(a.chunk(16, 1), b.chunk(16, 0), strict=True)]
    cheap, right = partial[0].to(kind), torch.stack(partial).sum(0).to(kind)
    for p in partial[1:]:
        cheap = cheap + p.to(kind)
    assert verify(call, inputs, {"d": right})
    found = verify(call, inputs, {"d": cheap})["d"]
    assert (found.ok, found.metric) == (False, "frobenius")


def test_nan_in_an_operand_must_show():
    call, inputs, _ = product("float16")
    inputs["a"][3, 0] = NAN
    result = (inputs["a"].float() @ inputs["b"].float()).half()
    assert verify(call, inputs, {"d": result})
    assert not verify(call, inputs, {"d": result.nan_to_num(0.0)})


def test_the_absolute_product_is_the_reference_on_absolute_values():
    call, inputs, _ = product("bfloat16")
    a, b = (x.double() for x in inputs.values())
    torch.testing.assert_close(absolute(call, inputs)["d"], a.abs() @ b.abs())
    inputs["a"][0, 0] = NAN
    assert absolute(call, inputs)["d"][0].eq(0).all()


def test_only_where_a_rule_asks_is_the_absolute_product_computed_and_once(monkeypatch):
    call, inputs, _ = product("bfloat16")
    plain = attrs.evolve(call, entry=attrs.evolve(call.entry, accuracy=None))
    other = attrs.evolve(call, entry=attrs.evolve(call.entry, accuracy={"d": {"floor": 4, "reason": "a test"}}))
    results, asked = {"d": inputs["a"] @ inputs["b"]}, []
    monkeypatch.setattr(accuracy.truth, "absolute", lambda c, i: asked.append(c) or absolute(c, i))
    for held in (accuracy.judge(c, inputs) for c in (call, plain, other)):
        assert held(results).error == held(results).error > 0
    assert asked == [call]


@pytest.mark.parametrize("dtype", PLAIN)
def test_a_norm_with_its_statistic(dtype):
    x = torch.randn(8, 100, generator=torch.Generator().manual_seed(0)).to(getattr(torch, dtype))
    call = make(
        {"x": x}, {"y": (dtype, (8, 100)), "rstd": ("float32", (8,))},
        declared={"rstd": "float32"}, indices={"T": dtype}, reference=ref("norm"),
    )  # fmt: skip
    y, rstd = norm(x.float(), None)
    right = {"y": y.to(x.dtype), "rstd": rstd}
    assert verify(call, {"x": x}, right)
    assert not verify(call, {"x": x}, {**right, "rstd": rstd.half().float()})
    padded, _ = norm(torch.cat([x.float(), torch.zeros(8, 28)], 1), None)
    assert not verify(call, {"x": x}, {**right, "y": padded[:, :100].to(x.dtype)})


def appending(dtype: str, mutated: str = "true") -> tuple[Call, dict[str, torch.Tensor]]:
    g, kind = torch.Generator().manual_seed(0), getattr(torch, dtype)
    inputs = {
        "x": torch.randn(2, 4, generator=g).to(kind),
        "pages": torch.randn(5, 4, generator=g).to(kind),
        "slot": torch.tensor([3, 1]),
    }
    if inputs["pages"].dtype == torch.float16:
        inputs["pages"][0, 0] = NAN
    call = make(inputs, {}, mutated={"pages": mutated}, indices={"T": dtype}, reference=ref("append"))
    return call, inputs


@pytest.mark.parametrize("dtype", [*PLAIN, "float8_e4m3fn"])
def test_mutated_inputs_are_compared_like_outputs(dtype):
    call, inputs = appending(dtype)
    before = inputs["pages"].clone()
    pages = inputs["pages"].clone()
    pages[inputs["slot"]] = inputs["x"]
    assert verify(call, inputs, {"pages": pages})
    assert torch.equal(inputs["pages"].view(torch.uint8), before.view(torch.uint8))

    if dtype == "float16":  # a NaN that a kernel wrote back need not have the bits that it had
        rewritten = pages.clone()
        rewritten.view(torch.int16)[0, 0] ^= 1
        assert verify(call, inputs, {"pages": rewritten})
        assert not verify(call, inputs, {"pages": pages.nan_to_num(0.0)})

    half = pages.clone()
    half[1] = before[1]
    assert not verify(call, inputs, {"pages": half})
    nudged = pages.clone()
    nudged.view(torch.uint8)[0, -1] ^= 1 if dtype == "float8_e4m3fn" else 2
    found = verify(call, inputs, {"pages": nudged})["pages"]
    assert found.metric == "untouched"
    assert found.index == (0, 3)


def test_an_input_that_this_call_does_not_mutate_is_no_result():
    call, inputs = appending("float16", mutated="T == float32")
    assert accuracy.mutated(call) == ()
    assert compare(call, {}, {}, {}, inputs).findings == ()
