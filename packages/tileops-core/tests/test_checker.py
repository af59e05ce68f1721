"""A call against its signature: what is admitted, what is refused in which words, and the Call that comes of it."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from tileops.core.check import Call, Checker, TensorMeta, contiguous_strides
from tileops.core.check.call import is_contiguous
from tileops.core.check.checker import dense_strides
from tileops.core.check.content import check_content, check_values
from tileops.core.errors import CheckError
from tileops.core.spec import load, parse_spec
from tileops.core.spec.expr import compile_expr
from tileops.core.spec.predicates import PREDICATES
from tileops.core.spec.steps import CheckAxis, CheckSplice, Require

SPECS = Path(__file__).parents[3] / "specs"


def checker(signature: str) -> Checker:
    """The checker of an entry that is a signature alone, as indented YAML."""
    file = parse_spec("OneFwdOp:\n  signature:\n" + "\n".join(f"    {line}" for line in signature.splitlines()))
    assert file.errors == ()
    return Checker(file.entries["OneFwdOp"])


def meta(shape: tuple[int, ...], dtype: str = "float32", strides: tuple[int, ...] | None = None) -> TensorMeta:
    return TensorMeta(shape, dtype) if strides is None else TensorMeta(shape, dtype, strides)


def bind(made: Checker, tensors: Mapping[str, TensorMeta | None], **params: Any) -> Call:
    return made.bind(made.params(params), tensors)


def refusal(made: Checker, tensors: Mapping[str, TensorMeta | None], **params: Any) -> str:
    with pytest.raises(CheckError) as e:
        bind(made, tensors, **params)
    return str(e.value)


GEMM = Checker(load(SPECS / "gemm.yaml")["GEMMFwdOp"])
NORM = Checker(load(SPECS / "norm.yaml")["RMSNormFwdOp"])
GQA = Checker(load(SPECS / "attention.yaml")["GQADenseFwdOp"])


def gqa(
    q: tuple[int, ...] = (2, 8, 32, 64), k: tuple[int, ...] = (2, 8, 8, 64), dtype: str = "float16", **others: Any
) -> dict[str, TensorMeta | None]:
    return {"q": meta(q, dtype), "k": meta(k, dtype), "v": meta(k, dtype), **others}


# -- messages ----------------------------------------------------------------------------------------------------------


def test_a_wrong_rank_names_op_argument_and_both_shapes() -> None:
    assert refusal(GEMM, {"a": meta((4, 5, 6), "float16"), "b": meta((7, 5), "float16")}) == (
        "GEMMFwdOp: a: got rank 3, shape (4, 5, 6), expected [M, K]\n"
        "  rule: shape Mat[trans_a, M, K]"
    )  # fmt: skip


def test_a_wrong_axis_names_where_its_index_came_from() -> None:
    assert refusal(GEMM, {"a": meta((4, 5), "float16"), "b": meta((7, 6), "float16")}) == (
        "GEMMFwdOp: b: got shape (7, 6), expected [N, K] with K = 5 (from a)\n"
        "  rule: shape Mat[trans_b, K, N]"
    )  # fmt: skip
    assert refusal(GEMM, {"a": meta((4, 5), "float16"), "b": meta((7, 6), "float16")}, trans_a=True, trans_b=False) == (
        "GEMMFwdOp: b: got shape (7, 6), expected [K, N] with K = 4 (from a)\n"
        "  rule: shape Mat[trans_b, K, N]"
    )  # fmt: skip


def test_a_wrong_dtype_names_the_allowed_ones() -> None:
    assert refusal(GEMM, {"a": meta((4, 5)), "b": meta((7, 5))}) == (
        "GEMMFwdOp: a: got float32, expected float16 or bfloat16\n  rule: dtype T"
    )
    assert refusal(GEMM, {"a": meta((4, 5), "float16"), "b": meta((7, 5), "bfloat16")}) == (
        "GEMMFwdOp: b: got bfloat16, expected float16 (as T)\n  rule: dtype T"
    )
    assert refusal(NORM, {"x": meta((4, 5), "float16"), "weight": meta((5,), "bfloat16")}, normalized_shape=[5]) == (
        "RMSNormFwdOp: weight: got bfloat16, expected float16 (as T) or float32\n  rule: dtype T | float32"
    )


def test_a_failing_rule_is_quoted_with_its_values() -> None:
    made = checker(
        "forall: {H: Dim, G: Dim}\n"
        'inputs: {x: {dtype: float32, shape: "[H, G]"}, w: {dtype: float32, shape: "[H]", optional: true}}\n'
        "outputs: {}\n"
        'where: [{rule: "H % G == 0", hint: heads in groups of G}, "H > 1", "present(w) == (H > 2)"]'
    )
    assert refusal(made, {"x": meta((12, 8))}) == (
        "OneFwdOp: got G = 8, H = 12, expected heads in groups of G\n  rule: H % G == 0"
    )
    assert refusal(made, {"x": meta((1, 1))}) == (
        "OneFwdOp: got H = 1, expected a call for which the rule holds\n  rule: H > 1"
    )
    assert refusal(made, {"x": meta((3, 1))}) == (
        "OneFwdOp: got no w, H = 3, expected a call for which the rule holds\n  rule: present(w) == (H > 2)"
    )
    assert refusal(made, {"x": meta((2, 1)), "w": meta((2,))}).startswith("OneFwdOp: got a w, H = 2, expected")


def test_presence_is_explained_by_its_condition() -> None:
    scale = meta((2, 8))
    assert refusal(GQA, gqa(dtype="float8_e4m3fn", q_scale=scale, k_scale=scale)) == (
        "GQADenseFwdOp: v_scale: got None, expected a tensor\n  rule: when: present(q_scale)"
    )
    assert refusal(GQA, gqa(k_scale=scale)) == (
        "GQADenseFwdOp: k_scale: got a tensor, expected None\n  rule: when: present(q_scale)"
    )
    assert refusal(GQA, {**gqa(), "v": None}) == (
        "GQADenseFwdOp: v: got None, expected a tensor\n  rule: v is not optional"
    )
    made = checker(
        "params: {stats: {type: bool, default: true}}\n"
        "inputs: {x: {dtype: float32, shape: '[]'}, s: {dtype: float32, shape: '[]', when: stats}}\noutputs: {}"
    )
    assert refusal(made, {"x": meta(())}) == (
        "OneFwdOp: s: got None, expected a tensor as stats = True\n  rule: when: stats"
    )
    assert bind(made, {"x": meta(())}, stats=False).inputs["s"] is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "normalized_shape: got nothing, expected list[int]\n  rule: param normalized_shape has no default"),
        ({"normalized_shape": "4"}, "normalized_shape: got '4', expected list[int]\n"
         "  rule: param normalized_shape: list[int]"),
        ({"normalized_shape": [True]}, "normalized_shape: got [True], expected list[int]"),
        ({"normalized_shape": 4, "eps": "small"}, "eps: got 'small', expected float | None"),
        ({"normalized_shape": 4, "eps": float("nan")}, "eps: got nan, expected a number"),
        ({"normalized_shape": 4, "eps": 10**400}, "eps: got 1000"),
        ({"normalized_shape": 2**63}, "normalized_shape: got 9223372036854775808, expected list[int]"),
        ({"normalized_shape": 4, "return_rstd": 1}, "return_rstd: got 1, expected bool"),
        ({"normalized_shape": 4, "return_rst": True}, "return_rst: got an unknown param, expected did you mean"),
    ],
)  # fmt: skip
def test_params_are_held_to_their_types(given: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckError) as e:
        NORM.params(given)
    assert str(e.value).startswith(f"RMSNormFwdOp: {message}")


def test_params_have_one_canonical_form() -> None:
    assert NORM.params({"normalized_shape": 4, "eps": 1}) == NORM.params({"normalized_shape": [4], "eps": 1.0}) == {
        "normalized_shape": (4,),
        "eps": 1.0,
        "weight_offset": 0.0,
        "return_rstd": False,
    }  # fmt: skip
    assert GQA.params({"out_dtype": "float16"})["out_dtype"] == "float16"
    with pytest.raises(CheckError, match=r"out_dtype: got 'float32', expected float16 \| bfloat16 \| None"):
        GQA.params({"out_dtype": "float32"})


# -- arithmetic that a call makes impossible ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("signature", "message"),
    [
        ('where: ["M // G > 1"]', "got G = 0, M = 4, expected a call for which the rule holds\n  rule: M // G > 1"),
        ("let: {L: M % G}", "got G = 0, M = 4, expected sizes for which 'L' has a value\n  rule: let L: M % G"),
        (
            'outputs: {y: {dtype: float32, shape: "[ceil_div(M, G)]"}}',
            "got M = 4, G = 0, S = [], expected sizes that give outputs",
        ),
        ('where: ["max(n for n in S) > 0"]', "got S = [], expected a call for which the rule holds"),
        ('where: ["S[1] > 0"]', "got S = [], expected a call for which the rule holds"),
    ],
)
def test_what_has_no_value_is_a_failed_rule(signature: str, message: str) -> None:
    made = checker(
        'forall: {M: Dim, G: Dim, S: Shape}\ninputs: {x: {dtype: float32, shape: "[M, G, *S]"}}\n'
        + signature
        + ("" if "outputs" in signature else "\noutputs: {}")
    )
    assert refusal(made, {"x": meta((4, 0))}).startswith(f"OneFwdOp: {message}")


def test_an_axis_that_has_no_value_is_a_wrong_shape() -> None:
    made = checker('forall: {M: Dim, G: Dim}\ninputs: {x: {dtype: float32, shape: "[M, G, M // G]"}}\noutputs: {}')
    assert refusal(made, {"x": meta((4, 0, 1))}) == (
        "OneFwdOp: x: got shape (4, 0, 1), expected [M, G, M // G]\n  rule: shape [M, G, M // G]"
    )


def test_shapes_that_do_not_broadcast_are_refused_where_they_should() -> None:
    made = checker(
        "forall: {A: Shape, B: Shape}\n"
        'inputs: {x: {dtype: float32, shape: "[*A]"}, y: {dtype: float32, shape: "[*B]"}}\n'
        'outputs: {z: {dtype: float32, shape: "[*broadcast(A, B)]"}}'
    )
    assert bind(made, {"x": meta((3, 1)), "y": meta((4,))}).outputs["z"] == meta((3, 4))
    assert refusal(made, {"x": meta((3,)), "y": meta((4,))}) == (
        "OneFwdOp: got A = [3], B = [4], expected sizes that give outputs"
    )


def test_a_condition_without_value_is_refused() -> None:
    made = checker(
        "params: {g: {type: int}}\nforall: {M: Dim}\n"
        'inputs: {x: {dtype: float32, shape: "[M] if 8 // g > 1 else [M, 1]"}}\noutputs: {}'
    )
    assert bind(made, {"x": meta((3,))}, g=4).indices == {"M": 3}
    assert refusal(made, {"x": meta((3,))}, g=0) == (
        "OneFwdOp: got g = 0, expected params for which the condition has a value\n  rule: 8 // g > 1"
    )


# -- strides -----------------------------------------------------------------------------------------------------------

LAID_OUT = checker(
    "forall: {N: Dim, C: Dim, L: Shape}\n"
    'inputs: {x: {dtype: float32, shape: "[N, C, *L]"}, w: {dtype: float32, shape: "[C, 1]", contiguous: true}}\n'
    'outputs: {y: {dtype: float16, shape: "[N, C, *L]", layout: like(x)}, s: {dtype: float32, shape: "[N, C]"}}'
)


def test_outputs_are_contiguous_or_laid_out_like_an_input() -> None:
    channels_last = meta((2, 3, 4, 5), strides=(60, 1, 15, 3))
    call = bind(LAID_OUT, {"x": channels_last, "w": meta((3, 1))})
    assert call.outputs == {"y": meta((2, 3, 4, 5), "float16", (60, 1, 15, 3)), "s": meta((2, 3))}


def test_contiguous_means_what_torch_means() -> None:
    x = meta((2, 3))
    bind(LAID_OUT, {"x": x, "w": meta((3, 1), strides=(1, 7))})  # the stride of an axis of size 1 says nothing
    assert refusal(LAID_OUT, {"x": x, "w": meta((3, 1), strides=(2, 1))}) == (
        "OneFwdOp: w: got strides (2, 1), expected a contiguous tensor\n  rule: contiguous: true"
    )


@st.composite
def views(draw: st.DrawFn) -> torch.Tensor:
    """A tensor in some order of axes, perhaps sliced or expanded."""
    shape = draw(st.lists(st.integers(0, 3), max_size=4))
    t = torch.empty(draw(st.permutations(shape)))
    t = t.permute(draw(st.permutations(range(t.dim()))))
    if t.dim() and draw(st.booleans()):
        t = t[..., ::2]
    return t.expand(2, *t.shape) if draw(st.booleans()) else t


@settings(deadline=None)
@given(views())
def test_strides_are_torchs(t: torch.Tensor) -> None:
    assert contiguous_strides(tuple(t.shape)) == torch.empty(t.shape).stride()
    assert is_contiguous(tuple(t.shape), t.stride()) == t.is_contiguous()
    assert dense_strides(tuple(t.shape), t.stride()) == torch.empty_like(t, device="meta").stride()


# -- the Call ----------------------------------------------------------------------------------------------------------


def call(**changes: Any) -> Call:
    metas = {"a": meta((4, 5), "float16"), "b": meta((7, 5), "float16")}
    return attrs.evolve(bind(GEMM, metas), **changes)


def test_a_call_is_made_from_shapes_alone() -> None:
    made = call()
    assert (made.params, made.indices) == (
        {"trans_a": False, "trans_b": True},
        {"M": 4, "N": 7, "K": 5, "T": "float16"},
    )
    assert made.outputs == {"d": meta((4, 7), "float16")}
    assert (made.device, made.content, made.id) == ("meta", None, None)
    assert (made["M"], made["T"], made["trans_b"]) == (4, "float16", True)
    assert str(made) == "GEMMFwdOp(a=float16[4, 5], b=float16[7, 5])"
    assert made.outputs["d"] is not None
    assert (made.outputs["d"].numel, made.outputs["d"].nbytes) == (28, 56)
    with pytest.raises(KeyError):
        made["X"]


def test_a_call_is_a_frozen_value() -> None:
    made = call()
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        made.device = "cuda:0"
    assert made == call()
    assert hash(made) == hash(call())
    assert made != "call"
    assert copy.deepcopy(made) == made
    assert pickle.loads(pickle.dumps(made)) == made


def test_calls_differ_in_op_params_inputs_device_and_content() -> None:
    other = call(inputs={"a": meta((4, 5), "float16", (1, 4)), "b": meta((7, 5), "float16")})
    made = call()
    for different in (
        other,
        call(params={"trans_a": True, "trans_b": True}),
        call(device="cuda:0"),
        call(content={"a": (1, 2)}),
        call(entry=attrs.evolve(GEMM.entry, name="OtherFwdOp")),
    ):
        assert different != made
    assert call(id="GEMMFwdOp/row") == made  # a name alone makes no difference


def test_no_key_has_content_in_it() -> None:
    assert call(content={"a": (1, 2)}).key == call().key
    assert hash(call(content={"a": (1, 2)})) == hash(call())
    assert call(content={"a": (1,), "b": (2,)}) == call(content={"b": (2,), "a": (1,)})
    assert call(content={}) == call()


def test_expressions_see_presence_of_inputs_and_outputs() -> None:
    x, w = meta((4, 5)), meta((5,))
    env = bind(NORM, {"x": x, "weight": w}, normalized_shape=5, return_rstd=True).env
    assert (env["present(weight)"], env["present(rstd)"], env["B"]) == (True, True, (4,))
    assert not bind(NORM, {"x": x}, normalized_shape=5).env["present(rstd)"]


def test_symbolic_indices_are_those_of_the_calls_params() -> None:
    metas = {"a": meta((5, 5), "float16"), "b": meta((5, 5), "float16")}
    assert bind(GEMM, metas).symbolic == {"M"}
    assert bind(GEMM, metas, trans_a=True).symbolic == {"M", "K"}


# -- content -----------------------------------------------------------------------------------------------------------

PAGED = checker(
    "forall: {B: Dim, T: Dim, P: Dim, W: Dim}\n"
    "params: {page: {type: int, default: 4}}\n"
    "inputs:\n"
    "  x: {dtype: float32, shape: '[T, P]'}\n"
    "  cu: {dtype: int32, shape: '[B + 1]', requires: offsets(T)}\n"
    "  seqlens: {dtype: int32, shape: '[B]', requires: lengths(W * page)}\n"
    "  table: {dtype: int32, shape: '[B, W]', requires: 'page_ids(P, seqlens, page)'}\n"
    "  scale: {dtype: float32, shape: '[]', optional: true, requires: positive}\n"
    "outputs: {}"
)
CONTENT: dict[str, Any] = {"cu": [0, 3, 3], "seqlens": [5, 0], "table": [[1, 0, -1], [-1, -1, -1]], "scale": 0.5}


def paged(**content: Any) -> tuple[Call, dict[str, torch.Tensor]]:
    tensors = {"x": torch.empty(3, 2), **{n: torch.tensor(v) for n, v in {**CONTENT, **content}.items()}}
    names = {torch.float32: "float32", torch.int64: "int32"}
    return bind(PAGED, {n: meta(tuple(t.shape), names[t.dtype]) for n, t in tensors.items()}), tensors


def test_content_that_meets_what_its_entry_requires() -> None:
    check_content(*paged())
    made, tensors = paged()
    check_content(made, {**tensors, "scale": None, "seqlens": None})  # what is absent is not asked


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"cu": [0, 3, 2]}, "cu: got [0, 3, 2], expected offsets that begin with 0, never decrease and end with total, "
         "with total = 3\n  rule: requires: offsets(T)"),
        ({"cu": [1, 3, 3]}, "cu: got [1, 3, 3]"),
        ({"cu": [0, 2, 1, 3]}, None),  # another B, so no such call
        ({"seqlens": [13, 0]}, "seqlens: got [13, 0], expected lengths from 0 to max, with max = 12\n"
         "  rule: requires: lengths(W * page)"),
        ({"seqlens": [-1, 0]}, "seqlens: got [-1, 0]"),
        ({"table": [[1, 2, 0], [0, 0, 0]]}, "table: got [[1, 2, 0], [0, 0, 0]], expected a page from 0 to pages - 1 "
         "for each page_size of a row's length, with pages = 2, page_size = 4"),
        ({"table": [[1, -1, 0], [0, 0, 0]]}, "table: got [[1, -1, 0], [0, 0, 0]]"),
        ({"scale": 0.0}, "scale: got [0.0], expected values above 0\n  rule: requires: positive"),
        ({"scale": float("nan")}, "scale: got [nan]"),
    ],
)  # fmt: skip
def test_content_that_does_not(content: dict[str, Any], message: str | None) -> None:
    with pytest.raises(CheckError) as e:
        check_content(*paged(**content))
    if message:
        assert str(e.value).startswith(f"OneFwdOp: {message}")


def test_long_content_is_shown_by_its_beginning() -> None:
    made = checker("forall: {B: Dim}\ninputs: {i: {dtype: int64, shape: '[B]', requires: index(3)}}\noutputs: {}")
    with pytest.raises(
        CheckError, match=r"got \[0, 1, 2, 3, 4, 5, 6, 7, \.\.\. 20 in all\], expected indices from 0 to hi"
    ):
        check_values(bind(made, {"i": meta((20,), "int64")}), {"i": tuple(range(20))})


@settings(deadline=None)
@given(st.randoms(use_true_random=False), st.integers(0, 6), st.integers(0, 40), st.integers(1, 9))
def test_what_a_statement_generates_holds(rng: Any, count: int, total: int, size: int) -> None:
    def generated(name: str, shape: tuple[int, ...], *args: Any) -> Any:
        made = PREDICATES[name].make(rng, shape, *args)
        assert PREDICATES[name].holds(made, *args)
        assert torch.empty(shape).shape == torch.tensor(made).reshape(shape).shape
        return made

    generated("offsets", (max(count, 1) + 1,), total)
    generated("lengths", (count,), total)
    generated("positive", (count, 2))
    generated("index", (count, 3), total + 1)
    if count or not total:
        generated("sizes", (count,), total)
    lengths = generated("lengths", (count,), total)
    pages = sum(-(-n // size) for n in lengths)
    generated("page_ids", (count, -(-total // size) + 1), pages + 2, lengths, size)


@pytest.mark.parametrize(
    ("name", "shape", "args", "message"),
    [
        ("offsets", (3,), ([1, 2, 3],), "3 values are given, where there are 2"),
        ("lengths", (3,), ([1, 2],), "2 values are given, where there are 3"),
        ("offsets", (0,), (0,), "offsets need at least one element"),
        ("sizes", (0,), (3,), "no sizes can sum to 3"),
        ("page_ids", (2, 1), (3, (4, 5), 4), "need 3 pages, at most 1 each"),
        ("page_ids", (2, 2), (2, (4, 5), 4), "need 3 pages, at most 2 each; there are 2"),
    ],
)
def test_what_can_not_be_generated_says_why(
    name: str, shape: tuple[int, ...], args: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        PREDICATES[name].make(random.Random(0), shape, *args)


def test_lists_say_what_is_due() -> None:
    rng = random.Random(0)
    assert PREDICATES["offsets"].make(rng, (3,), [2, 3]) == (0, 2, 5)
    assert PREDICATES["lengths"].make(rng, (2,), [7, 0]) == (7, 0)
    assert PREDICATES["sizes"].make(rng, (2,), [7, 0]) == (7, 0)


# -- any signature, any sizes ------------------------------------------------------------------------------------------

DIMS, SHAPES = ("L", "M", "N"), ("A", "B")


@attrs.frozen
class Drawn:
    """A signature in which every index is determined, and sizes that it admits."""

    made: Checker
    values: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]


@st.composite
def signatures(draw: st.DrawFn) -> Drawn:
    """One input gives each index alone or as c*X + e; others repeat them in any form, splices anywhere."""
    values: dict[str, Any] = {n: draw(st.integers(0, 9)) for n in DIMS}
    values |= {n: tuple(draw(st.lists(st.integers(0, 4), max_size=2))) for n in SHAPES}
    inputs: dict[str, list[str]] = {}
    for name in DIMS:
        scale, added = draw(st.integers(1, 3)), draw(st.integers(0, 3))
        inputs[name.lower()] = [
            draw(st.sampled_from([name, f"{scale} * {name} + {added}", f"{added} + {name} * {scale}"]))
        ]
    for name in SHAPES:
        inputs[name.lower()] = [f"*{name}", *draw(st.lists(st.sampled_from([*DIMS, "2"]), max_size=2))]
        if draw(st.booleans()):
            inputs[name.lower()].reverse()
    axes = [*DIMS, "L + M", "2 * N + 1", "L // 2", "ceil_div(M, 3)", "max(M, N)", "*A", "*B", "prod(A)", "len(B)",
            "M if flag else N", "*(A if flag else B)"]  # fmt: skip
    inputs["x"] = draw(st.lists(st.sampled_from(axes), max_size=4))
    values["flag"] = draw(st.booleans())
    order = draw(st.permutations(list(inputs)))
    text = "\n".join(f"  {n}: {{dtype: float32, shape: '[{', '.join(inputs[n])}]'}}" for n in order)
    made = checker(
        "forall: {L: Dim, M: Dim, N: Dim, A: Shape, B: Shape}\nparams: {flag: {type: bool}}\ninputs:\n"
        + text
        + "\noutputs: {y: {dtype: float32, shape: '[*B, L + M, *A]'}}"
    )
    shapes = {n: compile_expr(d.shape.expr)(values) for n, d in made.entry.signature.inputs.items()}
    return Drawn(made, values, shapes)


def indices(drawn: Drawn, shapes: Mapping[str, tuple[int, ...]], symbolic: bool = False) -> dict[str, Any]:
    """The indices that the compiled code finds, with the outputs' shapes."""
    params = {"flag": drawn.values["flag"]}
    names = drawn.made.entry.signature.inputs
    _, run = drawn.made.variant(params, [True] * len(names), symbolic=symbolic)
    found, outputs, _ = run(params, tuple(shapes[n] for n in names), ("float32",) * len(names))
    return {**found, "outputs": outputs}


