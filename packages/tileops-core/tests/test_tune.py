"""The tuner without a GPU: real measuring processes, whose clock and whose faults are planted in the configs."""

from __future__ import annotations

import importlib
import json
import math
import multiprocessing
import os
import signal
import sys
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from click.testing import CliRunner

from tileops.core import families, program
from tileops.core.backend import cuda, gpu
from tileops.core.cli import main, output
from tileops.core.cli import tune as command
from tileops.core.errors import BackendError, CaptureError, TileOpsError
from tileops.core.explain import Explanation
from tileops.core.kernel import H200
from tileops.core.op import make_op
from tileops.core.program import Program
from tileops.core.roofline import bound
from tileops.core.tune import build, results, search, shipped
from tileops.core.tune.results import Candidate, Result, Time
from tileops.core.tune.task import tasks

SPEC = """
TunedToyFwdOp:
  family: tuned_toy
  summary: Rows that may be many.
  status: spec-only
  reference: tuned_toy.reference:reference
  signature:
    forall: {M: Dim, N: Dim, T: "DType[float32 | float16]"}
    params: {eps: {type: float, default: 1.0e-6}, flag: {type: bool, default: false}}
    inputs:
      x: {dtype: T, shape: "[M, N]"}
      w: {dtype: "T | float32", shape: "[N]", optional: true}
    outputs: {y: {dtype: T, shape: "[M, N]"}}
    symbolic: [M]
  workloads:
  - {label: short, M: 8, N: 64, dtype_cases: [{T: float32}, {T: float16}]}
  - {label: long, M: 100, N: 64, dtype_cases: [{T: float32}]}
  - {label: longer, M: 120, N: 64, dtype_cases: [{T: float32}]}
  roofline: {flops: "M * N"}
"""
KERNELS = """
import attrs
from tileops.core.kernel import Kernel

@attrs.frozen
class Config:
    us: float = 10.0
    fault: str = ""

class Fast(Kernel):
    archs = {"cuda": ("sm90",)}
    space = (Config(), Config(8.0), Config(9.0))

    def refuse(self, call, device):
        return "N > 64" if call["N"] > 64 else None

    def configs(self, call, device):
        yield from self.space

class Slow(Fast):
    space = (Config(20.0), Config(9.9))

    def refuse(self, call, device):
        return None
"""
MEASURE = """
import os, signal, time
from pathlib import Path
from tileops.core.errors import TileOpsError
from tileops.core.tune.child import Rejected

def measure(trial, reference, rounds, slowest):
    config, kernel = trial.choice.config, type(trial.choice.kernel).__name__
    if log := os.environ.get("TOY_LOG"):
        with open(log, "a") as f:
            f.write(f"{os.getpid()} {kernel} {config.us} {trial.call.id} {rounds}\\n")
    if config.fault == "hangs":
        time.sleep(60)
    elif config.fault == "crashes":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif config.fault == "is wrong":
        raise Rejected("y: slice error 3 x its bound at [0, 0]: expected 1, got 2")
    elif config.fault == "later" and rounds > 3:
        raise Rejected("y: wrong this time")
    elif config.fault == "out of memory":
        raise TileOpsError("OutOfMemoryError: another process has it")
    other = reference.choice.config.us if reference else config.us
    if slowest and config.us > slowest * other:
        raise Rejected("far behind the best")
    time.sleep(float(os.environ.get("TOY_SECONDS", 0)))
    yield [(config.us, other)] * rounds

def build(recipes, workers):
    for recipe in recipes:
        yield recipe.key, "no such\\ninstruction" if recipe.config.fault == "does not compile" else None
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A family in a package of its own, which the children import too."""
    home = tmp_path_factory.mktemp("toy")
    package = home / "tuned_toy"
    (package / "kernels").mkdir(parents=True)
    for name in ("__init__.py", "kernels/__init__.py"):
        (package / name).touch()
    (package / "reference.py").write_text("def reference(x, w, **_): return x\n")
    (package / "_spec.yaml").write_text(SPEC)
    (package / "kernels/toy.py").write_text(KERNELS)
    (home / "toy_measure.py").write_text(MEASURE)
    sys.path.insert(0, str(home))
    yield home
    sys.path.remove(str(home))


