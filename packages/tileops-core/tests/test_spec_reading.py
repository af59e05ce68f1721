"""Every key and form of the spec language, read from a small entry; and every fault at its line and column."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import attrs
import pytest

from tileops.core.errors import SpecError
from tileops.core.spec import Diagnostic, Entry, SpecFile, load, parse_spec
from tileops.core.spec.expr import Const, Name, parse
from tileops.core.spec.model import Baselines, FuncRef, ParamType, Text

SIGNATURE = {
    "forall": '{M: Dim, N: Dim, T: "DType[float16 | bfloat16]"}',
    "inputs": '{a: {dtype: T, shape: "[M, N]"}}',
    "outputs": '{y: {dtype: T, shape: "[M, N]"}}',
}
ENTRY = {
    "family": "toy",
    "summary": "Copies.",
    "status": "spec-only",
    "reference": "toy.reference:copy",
    "workloads": "[{M: 4, N: 2, label: small, dtype_cases: [{T: float16}]}]",
    "roofline": "{flops: M * N}",
}
SIGNATURE_KEYS = ("forall", "types", "params", "let", "inputs", "outputs", "where", "symbolic")


def spec(name: str = "CopyFwdOp", **keys: str | None) -> str:
    """An entry's text, one key a line; None leaves a key out."""
    signature = {k: v for k, v in {**SIGNATURE, **keys}.items() if k in SIGNATURE_KEYS and v is not None}
    entry = {k: v for k, v in {**ENTRY, **keys}.items() if k not in SIGNATURE_KEYS and v is not None}
    lines = [f"{name}:", *(f"  {k}: {v}" for k, v in entry.items())]
    if "signature" not in keys:
        lines += ["  signature:", *(f"    {k}: {v}" for k, v in signature.items())]
    return "\n".join(lines) + "\n"


def entry(**keys: str | None) -> Entry:
    """The one entry of a spec without findings."""
    file = parse_spec(spec(**keys))
    assert file.diagnostics == ()
    (read,) = file.entries.values()
    return read


def findings(text: str) -> tuple[list[Diagnostic], list[tuple[int, int]]]:
    """What is found in a text, and the places that are marked with «» in it."""
    marks, plain = [], ""
    for piece in re.split("(«|»)", text):
        if piece == "«":
            line = plain.rpartition("\n")[2]
            marks.append((plain.count("\n") + 1, len(line) + 1))
        elif piece != "»":
            plain += piece
    return list(parse_spec(plain, "toy.yaml").diagnostics), marks


def text(source: str) -> Text:
    return Text(parse(source), source)


# -- what an entry holds -----------------------------------------------------------------------------------------------


def test_the_smallest_entry() -> None:
    read = entry()
    assert (read.name, read.family, read.summary, read.status) == ("CopyFwdOp", "toy", "Copies.", "spec-only")
    assert read.reference == FuncRef("toy.reference:copy")
    assert (read.aliases, read.ref_api, read.model, read.semantics, read.accuracy) == ((), None, None, {}, None)
    assert (read.baselines, read.grad, read.composition, read.source, read.fullgraph) == ({}, (), (), {}, True)
    assert not read.implemented


def test_names_and_words_of_an_entry() -> None:
    read = entry(
        aliases="[CopyOfFwdOp]",
        ref_api="torch.clone",
        model="toy.reference:copy_model",
        semantics="{empty: M = 0 gives nothing., bit-exact: The bits stay.}",
        composition="[load, store]",
        source="{kernel: kernels/copy.py}",
    )
    assert read.aliases == ("CopyOfFwdOp",)
    assert read.ref_api == "torch.clone"
    assert read.model == FuncRef("toy.reference:copy_model")
    assert read.semantics == {"empty": "M = 0 gives nothing.", "bit-exact": "The bits stay."}
    assert read.composition == ("load", "store")
    assert read.source == {"kernel": "kernels/copy.py"}


def test_indices() -> None:
    read = entry(
        forall='{M: Dim, B: Shape, T: "DType[float16 | float8_e4m3fn]"}',
        inputs='{a: {dtype: T, shape: "[*B, M]"}}',
        outputs='{y: {dtype: T, shape: "[*B]"}}',
        workloads="[{M: 4, B: [2, 3], label: two}, {M: 0, B: [], label: none}, {M: 1, B: 5, label: one}]",
        roofline="{flops: prod(B) * M}",
    )
    kinds = {i.name: (i.kind, i.choices) for i in read.signature.indices.values()}
    assert kinds == {"M": ("Dim", ()), "B": ("Shape", ()), "T": ("DType", ("float16", "float8_e4m3fn"))}
    assert [row.values["B"] for row in read.workloads] == [(2, 3), (), (5,)]


@pytest.mark.parametrize(
    ("written", "type_", "default"),
    [
        ("{type: bool}", ParamType("bool"), attrs.NOTHING),
        ("{type: bool, default: true}", ParamType("bool"), True),
        ("{type: int, default: -1}", ParamType("int"), -1),
        ("{type: float, default: 1e-6}", ParamType("float"), 1e-6),  # a number in YAML 1.2, text in 1.1
        ("{type: float, default: 1}", ParamType("float"), 1.0),
        ("{type: float, default: .inf}", ParamType("float"), float("inf")),
        ('{type: "float | None", default: null}', ParamType("float", optional=True), None),
        ('{type: "float | None", default: 2}', ParamType("float", optional=True), 2.0),
        ("{type: \"'neox' | 'interleaved'\", default: neox}", ParamType("literal", ("neox", "interleaved")), "neox"),
        ('{type: "float16 | bfloat16", default: bfloat16}', ParamType("dtype", ("float16", "bfloat16")), "bfloat16"),
        ('{type: "float16 | None", default: null}', ParamType("dtype", ("float16",), optional=True), None),
        ('{type: "list[int]", default: [1, 2]}', ParamType("list[int]"), (1, 2)),
        ('{type: "list[int]", default: 7}', ParamType("list[int]"), (7,)),
        ('{type: "list[int] | None", default: ~}', ParamType("list[int]", optional=True), None),
    ],
)
def test_params(written: str, type_: ParamType, default: Any) -> None:
    param = entry(params=f"{{p: {written}}}").signature.params["p"]
    assert (param.type, param.default) == (type_, default)
    assert type(param.default) is type(default)


