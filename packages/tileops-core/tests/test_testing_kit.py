"""The test kit catches planted faults and says what they are; its cases follow from a signature alone."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from itertools import combinations, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch

from tileops.core.check import contiguous_strides
from tileops.core.errors import CheckError, TileOpsError
from tileops.core.op import Op, make_op
from tileops.core.spec import parse_spec
from tileops.core.testing import (
    CaseFailure,
    assert_right,
    case_of,
    edge_cases,
    programs,
    reproduce,
    run_case,
    run_torch_case,
    torch_cases,
    workload_cases,
)

SPEC = """
KitScaleFwdOp:
  family: kit
  summary: Scales rows and, when asked, sums them.
  status: spec-only
  reference: kit_reference:scale
  signature:
    forall: {M: Dim, N: Dim, T: "DType[float32 | bfloat16]"}
    params:
      factor: {type: float, default: 1.0}
      with_sum: {type: bool, default: false}
    inputs:
      x: {dtype: T, shape: "[M, N]"}
      bias: {dtype: "T | float32", shape: "[N]", optional: true}
    outputs:
      y: {dtype: T, shape: "[M, N]"}
      total: {dtype: float32, shape: "[M]", when: with_sum}
    symbolic: [M]
  workloads:
  - {label: wide, M: 4096, N: 4096, dtype_cases: [{T: float32}, {T: bfloat16}]}
  roofline: {flops: "M * N", unit: cuda_core, dtype: float32}

KitPackFwdOp:
  family: kit
  summary: Adds one to the rows that are in use, in place.
  status: spec-only
  reference: kit_reference:pack
  signature:
    forall: {B: Dim, R: Dim, N: Dim}
    params:
      group: {type: int, default: 2}
      mode: {type: "'plain' | 'other'", default: plain}
      axes: {type: "list[int] | None", default: null}
    inputs:
      x: {dtype: float32, shape: "[R, N]", mutated: true}
      offsets: {dtype: int32, shape: "[B + 1]", requires: offsets(R)}
      scale: {dtype: float32, shape: "[N]", contiguous: true}
    outputs: {}
    where:
    - "N % (4 * group) == 0"
    - "axes is None or len(axes) <= 1"
  workloads:
  - {label: few, B: 2, R: 64, N: 1024, group: 1}
  roofline: {flops: "R * N", unit: cuda_core, dtype: float32}

KitStatsFwdOp:
  family: kit
  summary: Centres rows and, when asked, updates running means in place and returns those of the rows.
  status: spec-only
  reference: kit_reference:stats
  signature:
    forall: {M: Dim, N: Dim}
    params:
      update: {type: bool, default: false}
      mode: {type: "'plain' | 'halved'", default: plain}
      return_mean: {type: bool, default: false}
    inputs:
      x: {dtype: float32, shape: "[M, N]"}
      running: {dtype: float32, shape: "[M]", optional: true, mutated: update}
    outputs:
      y: {dtype: float32, shape: "[M, N]"}
      mean: {dtype: float32, shape: "[M]", when: return_mean}
    where:
    - "N >= 1"
    - "present(running) or not update"
    symbolic: [M]
  accuracy:
    y: {floor: 4, reason: a difference of two near numbers}
  workloads:
  - {label: one, M: 8, N: 512}
  roofline: {flops: "2 * M * N", bytes: "8 * M * N", unit: cuda_core, dtype: float32}
"""


def scale(x, bias=None, *, factor, with_sum, T):
    wide = x.dtype if x.dtype == torch.float64 else torch.float32
    y = x.to(wide) * factor
    y = y if bias is None else y + bias.to(wide)
    rounded = y if wide == torch.float64 else y.to(T)
    return rounded.contiguous().clone(), y.sum(1) if with_sum else None


def pack(x, offsets, scale, *, group, mode, axes):
    x[: int(offsets[-1]) // 2] += scale


def stats(x, running=None, *, update, mode, return_mean):
    mean = x.mean(1)
    if update:
        running.mul_(0.5).add_(mean, alpha=0.5)
    y = (x - mean[:, None]) * (0.5 if mode == "halved" else 1.0)
    return y.contiguous(), mean if return_mean else None


sys.modules["kit_reference"] = SimpleNamespace(
    scale=scale, pack=pack, stats=stats
)  # test modules have no importable name


@pytest.fixture(scope="module")
def spec(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("kit") / "kit.yaml"
    path.write_text(SPEC)
    return path


@pytest.fixture
def faulty(spec) -> Callable[..., type[Op]]:
    """A class of the scaling op whose results pass through a function: ``change(op, x, bias, result)``."""

    def make(change) -> type[Op]:
        def call(self, x, bias=None):
            return change(self, x, bias, self.run(x, bias))

        return make_op("KitScaleFwdOp", spec, __call__=call)

    return make


def failure(op: type[Op], layouts: Any = None, values: str = "normal", **params) -> str:
    """What the kit says about one small case of an op."""
    case = case_of(op(**params).bind((6, 5), T=torch.float32), "small", layouts or {}, values)
    with pytest.raises(CaseFailure) as e:
        run_case(case, op=op)
    return str(e.value)


@pytest.mark.parametrize("name", ["KitScaleFwdOp", "KitPackFwdOp", "KitStatsFwdOp"])
def test_right_ops_pass(spec, name):
    """Also one that writes to its inputs and returns nothing, or what it doesn't always."""
    op = make_op(name, spec)
    for case in (*edge_cases(op.entry), *workload_cases(op.entry)):
        run_case(case, op=op)
    for check in {case.check for case in torch_cases(op.entry)} - {"value"}:  # which has no module to be pickled by
        checked(op, check)