@pytest.fixture(scope="module")
def op_class(home):
    return make_op(
        "TunedToyFwdOp",
        home / "tuned_toy/_spec.yaml",
        __module__="tuned_toy.ops.toy",
        kernels=("toy:Fast", "toy:Slow"),
        buckets={"M": (16, 128)},
    )


@pytest.fixture
def kernels(home):
    return importlib.import_module("tuned_toy.kernels.toy")


@pytest.fixture(autouse=True)
def measured(home, tmp_path, monkeypatch):
    """Children that pretend, and an empty cache; gives how often each candidate was measured on each call."""
    monkeypatch.setenv("TILEOPS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TOY_LOG", str(tmp_path / "log"))
    monkeypatch.setattr(search, "MEASURE", "toy_measure:measure")
    monkeypatch.setattr(search, "BUILD", "toy_measure:build")
    results.forget()
    shipped.entries.cache_clear()

    def read() -> Counter[str]:
        lines = (tmp_path / "log").read_text().splitlines() if (tmp_path / "log").exists() else []
        return Counter(line.partition(" ")[2] for line in lines)

    yield read
    results.forget()
    (home / "tuned_toy/tuned/h200.yaml").unlink(missing_ok=True)
    shipped.entries.cache_clear()


def call_of(op_class, M=100, N=64, dtype=torch.float32, **params):
    return op_class(**params).bind((M, N), None, T=dtype)


def task_of(op_class, *calls):
    (task,) = tasks(cuda, calls or [call_of(op_class)], H200, "h200")
    return task


def tuned(task, failures=None):
    faults = search.run([task], [0], failures or {}, lambda progress: None)
    assert not faults, faults
    result = results.read(task.bucket)
    assert result is not None
    return result


def space(monkeypatch, kernels, *configs, kernel="Fast"):
    monkeypatch.setattr(getattr(kernels, kernel), "space", tuple(kernels.Config(*c) for c in configs))


# What is tuned.


def test_candidates_are_all_configs_of_all_kernels_that_serve_the_first_of_each(op_class, monkeypatch, kernels):
    shown = [(type(c.kernel).__name__, c.config.us) for c in task_of(op_class).candidates]
    assert shown == [("Fast", 10), ("Fast", 8), ("Fast", 9), ("Slow", 20), ("Slow", 9.9)]
    (wide,) = tasks(cuda, [call_of(op_class, N=128)], H200, "h200")
    assert {type(c.kernel).__name__ for c in wide.candidates} == {"Slow"}
    (few,) = tasks(cuda, [call_of(op_class)], H200, "h200", limit=1)
    assert [c.config.us for c in few.candidates] == [10, 20]


def test_calls_of_one_bucket_are_one_task(op_class):
    calls = [call_of(op_class, M) for M in (8, 100, 120, 16, 200)]
    found = tasks(cuda, [*calls, call_of(op_class, 0)], H200, "h200")
    assert [[c["M"] for c in task.calls.values()] for task in found] == [[8, 16], [100, 120], [200]]
    assert [task.bucket.call["M"] for task in found] == [[1, 16], [17, 128], [129, 256]]


def test_a_bucket_is_told_apart_by_all_that_a_choice_may_depend_on(op_class):
    x, w = torch.empty(100, 64), torch.empty(64)
    calls = {
        "as it is": call_of(op_class),
        "a param": call_of(op_class, eps=1e-5),
        "a dtype": call_of(op_class, dtype=torch.float16),
        "a fixed size": call_of(op_class, N=32),
        "another bucket": call_of(op_class, M=129),
        "an optional tensor": op_class().bind(x, w),
        "its own dtype": op_class().bind(x.half(), w),
        "strides": op_class().bind(torch.empty(100, 128)[:, ::2]),
    }
    found = {name: task_of(op_class, call).bucket for name, call in calls.items()}
    assert found["as it is"].call == {"N": 64, "T": "float32", "M": [17, 128]}
    assert found["strides"].call["x.strides"] == [None, 2]
    assert len({b.text for b in found.values()}) == len({b.key for b in found.values()}) == len(calls)
    first = found["as it is"]
    changed = (
        attrs.evolve(first, sources="other"),
        attrs.evolve(first, versions="other"),
        attrs.evolve(first, board="b"),
    )
    assert len({b.key for b in (first, *changed)}) == 4
    assert {b.text for b in changed} == {first.text}, "a shipped entry outlives a change of the kernels"


# The search.


