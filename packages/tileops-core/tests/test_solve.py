"""How indices follow from shapes and dtypes, and what is said of those that don't."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tileops.core.check import Call, Checker, TensorMeta
from tileops.core.errors import CheckError
from tileops.core.spec import Diagnostic, Entry, parse_spec
from tileops.core.spec.expr import Const, Name, parse, unparse
from tileops.core.spec.solve import fold, solve
from tileops.core.spec.steps import CheckAxis, CheckDType, Derive, Rank, Require, SolveAxis, SolveDType, SolveSplice
from tileops.core.workloads import calls


def text(inputs: Mapping[str, str], forall: str = "", **keys: str) -> str:
    """An entry whose inputs are given by their shapes; a tensor's other keys may follow its shape after a ``;``."""
    lines = [f"  forall: {{{forall}}}", *(f"  {k}: {v}" for k, v in keys.items())]
    for name, said in inputs.items():
        shape, _, rest = said.partition(";")
        dtype = "" if "dtype" in rest else ", dtype: float32"
        lines.append(f'    {name}: {{shape: "{shape}"{dtype}{"," if rest else ""}{rest}}}')
    lines.insert(len(lines) - len(inputs), "  inputs:")
    outputs = [] if "outputs" in keys else ["  outputs: {}"]
    return "\n".join(["OneFwdOp:", " signature:", *lines, *outputs, ""])


def entry(inputs: Mapping[str, str], forall: str = "", **keys: str) -> Entry:
    file = parse_spec(text(inputs, forall, **keys))
    assert file.errors == ()
    return file.entries["OneFwdOp"]


def errors(inputs: Mapping[str, str], forall: str = "", **keys: str) -> list[Diagnostic]:
    return list(parse_spec(text(inputs, forall, **keys)).errors)


def bind(entry: Entry, shapes: Mapping[str, Any], **params: Any) -> Call:
    checker = Checker(entry)
    metas = {n: s if isinstance(s, TensorMeta) else TensorMeta(s, "float32") for n, s in shapes.items()}
    return checker.bind(checker.params(params), metas)


# -- what can be solved ------------------------------------------------------------------------------------------------

DIMS = "M: Dim, N: Dim, K: Dim"
SHAPES = "A: Shape, B: Shape, M: Dim, N: Dim"