def test_types_are_shapes_with_parameters() -> None:
    """``Mat`` is there for all; own types may shadow it and ask their arguments anything."""
    read = entry(
        types='{"Tile[n, S]": "[ceil_div(n, 128), *S] if n > 128 else [1, *S]",'
        ' "Opt[x, n]": "[n] if present(x) else [1]"}',
        params="{wide: {type: bool, default: true}, group: {type: int, default: 128}}",
        forall='{M: Dim, N: Dim, B: Shape, T: "DType[float16]"}',
        inputs='{a: {dtype: T, shape: "Mat[wide, M, N + 1]"}, c: {dtype: T, shape: "[*B]"},'
        ' b: {dtype: T, shape: "Tile[group, [*B]]", optional: true}}',
        outputs='{y: {dtype: T, shape: "Opt[b, M]"}}',
        workloads="[]",
        roofline="{flops: M}",
    ).signature
    assert read.inputs["a"].shape.expr == parse("[M, N + 1] if not wide else [N + 1, M]")
    assert read.inputs["a"].shape.source == "Mat[wide, M, N + 1]"
    assert read.inputs["b"].shape.expr == parse("[ceil_div(group, 128), *[*B]] if group > 128 else [1, *[*B]]")
    assert read.outputs["y"].shape.expr == parse("[M] if present(b) else [1]")


def test_a_type_may_shadow_mat() -> None:
    read = entry(types='{"Mat[r, c]": "[c, r]"}', inputs='{a: {dtype: T, shape: "Mat[M, N]"}}')
    assert read.signature.inputs["a"].shape.expr == parse("[N, M]")


DTYPE_PARAMS = (
    '{p: {type: "float16 | float32", default: float16}, q: {type: "float16 | None", default: null},'
    " fast: {type: bool, default: false}}"
)


@pytest.mark.parametrize(
    "dtype",
    [
        "T",
        "float32",
        "float16 | bfloat16",
        "T | float32",
        "same_as(a)",
        "p",
        "coalesce(q, T)",
        "float16 if fast else T",
        "float16 | T if fast else same_as(a) | float32",
    ],
)
def test_dtypes_of_inputs(dtype: str) -> None:
    read = entry(
        params=DTYPE_PARAMS, inputs=f'{{a: {{dtype: T, shape: "[M, N]"}}, b: {{dtype: "{dtype}", shape: "[M]"}}}}'
    )
    assert read.signature.inputs["b"].dtype == text(dtype)


@pytest.mark.parametrize("dtype", ["T", "float32", "same_as(a)", "p", "coalesce(q, bfloat16 if T == float16 else T)"])
def test_dtypes_of_outputs(dtype: str) -> None:
    """An output has one dtype, which may follow from solved indices."""
    read = entry(params=DTYPE_PARAMS, outputs=f'{{y: {{dtype: "{dtype}", shape: "[M]"}}}}')
    assert read.signature.outputs["y"].dtype == text(dtype)


def test_what_a_tensor_may_say() -> None:
    read = entry(
        params="{update: {type: bool, default: true}}",
        inputs='{a: {dtype: T, shape: "[M, N]", contiguous: true, mutated: true},'
        ' w: {dtype: T, shape: "[N]", optional: true},'
        ' s: {dtype: float32, shape: "[N]", when: "present(w)", mutated: "update and M > 1", requires: positive},'
        ' o: {dtype: int32, shape: "[M + 1]", requires: offsets(N), values: "offsets([1, 1])"},'
        ' z: {dtype: int32, shape: "[M]", mutated: false, values: forward(y)}}',
        outputs='{y: {dtype: T, shape: "[M, N]", layout: like(a)}, n: {dtype: float32, shape: "[M]", when: update}}',
        workloads="[]",
    ).signature
    a, w, s, o, z = read.inputs.values()
    y, n = read.outputs.values()
    assert a.contiguous
    assert a.mutated is not None
    assert a.mutated.expr == Const(True)
    assert (w.optional, w.when, w.contiguous, w.mutated) == (True, None, False, None)
    assert s.when == text("present(w)")
    assert s.mutated == text("update and M > 1")
    assert s.requires is not None
    assert (s.requires.name, s.requires.args) == ("positive", ())
    assert o.requires is not None
    assert (o.requires.name, o.requires.args, o.requires.source) == ("offsets", (Name("N"),), "offsets(N)")
    assert o.values is not None
    assert o.values.args == (parse("[1, 1]"),)
    assert z.mutated is None  # as if it didn't say so
    assert z.values is not None
    assert (z.values.name, z.values.args) == ("forward", (Name("y"),))
    assert (y.layout, n.when) == ("a", text("update"))


def test_an_op_that_only_mutates_has_no_outputs() -> None:
    read = entry(inputs='{a: {dtype: T, shape: "[M, N]", mutated: true}}', outputs="{}")
    assert read.signature.outputs == {}


def test_let_where_and_symbolic() -> None:
    read = entry(
        params="{wide: {type: bool, default: true}, window: {type: int, default: -1}}",
        forall='{M: Dim, N: Dim, K: Dim, T: "DType[float16 | bfloat16]"}',
        inputs='{a: {dtype: T, shape: "[M, N]"}, b: {dtype: T, shape: "[K]"}}',
        let='{G: "ceil_div(K, 128)", H: "G + 1"}',
        outputs='{y: {dtype: T, shape: "[M, H]"}}',
        where='["M >= 1", {rule: "window >= -1", hint: "a window, or -1"}]',
        symbolic="[M, {N: wide}]",
    ).signature
    assert {n: t.source for n, t in read.let.items()} == {"G": "ceil_div(K, 128)", "H": "G + 1"}
    assert [(r.text.source, r.hint) for r in read.where] == [("M >= 1", None), ("window >= -1", "a window, or -1")]
    assert [(s.index, s.when and s.when.source) for s in read.symbolic] == [("M", None), ("N", "wide")]