def test_the_fastest_is_kept_with_every_time(op_class):
    result = tuned(task_of(op_class))
    assert (result.chosen.kernel, result.chosen.config["us"]) == ("Fast", 8)
    (case,) = result.chosen.times
    assert result.times(case) == (10, 8)
    assert result.gain(case) == 1.25
    assert [c.reason and c.reason[:10] for c in result.candidates] == [None, None, None, "far behind", None]


def test_a_tie_leaves_the_default(op_class, monkeypatch, kernels):
    space(monkeypatch, kernels, (10.0,), (9.95,))
    result = tuned(task_of(op_class))
    assert result.choice == 0
    assert result.gain(next(iter(result.chosen.times))) == 1


def test_only_the_best_are_timed_for_long(op_class, measured, monkeypatch, kernels):
    space(monkeypatch, kernels, (10.0,), (8.0,), (8.1,), (8.2,), (8.3,), (8.9,))
    tuned(task_of(op_class))
    assert sorted(line.split()[1] for line in measured() if line.endswith(" 9")) == ["10.0", "8.0", "8.1", "8.2"]


FAULTS = {
    "hangs": "no answer within 1.5 s: its process was killed",
    "crashes": "its process died: SIGSEGV",
    "is wrong": "y: slice error 3 x its bound at [0, 0]: expected 1, got 2",
    "does not compile": "it does not compile: no such",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_candidate_is_out_with_its_reason_and_the_others_go_on(op_class, monkeypatch, kernels, fault):
    monkeypatch.setattr(search, "DEADLINE", 1.5)
    space(monkeypatch, kernels, (10.0,), (1.0, fault), (8.0,))
    task = task_of(op_class)
    result = tuned(task, search.build([task], 1, lambda progress: None).failures)
    assert result.candidates[1] == Candidate("Fast", {"us": 1.0, "fault": fault}, {}, FAULTS[fault])
    assert result.chosen.config["us"] == 8


def test_a_faulty_default_leaves_nothing_to_compare_with(op_class, monkeypatch, kernels):
    space(monkeypatch, kernels, (1.0, "is wrong"), (8.0,))
    result = tuned(task_of(op_class))
    (case,) = result.chosen.times
    assert (result.chosen.config["us"], result.times(case), result.gain(case)) == (8, (None, 8), None)
    assert shipped.entry_of(result, [case]) is not None, "whatever is right is better"


def test_who_fails_when_it_is_timed_again_is_not_kept(op_class, monkeypatch, kernels):
    space(monkeypatch, kernels, (10.0,), (8.0, "later"), (9.0,))
    result = tuned(task_of(op_class))
    assert result.candidates[1].reason == "y: wrong this time"
    assert result.chosen.config["us"] == 9


def test_a_reference_that_falls_leaves_its_place_to_the_next(op_class, monkeypatch, kernels, measured):
    space(monkeypatch, kernels, (10.0, "later"), (8.0,), (9.0,))
    result = tuned(task_of(op_class))
    times = {c.config["us"]: t.ratio for c in result.candidates for t in c.times.values() if c.reason is None}
    assert sorted(line.split()[1] for line in measured() if line.endswith(" 9")) == ["10.0", "8.0"]
    assert times == {8.0: 1, 9.0: pytest.approx(9 / 8), 9.9: pytest.approx(9.9 / 8)}
    assert result.chosen.config["us"] == 8


def test_ratios_are_to_the_first_that_is_in_even_if_that_came_later(op_class, monkeypatch, kernels):
    """As where a larger limit lets in a candidate that ranks before those of another kernel."""
    space(monkeypatch, kernels, (10.0, "is wrong"), (8.0,))
    space(monkeypatch, kernels, (9.0,), (9.9,), kernel="Slow")
    tuned(*tasks(cuda, [call_of(op_class)], H200, "h200", limit=1))
    ratios = {c.config["us"]: t.ratio for c in tuned(task_of(op_class)).candidates for t in c.times.values()}
    assert ratios == {8: 1, 9: pytest.approx(9 / 8), 9.9: pytest.approx(9.9 / 8)}


def test_where_nothing_is_right_nothing_is_kept(op_class, monkeypatch, kernels):
    for kernel in ("Fast", "Slow"):
        space(monkeypatch, kernels, (10.0, "is wrong"), kernel=kernel)
    task = task_of(op_class)
    (fault,) = search.run([task], [0], {}, lambda progress: None).values()
    assert "no candidate is right\n  Fast(us=10.0, fault=is wrong): y: slice error 3" in fault
    assert results.choice(task.bucket) is None


def test_what_is_no_fault_of_a_candidate_is_not_held_against_it(op_class, monkeypatch, kernels):
    space(monkeypatch, kernels, (10.0,), (8.0, "out of memory"))
    task = task_of(op_class)
    (fault,) = search.run([task], [0], {}, lambda progress: None).values()
    assert fault == "OutOfMemoryError: another process has it"
    result = results.read(task.bucket)
    assert [c.reason for c in result.candidates if c.config["fault"]] == [None]


def test_a_choice_for_several_calls_is_best_in_the_mean():
    def candidate(name, *ratios):
        return Candidate(name, {}, {f"case {i}": Time(1, r, 3) for i, r in enumerate(ratios)})

    cases = ["case 0", "case 1"]
    scores = {c.kernel: c.score(cases) for c in (candidate("a", 1, 1), candidate("b", 0.5, 1.5), candidate("c", 0.1))}
    assert scores == {"a": 1, "b": pytest.approx(math.sqrt(0.75)), "c": math.inf}


# What is kept.


def test_a_repeated_run_measures_nothing(op_class, measured):
    first = tuned(task_of(op_class))
    before = measured()
    assert tuned(task_of(op_class)) == first
    assert measured() == before


def test_more_candidates_or_calls_are_measured_in_addition(op_class, measured):
    (few,) = tasks(cuda, [call_of(op_class)], H200, "h200", limit=1)
    tuned(few)
    tuned(task_of(op_class))
    tuned(task_of(op_class, call_of(op_class), call_of(op_class, 120)))
    assert max(n for line, n in measured().items() if line.endswith(" 3")) <= 2  # once on each of the two calls


DAMAGE = {
    "truncated": lambda text: text[: len(text) // 2],
    "of another form": lambda text: "[1, 2]",
    "with another key": lambda text: json.dumps(json.loads(text) | {"more": 1}),
    "with a choice that is not there": lambda text: json.dumps(json.loads(text) | {"choice": 99}),
    "empty": lambda text: "",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_entry_is_made_again(op_class, damage):
    task = task_of(op_class)
    tuned(task)
    (place,) = results.home().glob("*.json")
    place.write_text(DAMAGE[damage](place.read_text()))
    results.forget()
    assert results.choice(task.bucket) is None
    assert tuned(task).chosen.config["us"] == 8


def test_a_cache_that_can_not_be_written_is_told(op_class, tmp_path):
    (tmp_path / "cache").write_text("a file where the folder should be")
    (fault,) = search.run([task_of(op_class)], [0], {}, lambda progress: None).values()
    assert fault.startswith("tuned choices can't be kept in ")
    assert fault.endswith("; set TILEOPS_CACHE_DIR")


def _tune(task) -> None:
    search.run([task], [0], {}, lambda progress: None)


def process(task):
    made = multiprocessing.get_context("fork").Process(target=_tune, args=(task,))
    made.start()
    return made


def test_a_killed_run_goes_on_where_it_stopped(op_class, measured, monkeypatch, tmp_path):
    monkeypatch.setenv("TOY_SECONDS", "0.2")
    task = task_of(op_class)
    running = process(task)
    while sum(measured().values()) < 3:
        time.sleep(0.02)
    os.kill(running.pid, signal.SIGKILL)
    running.join()
    in_flight = list(measured())[-1]
    monkeypatch.setenv("TOY_SECONDS", "0")
    assert tuned(task).chosen.config["us"] == 8
    repeated = {line for line, n in measured().items() if n > 1}
    assert repeated <= {in_flight}


def test_two_processes_share_the_work(op_class, measured):
    task = task_of(op_class)
    both = [process(task), process(task)]
    for running in both:
        running.join()
        assert running.exitcode == 0
    assert set(measured().values()) == {1}
    assert results.read(task.bucket).chosen.config["us"] == 8


def test_gpus_share_the_buckets(op_class, tmp_path):
    found = tasks(cuda, [call_of(op_class, M) for M in (8, 100, 200)], H200, "h200")
    lines = []
    assert search.run(found, [0, 1], {}, lines.append) == {}
    assert len({line.split()[0] for line in (tmp_path / "log").read_text().splitlines()}) == 2
    assert [(p.done, p.total) for p in lines] == [(i, 15) for i in range(1, 16)]
    assert lines[-1].left == 0


def test_a_child_that_can_not_be_started_ends_the_run(op_class, monkeypatch):
    monkeypatch.setattr(search, "MEASURE", "no_such_module:measure")
    with pytest.raises(BackendError, match="No module named 'no_such_module'"):
        _tune(task_of(op_class))


def test_a_crash_of_a_compiler_costs_its_own_program(monkeypatch):
    """And not those that were in the same pool."""
    recipes = [SimpleNamespace(key=key) for key in "abc"]

    def compile_all(todo, workers):
        for recipe in todo:
            if recipe.key == "b":
                raise build.BrokenProcessPool
            yield recipe, None

    monkeypatch.setattr(program, "build", compile_all)
    assert list(build.build(recipes, 4)) == [("a", None), ("b", "its compiler crashed"), ("c", None)]


# How a plan finds it.


def chosen(op_class, call=None, board="h200"):
    return gpu.choose(gpu.bucketed(call or call_of(op_class)), H200, board=board)


def ship(task, kernel="Fast", **config):
    table = shipped.path(gpu.torch_ops.class_of(next(iter(task.calls.values())).entry), "h200")
    entry = shipped.Shipped(
        task.bucket.op, task.bucket.call, kernel, {"us": 9.0, "fault": "", **config}, {"a": [10, 9]}
    )
    shipped.write(table, {"board": "h200"}, {task.bucket.text: entry})
    return table


def test_the_result_cache_comes_before_the_shipped_table_and_that_before_the_default(op_class):
    task = task_of(op_class)
    assert (chosen(op_class).config.us, chosen(op_class).source) == (10, "default")
    ship(task)
    assert (chosen(op_class).config.us, chosen(op_class).source) == (9, "shipped table h200")
    tuned(task)
    assert (chosen(op_class).config.us, chosen(op_class).source) == (8, "result cache")
    assert chosen(op_class, board="h100").source == chosen(op_class, board=None).source == "default"
    assert chosen(op_class, call_of(op_class, M=8)).source == "default", "another bucket"
    assert chosen(op_class, call_of(op_class, M=17)).source == "result cache", "another length of the bucket"


@pytest.mark.parametrize(
    ("kernel", "config", "N", "reason"),
    [
        ("Gone", {}, 64, "there is no such kernel"),
        ("Fast", {"us": 7.5}, 64, "it has no such config"),
        ("Fast", {"more": 1}, 64, "it has no such config"),
        ("Fast", {}, 128, "N > 64"),
    ],
)
def test_a_tuned_choice_that_is_no_longer_legal_is_ignored_and_told(op_class, kernel, config, N, reason):
    call = call_of(op_class, N=N)
    ship(task_of(op_class, call), kernel, **config)
    choice = chosen(op_class, call)
    assert choice.source == "default"
    (told,) = choice.ignored
    assert told.startswith(f"{kernel} with {{'us': ")
    assert told.endswith(f"from the shipped table h200: {reason}")
    explained = Explanation(call, "Fast", choice.config, {}, (), bound(call, None), choice.source, choice.ignored)
    assert f"kernel: Fast, {choice.config} (default)\n  ignored: {told}" in str(explained)


def test_files_are_read_once(op_class, monkeypatch):
    task = task_of(op_class)
    ship(task)
    reads = []
    read, load = results.read, shipped.yaml.load
    monkeypatch.setattr(results, "read", lambda bucket: reads.append("result") or read(bucket))
    monkeypatch.setattr(shipped.yaml, "load", lambda *a: reads.append("table") or load(*a))
    for _ in range(3):
        chosen(op_class)
    assert sorted(reads) == ["result", "table"]


# What is shipped.


def test_a_table_is_small_sorted_and_comes_back_as_it_was(op_class):
    found = tasks(cuda, [call_of(op_class, M, eps=1e-5) for M in (200, 8, 100)], H200, "h200")
    entries = {t.bucket.text: shipped.entry_of(tuned(t), list(t.calls)) for t in found}
    table = ship(task_of(op_class))
    shipped.write(table, {"board": "h200", "date": "2026-12-01"}, entries)
    text = table.read_text()
    assert text.startswith("# Written by `tileops tune --ship`")
    assert "\nboard: h200\ndate: '2026-12-01'\nchoices:\n- op: TunedToyFwdOp\n  call: {" in text
    assert "call: {eps: 1.0e-05, N: 64, T: float32, M: [1, 16]}\n  kernel: Fast\n  config: {us: 8.0, fault: ''}" in text
    assert [entry.call["M"] for entry in shipped.entries(table).values()] == [[17, 128], [1, 16], [17, 128], [129, 256]]
    again = shipped.entries(table)
    assert {text: again[text] for text in entries} == entries
    assert len(again) == 4, "other buckets stay"
    shipped.write(table, {"board": "h200"}, dict.fromkeys(again))
    assert "choices: []" in table.read_text()
    assert shipped.entries(table) == {}


@pytest.mark.parametrize(("us", "worth"), [(9.9, False), (9.81, False), (9.7, True)])
def test_gains_within_the_noise_are_not_shipped(op_class, us, worth):
    times = {"a": Time(us, us / 10, 9)}
    result = Result("TunedToyFwdOp", {}, "h200", "", "", [Candidate("A", {}, {"a": Time(10, 1, 9)})], 1)
    result.candidates.append(Candidate("B", {}, times))
    assert (shipped.entry_of(result, ["a"]) is not None) is worth
    assert shipped.entry_of(result, ["a"], every=True).us == {"a": [10, us]}


def test_a_malformed_table_says_so(op_class):
    table = ship(task_of(op_class))
    table.write_text("choices: [{op: 1}]")
    shipped.entries.cache_clear()
    with pytest.raises(TileOpsError, match=r"h200.yaml: no table of tuned choices: .*; restore it from git"):
        chosen(op_class)


# Live.


class Pretender:
    """A GPU that launches nothing."""

    device_type, is_capturing = "cuda", False
    target, fence = staticmethod(cuda.target), staticmethod(lambda index: (None, None))

    def name(self, index):
        return "NVIDIA H200"

    def device(self, index):
        return H200

    def capturing(self):
        return self.is_capturing

    def empty(self, index):
        return lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype)


@pytest.fixture
def pretender(monkeypatch):
    programs: dict[str, Program] = {}
    monkeypatch.setattr(program, "load", lambda r: programs.setdefault(r.key, Program(r.key, lambda *tensors: None)))
    monkeypatch.setattr(program, "loaded", programs.get)
    return Pretender()


def plan(pretender, call, tune=False):
    last: Any = SimpleNamespace()
    return gpu.plan(pretender, call, (), {}, last, tune).choice


def test_a_call_is_tuned_once_when_it_is_asked_for(op_class, pretender, measured, caplog):
    call = call_of(op_class)
    assert plan(pretender, call).source == "default"
    assert not measured()
    seen = []
    for _ in range(2):
        choice = plan(pretender, call, tune=True)
        assert (choice.config.us, choice.source) == (8, "result cache")
        seen.append(measured())
    assert seen[0] == seen[1]
    assert [r.message for r in caplog.records] == [
        "tuning TunedToyFwdOp N=64, T=float32, M=17-128: 5 candidates on meta",
        "tuned: Fast(us=8.0, fault=), x1.250 of the default",
    ]


def test_the_environment_asks_for_every_bucket(op_class, pretender, monkeypatch):
    monkeypatch.setenv("TILEOPS_TUNE", "1")
    assert plan(pretender, call_of(op_class)).source == "result cache"
    assert plan(pretender, call_of(op_class, 8)).source == "result cache"


def test_a_capture_can_not_wait_for_it(op_class, pretender, measured):
    call = call_of(op_class)
    pretender.is_capturing = True
    with pytest.raises(CaptureError, match=r"this call is to be tuned.*call it once, or op.warmup"):
        plan(pretender, call, tune=True)
    assert not measured()
    pretender.is_capturing = False
    plan(pretender, call, tune=True)
    pretender.is_capturing = True
    assert plan(pretender, call, tune=True).source == "result cache"


def test_a_fault_leaves_the_default_and_is_logged(op_class, pretender, monkeypatch, caplog):
    monkeypatch.setattr(search, "MEASURE", "no_such_module:measure")
    assert plan(pretender, call_of(op_class), tune=True).source == "default"
    assert "not tuned: no_such_module:measure can't be started" in caplog.text


def test_a_request_is_for_all_equal_ops_and_for_later_calls(op_class, pretender, monkeypatch):
    from tileops.core import backend

    monkeypatch.setattr(backend, "plan", lambda *args: gpu.plan(pretender, *args))
    op, x = op_class(eps=0.125), torch.ones(100, 64)
    op(x, None)
    state = op._state
    assert state.local.plan.choice.source == "default"
    op_class(eps=0.125).request_tune()
    op(x, None)
    assert state.local.plan.choice.source == "result cache"


def test_on_a_cpu_it_does_nothing(op_class, monkeypatch, measured):
    monkeypatch.setenv("TILEOPS_TUNE", "1")
    op, x = op_class(eps=0.25), torch.ones(100, 64)
    op.request_tune()
    assert torch.equal(op(x, None), x)
    assert not measured()


# The command.


@pytest.fixture
def tileops(op_class, monkeypatch):
    monkeypatch.setattr(
        command, "_devices", lambda: [("h200", H200), ("h200", H200), ("a100", attrs.evolve(H200, arch="sm80"))]
    )
    monkeypatch.setattr(output, "entry_of", lambda name: op_class.entry)
    monkeypatch.setattr(families, "op_class", lambda entry: op_class)
    return lambda *args: CliRunner(env={"COLUMNS": "200"}).invoke(main, ["tune", "TunedToyFwdOp", "--gpus", "0", *args])


def test_the_command_tunes_rows_and_says_what_it_gained(tileops, tmp_path):
    done = tileops("--json", str(tmp_path / "out.json"))
    assert done.exit_code == 0, done.output
    assert "compiling [10/10] 0:00:00 left" in done.output
    assert "compiled 10 in 0 s: 0." in done.output
    assert "measuring [20/20] 0:00:00 left" in done.output
    assert "TunedToyFwdOp/long-float32" in done.output
    assert "x1.250 over the defaults, geometric mean of 4; 3 candidates are out" in done.output
    document = json.loads((tmp_path / "out.json").read_text())
    assert [b["gain"] for b in document["buckets"]][-1] == {
        "TunedToyFwdOp/long-float32": 1.25,
        "TunedToyFwdOp/longer-float32": 1.25,
    }
    assert all(c["times"] or c["reason"] for b in document["buckets"] for c in b["candidates"])
    assert "measuring" not in tileops().output


def test_rows_and_dtypes_select_buckets(tileops, measured):
    assert tileops("--row", "short", "--dtype", "float16").exit_code == 0
    assert {line.split()[2] for line in measured()} == {"TunedToyFwdOp/short-float16"}
    assert tileops("--row", "long").exit_code == 0
    assert {line.split()[2].partition("/")[2] for line in measured()} == {
        "short-float16",
        "long-float32",
        "longer-float32",
    }


def test_ship_writes_the_familys_table(tileops, home):
    done = tileops("--ship")
    assert done.exit_code == 0, done.output
    table = home / "tuned_toy/tuned/h200.yaml"
    assert f"{table}: 3 of 3 choices" in done.output
    text = table.read_text()
    assert all(f"\n{key}: " in text for key in ("board", "date", "versions", "kernels", "protocol"))
    assert "us: {TunedToyFwdOp/long-float32: [10.0, 8.0], TunedToyFwdOp/longer-float32: [10.0, 8.0]}" in text


def test_an_interruption_has_its_own_exit_code(tileops, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(search, "run", interrupted)
    assert tileops().exit_code == 130


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("--row", "lon"), 2, "no row is called 'lon'; did you mean 'long'?"),
        (("--dtype", "float15"), 2, "no dtype is called 'float15'; did you mean 'float16'?"),
        (("--gpus", "a"), 2, "--gpus is 'all' or numbers such as '0,1', not 'a'"),
        (("--gpus", "7"), 3, "there is no GPU 7: 3 are visible; name fewer with --gpus"),
        (("--gpus", "all"), 2, "the GPUs are not alike (0: h200, 1: h200, 2: a100); name those of one kind"),
    ],
)
def test_what_can_not_be_tuned_is_said(tileops, args, code, message):
    done = tileops(*args)
    assert done.exit_code == code
    assert message in done.output


def test_a_fault_is_shown_and_fails_the_command(tileops, monkeypatch, kernels):
    space(monkeypatch, kernels, (10.0,), (8.0, "out of memory"))
    done = tileops("--row", "short", "--dtype", "float16")
    assert done.exit_code == 1
    assert "OutOfMemoryError: another process has it" in done.output
