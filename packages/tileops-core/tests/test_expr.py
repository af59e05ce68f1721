"""The expression language: what it holds, what it means, and that nothing else is reachable."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from itertools import product
from string import Formatter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tileops.core.check import symbolic
from tileops.core.spec.expr import (
    FUNCTIONS,
    MAX_DEPTH,
    MAX_LENGTH,
    MAX_NODES,
    Binary,
    Const,
    ExprError,
    Name,
    Star,
    Symbolic,
    broadcast,
    compile_expr,
    emit,
    names,
    parse,
    substitute,
    unparse,
    visible,
)
from tileops.core.spec.kinds import Kind, Scope
from tileops.core.spec.solve import FAILURES

ENV: dict[str, Any] = {
    "M": 6, "N": 4, "Z": 0, "S": (2, 3, 5), "E": (), "flag": True, "off": False, "eps": None, "scale": 0.5,
    "mode": "neox", "T": "float16", "present(w)": True, "present(v)": False,
}  # fmt: skip


def value(text: str, **env: Any) -> Any:
    return compile_expr(parse(text))({**ENV, **env})


def symbolically(text: str, env: Mapping[str, Any] = ENV) -> Any:
    """The value by the code that serves symbolic sizes."""
    source = f"lambda env: {emit(parse(text), lambda n: f'env[{n!r}]', Symbolic)}"
    return eval(source, {**FUNCTIONS, "sym": symbolic})(env)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1_000", 1000),
        ("-3", -3),
        ("1.5", 1.5),
        ("1e-6", 1e-6),
        (".5", 0.5),
        ("'neox'", "neox"),
        ('"neox"', "neox"),
        ("true", True),
        ("False", False),
        ("none", None),
        ("float16", "float16"),  # a dtype's name stands for itself
        ("M", 6),
        ("[M, 2, *S]", (6, 2, 2, 3, 5)),
        ("[*S]", (2, 3, 5)),
        ("[]", ()),
        ("S + [1]", (2, 3, 5, 1)),
        ("S[0]", 2),
        ("S[-1]", 5),
        ("M + N * 2", 14),
        ("(M + N) * 2", 20),
        ("M - N - 1", 1),
        ("M // 4", 1),
        ("-M // 4", -2),
        ("M % 4", 2),
        ("M == 6", True),
        ("M != 6", False),
        ("N < M <= 6", True),
        ("1 < M < 3", False),
        ("M > N > 5", False),
        ("mode == 'neox'", True),
        ("mode in ['neox', 'interleaved']", True),
        ("M not in [1, 2]", True),
        ("T in [float16, bfloat16]", True),
        ("eps is None", True),
        ("eps is not None", False),
        ("not flag", False),
        ("not M == 6", False),  # `not` binds less than a comparison
        ("flag and off or flag", True),
        ("off and off or flag", True),
        ("1 if flag else 2", 1),
        ("M if N > M else N if off else 9", 9),
        ("present(w)", True),
        ("present(v) or M > 5", True),
        ("len(S)", 3),
        ("len([M, *S])", 4),
        ("prod(S)", 30),
        ("prod(E)", 1),
        ("sum(S)", 10),
        ("min(S)", 2),
        ("min(M, N)", 4),
        ("max(M, N, 7)", 7),
        ("max(S)", 5),
        ("all([M > 1, N > 1])", True),
        ("any(n > 4 for n in S)", True),
        ("all(n > 2 for n in S)", False),
        ("all(n > 2 for n in E)", True),
        ("sum(n * M for n in S if n > 2)", 48),
        ("max(n % 3 for n in S)", 2),
        ("sum(n * sum(m for m in S) for n in S)", 100),
        ("ceil_div(M, 4)", 2),
        ("ceil_div(Z, 4)", 0),
        ("broadcast([M, 1], [N])", (6, 4)),
        ("visible(4, 4, true, -1, -1)", 10),
    ],
)
def test_value(text: str, expected: Any) -> None:
    assert value(text) == expected
    assert type(value(text)) is type(expected)
    assert symbolically(text) == expected


def test_lines_of_a_text_are_one_expression() -> None:
    assert value("\n  M\n  + N\n") == 10


@pytest.mark.parametrize(
    "text",
    ["Z != 0 and M // Z > 1", "Z == 0 or M // Z > 1", "1 if Z == 0 else M // Z", "all(n > 2 and M // Z for n in S)"],
)
def test_what_is_not_reached_is_not_computed(text: str) -> None:
    assert value(text) in (False, True, 1)
    assert symbolically(text) == value(text)


@pytest.mark.parametrize(
    "text", ["M // Z", "M % Z", "ceil_div(M, Z)", "S[3]", "min(E)", "eps > 0", "broadcast(S, [4])"]
)
def test_what_has_no_value_raises_one_of_the_failures(text: str) -> None:
    with pytest.raises(FAILURES):
        value(text)
    with pytest.raises(FAILURES):
        symbolically(text)


def visible_pairs(s_q: int, s_kv: int, causal: bool, left: int, right: int) -> int:
    right = 0 if causal else right
    at = s_kv - s_q
    return sum(
        (left < 0 or i + at - left <= j) and (right < 0 or j <= i + at + right) for i in range(s_q) for j in range(s_kv)
    )


def test_visible_counts_the_scores_that_a_mask_leaves() -> None:
    for s_q, s_kv, causal, left, right in product(range(6), range(6), (False, True), (-1, 0, 1, 3, 9), (-1, 0, 2, 9)):
        assert visible(s_q, s_kv, causal, left, right) == visible_pairs(s_q, s_kv, causal, left, right)


@given(st.integers(0, 40), st.integers(0, 40), st.booleans(), st.integers(-1, 50), st.integers(-1, 50))
def test_visible_in_general(s_q: int, s_kv: int, causal: bool, left: int, right: int) -> None:
    assert visible(s_q, s_kv, causal, left, right) == visible_pairs(s_q, s_kv, causal, left, right)


@settings(deadline=None)  # torch wakes up in the first example
@given(st.lists(st.lists(st.sampled_from([0, 1, 2, 3]), max_size=4).map(tuple), min_size=1, max_size=3))
def test_broadcast_is_torchs(shapes: list[tuple[int, ...]]) -> None:
    try:
        expected = tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError:
        for own in (broadcast, symbolic.broadcast):
            with pytest.raises(ValueError, match="don't broadcast"):
                own(*shapes)
    else:
        assert broadcast(*shapes) == symbolic.broadcast(*shapes) == expected


@pytest.mark.parametrize(
    ("text", "offset", "message"),
    [
        ("M +", 3, "not an expression"),
        ("", 0, "not an expression"),
        ("(M", 0, "not an expression: '(' was never closed"),
        ("M N", 0, "not an expression"),
        ("M / N", 0, "'/' is not part of the expression language"),
        ("M ** N", 0, "'**' is not"),
        ("+M", 0, "a leading '+' is not"),
        ("M @ N", 2, "'@' is not"),
        ("~M", 0, "'~' is not"),
        ("M; N", 1, "';' is not"),
        ("M # N", 2, "'#' is not"),
        ("lambda: 0", 6, "':' is not"),
        ("S[0:1]", 3, "':' is not"),
        ("(M := 1)", 3, "':' is not"),
        ("{M}", 0, "'{' is not"),
        ("M.N", 1, "'.' is not"),
        ("f'M'", 0, "JoinedStr is not"),
        ("b'M'", 0, "Constant is not"),
        (r"'\x41'", 0, '"\'" is not'),
        ("'a", 0, '"\'" is not'),
        ("0x10", 0, "'0' is not"),
        ("1if flag else 2", 0, "'1' is not"),  # which Python itself only warns of
        ("Ｍ", 0, "'Ｍ' is not"),  # Python would read a plain M
        ("1j", 0, "'1' is not"),
        ("...", 0, "'.' is not"),
        ("[n for n in S]", 0, "a list comprehension is not"),
        ("sum(n for n in S if n if n)", 3, "a comprehension takes one condition"),
        ("sum(n for n in S for m in S)", 3, "GeneratorExp is not"),
        ("sum(n for n, m in S)", 3, "GeneratorExp is not"),
        ("len(x=S)", 0, "Call is not"),
        ("S[0](M)", 0, "Call is not"),
        ("await M", 0, "Await is not"),
        ("9223372036854775808", 0, "a number outside 64 bits"),
        ("1e400", 0, "a number outside 64 bits"),
        ("012", 0, "not an expression"),
    ],
)
def test_text_outside_the_language(text: str, offset: int, message: str) -> None:
    with pytest.raises(ExprError) as e:
        parse(text)
    assert message in e.value.message
    assert e.value.code == "S201"
    assert e.value.offset == offset or message == "not an expression"  # where Python's own word is relayed


def test_size_is_bounded() -> None:
    parse("M" * MAX_LENGTH)
    for text, message in [
        ("M" * (MAX_LENGTH + 1), f"at most {MAX_LENGTH}"),
        ("[" + "1," * MAX_NODES + "]", f"more than {MAX_NODES} parts"),
        ("not " * MAX_DEPTH + "flag", f"nested more than {MAX_DEPTH} deep"),
        ("+".join("M" * 200), f"nested more than {MAX_DEPTH} deep"),
        ("(" * 300 + "M" + ")" * 300, "not an expression"),
    ]:
        with pytest.raises(ExprError, match=message):
            parse(text)


def test_the_deepest_expressions_compile_in_both_spellings() -> None:
    """A type's body may be as deep as its argument; Python's compiler takes 200 nested parentheses."""
    body = "flag"
    for _ in range(MAX_DEPTH - 1):
        body = f"off != (on != {body})" if len(body) < 40 else f"not {body}"
    deep = "M != (" * (MAX_DEPTH - 1) + "M" + ")" * (MAX_DEPTH - 1)
    both = substitute(parse(deep.replace("M)", "X)", 1)), {"X": parse(deep)})
    for spelt in (emit(both, lambda n: n), emit(both, lambda n: n, Symbolic)):
        compile(spelt, "both", "eval")


def test_checking_a_deep_expression_takes_no_time() -> None:
    began = time.process_time()
    scope = Scope({"M": "int", "b": "bool"})
    for text in (
        "+".join("M" * MAX_DEPTH),
        "b == (b == (" * 14 + "b" + ") == b)" * 14,
        "max(" * 29 + "M" + ", M)" * 29,
    ):
        scope.infer(parse(text))
    assert time.process_time() - began < 1


SCOPE = Scope(
    {"M": "int", "eps": "any", "scale": "number", "S": "shape", "flag": "bool", "mode": "text", "T": "dtype"},
    tensors=("w",),
    choices={"mode": ("neox", "interleaved"), "T": ("float16", "bfloat16")},
)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("M", "int"),
        ("M * 2", "int"),
        ("M * scale", "number"),
        ("-scale", "number"),
        ("M > scale", "bool"),
        ("[M, *S]", "shape"),
        ("['a', 'b']", "list"),
        ("S + S", "shape"),
        ("S[0]", "int"),
        ("M if flag else scale", "number"),
        ("M if flag else S", "any"),
        ("max(M, scale)", "number"),
        ("sum(n for n in S)", "int"),
        ("sum(n * scale for n in S)", "number"),
        ("broadcast(S, [M])", "shape"),
        ("T if flag else float32", "dtype"),
        ("present(w)", "bool"),
        ("eps is None", "bool"),
        ("visible(M, M, flag, -1, -1)", "int"),
    ],
)
def test_kind(text: str, kind: Kind) -> None:
    assert SCOPE.infer(parse(text)) == kind


@pytest.mark.parametrize(
    ("text", "offset", "message", "hint"),
    [
        ("M + KK", 4, "unknown name 'KK'", None),
        ("M + moode", 4, "unknown name 'moode'", "did you mean 'mode'?"),
        ("M + S", 0, "the operand of '+' must give a shape, not a whole number", None),
        ("M + flag", 4, "the operand of '+' must give a number, not a bool", None),
        ("not M", 4, "the operand of 'not' must give a bool, not a whole number", None),
        ("M and flag", 0, "the operand of 'and' must give a bool", None),
        ("1 if M else 2", 5, "a condition must give a bool", None),
        ("T == mode", 0, "'==' compares a dtype with a text", None),
        ("mode == 'neo'", 8, "'mode' is never 'neo'", "did you mean 'neox'?"),
        ("mode in ['neox', 'flat']", 17, "'mode' is never 'flat'", None),
        ("T == float32", 5, "'T' is never 'float32'", "did you mean 'float16'?"),
        ("mode > 1", 0, "the left side of '>' must give a number", None),
        ("M is None", 0, "'is None' asks for a param that may be None, not a whole number", None),
        ("eps is 1", 7, "'is' compares with None only", None),
        ("M in 3", 5, "the right side of 'in' must give a list", None),
        ("M | 1", 0, "'|' joins dtypes in a dtype", None),
        ("w", 0, "'w' is a tensor, not a value", "ask for present(w), or name its indices"),
        ("present(ww)", 0, "present() takes the name of a tensor", "did you mean 'w'?"),
        ("present(M)", 0, "present() takes the name of a tensor", None),
        ("lenn(S)", 0, "unknown function 'lenn'", "did you mean 'len'?"),
        ("len(M)", 4, "an argument of len() must give a list", None),
        ("len(S, S)", 0, "len() takes 1 argument, not 2", None),
        ("ceil_div(M)", 0, "ceil_div() takes 2 arguments, not 1", None),
        ("max()", 0, "max() takes some arguments, not 0", None),
        ("S[scale]", 2, "an index must give a whole number, not a number", None),
        ("S[0, 1]", 0, "indexing takes one number", None),
        ("M[0]", 0, "what is indexed must give a shape", None),
        ("*S", 0, "", None),
        ("max(*S)", 4, "a splice belongs inside a list", None),
        ("len(n for n in S)", 3, "a comprehension belongs inside all, any, sum, min or max", None),
        ("sum(M for M in S)", 3, "'M' is taken already", None),
        ("sum(len for len in S)", 3, "'len' is taken already", None),
        ("all(int8 > 1 for int8 in S)", 3, "'int8' is taken already", None),
        ("all(n for n in S)", 4, "a comprehension's value must give a bool", None),
    ],
)
def test_a_slip_is_found_where_it_is(text: str, offset: int, message: str, hint: str | None) -> None:
    with pytest.raises(ExprError) as e:
        SCOPE.infer(parse(text))
    assert message in e.value.message
    assert (e.value.offset, e.value.hint) == (offset, hint) or text == "*S"


@pytest.mark.parametrize(
    "text",
    [
        "[2 * N if mode == 'swiglu' else N, *B]",
        "(M + N) * 2 - (M - (N - 1))",
        "not (flag and off) or present(w)",
        "sum((n * M for n in S if n > M))",
        "coalesce(p, bfloat16 if T == float8_e4m3fn else T)",
        "Mat[trans_a, M, K]",
        "float16 | T",
        "a < b <= c != d",
        "x is not None",
        "True",
    ],
)
def test_unparse_writes_what_a_person_would(text: str) -> None:
    assert unparse(parse(text)) == text


def test_equality_knows_types() -> None:
    assert Const(1) != Const(True)
    assert Const(1) != Const(1.0)
    assert parse("M+1") == parse("M  +  1") == Binary("+", Name("M"), Const(1))


def test_names_are_the_free_ones() -> None:
    assert names(parse("sum(n * M for n in S if n > K) + len([*B])")) == {"M", "S", "K", "B"}
    assert names(parse("present(w) and T == float16")) == {"T"}
    assert names(parse("same_as(x) | T")) == {"T"}


def test_substitute_takes_expressions() -> None:
    assert substitute(parse("[R, *C]"), {"R": parse("M + 1"), "C": Name("S")}) == parse("[M + 1, *S]")
    assert isinstance(substitute(Star(Name("C")), {"C": Name("S")}), Star)


LEAVES = {"number": ["M", "N", "Z", "0", "1", "2", "7"], "bool": ["flag", "off", "True"], "shape": ["S", "[M, *S]"]}
FORMS = {
    "number": [
        "({number} {arithmetic} {number})",
        "(-{number})",
        "({number} if {bool} else {number})",
        "max({number}, {number})",
        "{reduce}({shape})",
        "sum(({var} + {number} for {var} in {shape} if {bool}))",
    ],
    "bool": [
        "({number} {order} {number})",
        "({number} <= {number} < {number})",
        "({number} in {shape})",
        "({bool} {logic} {bool})",
        "(not {bool})",
        "all(({var} > {number} for {var} in {shape}))",
        "all(({var} > {number} for {var} in {shape} if {bool}))",
        "any(({var} > {number} for {var} in {shape} if {var} != {number}))",
    ],
    "shape": ["[{number}]", "[{number}, *{shape}]", "({shape} + {shape})"],
}
WORDS = {
    "arithmetic": ["+", "-", "*", "//", "%"],
    "order": ["<", "<=", "==", "!=", ">", ">="],
    "logic": ["and", "or"],
    "reduce": ["len", "sum", "min", "max", "prod"],
}


@st.composite
def trees(draw: st.DrawFn, kind: str, depth: int) -> str:
    """The text of an expression of this kind, so small that it is far from any bound."""
    if depth == 0:
        return draw(st.sampled_from(LEAVES[kind]))
    form = draw(st.sampled_from([*FORMS[kind], *LEAVES[kind]]))
    pieces = (
        (before, None if what is None else f"n{depth}" if what == "var" else draw(_piece(what, depth)))
        for before, what, _, _ in Formatter().parse(form)
    )
    return "".join(before + (piece or "") for before, piece in pieces)


def _piece(what: str, depth: int) -> st.SearchStrategy[str]:
    return st.sampled_from(WORDS[what]) if what in WORDS else trees(what, depth - 1)


def outcome(compute: Callable[[], Any]) -> Any:
    try:
        result = compute()
    except FAILURES as e:
        return type(e)
    return result if isinstance(result, bool) else (int(result),)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(["number", "bool"]).flatmap(lambda kind: trees(kind, 3)),
    st.tuples(*[st.integers(0, 9)] * 2),
    st.lists(st.integers(0, 9), max_size=3).map(tuple),
)
def test_a_tree_means_what_python_means(text: str, sizes: tuple[int, int], shape: tuple[int, ...]) -> None:
    env = {**ENV, "M": sizes[0], "N": sizes[1], "S": shape}
    tree = parse(text)
    expected = outcome(lambda: eval(text, {"prod": math.prod, **env, "S": list(shape)}))
    assert outcome(lambda: compile_expr(tree)(env)) == expected
    assert outcome(lambda: symbolically(text, env)) == expected
    assert parse(unparse(tree)) == tree
    Scope({**dict.fromkeys("MNZ", "int"), "S": "shape", "flag": "bool", "off": "bool"}).infer(tree)


@settings(max_examples=300, deadline=None)
@given(
    st.one_of(st.text(max_size=60), st.text("MNS flag()[]'\"*+-/%<>=!,.0123456789ifelsenotandorin\n\\#", max_size=60))
)
def test_any_text_is_read_or_refused(text: str) -> None:
    place = 0
    try:
        tree = parse(text)
        assert parse(unparse(tree)) == tree
        SCOPE.infer(tree)
    except ExprError as e:
        place = e.offset
    assert 0 <= place <= len(text)