@settings(max_examples=60, deadline=None)
@given(signatures())
def test_shapes_built_from_indices_give_them_back(drawn: Drawn) -> None:
    expected = {n: v for n, v in drawn.values.items() if n != "flag"}
    expected["outputs"] = ((*expected["B"], expected["L"] + expected["M"], *expected["A"]),)
    assert indices(drawn, drawn.shapes) == expected
    assert indices(drawn, drawn.shapes, symbolic=True) == expected


@settings(max_examples=60, deadline=None)
@given(signatures(), st.data())
def test_a_changed_axis_is_found(drawn: Drawn, data: st.DataObject) -> None:
    """One axis of the input that is all checks, or one axis more or less."""
    shape = drawn.shapes["x"]
    change = data.draw(st.sampled_from(["more", "less", *range(len(shape))]))
    if change == "more":
        changed = (*shape, 3)
    elif change == "less":
        assume(shape)
        changed = shape[:-1]
    else:
        changed = tuple(n + (i == change) for i, n in enumerate(shape))
    for symbolic in (False, True):
        with pytest.raises(CheckError):
            indices(drawn, {**drawn.shapes, "x": changed}, symbolic=symbolic)


# -- symbolic sizes ----------------------------------------------------------------------------------------------------


def fake(env: ShapeEnv, mode: FakeTensorMode, shape: tuple[int, ...], name: str) -> torch.Tensor:
    dynamic = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * len(shape))
    return mode.from_tensor(torch.empty(shape, device="meta"), symbolic_context=dynamic, source=ConstantSource(name))