def test_rows() -> None:
    read = entry(
        params='{flip: {type: bool, default: false}, axes: {type: "list[int]", default: [0]}}',
        inputs='{a: {dtype: T, shape: "[M, N]"}, w: {dtype: "T | float32", shape: "[N]", optional: true},'
        ' o: {dtype: int32, shape: "[M]", requires: index(N)}}',
        workloads="[{M: 4, N: 2, flip: true, some: [w], label: r4-n2.half,"
        " dtype_cases: [{T: float16, w: float32}, {T: bfloat16}], values: {o: index(N)}, dim_order: {a: [1, 0]}},"
        " {M: 1, N: 1, label: 1x}]",
    )
    row, plain = read.workloads
    assert row.label == "r4-n2.half"
    assert row.values == {"M": 4, "N": 2, "flip": True, "axes": (0,)}  # defaults filled in
    assert row.some == ("w",)
    assert row.dtype_cases == ({"T": "float16", "w": "float32"}, {"T": "bfloat16"})
    assert row.content["o"].source == "index(N)"
    assert row.dim_order == {"a": (1, 0)}
    assert (plain.some, plain.dtype_cases, plain.content, plain.dim_order) == ((), (), {}, {})


def test_baselines_and_compile() -> None:
    read = entry(
        baselines="{cuda: {required: [torch, cublaslt], optional: [deepgemm]}, musa: {required: [torch]}}",
        compile="{fullgraph: false, reason: reads lengths on the host}",
    )
    assert read.baselines == {
        "cuda": Baselines(("torch", "cublaslt"), ("deepgemm",)),
        "musa": Baselines(("torch",)),
    }
    assert (read.fullgraph, read.fullgraph_reason) == (False, "reads lengths on the host")


@pytest.mark.parametrize(
    ("roofline", "flops", "nbytes"),
    [
        ("{flops: M * N, unit: cuda_core, dtype: T}", text("M * N"), None),
        ("{flops: 0, bytes: 2 * M * N, unit: tensor_core, dtype: float32}", text("0"), text("2 * M * N")),
        ('{flops: "toy.work:flops", bytes: "toy.work:moved"}', FuncRef("toy.work:flops"), FuncRef("toy.work:moved")),
        ("{flops: sum(n for n in o) * N}", text("sum(n for n in o) * N"), None),  # content of metadata may be read
        ('{flops: "(4 if present(y) else 3) * M"}', text("(4 if present(y) else 3) * M"), None),
    ],
)
def test_roofline(roofline: str, flops: Any, nbytes: Any) -> None:
    read = entry(
        inputs='{a: {dtype: T, shape: "[M, N]"}, o: {dtype: int32, shape: "[M]", requires: lengths(N)}}',
        roofline=roofline,
    ).roofline
    assert read is not None
    assert (read.flops, read.bytes) == (flops, nbytes)


def test_accuracy_overrides_hold_expressions() -> None:
    read = entry(
        inputs='{a: {dtype: T, shape: "[M, N]", mutated: true}}',
        accuracy="{y: {rule: slices, contraction: N, factor: 3, floor: 4 if T == float16 else 1.5, reason: few digits},"
        " a: {rule: exact}}",
    )
    assert read.accuracy == {
        "y": {
            "rule": "slices",
            "contraction": text("N"),
            "factor": text("3"),
            "floor": text("4 if T == float16 else 1.5"),
            "reason": "few digits",
        },
        "a": {"rule": "exact"},
    }


NORM = {
    "params": "{eps: {type: float, default: 1e-6}, stats: {type: bool, default: false}}",
    "inputs": '{x: {dtype: T, shape: "[M, N]"}, w: {dtype: T, shape: "[N]", optional: true}}',
    "outputs": '{y: {dtype: T, shape: "[M, N]"}, r: {dtype: float32, shape: "[M]", when: stats}}',
}


def test_one_backward_op() -> None:
    (call,) = entry(
        grad="{op: CopyBwdOp, when: M > 0, params: {eps: eps * 2}, inputs: {dy: grad(y), x: x, w: w, r: saved(r)},"
        " gives: {x: dx + grad(r), w: dw}}",
        **NORM,
    ).grad
    assert call.op == "CopyBwdOp"
    assert call.when == text("M > 0")
    assert call.params == {"eps": text("eps * 2")}
    assert call.inputs == {"dy": text("grad(y)"), "x": text("x"), "w": text("w"), "r": text("saved(r)")}
    assert call.gives == {"x": text("dx + grad(r)"), "w": text("dw")}


def test_a_backward_of_two_ops() -> None:
    calls = entry(
        grad="{calls: [{op: CopyFwdOp, inputs: {a: grad(y)}, gives: {x: y}},"
        " {op: OtherFwdOp, inputs: {a: x}, gives: {w: y}}]}",
        **NORM,
    ).grad
    assert [(c.op, *c.gives) for c in calls] == [("CopyFwdOp", "x"), ("OtherFwdOp", "w")]


# -- YAML --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("1e-6", 1e-6),
        ("1E6", 1e6),
        ("-0.5", -0.5),
        ("+.5", 0.5),
        ("1.", 1.0),
        ("0", 0.0),
        ("1_000", 1000.0),
        ("-.inf", float("-inf")),
        ("~", None),
        ("null", None),
        ("Null", None),
    ],
)
def test_scalars_are_those_of_yaml_1_2(written: str, value: float | None) -> None:
    param = entry(params=f'{{p: {{type: "float | None", default: {written}}}}}').signature.params["p"]
    assert param.default == value


@pytest.mark.parametrize("written", ["true", "True", "TRUE"])
def test_booleans(written: str) -> None:
    assert entry(params=f"{{p: {{type: bool, default: {written}}}}}").signature.params["p"].default is True