def test_what_drops_the_last_column(faulty):
    def drop(op, x, bias, y):
        y[..., -1] = 0
        return y

    message = failure(faulty(drop), factor=3.0)
    assert "- y: " in message
    assert "6 of 30 are outside" in message
    assert "KitScaleFwdOp/small on cpu" in message
    assert "factor=3.0" in message


def test_what_ignores_strides(faulty):
    def flat(op, x, bias, y):
        return x.as_strided(x.shape, contiguous_strides(tuple(x.shape))).clone()

    run_case(case_of(faulty(flat)().bind((6, 5), T=torch.float32), "small"), op=faulty(flat))
    assert "- y: " in failure(faulty(flat), {"x": "transposed"})
    assert "NaN" in failure(faulty(flat), {"x": "odd-pitch"}), "the gaps between rows are poison"
    assert "non-finite" in failure(faulty(flat), {"x": "every-other"})


def test_what_reads_beside_its_input(faulty):
    def read(op, x, bias, y):
        y[-1, -1] += 0 * x.as_strided((1,), (1,), x.storage_offset() + x.numel())[0]
        return y

    assert "y: non-finite at [5, 4]" in failure(faulty(read))


def test_what_writes_beside_its_input(faulty):
    def after(op, x, bias, y):
        x.as_strided((1,), (1,), x.storage_offset() + x.numel()).fill_(1)
        return y

    def before(op, x, bias, y):
        x.as_strided((1,), (1,), x.storage_offset() - 2).fill_(1)
        return y

    assert "x: 4 bytes around the input are written, first 30 elements from its start" in failure(faulty(after))
    assert "x: 4 bytes around the input are written, first -2 elements from its start" in failure(faulty(before))


def test_what_writes_between_rows(faulty):
    def write(op, x, bias, y):
        x.as_strided((1,), (1,), x.storage_offset() + x.shape[1]).fill_(1)
        return y

    assert "x: 4 bytes around the input are written, first 5" in failure(faulty(write), {"x": "odd-pitch"})


def test_what_writes_to_its_input(faulty):
    def write(op, x, bias, y):
        x[2, 3] = 8.0
        return y

    message = failure(faulty(write))
    assert "x: the input is changed, first at [2, 3]" in message
    assert "is 8.0 now" in message
    assert "around" not in message


def test_what_returns_its_input(faulty):
    assert "y: the output shares its memory with x" in failure(faulty(lambda op, x, bias, y: x))
    assert "y: the output shares its memory with x" in failure(faulty(lambda op, x, bias, y: x.view(6, 5)))


def test_outputs_that_share_memory(faulty):
    def share(op, x, bias, results):
        both = torch.cat([results[0].flatten(), results[1]])
        return both[:30].view(6, 5), both[30:]

    assert "y: the output shares its memory with total" in failure(faulty(share), with_sum=True)


def test_what_returns_nan(faulty):
    def spoil(op, x, bias, y):
        y[1, 2] = float("nan")
        return y

    assert "y: non-finite at [1, 2]" in failure(faulty(spoil))


def test_what_swallows_nan(faulty):
    message = failure(faulty(lambda op, x, bias, y: y.nan_to_num(0)), values="nan")
    assert "y: non-finite at [3, 0]: expected nan, got 0" in message


def test_what_keeps_stale_memory(faulty):
    def stale(op, x, bias, y):
        fresh = torch.empty_like(y)
        fresh[:-1] = y[:-1]
        return fresh

    assert "y: non-finite at [5, 0]" in failure(faulty(stale))


