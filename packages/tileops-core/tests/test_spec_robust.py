"""The reader takes any text, takes it quickly, and needs no torch."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tileops.core.check import Checker
from tileops.core.errors import SpecError
from tileops.core.spec import load, parse_spec
from tileops.core.workloads import calls

SPECS = Path(__file__).parents[3] / "specs"
DATA = Path(__file__).parent / "data"
SEEDS = [p.read_text() for p in (DATA / "every_form.yaml", DATA / "older_completed.yaml", SPECS / "gemm.yaml")]
TOKEN = re.compile(r"[\w.]+|[^\w\s]")
POOL = sorted({t for seed in SEEDS for t in TOKEN.findall(seed)} | {
    "M // 0", "[]", "{}", "null", "true", "1e400", "9" * 40, "*B", "[*B]", "present(y)", "same_as(a)", "...", "~", "&a",
    "!!str", "- ", "\n", "\t", "\0", "\ud800", "é", "if", "else", "not", "is", "for",
})  # fmt: skip


def test_the_seed_holds_every_form() -> None:
    file = parse_spec(SEEDS[0])
    assert file.diagnostics == ()
    every, back = file.entries.values()
    assert [len(list(calls(e))) for e in (every, back)] == [3, 1]


# -- any text ----------------------------------------------------------------------------------------------------------


@st.composite
def mutations(draw: st.DrawFn) -> str:
    """A spec with characters, words or lines left out, doubled or replaced."""
    text = draw(st.sampled_from(SEEDS))
    for _ in range(draw(st.integers(1, 3))):
        words, lines = list(TOKEN.finditer(text)), text.splitlines(keepends=True)
        word, line = draw(st.sampled_from(words)), draw(st.integers(0, len(lines) - 1))
        match draw(st.sampled_from(["replace", "swap", "drop", "insert", "cut", "double", "move"])):
            case "replace":
                text = text[: word.start()] + draw(st.sampled_from(POOL)) + text[word.end() :]
            case "swap":
                text = text[: word.start()] + draw(st.sampled_from(words)).group() + text[word.end() :]
            case "drop":
                text = text[: word.start()] + text[word.start() + 1 :]
            case "insert":
                text = text[: word.end()] + draw(st.sampled_from(POOL)) + text[word.end() :]
            case "cut":
                text = "".join(lines[:line] + lines[line + 1 :])
            case "double":
                text = "".join(lines[:line] + lines[line : line + 1] * 2 + lines[line + 1 :])
            case "move":
                text = "".join(lines[:line] + lines[line + 1 :] + lines[line : line + 1])
        text = text if TOKEN.search(text) else "a"
    return text


def hold(text: str) -> None:
    """Only findings come of reading a text, and only SpecErrors of making its rows into calls."""
    file = parse_spec(text)
    lines = re.split("\r\n|\r|\n", text)
    assert all(1 <= d.place.line <= len(lines) + 1 for d in file.diagnostics)
    for entry in file.entries.values():
        checker = Checker(entry)
        assert checker.entry is entry
        try:
            list(calls(entry))
        except SpecError as e:
            assert e.diagnostics  # noqa: PT017 - there need not be one


@settings(max_examples=150, deadline=None)
@given(mutations())
def test_a_changed_spec_gives_findings(text: str) -> None:
    hold(text)


@settings(max_examples=200, deadline=None)
@given(st.one_of(st.text(max_size=80), st.text("ab: {}[],'\"\n-?*&!|>#%@`\\~0.e", max_size=80)))
def test_any_text_gives_findings(text: str) -> None:
    hold(text)
    hold(f"AFwdOp:\n  signature: {{inputs: {{x: {{dtype: float32, shape: {text}}}}}, outputs: {{}}}}\n")
    hold(f"AFwdOp:\n  signature:\n    inputs:\n      x: {text}\n    outputs: {text}\n  workloads: [{text}]\n")


@settings(max_examples=60, deadline=None)
@given(st.one_of(mutations(), st.text(max_size=80)))
def test_load_raises_spec_errors_alone(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        load(path)
    except SpecError as e:
        assert str(e) == "\n".join(map(str, e.diagnostics))  # noqa: PT017 - there need not be one


# -- quickly -----------------------------------------------------------------------------------------------------------


def test_a_hundred_large_entries_take_few_times_their_yaml(capsys: pytest.CaptureFixture[str]) -> None:
    """A second where this was written; a ratio holds on slow and shared cores too."""
    largest = (SPECS / "attention.yaml").read_text()
    text = "".join(largest.replace("GQADenseFwdOp:", f"Dense{i}FwdOp:") for i in range(100))
    began = time.process_time()
    file = parse_spec(text)
    took = time.process_time() - began
    yaml.compose(text, yaml.CSafeLoader)
    yamls = time.process_time() - began - took
    with capsys.disabled():
        print(f" [100 entries, {len(text) // 1000} kB: {took:.2f} s of CPU time, yaml's {yamls:.2f}] ", end="")
    assert len(file.entries) == 100
    assert file.errors == ()
    assert took < 5 * yamls


def test_reading_leaves_no_garbage() -> None:
    """Nodes are gone when their file is read, without a collector's help."""
    gc.collect()
    gc.disable()
    try:
        parse_spec(SEEDS[0])
        assert not any(issubclass(type(o), yaml.Node) for o in gc.get_objects())
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "text",
    [
        "AFwdOp: {signature: {forall: {M: Dim}, where: ['" + "+".join("M" * 400) + "']}}",
        "AFwdOp: {signature: {forall: {M: Dim}, where: ['" + "(" * 180 + "M" + ")" * 180 + "']}}",
        "AFwdOp: {signature: {forall: {" + ", ".join(f"M{i}: Dim" for i in range(3000)) + "}}}",
        "AFwdOp: {" + "a: 1, " * 20_000 + "}",
        "? " * 900 + "a",
        "a: " + "'" * 200_001,
    ],
    ids=["terms", "parentheses", "indices", "keys", "nesting", "quotes"],
)
def test_no_text_takes_long(text: str) -> None:
    began = time.process_time()
    assert parse_spec(text).errors
    assert time.process_time() - began < 2.5