@pytest.mark.parametrize(
    "written", ["«yes»", "«on»", "«0x10»", "«0o7»", "«1:30»", "«2020-01-01»", "'«1e-6»'", '"«1»"', "«true»", "«[1.0]»"]
)
def test_what_is_no_number_for_yaml_1_2(written: str) -> None:
    (fault,), (place,) = findings(spec(params=f"{{p: {{type: float, default: {written}}}}}"))
    assert (fault.code, fault.message) == ("S108", "the default of param 'p' must be float")
    assert (fault.place.line, fault.place.column) == place


def test_not_a_number_is_no_value() -> None:
    (fault,), _ = findings(spec(params="{p: {type: float, default: .nan}}"))
    assert fault.message == "the default of param 'p' must be a number"


def test_a_byte_order_mark_is_no_part_of_the_text() -> None:
    file = parse_spec("\ufeff" + spec())
    assert (list(file.entries), file.diagnostics) == (["CopyFwdOp"], ())


def test_an_empty_file_has_no_entries() -> None:
    assert parse_spec("") == parse_spec("# nothing yet\n") == SpecFile("<spec>", {}, ())


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        ("a: [1\n", "S001", "not YAML: "),
        ("a: 'x\n", "S001", "not YAML: found unexpected end of stream"),
        ("a: 1\n---\nb: 2\n", "S001", "not YAML: but found another document"),
        ("a: \x00\n", "S001", "not YAML: "),
        ("a: \ud800\n", "S001", "not YAML: "),
        ("a: 1\nb: x\x85y\n", "S001", "not YAML: U+0085 ends a line for some readers and not for others"),
        ("a: \u2028\n", "S001", "not YAML: U+2028 ends a line"),
        ("[" * 100_000, "S001", "not YAML: "),
        ("- " * 100_000, "S001", "not YAML: "),
        ("x" * 5_000_000, "S001", "a file of 5000000 characters; at most 4194304 are read"),
        ("a: " + "[" * 30 + "]" * 30, "S004", "nested more than 20 levels deep"),
        ("- a\n", "S103", "a spec file must be a mapping"),
        ("just text\n", "S103", "a spec file must be a mapping"),
        ("[a]: 1\n", "S103", "a key of a spec file must be a word"),
        ("? {a: 1}\n: 2\n", "S103", "a key of a spec file must be a word"),
    ],
)
def test_what_is_no_spec(text: str, code: str, message: str) -> None:
    (fault,) = (d for d in parse_spec(text).diagnostics if d.severity == "error")
    assert (fault.code, fault.message[: len(message)]) == (code, message)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_lines_are_counted_as_editors_do(end: str) -> None:
    places = [d.place for d in parse_spec(f"A: {{}}{end}{end}A: {{}}{end}").diagnostics if d.code == "S002"]
    assert [(p.line, p.column) for p in places] == [(3, 1)]
    (odd,) = parse_spec(f"A: {{}}{end}{end}B: 'x\x85y'{end}").diagnostics
    assert (odd.place.line, odd.place.column) == (3, 6)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"forall": "{M: «&d Dim», N: Dim, T: 'DType[float16]'}"}, "anchors and aliases"),
        ({"forall": "{M: «&d Dim», N: *d, T: 'DType[float16]'}"}, "anchors and aliases"),
        ({"workloads": "[«&r {M: 1, N: 1, label: a}», *r]"}, "anchors and aliases"),
        ({"summary": "«!!str 5»"}, "tags"),
        ({"summary": "«!own text»"}, "tags"),
        ({"workloads": "[{M: «!!int '4'», N: 1, label: a}]"}, "tags"),
        ({"aliases": "«!!python/tuple [AFwdOp]»"}, "tags"),
    ],
)
def test_anchors_and_tags_are_refused(changes: dict[str, str], what: str) -> None:
    (fault,), (place,) = findings(spec(**changes))
    assert (fault.code, fault.message) == ("S003", f"{what} are not part of the spec language")
    assert (fault.place.line, fault.place.column) == place


def test_a_tower_of_aliases_is_refused_at_once() -> None:
    tower = "a: &a [x, x]\n" + "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True))
    assert {d.code for d in parse_spec(tower).diagnostics} == {"S003"}


# -- faults ------------------------------------------------------------------------------------------------------------