@pytest.mark.parametrize(
    ("forall", "inputs", "shapes", "indices"),
    [
        # a name that stands alone
        ("M: Dim", {"x": "[M]"}, {"x": (7,)}, {"M": 7}),
        (DIMS, {"x": "[M, K]", "y": "[K, N]"}, {"x": (2, 3), "y": (3, 5)}, {"M": 2, "K": 3, "N": 5}),
        ("M: Dim", {"x": "[M, M]"}, {"x": (4, 4)}, {"M": 4}),
        ("M: Dim", {"x": "[M]"}, {"x": (0,)}, {"M": 0}),
        # c * M + e
        ("M: Dim", {"x": "[2 * M]"}, {"x": (6,)}, {"M": 3}),
        ("M: Dim", {"x": "[M * 2 + 1]"}, {"x": (7,)}, {"M": 3}),
        ("M: Dim", {"x": "[1 + M]"}, {"x": (4,)}, {"M": 3}),
        ("M: Dim", {"x": "[M - 1]"}, {"x": (4,)}, {"M": 5}),
        ("M: Dim", {"x": "[3 * (M + 1) - 2]"}, {"x": (7,)}, {"M": 2}),
        ("M: Dim", {"x": "[M + M]"}, {"x": (6,)}, {"M": 3}),
        ("M: Dim, N: Dim", {"x": "[M + N]", "y": "[N]"}, {"x": (7,), "y": (3,)}, {"M": 4, "N": 3}),
        ("M: Dim, N: Dim", {"x": "[N + 2 * M, M]"}, {"x": (7, 2)}, {"M": 2, "N": 3}),
        ("M: Dim, N: Dim", {"x": "[M + N // 2, N]"}, {"x": (7, 6)}, {"M": 4, "N": 6}),
        # splices: in front, in the middle, behind, empty, several tensors long
        (SHAPES, {"x": "[*A, M]", "y": "[*B, N]"}, {"x": (2, 3, 4), "y": (5,)}, {"A": (2, 3), "M": 4, "B": (), "N": 5}),
        ("A: Shape, M: Dim", {"x": "[M, *A]"}, {"x": (4, 2, 3)}, {"M": 4, "A": (2, 3)}),
        ("A: Shape, M: Dim, N: Dim", {"x": "[M, *A, N]"}, {"x": (4, 2, 3, 5)}, {"M": 4, "A": (2, 3), "N": 5}),
        ("A: Shape, M: Dim, N: Dim", {"x": "[M, *A, N]"}, {"x": (4, 5)}, {"M": 4, "A": (), "N": 5}),
        ("A: Shape", {"x": "[*A]", "y": "[*A]"}, {"x": (2, 3), "y": (2, 3)}, {"A": (2, 3)}),
        ("A: Shape, B: Shape", {"x": "[*A, *B]", "y": "[*A]"}, {"x": (2, 3, 4), "y": (2,)}, {"A": (2,), "B": (3, 4)}),
        ("A: Shape, B: Shape", {"x": "[*A, *B]", "y": "[*B]"}, {"x": (2, 3, 4), "y": (4,)}, {"A": (2, 3), "B": (4,)}),
        ("A: Shape, M: Dim", {"x": "[*A, M, *A]", "y": "[*A]"}, {"x": (2, 3, 9, 2, 3), "y": (2, 3)},
         {"A": (2, 3), "M": 9}),
        ("M: Dim, A: Shape", {"x": "[*[M, *A]]"}, {"x": (4, 2)}, {"M": 4, "A": (2,)}),
        # a splice that two others give
        ("A: Shape, B: Shape", {"x": "[*A]", "y": "[*B]", "z": "[*broadcast(A, B), 2]"},
         {"x": (3, 1), "y": (4,), "z": (3, 4, 2)}, {"A": (3, 1), "B": (4,)}),
    ],
)  # fmt: skip
def test_indices_of_a_call(
    forall: str, inputs: dict[str, str], shapes: dict[str, tuple[int, ...]], indices: dict[str, Any]
) -> None:
    assert bind(entry(inputs, forall), shapes).indices == indices


@pytest.mark.parametrize(
    ("forall", "inputs", "shapes"),
    [
        ("M: Dim", {"x": "[M]"}, {"x": (7, 1)}),
        ("M: Dim", {"x": "[M, M]"}, {"x": (4, 5)}),
        ("M: Dim", {"x": "[2 * M]"}, {"x": (7,)}),
        ("M: Dim", {"x": "[2 * M + 3]"}, {"x": (1,)}),  # M would be -1
        ("A: Shape, M: Dim, N: Dim", {"x": "[M, *A, N]"}, {"x": (4,)}),
        ("A: Shape", {"x": "[*A]", "y": "[*A]"}, {"x": (2, 3), "y": (2, 3, 1)}),
        ("A: Shape", {"x": "[*A]", "y": "[*A]"}, {"x": (2, 3), "y": (3, 2)}),
        ("A: Shape", {"y": "[*A, 3]", "x": "[*A]"}, {"y": (2, 3), "x": (2, 3)}),
        # a rank that is known only when other tensors have given theirs
        ("A: Shape, B: Shape", {"z": "[*broadcast(A, B)]", "x": "[*A]", "y": "[*B]"},
         {"x": (3, 1), "y": (4,), "z": (3, 4, 1)}),
        ("A: Shape, B: Shape", {"z": "[*broadcast(A, B), 2]", "x": "[*A]", "y": "[*B]"},
         {"x": (3, 1), "y": (4,), "z": (9, 3, 4, 2)}),
        ("A: Shape, B: Shape", {"x": "[*A]", "y": "[*B]", "z": "[*broadcast(A, B)]"},
         {"x": (3,), "y": (4,), "z": (4,)}),
    ],
)  # fmt: skip
def test_what_fits_no_indices(forall: str, inputs: dict[str, str], shapes: dict[str, tuple[int, ...]]) -> None:
    with pytest.raises(CheckError):
        bind(entry(inputs, forall), shapes)