def test_many_optional_inputs_and_params_take_no_time() -> None:
    """The variants that are looked at are bounded, however many a signature has."""
    params = ", ".join(f"p{i}: {{type: bool}}" for i in range(16))
    inputs = ", ".join(f"x{i}: {{dtype: float32, shape: '[M] if p{i} else [M, 1]', optional: true}}" for i in range(16))
    began = time.process_time()
    file = parse_spec(
        "AFwdOp:\n  signature:\n    forall: {M: Dim}\n"
        f"    params: {{{params}}}\n    inputs: {{a: {{dtype: float32, shape: '[M]'}}, {inputs}}}\n    outputs: {{}}\n"
    )
    assert file.errors == ()
    assert time.process_time() - began < 5


# -- without torch -----------------------------------------------------------------------------------------------------

TORCH_FREE = """
import sys
sys.modules["torch"] = None  # importing it fails
from pathlib import Path
from tileops.core.check import Call, Checker, TensorMeta
from tileops.core.check.content import check_values
from tileops.core.spec import load
from tileops.core.workloads import calls
made = [c for p in sorted(Path(sys.argv[1]).glob("*.yaml")) for e in load(p).values() for c in calls(e)]
for call in made:
    check_values(call, call.content or {})
print(len(made), sorted(m for m in sys.modules if m.split(".")[0] in ("torch", "numpy", "tilelang") and sys.modules[m]))
"""


def test_specs_are_read_and_rows_made_into_calls_without_torch() -> None:
    done = subprocess.run([sys.executable, "-c", TORCH_FREE, str(SPECS)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    count, loaded = done.stdout.split(maxsplit=1)
    assert int(count) > 50
    assert loaded.strip() == "[]"