FAULTS: list[tuple[dict[str, str | None], str, str, str | None]] = [
    # structure
    ({"«worklods»": "[]"}, "S101", "unknown key 'worklods' in CopyFwdOp", "did you mean 'workloads'?"),
    ({"inputs": '{a: {dtype: T, shape: "[M, N]", «optionl»: true}}'}, "S101", "unknown key 'optionl' in input a",
     "did you mean 'optional'?"),
    ({"outputs": '{y: {dtype: T, shape: "[M, N]", «optional»: true}}'}, "S101", "unknown key 'optional' in output y",
     None),
    ({"inputs": '{a: «{shape: "[M, N]"}»}'}, "S102", "input a lacks 'dtype'", None),
    ({"params": "{p: «{default: 1}»}"}, "S102", "param 'p' lacks 'type'", None),
    ({"params": "{p: {type: int, default: 1}, q: «{type: int}»}"}, "S102",
     "param 'q' needs a default, since 'p' before it has one", None),
    ({"aliases": "«CopyOpFwdOp»"}, "S103", "'aliases' of CopyFwdOp must be a list", None),
    ({"inputs": "«[a, b]»"}, "S103", "inputs must be a mapping", None),
    ({"summary": "«[a]»"}, "S103", "'summary' of CopyFwdOp must be text", None),
    ({"summary": "«5»"}, "S103", "'summary' of CopyFwdOp must be text", None),
    ({"inputs": '{a: {dtype: T, shape: "[M, N]", optional: «maybe»}}'}, "S103", "'optional' of input a must be true or "
     "false", None),
    ({"inputs": '{a: {dtype: T, shape: «[M, N]»}}'}, "S103", "the shape of input a must be an expression", None),
    ({"status": "«done»"}, "S107", "'status' must be implemented or spec-only", None),
    ({"status": "«[implemented]»"}, "S107", "'status' must be implemented or spec-only", None),
    ({"family": "«Toy-ops»"}, "S106", "'Toy-ops' is no family: lower-case letters, digits and '_'", None),
    ({"reference": "«toy.reference.copy»"}, "S107",
     "'reference' of CopyFwdOp must be module:function, not 'toy.reference.copy'", None),
    ({"aliases": "[CopyOfFwdOp, «copy»]"}, "S106", "'copy' is no op's name", "write {Name}FwdOp or {Name}BwdOp"),
    ({"semantics": "{«Empty K»: zeros}"}, "S106", "'Empty K' is no id: lower-case words joined by '-'", None),
    ({"compile": "«{fullgraph: false}»"}, "S102", "'fullgraph: false' needs a 'reason'", None),
    # names
    ({"forall": '{M: Dim, N: Dim, T: "DType[float16]", «2M»: Dim}'}, "S106",
     "'2M' is no name: letters, digits and '_', a letter first", None),
    ({"forall": '{M: Dim, N: Dim, T: "DType[float16]", «len»: Dim}'}, "S105",
     "'len' is a word of the language and can't name anything", None),
    ({"forall": '{M: Dim, N: Dim, T: "DType[float16]", «lambda»: Dim}'}, "S105",
     "'lambda' is a word of the language and can't name anything", None),
    ({"params": "{«M»: {type: int}}"}, "S105", "'M' is declared twice in this signature", None),
    ({"params": "{«a»: {type: int}}"}, "S105", "'a' is declared twice in this signature", None),
    ({"let": "{«N»: M}"}, "S105", "'N' is declared twice in this signature", None),
    ({"inputs": '{a: {dtype: T, shape: "[M, N]"}}', "outputs": '{«a»: {dtype: T, shape: "[M]"}}'}, "S105",
     "'a' is declared twice in this signature", None),
    # types of indices and params
    ({"forall": '{M: «Dimm», N: Dim, T: "DType[float16]"}'}, "S107",
     "the type of index 'M' must be Dim, Shape or DType[a | b] with dtypes' names", None),
    ({"forall": '{M: Dim, N: Dim, T: "«DType[half]»"}'}, "S107",
     "the type of index 'T' must be Dim, Shape or DType[a | b] with dtypes' names", None),
    ({"forall": '{M: Dim, N: Dim, T: "«DType[float16 | float16]»"}'}, "S107",
     "the type of index 'T' must be Dim, Shape or DType[a | b] with dtypes' names", None),
    ({"params": "{p: {type: «str»}}"}, "S107", "the type of param 'p' is none of the language's",
     "bool, int, float, list[int], quoted words, dtypes; '| None' where None is a value"),
    ({"params": '{p: {type: "«int | float»"}}'}, "S107", "the type of param 'p' is none of the language's",
     "bool, int, float, list[int], quoted words, dtypes; '| None' where None is a value"),
    ({"params": "{p: {type: bool, default: «1»}}"}, "S108", "the default of param 'p' must be bool", None),
    ({"params": "{p: {type: int, default: «1.0»}}"}, "S108", "the default of param 'p' must be int", None),
    ({"params": "{p: {type: int, default: «9223372036854775808»}}"}, "S108", "the default of param 'p' must be int",
     None),
    ({"params": f"{{p: {{type: float, default: «{'9' * 400}»}}}}"}, "S108", "the default of param 'p' must be float",
     None),
    ({"params": '{p: {type: "list[int]", default: «[1, a]»}}'}, "S108", "the default of param 'p' must be list[int]",
     None),
    ({"params": "{p: {type: \"'a' | 'b' | None\", default: «c»}}"}, "S108",
     "the default of param 'p' must be 'a' | 'b' | None", None),
    # named types
    ({"types": "{«Tile»: '[M]'}"}, "S107", "'Tile' is no type's head", "write it as Name[a, b]"),
    ({"types": "{'Tile[n]': '[n, «m»]'}"}, "S104", "unknown name 'm' in type Tile", None),
    ({"types": "{'«Tile[n, n]»': '[n]'}"}, "S105",
     "'Tile[n, n]' needs a name of its own, and one for each of its parameters", None),
    ({"types": "{'«M[n]»': '[n]'}"}, "S105",
     "'M[n]' needs a name of its own, and one for each of its parameters", None),
    ({"types": "{'Tile[n, S]': '[sum«(n for n in S)»]'}"}, "S105",
     "'n' is a parameter of type Tile and can't run over a list", None),
    ({"inputs": '{a: {dtype: T, shape: "«Mt»[true, M, N]"}}'}, "S104", "unknown type 'Mt' in the shape of input a",
     "did you mean 'Mat'?"),
    ({"inputs": '{a: {dtype: T, shape: "«Mat[M, N]»"}}'}, "S202", "Mat[t, R, C] takes 3 arguments, not 2 in the shape "
     "of input a", None),
    ({"inputs": '{a: {dtype: T, shape: "Mat[«M», M, N]"}}'}, "S202",
     "the operand of 'not' must give a bool, not a whole number in the shape of input a", None),
    # shapes
    ({"inputs": '{a: {dtype: T, shape: "[M, «NN»]"}}'}, "S104", "unknown axis 'NN' in input a", "did you mean 'N'?"),
    ({"inputs": '{a: {dtype: T, shape: "[M, N * «k»]"}}'}, "S104", "unknown name 'k' in the shape of input a", None),
    ({"inputs": '{a: {dtype: T, shape: "[M, «T»]"}}'}, "S202", "an axis must give a whole number, not a dtype in input "
     "a", None),
    ({"inputs": '{a: {dtype: T, shape: "[M, «1.5»]"}}'}, "S202", "an axis must give a whole number, not a number in "
     "input a", None),
    ({"inputs": '{a: {dtype: T, shape: "[M, *«N»]"}}'}, "S202",
     "a splice must give a shape, not a whole number in the shape of input a", None),
    ({"inputs": '{a: {dtype: T, shape: "«M»"}}'}, "S202", "not a shape in the shape of input a",
     "write [axis, ...], Type[...] or a conditional of shapes"),
    ({"inputs": '{a: {dtype: T, shape: "[M, N]«]»"}}'}, "S201",
     "not an expression: unmatched ']' in the shape of input a", None),
    ({"inputs": '{a: {dtype: T, shape: "[M, N «@» N]"}}'}, "S201",
     "'@' is not part of the expression language in the shape of input a", None),
    # dtypes
    ({"inputs": "{a: {dtype: «half», shape: '[M, N]'}}"}, "S104", "'half' is unknown in the dtype of input a", None),
    ({"inputs": "{a: {dtype: «floaf16», shape: '[M, N]'}}"}, "S104", "'floaf16' is unknown in the dtype of input a",
     "did you mean 'float16'?"),
    ({"inputs": "{a: {dtype: «M», shape: '[M, N]'}}"}, "S202", "'M' is no dtype in the dtype of input a", None),
    ({"inputs": "{a: {dtype: same_as(«b»), shape: '[M, N]'}, b: {dtype: T, shape: '[M]'}}"}, "S104",
     "same_as() names an input declared before, not 'b' in the dtype of input a", None),
    ({"inputs": "{a: {dtype: T, shape: '[M, N]'}}", "outputs": "{y: {dtype: «T» | float32, shape: '[M]'}}"}, "S202",
     "an output has one dtype, not a choice in the dtype of output y", None),
    ({"params": "{p: {type: float16 | None, default: null}}", "outputs": "{y: {dtype: «p», shape: '[M]'}}"}, "S202",
     "'p' may be None in the dtype of output y", "write coalesce(p, ...)"),
    ({"params": "{p: {type: float | None, default: null}}", "outputs": "{y: {dtype: «p», shape: '[M]'}}"}, "S202",
     "'p' is no dtype in the dtype of output y", None),
    ({"outputs": "{y: {dtype: 'coalesce(«T», float16)', shape: '[M]'}}"}, "S202",
     "'T' is no dtype param that may be None in the dtype of output y", None),
    ({"outputs": "{y: {dtype: «M + 1», shape: '[M]'}}"}, "S202", "not a dtype in the dtype of output y",
     "a name, a | b, same_as(x), coalesce(param, T) or a conditional"),
    # conditions, layout, content
    ({"inputs": "{a: {dtype: T, shape: '[M, N]'}, b: {dtype: T, shape: '[M]', optional: true, when: '«true»'}}"},
     "S109",
     "input b is either optional or there under a condition, not both", None),
    ({"inputs": "{a: {dtype: T, shape: '[M, N]'}, b: {dtype: T, shape: '[M]', when: «present(c)»}}"}, "S202",
     "present() takes the name of a tensor in 'when' of input b", None),
    ({"where": "[«present(y)»]"}, "S202", "present() takes the name of a tensor in a rule of 'where'", None),
    ({"where": "[{rule: «M + 1»}]"}, "S202", "it must give a bool, not a whole number in a rule of 'where'", None),
    ({"where": "[«{hint: why}»]"}, "S102", "a rule of 'where' lacks 'rule'", None),
    ({"outputs": "{y: {dtype: T, shape: '[M, N]', layout: «like(b)»}}"}, "S107",
     "'layout' of output y must be like(x), x an input", None),
    ({"outputs": "{y: {dtype: T, shape: '[N, M]', layout: «like(a)»}}"}, "S107",
     "output y has another shape than a, so it can't be laid out so", None),
    ({"inputs": "{a: {dtype: int32, shape: '[M, N]', requires: «offset(M)»}}", "outputs": "{y: {dtype: int32, shape: "
     "'[M]'}}", "forall": "{M: Dim, N: Dim}", "workloads": "[]"}, "S110",
     "'requires' of input a is no statement about content", "did you mean 'offsets'?"),
    ({"inputs": "{a: {dtype: T, shape: '[M, N]', requires: «lengths»}}"}, "S110",
     "'requires' of input a is no statement about content", "lengths(max)"),
    ({"inputs": "{a: {dtype: T, shape: '[M, N]', requires: 'lengths(«[M]»)'}}"}, "S202",
     "'max' of lengths() must give a whole number, not a shape in 'requires' of input a", None),
    ({"inputs": "{a: {dtype: T, shape: '[M, N]', requires: 'page_ids(M, «a», N)'}}"}, "S110",
     "'lengths' of page_ids() must name another input in 'requires' of input a", None),
    ({"symbolic": "[«K»]"}, "S104", "'symbolic' names 'K', which is no index of sizes", None),
    ({"symbolic": "[«T»]"}, "S104", "'symbolic' names 'T', which is no index of sizes", None),
    ({"symbolic": "[{«M»: N > 1}]"}, "S203", "the condition of symbolic 'M' may ask only params and present()", "N"),
    ({"symbolic": "[«{M: true, N: true}»]"}, "S103", "an item of 'symbolic' must be an index, or one index with its "
     "condition", None),
    ({"inputs": "{a: {dtype: T, shape: '«[M, N] if M > 1 else [M]»'}}"}, "S203",
     "a condition of input a may ask only params and present()", None),
    ({"inputs": "{a: {dtype: T, shape: '[M, N]'}, b: {dtype: T, shape: '[M]', when: «M > 1»}}"}, "S203",
     "a condition of input b may ask only params and present()", None),
    ({"inputs": "{a: {dtype: T, shape: '[M, N]'}, b: {dtype: T, shape: '[M]', when: «present(c)»},"
      " c: {dtype: T, shape: '[M]', when: present(b)}}"}, "S203",
     "input b is there when 'c' is, whose own condition comes later", None),
    # rows
    ({"workloads": "[«{M: 1, N: 1}»]"}, "S102", "a row of CopyFwdOp lacks 'label'", None),
    ({"workloads": "[{M: 1, N: 1, label: «Big One»}]"}, "S106", "'Big One' is no label: lower-case words joined by '-'",
     None),
    ({"workloads": "[{M: 1, N: 1, «K»: 1, label: a}]"}, "S101", "unknown key 'K' in a row of CopyFwdOp", None),
    ({"workloads": "[{M: «-1», N: 1, label: a}]"}, "S301", "'M' must be a size, not -1", None),
    ({"workloads": "[{M: «true», N: 1, label: a}]"}, "S301", "'M' must be a size, not True", None),
    ({"workloads": "[{M: «[1, 2]», N: 1, label: a}]"}, "S301", "'M' must be a size, not [1, 2]", None),
    ({"params": "{p: {type: bool, default: true}}", "workloads": "[{M: 1, N: 1, p: «2», label: a}]"}, "S301",
     "param 'p' must be bool in row 'a'", None),
    ({"workloads": "[{M: 1, N: 1, some: «[a]», label: a}]"}, "S301", "'some' names 'a', no optional input", None),
    ({"workloads": "[{M: 1, N: 1, dim_order: {«b»: [0, 1]}, label: a}]"}, "S101",
     "unknown key 'b' in dim_order of row 'a'", None),
    ({"workloads": "[{M: 1, N: 1, dim_order: {a: «[1, 1]»}, label: a}]"}, "S301",
     "a dim_order must have each axis once, outermost first, not [1, 1]", None),
    ({"workloads": "[{M: 1, N: 1, dim_order: {a: «2»}, label: a}]"}, "S301",
     "a dim_order must have each axis once, outermost first, not 2", None),
    ({"workloads": "[{M: 1, N: 1, values: {«b»: positive}, label: a}]"}, "S301", "'values' names 'b', no input", None),
    ({"workloads": "[{M: 1, N: 1, label: a, dtype_cases: [{T: «float32»}]}]"}, "S301",
     "'T' must be float16 or bfloat16, not 'float32'", "did you mean 'float16'?"),
    ({"workloads": "[{M: 1, N: 1, label: a, dtype_cases: [{«a»: float16}]}]"}, "S101",
     "unknown key 'a' in a dtype case of row 'a'", None),
    ({"inputs": "{a: {dtype: T | float32, shape: '[M, N]'}, b: {dtype: T, shape: '[M]'}}",
      "workloads": "[{M: 1, N: 1, label: a, dtype_cases: [{a: «int8»}]}]"}, "S301",
     "'a' must be float32 or float16 or bfloat16, not 'int8'", None),
    # accuracy, baselines, roofline, grad
    ({"accuracy": "{«z»: {rule: exact}}"}, "S101", "unknown key 'z' in accuracy of CopyFwdOp", None),
    ({"accuracy": "{«a»: {rule: exact}}"}, "S101", "unknown key 'a' in accuracy of CopyFwdOp", None),
    ({"accuracy": "{y: {«tolerance»: 2}}"}, "S101", "unknown key 'tolerance' in accuracy of y", None),
    ({"accuracy": "{y: {rule: «close»}}"}, "S107", "'rule' must be slices or statistic or codes or exact", None),
    ({"accuracy": "{y: {contraction: «K»}}"}, "S104", "unknown name 'K' in 'contraction' in accuracy of y", None),
    ({"accuracy": "{y: {contraction: «M == 1»}}"}, "S202",
     "it must give a whole number, not a bool in 'contraction' in accuracy of y", None),
    ({"accuracy": "{y: {contraction: «[M]»}}"}, "S103", "'contraction' in accuracy of y must be an expression", None),
    ({"accuracy": "{y: «{factor: 3}»}"}, "S102", "accuracy of y needs a 'reason' for its factor", None),
    ({"accuracy": "{y: «{factor: 3, floor: 2}»}"}, "S102", "accuracy of y needs a 'reason' for its factor and floor",
     None),
    ({"accuracy": "{y: {floor: «0.5», reason: why}}"}, "S107", "'floor' in accuracy of y must be at least 1", None),
    ({"accuracy": "{y: {factor: «-1», reason: why}}"}, "S107", "'factor' in accuracy of y must be at least 0", None),
    ({"accuracy": "{y: {factor: 2, reason: «[]»}}"}, "S103", "'reason' in accuracy of y must be text", None),
    ({"accuracy": "«exact»"}, "S103", "accuracy of CopyFwdOp must be a mapping", None),
    ({"baselines": "{cuda: {«requires»: [torch]}}"}, "S101", "unknown key 'requires' in baselines of cuda",
     "did you mean 'required'?"),
    ({"roofline": "«{unit: cuda_core}»"}, "S102", "roofline of CopyFwdOp lacks 'flops'", None),
    ({"roofline": "{flops: M * «K»}"}, "S104", "unknown name 'K' in 'flops' of roofline", None),
    ({"roofline": "{flops: M, unit: «cuda»}"}, "S107", "'unit' must be tensor_core or cuda_core", None),
    ({"roofline": "{flops: M, dtype: «U»}"}, "S104", "'U' is no dtype", None),
    ({"grad": "«{op: CopyBwdOp, inputs: {}}»"}, "S102", "grad of CopyFwdOp lacks 'gives'", None),
    ({"grad": "{op: CopyBwdOp, inputs: {dy: «grad(z)»}, gives: {a: da}}"}, "S104",
     "'z' is no output in 'dy' in 'inputs' of grad", None),
    ({"grad": "{op: CopyBwdOp, inputs: {x: «b»}, gives: {a: da}}"}, "S104",
     "'b' is no input in 'x' in 'inputs' of grad", None),
    ({"grad": "{op: CopyBwdOp, inputs: {x: «a + a»}, gives: {a: da}}"}, "S202",
     "not an input, grad(y) or saved(y) in 'x' in 'inputs' of grad", None),
    ({"grad": "{op: CopyBwdOp, inputs: {}, gives: {a: «da * 2»}}"}, "S202",
     "not outputs of the op and grad(y), summed in 'a' in 'gives' of grad", None),
    ({"grad": "{op: CopyBwdOp, inputs: {}, gives: {«b»: db}}"}, "S104", "'gives' of grad names 'b', no input", None),
    ({"grad": "{op: CopyBwdOp, params: {p: «q»}, inputs: {}, gives: {a: da}}"}, "S104",
     "unknown name 'q' in 'p' in 'params' of grad", None),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "code", "message", "hint"), FAULTS, ids=[f"{c}-{m[:40]}" for _, c, m, _ in FAULTS])