def test_a_param_may_be_a_splice_or_part_of_an_axis() -> None:
    norm = entry(
        {"x": "[*B, *tail, g + 1]"}, "B: Shape", params='{tail: {type: "list[int]"}, g: {type: int, default: 1}}'
    )
    assert bind(norm, {"x": (5, 3, 4, 2)}, tail=[3, 4]).indices == {"B": (5,)}
    assert bind(norm, {"x": (3, 4, 1)}, tail=(3, 4), g=0).indices == {"B": ()}
    with pytest.raises(CheckError, match=r"got shape \(5, 4, 3, 2\), expected \[\*B, \*tail, g \+ 1\] with "):
        bind(norm, {"x": (5, 4, 3, 2)}, tail=(3, 4))
    with pytest.raises(CheckError, match="got rank 2"):
        bind(norm, {"x": (3, 2)}, tail=(3, 4))


def test_conditionals_are_folded_by_params_and_presence() -> None:
    linear = entry(
        {
            "a": "[M, K] if not flip else [K, M]",
            "b": "[2 * N if act == 'swiglu' else N, K]",
            "bias": "[N if present(b2) else 1]; optional: true",
            "b2": "[*([N] if act != 'none' else []), 3]; optional: true",
        },
        DIMS,
        params="{flip: {type: bool, default: false}, act: {type: \"'none' | 'swiglu'\", default: none}}",
    )
    assert bind(linear, {"a": (2, 3), "b": (4, 3)}).indices == {"M": 2, "K": 3, "N": 4}
    assert bind(linear, {"a": (3, 2), "b": (8, 3)}, flip=True, act="swiglu").indices == {"M": 2, "K": 3, "N": 4}
    assert bind(linear, {"a": (2, 3), "b": (4, 3), "bias": (1,)}).indices["N"] == 4
    assert bind(linear, {"a": (2, 3), "b": (4, 3), "bias": (4,), "b2": (3,)}).indices["N"] == 4
    bind(linear, {"a": (2, 3), "b": (8, 3), "b2": (4, 3)}, act="swiglu")
    with pytest.raises(CheckError, match=r"b2: got rank 1, shape \(3,\), expected \[N, 3\]"):
        bind(linear, {"a": (2, 3), "b": (8, 3), "b2": (3,)}, act="swiglu")


def test_lets_are_derived_when_their_names_are_known() -> None:
    """They may be axes and splices, stand on presence, and follow from each other."""
    made = entry(
        {"x": "[G, *S]", "y": "[*S, H]", "z": "[M, N]", "w": "[H]; optional: true"},
        "M: Dim, N: Dim",
        let='{G: "ceil_div(M, 4)", H: "G + (1 if present(w) else 0)", S: "[N] if present(w) else [N, N]"}',
        outputs='{o: {dtype: float32, shape: "[H, *S]"}}',
    )
    call = bind(made, {"x": (2, 5, 5), "y": (5, 5, 2), "z": (7, 5)})
    assert call.indices == {"M": 7, "N": 5, "G": 2, "H": 2, "S": (5, 5)}
    call = bind(made, {"x": (2, 5), "y": (5, 3), "z": (7, 5), "w": (3,)})
    assert call.indices == {"M": 7, "N": 5, "G": 2, "H": 3, "S": (5,)}
    assert call.outputs["o"] == TensorMeta((3, 5), "float32")


# -- dtypes ------------------------------------------------------------------------------------------------------------


def dtypes(**kinds: str) -> dict[str, TensorMeta]:
    return {n: TensorMeta((2,), d) for n, d in kinds.items()}


def test_dtypes_of_a_call() -> None:
    made = entry(
        {
            "x": "[M]; dtype: T",
            "y": "[M]; dtype: float16 | float32",
            "z": "[M]; dtype: T | int8",
            "s": "[M]; dtype: same_as(y)",
            "c": "[M]; dtype: 'float32 if wide else T'",
        },
        'M: Dim, T: "DType[float16 | bfloat16]"',
        params='{wide: {type: bool, default: false}, out: {type: "float32 | None", default: null},'
        ' also: {type: "int8 | None", default: null}}',
        outputs='{o: {dtype: "coalesce(out, coalesce(also, T))", shape: "[M]"}, p: {dtype: same_as(s), shape: "[M]"},'
        ' q: {dtype: "int8 if T == bfloat16 else T", shape: "[M]"}}',
    )
    good = {"x": "bfloat16", "y": "float32", "z": "int8", "s": "float32", "c": "bfloat16"}
    call = bind(made, dtypes(**good))
    assert call.indices["T"] == "bfloat16"
    assert [m and m.dtype for m in call.outputs.values()] == ["bfloat16", "float32", "int8"]
    call = bind(made, dtypes(**{**good, "x": "float16", "z": "float16", "c": "float32"}), wide=True, out="float32")
    assert [m and m.dtype for m in call.outputs.values()] == ["float32", "float32", "float16"]
    assert bind(made, dtypes(**good), also="int8").outputs["o"] == TensorMeta((2,), "int8")
    for bad in (
        {"x": "float32"},
        {"y": "bfloat16"},
        {"z": "float16"},  # T is bfloat16
        {"s": "float16"},
        {"c": "float32"},
        {"x": "complex64"},
    ):
        with pytest.raises(CheckError):
            bind(made, dtypes(**{**good, **bad}))