def test_what_differs_from_call_to_call(faulty):
    calls: list[int] = []

    def drift(op, x, bias, y):
        calls.append(1)
        return y * (1 + len(calls) * 2**-24)

    assert "y: a second call gives other bits" in failure(faulty(drift))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda op, x, bias, y: y.double(), "y: wrong dtype: expected float32, got float64"),
        (lambda op, x, bias, y: y[:, :4].clone(), "y: wrong shape: expected [6, 5], got [6, 4]"),
        (lambda op, x, bias, y: y.t().contiguous().t(), "y: strides are (1, 6), expected (5, 1)"),
        (lambda op, x, bias, y: y.to("meta"), "meta"),
        (lambda op, x, bias, y: (y,), "returns a tuple, expected a Tensor: it has 1 outputs"),
        (lambda op, x, bias, y: (y, x.sum(1)), "total: wrong presence: expected none, got a tensor"),
        (lambda op, x, bias, y: (y, y, y), "got 3 outputs, expected y"),
        (lambda op, x, bias, y: None, "got 0 outputs, expected y"),
        (lambda op, x, bias, y: 1 // 0, "ZeroDivisionError: "),
    ],
)
def test_what_returns_something_else(faulty, change, said):
    assert said in failure(faulty(change))


def test_a_bind_that_tells_another_call(spec):
    def bind(self, *inputs, **dtypes):
        call = Op.bind(self, *inputs, **dtypes)
        return attrs.evolve(call, params={**call.params, "factor": 2.0})

    case = edge_cases(make_op("KitScaleFwdOp", spec).entry)[0]
    with pytest.raises(CaseFailure, match=r"bind: params are \{'factor': 2.0"):
        run_case(case, op=make_op("KitScaleFwdOp", spec, bind=bind))


def test_all_that_is_wrong_is_said_at_once(faulty):
    def spoil(op, x, bias, y):
        x[0, 0] = 8.0
        return y.t().contiguous().t() + 1

    message = failure(faulty(spoil))
    assert message.count("\n- ") == 3
    assert "call: KitScaleFwdOp(x=float32[6, 5]) factor=1.0, with_sum=False" in message


def test_what_an_op_may_write(spec):
    def call(self, x, offsets, scale):
        self.run(x, offsets, scale)
        x[-1] += 1

    wrong = make_op("KitPackFwdOp", spec, __call__=call)
    with pytest.raises(CaseFailure, match="x: untouched"):
        run_case(edge_cases(wrong.entry)[0], op=wrong)


def test_these_very_tensors(faulty):
    right, wrong = faulty(lambda op, x, bias, y: y), faulty(lambda op, x, bias, y: y + 1)
    x = torch.randn(3, 4)
    assert torch.equal(assert_right(right(), x.t()), x.t())
    with pytest.raises(AssertionError, match=r"y: \w+ error"):
        assert_right(wrong(), x.t())


def checked(op: type[Op], check: str) -> None:
    for case in torch_cases(op.entry):
        if case.check == check:
            run_torch_case(case, op=op)


def test_a_gradient_that_is_lost(faulty):
    with pytest.raises(CaseFailure, match="RuntimeError"):
        checked(faulty(lambda op, x, bias, y: y[0] if isinstance(y, tuple) else y.detach()), "gradient")


def test_a_gradient_that_is_silently_given(faulty):
    with pytest.raises(CaseFailure, match="gives gradients without an error"):
        checked(faulty(lambda op, x, bias, y: x * 1.0), "gradient")


def test_an_op_that_accepts_anything(faulty):
    class_ = faulty(lambda op, x, bias, y: y)
    lenient = make_op("KitScaleFwdOp", class_.spec, __call__=lambda self, x, bias=None: torch.zeros(()))
    with pytest.raises(CaseFailure, match="x a list: no CheckError is raised"):
        checked(lenient, "refusals")