def test_a_fault_is_found_at_its_place(changes: dict[str, str], code: str, message: str, hint: str | None) -> None:
    found, (place,) = findings(spec(**changes))
    (fault,) = found
    assert (fault.code, fault.message) == (code, message)
    assert (fault.place.line, fault.place.column) == place
    if hint is not None:
        assert fault.hint == hint


def test_the_example_of_the_design() -> None:
    """The column is that of the axis, inside the quotes."""
    gemm = """\
GEMMFwdOp:
 family: gemm
 summary: Dense matrix product.
 status: spec-only
 reference: tileops.gemm.reference:gemm
 signature:
  forall: {M: Dim, N: Dim, K: Dim, T: "DType[float16]"}
  inputs:
   a: {dtype: T, shape: "[M, K]"}
   b:
    shape:
      "[KK, N]"
    dtype: T
  outputs: {d: {dtype: T, shape: "[M, N]"}}
 workloads: []
 roofline: {flops: "2 * M * N * K"}
"""
    (fault,) = parse_spec(gemm, "specs/gemm.yaml").diagnostics
    assert str(fault) == "specs/gemm.yaml:12:9: error[S104] unknown axis 'KK' in input b; did you mean 'K'?"


def test_keys_that_come_twice() -> None:
    found, places = findings("\n".join([spec().rstrip(), "  «summary»: Again.", "«CopyFwdOp»: {}", ""]))
    assert [(d.code, d.message, d.hint) for d in found] == [
        ("S002", "CopyFwdOp has the key 'summary' twice", "first in line 3"),
        ("S002", "a spec file has the key 'CopyFwdOp' twice", "first in line 1"),
    ]
    assert [(d.place.line, d.place.column) for d in found] == places