def test_rows_take_the_first_dtype_of_a_choice_that_their_case_leaves_open() -> None:
    inputs = {
        "x": "[M]; dtype: T",
        "y": "[M]; dtype: 'float16 | T if wide else int8 | float32'",
        "z": "[M]; dtype: same_as(y)",
    }
    forall = 'M: Dim, T: "DType[float16 | bfloat16]"'
    rows = (
        " workloads:\n - {M: 1, label: a, dtype_cases: [{T: bfloat16}, {T: float16, y: float32}]}\n"
        " - {M: 1, label: b, wide: true, dtype_cases: [{T: bfloat16}, {T: bfloat16, y: bfloat16}]}\n"
    )
    file = parse_spec(text(inputs, forall, params="{wide: {type: bool, default: false}}") + rows)
    assert file.errors == ()
    made = file.entries["OneFwdOp"]
    assert [[m.dtype for m in call.inputs.values() if m] for call in calls(made)] == [
        ["bfloat16", "int8", "int8"],
        ["float16", "float32", "float32"],
        ["bfloat16", "float16", "float16"],
        ["bfloat16", "bfloat16", "bfloat16"],
    ]


def test_a_union_waits_for_its_index() -> None:
    made = entry({"w": "[M]; dtype: T | float32", "x": "[M]; dtype: T"}, 'M: Dim, T: "DType[float16 | bfloat16]"')
    assert bind(made, dtypes(w="float32", x="float16")).indices["T"] == "float16"
    assert bind(made, dtypes(w="float16", x="float16")).indices["T"] == "float16"


def test_a_let_may_be_a_dtype() -> None:
    made = entry(
        {"x": "[M]; dtype: T"},
        'M: Dim, T: "DType[float16 | int8]"',
        let='{U: "float16 if T == int8 else T"}',
        outputs='{y: {dtype: U, shape: "[M]"}}',
    )
    assert bind(made, dtypes(x="int8")).outputs["y"] == TensorMeta((2,), "float16")


# -- the steps are data ------------------------------------------------------------------------------------------------


def test_a_variant_is_a_list_of_steps() -> None:
    made = entry(
        {"x": "[*B, 2 * N + 1]; dtype: T", "w": "[N]; dtype: T | float32"},
        'B: Shape, N: Dim, T: "DType[float16]"',
        let='{R: "prod(B)"}',
        where='["R > 0"]',
    )
    steps = solve(made.signature, {"x": True, "w": True}, {}).steps
    shown = [(type(s), getattr(s, "tensor", None), getattr(s, "name", None)) for s in steps]
    assert shown == [
        (SolveDType, "x", "T"),
        (Rank, "x", None),
        (SolveSplice, "x", "B"),
        (Rank, "w", None),
        (SolveAxis, "w", "N"),  # from where it stands alone, so the other place is checked
        (Derive, None, "R"),
        (CheckDType, "w", None),
        (CheckAxis, "x", None),
        (Require, None, None),
    ]


@pytest.mark.parametrize(
    ("source", "folded"),
    [
        ("present(w)", "True"),
        ("not present(w)", "False"),
        ("present(w) and M > 1", "M > 1"),
        ("present(v) and M > 1", "False"),
        ("present(v) or M > 1", "M > 1"),
        ("M > 1 or present(w)", "M > 1 or True"),
        ("[M] if present(w) else [N]", "[M]"),
        ("[M if flag else N, *(S if not present(v) else E)]", "[M, *S]"),
        ("[M if mode != 'a' else N]", "[N]"),
        ("mode != 'a' or M > 1", "M > 1"),
        ("not flag or M > 1", "M > 1"),
        ("present(v) == (M > 1)", "False == (M > 1)"),
        ("M if N > 1 else K", "M if N > 1 else K"),
    ],
)
def test_a_variant_folds_what_it_decides(source: str, folded: str) -> None:
    truth = {Name("flag"): True, parse("mode == 'a'"): True}
    assert unparse(fold(parse(source), {"w": True, "v": False}, truth)) == folded