def test_an_op_that_threads_disturb(faulty):
    last: list[Any] = []

    def shared(op, x, bias, y):
        last.append(y)
        return last[len(last) // 2] if len(last) > 40 else y

    with pytest.raises(CaseFailure, match="in threads"):
        checked(faulty(shared), "threads")


def test_an_op_that_meets_each_size_anew(faulty):
    sizes: dict[int, float] = {3: 0.0, 7: 0.0}  # asked by value, so that a symbolic size has to be known

    with pytest.raises(CaseFailure, match=r"compile \d times, expected 1"):
        checked(faulty(lambda op, x, bias, y: y + sizes.get(x.shape[0], 0.0)), "dynamic")


def test_cases_are_the_same_each_time():
    entries = [parse_spec(SPEC, "kit.yaml").entries["KitScaleFwdOp"] for _ in range(2)]
    first, again = ([(c.id, c.call, c.layouts, c.values, c.tier) for c in edge_cases(entry)] for entry in entries)
    assert first == again
    assert len({id for id, *_ in first}) == len(first)


def test_edges_of_a_signature(spec):
    entry = make_op("KitScaleFwdOp", spec).entry
    cases = edge_cases(entry)
    assert len(cases) <= 120
    for size in (0, 1, 63, 65, 129, 257):
        assert any(c.call.indices["M"] == size for c in cases)
        assert any(c.call.indices["N"] == size for c in cases)
    for one, other in combinations(["T", "factor", "with_sum", "present(bias)"], 2):
        seen = {(c.call[one], c.call[other]) for c in cases}
        assert seen == set(product({a for a, _ in seen}, {b for _, b in seen}))
        assert len(seen) == (6 if "factor" in (one, other) else 4)
    assert {"transposed", "sliced", "odd-pitch", "every-other", "misaligned", "expanded0", "expanded1"} <= {
        c.layouts.get("x") for c in cases
    }
    assert {"every-other", "misaligned", "expanded0"} <= {c.layouts.get("bias") for c in cases}
    assert {(c.values, c.where) for c in cases} >= {
        ("nan", "x"), ("inf", "x"), ("nan", "bias"), ("large", None), ("zeros", None), ("constant-rows", None)
    }  # fmt: skip
    assert 3 <= sum(c.tier == "smoke" for c in cases) <= 12


def test_edges_stay_within_rules_and_content(spec):
    """Nothing here is known about this op but its entry: a rule that base sizes break, metadata, a fixed layout."""
    cases = edge_cases(make_op("KitPackFwdOp", spec).entry)
    assert all(c.call["N"] % (4 * c.call["group"]) == 0 for c in cases)
    assert {c.call["mode"] for c in cases} == {"plain", "other"}
    assert {c.call["axes"] for c in cases} >= {None, (0,)}
    assert all(c.call.content["offsets"][-1] == c.call["R"] for c in cases)
    assert {c.layouts.get("scale") for c in cases} == {None, "misaligned"}
    assert {c.layouts.get("offsets") for c in cases} == {None, "every-other", "misaligned"}
    assert not any(str(layout).startswith("expanded") for c in cases for n, layout in c.layouts.items() if n == "x")


def test_an_entry_without_a_small_call(spec):
    text = SPEC.replace('"N % (4 * group) == 0"', '"N * R == 7777777"').replace("R: 64, N: 1024", "R: 7, N: 1111111")
    entry = parse_spec(text, "odd.yaml").entries["KitPackFwdOp"]
    assert [c.call["N"] for c in edge_cases(entry)[:1]] == [1111111]


def test_rows_are_scaled_to_the_machine(spec):
    entry = make_op("KitScaleFwdOp", spec).entry
    small, true = workload_cases(entry), workload_cases(entry, device="cuda")
    assert (
        [c.id for c in small] == [c.id for c in true] == ["KitScaleFwdOp/wide-float32", "KitScaleFwdOp/wide-bfloat16"]
    )
    assert all(c.call["M"] * c.call["N"] < 2e6 for c in small)
    assert all((c.call["M"], c.call["N"]) == (4096, 4096) for c in true)
    assert workload_cases(entry, max_bytes=1e9)[0].call["M"] == 4096
    assert workload_cases(entry, max_flops=1e3)[0].call["M"] < 4096


def test_a_layout_that_the_signature_refuses(spec):
    op = make_op("KitPackFwdOp", spec)()
    with pytest.raises(CheckError, match="a contiguous tensor"):
        case_of(op.bind((4, 8), (3,), (8,)), "strided", {"scale": "every-other"})


def test_a_case_is_found_by_its_id():
    reproduce("GEMMFwdOp/M=0")
    reproduce("GQADenseFwdOp/gradient")
    with pytest.raises(TileOpsError, match=r"no case is called 'GEMMFwdOp/M=00'; did you mean 'GEMMFwdOp/M=0'\?"):
        reproduce("GEMMFwdOp/M=00")
    with pytest.raises(TileOpsError, match="no operator is called"):
        reproduce("NoFwdOp/M=0")


def test_only_what_can_be_found_is_said_to_be(spec, faulty):
    wrong = faulty(lambda op, x, bias, y: y + 1)
    with pytest.raises(CaseFailure, match=r"again: python -c .*reproduce\('KitScaleFwdOp/base', 'cpu'\)"):
        run_case(edge_cases(wrong.entry)[0], op=wrong)
    assert "again" not in failure(wrong)


MARKED = """
import pytest

def test_plain(): pass

@pytest.mark.smoke
def test_smoke(): pass

@pytest.mark.nightly
def test_nightly(): pass

@pytest.mark.cuda
def test_cuda(): pass

@pytest.mark.musa
@pytest.mark.smoke
def test_musa(): pass
"""
GENERATED = """
import pytest

@pytest.mark.op("GEMMFwdOp", "RMSNormFwdOp")
def test_edges(edge_case, device): pass
"""


def pytest_in(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", "tileops.core.testing", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("arguments", "selected"),
    [
        ([], "plain smoke"),
        (["-m", "smoke"], "smoke"),
        (["--tier", "smoke"], "smoke"),
        (["--tier", "nightly"], "plain smoke nightly"),
        (["-m", "nightly"], "nightly"),
        (["-m", "cuda"], "cuda"),
        (["--device", "cuda"], "cuda"),
        (["--device", "musa", "--tier", "smoke"], "musa"),
        (["-m", "not cuda and not musa"], "plain smoke"),
        (["-m", "musa and smoke"], "musa"),
        (["--device", "cpu", "-m", "cuda"], ""),
    ],
)
def test_what_a_run_selects(tmp_path, arguments, selected):
    (tmp_path / "test_it.py").write_text(MARKED)
    lines = pytest_in(tmp_path, "--collect-only", "-q", *arguments).stdout.splitlines()
    assert {line.partition("::test_")[2] for line in lines if "::" in line} == set(selected.split())


def test_generated_cases_carry_their_markers(tmp_path):
    (tmp_path / "test_it.py").write_text(GENERATED)
    shown = pytest_in(tmp_path, "--collect-only", "-q", "-m", "smoke and cuda").stdout
    assert "test_it.py::test_edges[cuda-GEMMFwdOp/M=0]" in shown
    assert "test_it.py::test_edges[cuda-RMSNormFwdOp/base]" in shown
    assert "cpu" not in shown
    assert "M=1" not in shown


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_an_absent_device_fails_the_run(tmp_path):
    (tmp_path / "test_it.py").write_text(MARKED)
    result = pytest_in(tmp_path, "-m", "cuda")
    assert result.returncode == pytest.ExitCode.USAGE_ERROR
    assert "the tests of cuda can't run" in result.stderr
    assert "passed" not in result.stdout


@pytest.mark.parametrize("workers", [(), ("-n", "2")])
def test_outcomes_are_written_as_tests_end(tmp_path, workers):
    (tmp_path / "test_it.py").write_text(
        "import os, pytest\n"
        "def test_passes(): pass\n"
        "def test_fails(): assert 1 == 2, 'no'\n"
        "@pytest.mark.skip(reason='later')\ndef test_waits(): pass\n"
        "@pytest.fixture\ndef broken(): raise ValueError('gone')\n"
        "def test_breaks(broken): pass\n"
    )
    pytest_in(tmp_path, "--outcomes", str(tmp_path / "out/lines.jsonl"), *workers)
    lines = {d["test"]: d for d in map(json.loads, (tmp_path / "out/lines.jsonl").read_text().splitlines())}
    found = {name.partition("::test_")[2]: (d["outcome"], d.get("message", "")) for name, d in lines.items()}
    assert found["passes"] == ("passed", "")
    assert found["fails"][0] == found["breaks"][0] == "failed"
    assert found["fails"][1].startswith("AssertionError: no assert 1 == 2")
    assert found["breaks"][1] == "ValueError: gone"
    assert found["waits"][0] == "skipped"
    again = pytest_in(tmp_path, "--outcomes", str(tmp_path / "out/lines.jsonl"), "--resume", *workers)
    assert "1 failed, 1 skipped" in again.stdout
    assert "passed" not in again.stdout, "what has passed is left out"
    alone = pytest_in(tmp_path, "--resume")
    assert "--resume needs --outcomes FILE" in alone.stderr


def test_the_plugin_alone_imports_no_torch():
    code = "import sys, tileops.core.testing, tileops.core.testing.plugin; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_program_that_fails_to_compile_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEOPS_CACHE_DIR", str(tmp_path / "cold"))
    failures = {"one": "no such layout", "two": None, "three": "too many registers"}
    monkeypatch.setattr(programs, "build", lambda recipes: ((r, failures[r]) for r in recipes))
    programs.compile_all(["two"])
    with pytest.raises(AssertionError, match="no such layout\ntoo many registers"):
        programs.compile_all(list(failures))