def traced(made: Checker, tensors: Mapping[str, tuple[int, ...]], meeting: int = 0, **params: Any) -> Any:
    """The outputs' shapes by symbolic sizes; only what is checked guards these, and axes ``meeting`` in a broadcast."""
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    shapes = {n: tuple(fake(env, mode, s, n).shape) for n, s in tensors.items()}
    names = made.entry.signature.inputs
    given = made.params(params)
    solution, run = made.variant(given, [n in shapes for n in names], symbolic=True)
    dtypes = tuple("float16" if n in shapes else None for n in names)
    outputs = run(given, tuple(shapes.get(n) for n in names), dtypes)[1]
    checks = sum(isinstance(step, CheckAxis | CheckSplice | Require) for step in solution.steps)
    assert len(env.guards) <= checks + meeting
    return outputs


def hints(shape: tuple[Any, ...]) -> list[int]:
    return [n if isinstance(n, int) else n.node.hint for n in shape]


def test_symbolic_sizes_give_symbolic_outputs() -> None:
    tensors = {"q": (2, 10, 32, 64), "k": (2, 12, 8, 64), "v": (2, 12, 8, 96)}
    o, lse = traced(GQA, tensors, return_lse=True)
    assert all(isinstance(n, torch.SymInt) for n in (*o, *lse))
    assert (hints(o), hints(lse)) == ([2, 10, 32, 96], [2, 32, 10])