def test_folding_keeps_what_it_can_not_decide_as_it_is() -> None:
    expr = parse("[M, N] if flag and M > 1 else [K]")
    assert fold(expr, {}, {}) is expr
    assert fold(Const(1), {}, {}) == Const(1)


# -- what can't be solved ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("forall", "inputs", "index"),
    [
        ("M: Dim, N: Dim", {"x": "[M]"}, "N"),  # nowhere
        ("M: Dim", {"x": "[M * M]"}, "M"),
        ("M: Dim", {"x": "[M // 2]"}, "M"),
        ("M: Dim", {"x": "[3 - M]"}, "M"),
        ("M: Dim", {"x": "[max(M, 2)]"}, "M"),
        ("M: Dim", {"x": "[0 * M]"}, "M"),
        ("M: Dim, N: Dim", {"x": "[M + N]", "y": "[M - N]"}, "M"),
        ("A: Shape, B: Shape", {"x": "[*A, *B]"}, "A"),
        ("A: Shape", {"x": "[*broadcast(A, [2])]"}, "A"),
        ('T: "DType[float16]"', {"x": "[3]"}, "T"),
        ('T: "DType[float16]"', {"x": "[3]; dtype: T | float32"}, "T"),
        ("M: Dim", {"x": "[len([M])]"}, "M"),
    ],
)
def test_an_index_that_no_call_determines(forall: str, inputs: dict[str, str], index: str) -> None:
    found = errors(inputs, forall)
    assert f"no call can determine the index '{index}'" in [d.message for d in found]
    assert {d.code for d in found} == {"S205"}


def test_the_hint_fits_the_index() -> None:
    dim, dtype = errors({"x": "[3]"}, 'M: Dim, T: "DType[float16]"')
    assert (dim.hint, dtype.hint) == (
        "let it stand alone on some axis of an input, or as c*X + e",
        "give it as the dtype of an input",
    )


@pytest.mark.parametrize(
    ("keys", "inputs", "message"),
    [
        (
            {"outputs": '{y: {dtype: float32, shape: "[N]"}}'},
            {"x": "[M]", "w": "[N]; optional: true"},
            "output y uses 'N', which is unbound when w is absent",
        ),
        (
            {"outputs": '{y: {dtype: float32, shape: "[M]", when: N > 1}}'},
            {"x": "[M]", "w": "[N]; optional: true"},
            "output y uses 'N', which is unbound when w is absent",
        ),
        (
            {"where": '["N > 1"]'},
            {"x": "[M]", "w": "[N]; optional: true"},
            "the rule 'N > 1' uses 'N', which is unbound when w is absent",
        ),
        (
            {"where": '["L > 1"]', "let": "{L: N + 1}"},
            {"x": "[M]", "w": "[N]; optional: true"},
            "the rule 'L > 1' uses 'L', which is unbound when w is absent",
        ),
        (
            {},
            {"x": "[M]", "y": "[2 * M, N // 2]", "w": "[N]; optional: true"},
            "index 'N' of input y can't be determined when w is absent",
        ),
        (
            {},
            {"x": "[M, N]", "a": "[M]; optional: true", "b": "[M]; dtype: same_as(a)"},
            "the dtype of input b can't be determined when a is absent",
        ),
        (
            {"outputs": '{y: {dtype: same_as(a), shape: "[M]"}}'},
            {"x": "[M, N]", "a": "[M]; optional: true"},
            "output y takes the dtype of a, which is absent when a is absent",
        ),
        (  # only under a condition of params that some value meets
            {"params": "{g: {type: int, default: 1}}", "outputs": '{y: {dtype: float32, shape: "[N]"}}'},
            {"x": "[M, N] if g < 1000 else [M]"},
            "output y uses 'N', which is unbound",
        ),
        (
            {"params": '{s: {type: "list[int]"}}', "outputs": '{y: {dtype: float32, shape: "[N]"}}'},
            {"x": "[M, N] if len(s) != 3 else [M]"},
            "output y uses 'N', which is unbound",
        ),
    ],
)
def test_an_index_that_some_calls_leave_unbound(keys: dict[str, str], inputs: dict[str, str], message: str) -> None:
    (fault,) = errors(inputs, "M: Dim, N: Dim", **keys)
    assert (fault.code, fault.message) == ("S206", message)