def test_labels_that_come_twice() -> None:
    rows = "\n  - {M: 1, N: 1, label: a}\n  - {M: 1, N: 1, label: b}\n  - «{M: 2, N: 1, label: a}»"
    (fault,), (place,) = findings(spec(workloads=rows))
    assert (fault.code, fault.message, fault.hint) == ("S302", "label 'a' is used twice", "first in line 7")
    assert (fault.place.line, fault.place.column) == place


@pytest.mark.parametrize("key", ["family", "summary", "status", "reference", "workloads", "roofline"])
def test_what_only_an_implemented_entry_needs_is_a_warning_before(key: str) -> None:
    (warning,) = parse_spec(spec(**{key: None})).diagnostics
    assert (warning.severity, warning.code, warning.message) == ("warning", "S102", f"CopyFwdOp lacks '{key}'")


def test_an_implemented_entry_lacks_nothing() -> None:
    found, _ = findings(spec(status="implemented", reference=None))
    assert [(d.severity, d.message) for d in found] == [
        ("error", "CopyFwdOp lacks 'baselines'"),
        ("error", "CopyFwdOp lacks 'reference'"),
        ("error", "roofline of CopyFwdOp lacks 'dtype'"),
        ("error", "roofline of CopyFwdOp lacks 'unit'"),
    ]