@pytest.mark.parametrize("shape", [(7, 6), (7, 5, 1)])
def test_symbolic_sizes_that_do_not_fit_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(
        (CheckError, RuntimeError), match=r"GEMMFwdOp: b: got (rank 3, )?shape \(.*\), expected \[N, K\]"
    ):
        traced(GEMM, {"a": (4, 5), "b": shape})


def test_what_only_a_run_can_tell_of_symbolic_sizes() -> None:
    """Membership, choices between sizes, division and broadcasting stay symbolic too."""
    made = checker(
        "forall: {M: Dim, N: Dim, A: Shape, B: Shape}\n"
        "inputs: {x: {dtype: float16, shape: '[M, N]'}, a: {dtype: float16, shape: '[*A]'},"
        " b: {dtype: float16, shape: '[*B]'}}\n"
        "outputs: {y: {dtype: float16, shape: '[M if M > N else 2 * N, ceil_div(M, N), 1 if N > 4 else 2, min(M, N)]'},"
        " z: {dtype: float16, shape: '[*broadcast(A, B)]'}}\n"
        "where: ['M not in [1, 2, 3]', 'N % 2 == 0 or M > 100', 'M // N >= 0',"
        " 'all(n < 9 for n in A if n > M) and sum(n for n in A if n > 3) > 0']"
    )
    y, z = traced(made, {"x": (7, 6), "a": (5, 1, 3), "b": (4, 3)}, meeting=1)
    assert (hints(y), hints(z)) == ([7, 2, 1, 6], [5, 4, 3])
    assert all(isinstance(n, torch.SymInt) for n in (*y, *z))
