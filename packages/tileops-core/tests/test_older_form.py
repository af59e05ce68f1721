"""The two descriptions that this project started from: both are read, and what is complete runs."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tileops.core.check import Call, Checker
from tileops.core.errors import CheckError
from tileops.core.inputs import make_inputs
from tileops.core.op import Op, make_op
from tileops.core.roofline import Work, work
from tileops.core.spec import Entry, load, parse_spec
from tileops.core.spec.expr import parse
from tileops.core.spec.model import FuncRef
from tileops.core.workloads import calls, cases, scaled

DATA = Path(__file__).parent / "data"


def gemm(a: Tensor, b: Tensor, bias: Tensor | None, *, trans_b: bool) -> Tensor:
    """The reference that ``older_completed.yaml`` names."""
    d = a.double() @ (b.double().T if trans_b else b.double())
    return (d if bias is None else d + bias.double()).to(a.dtype)


def gemm_fwd_roofline(call: Call) -> tuple[int, int]:
    """Flops and bytes, as ``roofline.func`` of the older form gives them."""
    m, n, k = call["m"], call["n"], call["k"]
    return 2 * m * n * k, 2 * (m * k + n * k + m * n)


sys.modules["older_gemm"] = SimpleNamespace(gemm=gemm, gemm_fwd_roofline=gemm_fwd_roofline)


def product(call: Call, a: Tensor, b: Tensor) -> Tensor:
    a, b = (x.T if call.params.get(f"trans_{n}") else x for n, x in (("a", a), ("b", b)))
    return (a.double() @ b.double()).to(a.dtype)


# -- the newer form ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def newer() -> Entry:
    return load(DATA / "newer.yaml")["GEMMFwdOp"]


def test_the_newer_entry_is_read_as_spec_only(newer: Entry) -> None:
    assert (newer.form, newer.status, newer.implemented) == ("newer", "spec-only", False)
    warnings = parse_spec((DATA / "newer.yaml").read_text()).diagnostics
    assert [(d.severity, d.code, d.message) for d in warnings] == [
        ("warning", "S102", f"GEMMFwdOp lacks '{key}'") for key in ("reference", "status", "summary")
    ]


def test_the_newer_rows_are_calls(newer: Entry) -> None:
    half, bf = calls(newer)
    assert [half.id, bf.id] == ["GEMMFwdOp/square-1k-float16", "GEMMFwdOp/square-1k-bfloat16"]
    assert str(half) == "GEMMFwdOp(a=float16[1024, 1024], b=float16[1024, 1024])"
    assert work(half) == Work(2 * 1024**3, 3 * 2 * 1024**2, exact=True)


def test_the_newer_rows_run(newer: Entry) -> None:
    from tileops.gemm import GEMMFwdOp

    (row,) = newer.workloads
    for case in cases(row):
        call = scaled(Checker(newer), row, case, max_flops=1e6)
        tensors = make_inputs(call)
        d = GEMMFwdOp(**call.params)(tensors["a"], tensors["b"])
        assert d.dtype == getattr(torch, case["T"])
        torch.testing.assert_close(d, product(call, tensors["a"], tensors["b"]))


# -- the older form ----------------------------------------------------------------------------------------------------


def test_the_abridged_older_entry_is_checked_for_form() -> None:
    file = parse_spec((DATA / "older.yaml").read_text())
    entry = file.entries["GemmFwdOp"]
    assert entry.form == "older"
    assert {d.severity for d in file.diagnostics} == {"warning"}
    assert [d.message for d in file.diagnostics if d.code == "S303"] == [
        "the signature is abridged, so these rows can't be made into calls"
    ]
    (row,) = entry.workloads
    assert (row.label, row.dtype_cases) == ("m1024-n1024-k1024", ({"a": "float16"}, {"a": "bfloat16"}))
    assert entry.roofline is not None
    assert entry.roofline.flops == entry.roofline.bytes == FuncRef("tileops.perf.formulas:gemm_fwd_roofline")
    assert entry.source == dict.fromkeys(("kernel", "op", "test", "bench"), "...")
    assert entry.signature.inputs["a"].shape.expr == parse("[*shape_of_a]")


@pytest.fixture(scope="module")
def older() -> type[Op]:
    return make_op("GemmFwdOp", DATA / "older_completed.yaml")


def test_the_completed_older_entry_has_no_findings(older: type[Op]) -> None:
    assert parse_spec((DATA / "older_completed.yaml").read_text()).diagnostics == ()
    sig = older.entry.signature
    assert {n: i.kind for n, i in sig.indices.items()} == {"m": "Dim", "k": "Dim", "n": "Dim"}
    assert [str(rule.text) for rule in sig.where] == ["[m, k][-1] % 8 == 0", sig.where[1].text.source]


def test_the_completed_older_rows_run(older: type[Op]) -> None:
    made = list(calls(older.entry))
    assert [call.id for call in made] == [
        "GemmFwdOp/m64-n32-k16-float16",
        "GemmFwdOp/m64-n32-k16-bfloat16",
        "GemmFwdOp/with-bias-float16",
    ]
    assert work(made[0]) == Work(2 * 64 * 32 * 16, 2 * (64 * 16 + 32 * 16 + 64 * 32), exact=True)
    for call in made:
        tensors = make_inputs(call)
        d = older(**call.params)(*tensors.values())
        torch.testing.assert_close(d, gemm(**tensors, **call.params))


def test_shapes_alone_make_a_call(older: type[Op]) -> None:
    """The dtype of a is said by its name, and b and d take it."""
    call = older(trans_b=False).bind((8, 16), (16, 4), a=torch.bfloat16)
    assert str(call) == "GemmFwdOp(a=bfloat16[8, 16], b=bfloat16[16, 4])"


def test_the_older_rules_and_dtypes_are_enforced(older: type[Op]) -> None:
    op = older()
    with pytest.raises(CheckError, match=r"rule: \[m, k\]\[-1\] % 8 == 0"):
        op(torch.zeros(4, 12, dtype=torch.float16), torch.zeros(4, 12, dtype=torch.float16))
    with pytest.raises(CheckError, match=r"b: got bfloat16, expected float16 \(as a\)"):
        op(torch.zeros(4, 8, dtype=torch.float16), torch.zeros(2, 8, dtype=torch.bfloat16))


# -- marks of the older form, and its faults ---------------------------------------------------------------------------

SIGNATURE = (
    '{inputs: {x: {dtype: "float16 | float32", shape: "[m, n]"}}, outputs: {y: {dtype: same_as(x), shape: "[m]"}}'
)


def read(signature: str = SIGNATURE + "}", rest: str = "workloads: [{m: 1, n: 2, dtypes: [float16]}]") -> Entry:
    file = parse_spec(f"SumFwdOp:\n  family: toy\n  signature: {signature}\n  {rest}\n")
    assert file.errors == ()
    return file.entries["SumFwdOp"]


@pytest.mark.parametrize(
    ("signature", "rest"),
    [
        (SIGNATURE + "}", "workloads: [{m: 1, n: 2, dtypes: [float16]}]"),
        (SIGNATURE + ', shape_rules: ["m > 0"]}', "workloads: []"),
        (SIGNATURE + "}", "roofline: {func: toy.work.total}"),
        (SIGNATURE + "}", "source: {kernel_map: {a: b}}"),
        (SIGNATURE + ", ...}", "workloads: []"),
        (SIGNATURE + "}", "...:"),
    ],
)
def test_one_mark_makes_an_entry_older(signature: str, rest: str) -> None:
    assert read(signature, rest).form == "older"


def test_dims_are_the_names_in_shapes() -> None:
    """Functions, types, params and ``let`` names are none; a splice is a whole shape."""
    entry = read(
        '{params: {t: {type: bool, default: true}}, let: {g: "ceil_div(n, 128)"},'
        ' inputs: {x: {dtype: "float16 | float32", shape: "Mat[t, m, n]"},'
        ' z: {dtype: float32, shape: "[*batch, 2 * h]"}},'
        ' outputs: {y: {dtype: same_as(x), shape: "[*batch, ceil_div(h, 2), g, min(m, n)]"}}}',
        "workloads: [{m: 1, n: 2, batch: [3], h: 4, dtypes: [float32]}]",
    )
    kinds = {n: i.kind for n, i in entry.signature.indices.items()}
    assert kinds == {"m": "Dim", "n": "Dim", "batch": "Shape", "h": "Dim"}
    (call,) = calls(entry)
    assert call.outputs["y"] is not None
    assert call.outputs["y"].shape == (3, 2, 1, 1)


def test_dtypes_go_to_the_inputs_that_leave_a_choice() -> None:
    entry = read(
        '{inputs: {x: {dtype: "float16 | float32", shape: "[m]"}, i: {dtype: int32, shape: "[m]"},'
        ' w: {dtype: "float16 | bfloat16", shape: "[m]"}}, outputs: {}}',
        "workloads: [{m: 1, dtypes: [float16, float32]}]",
    )
    assert entry.workloads[0].dtype_cases == ({"x": "float16", "w": "float16"}, {"x": "float32"})
    assert [str(c) for c in calls(entry)] == [
        "SumFwdOp(x=float16[1], i=int32[1], w=float16[1])",
        "SumFwdOp(x=float32[1], i=int32[1], w=float16[1])",
    ]


def test_faults_are_at_their_places() -> None:
    text = """\
SumFwdOp:
  signature:
    inputs: {x: {dtype: "float16 | half", shape: "[m, n]"}, w: {dtype: float16, shape: "[m, n"}}
    outputs: {y: {dtype: same_as(x), shape: "[m]"}}
    shape_rules: ["x.shape[0] > kk", "x.strides[0] == 1"]
  workloads: [{m: 1, q: 2, dtypes: [float16]}, {m: 1, dtypes: 5}]
  roofline: {func: work}
"""
    assert [(d.code, d.place.line, d.place.column) for d in parse_spec(text).errors] == [
        ("S104", 3, 36),
        ("S201", 3, 89),
        ("S104", 5, 19),
        ("S201", 5, 40),
        ("S101", 6, 22),
        ("S101", 6, 55),
        ("S107", 7, 20),
    ]