@pytest.mark.parametrize(
    ("keys", "inputs", "what", "computed"),
    [
        ({}, {"x": "[M, N]", "y": "[2 * M]"}, "an axis of y", "2 * M"),
        ({}, {"x": "[M + 1, N]"}, "an axis of x", "M + 1"),
        ({"outputs": '{y: {dtype: float32, shape: "[M // 2]"}}'}, {"x": "[M, N]"}, "an axis of y", "M // 2"),
        ({"let": "{L: M * N}"}, {"x": "[M, N]"}, "let L", "M * N"),
    ],
)
def test_no_size_is_computed_from_one_that_moves(
    keys: dict[str, str], inputs: dict[str, str], what: str, computed: str
) -> None:
    (fault,) = errors(inputs, "M: Dim, N: Dim", symbolic="[M]", **keys)
    message = f"'M' changes from call to call, so {what} can't be computed from it: '{computed}'"
    assert (fault.code, fault.message) == ("S207", message)
    assert fault.hint == "leave 'M' out of 'symbolic', or give the axis a name"
    assert errors(inputs, "M: Dim, N: Dim", symbolic="[N]" if "N" not in computed else "[]", **keys) == []


@pytest.mark.parametrize(
    ("keys", "inputs"),
    [
        ({"where": '["not present(w) or N > 1"]'}, {"x": "[M]", "w": "[N]; optional: true"}),
        ({"where": '["N > 1 if present(w) else M > 1"]'}, {"x": "[M]", "w": "[N]; optional: true"}),
        ({"outputs": '{y: {dtype: float32, shape: "[N]", when: present(w)}}'},
         {"x": "[M]", "w": "[N]; optional: true"}),
        ({"outputs": '{y: {dtype: float32, shape: "[N if present(w) else M]"}}'},
         {"x": "[M]", "w": "[N]; optional: true"}),
        ({"where": '["wide or N > 1"]', "params": "{wide: {type: bool}}"}, {"x": "[M] if wide else [M, N]"}),
        ({"where": "[\"mode != 'b' or N > 1\"]", "params": "{mode: {type: \"'a' | 'b'\"}}"},
         {"x": "[M, N] if mode == 'b' else [M]"}),
        ({}, {"x": "[M]", "w": "[N]; optional: true", "b": "[N]; when: present(w), dtype: same_as(w)"}),
    ],
)  # fmt: skip
def test_what_asks_first_may_use_it(keys: dict[str, str], inputs: dict[str, str]) -> None:
    assert errors(inputs, "M: Dim, N: Dim", **keys) == []


def test_conditions_that_have_no_value_for_some_params_are_no_fault() -> None:
    """They are looked at with many values of the params, and some of these divide by zero or index too far."""
    keys = {"params": '{g: {type: int}, s: {type: "list[int]"}, e: {type: "int | None", default: null}}'}
    for condition in ("8 // g == 2 or g * 0.5 > 100.5", "s[2] == 1", "e > 1"):
        assert errors({"x": f"[M] if {condition} else [M, 1]"}, "M: Dim", **keys) == []


def test_a_call_that_the_checks_did_not_foresee_is_refused() -> None:
    """Of many params' values only a part is tried; a call with others is told, not crashed."""
    params = ", ".join(f"p{i}: {{type: int}}" for i in range(9))
    odd = " and ".join(f"p{i} % 11 == {i}" for i in range(9))
    made = entry(
        {"x": f"[M, N] if not ({odd}) else [M]"},
        "M: Dim, N: Dim",
        params=f"{{{params}}}",
        outputs='{y: {dtype: float32, shape: "[N]"}}',
    )
    assert bind(made, {"x": (1, 2)}, **{f"p{i}": 0 for i in range(9)}).indices == {"M": 1, "N": 2}
    with pytest.raises(CheckError, match="output y uses 'N', which is unbound"):
        bind(made, {"x": (1,)}, **{f"p{i}": i for i in range(9)})