def test_an_entry_without_signature_is_no_entry() -> None:
    file = parse_spec("CopyFwdOp: {family: toy}\nNoOp:\n")
    assert file.entries == {}
    assert [d.message for d in file.errors] == [
        "CopyFwdOp lacks 'signature'",
        "NoOp lacks 'signature'",
        "'NoOp' is no op's name",
    ]


def test_all_faults_of_a_file_come_at_once_and_sorted() -> None:
    found, places = findings(
        spec("AFwdOp", inputs='{a: {dtype: «U», shape: "[M, «L»]"}}', workloads="[{M: «-1», N: 1, label: a}]")
        + spec("BFwdOp", summary="«5»", outputs='{y: {dtype: T, shape: "[«L»]"}}', roofline="{flops: «K», unit: «no»}")
    )
    assert [(d.place.line, d.place.column) for d in found] == sorted(places)
    assert len(found) == 7


def test_a_faulty_name_is_one_fault() -> None:
    """What a fault declares is known from then on, so that its uses are no faults."""
    found, _ = findings(
        spec(forall='{M: Dim, N: Dims, T: "DType[half]"}', params="{p: {type: string}}", let="{G: M +}")
    )
    assert [d.code for d in found] == ["S107", "S107", "S107", "S201"]


def test_entries_beside_a_faulty_one_are_read() -> None:
    file = parse_spec(spec("AFwdOp", status="done") + spec("BFwdOp"))
    assert list(file.entries) == ["BFwdOp"]
    assert len(file.errors) == 1


def test_places_count_characters_not_bytes() -> None:
    found, (place,) = findings(spec(summary="Über.", where="[{hint: 'größer als ½', rule: «K» > 1}]"))
    assert (found[0].place.line, found[0].place.column) == place


@pytest.mark.parametrize(
    "shape", ['"[M,\\x20«K»]"', "'[M, K, ''a'']'", "|\n          [M,\n          K]", "[M,\n         K]"]
)
def test_where_the_file_has_other_text_the_place_is_where_the_value_starts(shape: str) -> None:
    text = spec(inputs="\n      a:\n        dtype: T\n        shape: @").replace(
        "@", shape.replace("«", "").replace("»", "")
    )
    fault = parse_spec(text).diagnostics[0]
    assert fault.place.line == 13
    assert fault.place.column == 16


# -- files -------------------------------------------------------------------------------------------------------------


def test_load_gives_entries_or_every_error(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text(spec())
    bad.write_text(spec(status="done", summary="5"))
    assert list(load(good)) == ["CopyFwdOp"]
    with pytest.raises(SpecError) as e:
        load(bad)
    assert str(e.value).splitlines() == [str(d) for d in e.value.diagnostics]
    assert [d.code for d in e.value.diagnostics] == ["S103", "S107"]
    assert str(e.value).startswith(f"{bad}:3:12: error[S103]")


@pytest.mark.parametrize("name", ["absent.yaml", ".", "latin.yaml", "nul\0.yaml"])
def test_a_file_that_can_not_be_read(tmp_path: Path, name: str) -> None:
    (tmp_path / "latin.yaml").write_bytes("a: \xff".encode("latin-1"))
    with pytest.raises(SpecError, match="S000"):
        load(tmp_path / name)
