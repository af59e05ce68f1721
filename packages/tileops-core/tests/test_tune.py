"""The tuner without a GPU: real measuring processes, whose clock and whose faults are planted in the configs."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import signal
import time
from types import SimpleNamespace

import attrs
import pytest
import torch

from tileops.core import program
from tileops.core.backend import gpu
from tileops.core.errors import BackendError
from tileops.core.kernel import H200, Kernel
from tileops.core.tune import build, results, search, shipped
from tileops.core.tune.results import Candidate, Time

# What is tuned.


def test_candidates_are_all_configs_of_all_kernels_that_serve_the_first_of_each(toy):
    shown = [(type(c.kernel).__name__, c.config.us) for c in toy.task().candidates]
    assert shown == [("Fast", 10), ("Fast", 8), ("Fast", 9), ("Slow", 20), ("Slow", 9.9)]
    (wide,) = toy.tasks(toy.call(N=128))
    assert {type(c.kernel).__name__ for c in wide.candidates} == {"Slow"}
    (few,) = toy.tasks(toy.call(), limit=1)
    assert [c.config.us for c in few.candidates] == [10, 20]


def test_calls_of_one_bucket_are_one_task(toy):
    calls = [toy.call(M) for M in (8, 100, 120, 16, 200)]
    found = toy.tasks(*calls, toy.call(0))
    assert [[c["M"] for c in task.calls.values()] for task in found] == [[8, 16], [100, 120], [200]]
    assert [task.bucket.call["M"] for task in found] == [[1, 16], [17, 128], [129, 256]]


def test_a_bucket_is_told_apart_by_all_that_a_choice_may_depend_on(toy):
    x, w = torch.empty(100, 64), torch.empty(64)
    calls = {
        "as it is": toy.call(),
        "a param": toy.call(eps=1e-5),
        "a dtype": toy.call(dtype=torch.float16),
        "a fixed size": toy.call(N=32),
        "another bucket": toy.call(M=129),
        "an optional tensor": toy.op().bind(x, w),
        "its own dtype": toy.op().bind(x.half(), w),
        "strides": toy.op().bind(torch.empty(100, 128)[:, ::2]),
    }
    found = {name: toy.task(call).bucket for name, call in calls.items()}
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


def test_an_edit_of_any_kernel_makes_what_was_measured_stale(toy, monkeypatch):
    """Not only one of the default's: another may have become the best."""
    kernels = [type(name, (Kernel,), {"__module__": f"home.{name}"})() for name in ("first", "second")]
    digests = {"home.first": "1", "home.second": "2"}
    monkeypatch.setattr(gpu, "kernels", lambda entry: kernels)
    monkeypatch.setattr(program, "sources_digest", digests.__getitem__)
    keys = set()
    for module in (None, *digests):
        if module:
            digests[module] += "edited"
        keys.add(gpu.bucket_of(toy.call(), H200, "h200").key)
    assert len(keys) == 3


# The search.


def test_the_fastest_is_kept_with_every_time(toy):
    result = toy.tuned(toy.task())
    assert (result.chosen.kernel, result.chosen.config["us"]) == ("Fast", 8)
    (case,) = result.chosen.times
    assert result.times(case) == (10, 8)
    assert result.gain(case) == 1.25
    assert [c.reason and c.reason[:10] for c in result.candidates] == [None, None, None, "far behind", None]


def test_a_tie_leaves_the_default(toy):
    toy.space((10.0,), (9.95,))
    result = toy.tuned(toy.task())
    assert result.choice == 0
    assert result.gain(next(iter(result.chosen.times))) == 1


def test_only_the_best_are_timed_for_long(toy):
    toy.space((10.0,), (8.0,), (8.1,), (8.2,), (8.3,), (8.9,))
    toy.tuned(toy.task())
    assert sorted(line.split()[1] for line in toy.measured() if line.endswith(" 9")) == ["10.0", "8.0", "8.1", "8.2"]


FAULTS = {
    "hangs": "no answer within 1.5 s: its process was killed",
    "crashes": "its process died: SIGSEGV",
    "is wrong": "y: slice error 3 x its bound at [0, 0]: expected 1, got 2",
    "does not compile": "it does not compile: no such",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_candidate_is_out_with_its_reason_and_the_others_go_on(toy, monkeypatch, fault):
    monkeypatch.setattr(search, "DEADLINE", 1.5)
    toy.space((10.0,), (1.0, fault), (8.0,))
    task = toy.task()
    result = toy.tuned(task, search.build([task], 1, lambda progress: None).failures)
    assert result.candidates[1] == Candidate("Fast", {"us": 1.0, "fault": fault}, {}, FAULTS[fault])
    assert result.chosen.config["us"] == 8


def test_a_faulty_default_leaves_nothing_to_compare_with(toy):
    toy.space((1.0, "is wrong"), (8.0,))
    result = toy.tuned(toy.task())
    (case,) = result.chosen.times
    assert (result.chosen.config["us"], result.times(case), result.gain(case)) == (8, (None, 8), None)
    assert shipped.entry_of(result, [case]) is not None, "whatever is right is better"


def test_who_fails_when_it_is_timed_again_is_not_kept(toy):
    toy.space((10.0,), (8.0, "later"), (9.0,))
    result = toy.tuned(toy.task())
    assert result.candidates[1].reason == "y: wrong this time"
    assert result.chosen.config["us"] == 9


def test_a_reference_that_falls_leaves_its_place_to_the_next(toy):
    toy.space((10.0, "later"), (8.0,), (9.0,))
    result = toy.tuned(toy.task())
    times = {c.config["us"]: t.ratio for c in result.candidates for t in c.times.values() if c.reason is None}
    assert sorted(line.split()[1] for line in toy.measured() if line.endswith(" 9")) == ["10.0", "8.0"]
    assert times == {8.0: 1, 9.0: pytest.approx(9 / 8), 9.9: pytest.approx(9.9 / 8)}
    assert result.chosen.config["us"] == 8


def test_ratios_are_to_the_first_that_is_in_even_if_that_came_later(toy):
    """As where a larger limit lets in a candidate that ranks before those of another kernel."""
    toy.space((10.0, "is wrong"), (8.0,))
    toy.space((9.0,), (9.9,), kernel="Slow")
    toy.tuned(*toy.tasks(toy.call(), limit=1))
    ratios = {c.config["us"]: t.ratio for c in toy.tuned(toy.task()).candidates for t in c.times.values()}
    assert ratios == {8: 1, 9: pytest.approx(9 / 8), 9.9: pytest.approx(9.9 / 8)}


def test_where_nothing_is_right_nothing_is_kept(toy):
    for kernel in ("Fast", "Slow"):
        toy.space((10.0, "is wrong"), kernel=kernel)
    task = toy.task()
    fault = toy.fault(task)
    assert "no candidate is right\n  Fast(us=10.0, fault=is wrong): y: slice error 3" in fault
    assert results.choice(task.bucket) is None


def test_what_is_no_fault_of_a_candidate_is_not_held_against_it(toy):
    toy.space((10.0,), (8.0, "out of memory"))
    task = toy.task()
    fault = toy.fault(task)
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


def test_a_repeated_run_measures_nothing(toy):
    first = toy.tuned(toy.task())
    before = toy.measured()
    assert toy.tuned(toy.task()) == first
    assert toy.measured() == before


def test_more_candidates_or_calls_are_measured_in_addition(toy):
    (few,) = toy.tasks(toy.call(), limit=1)
    toy.tuned(few)
    toy.tuned(toy.task())
    toy.tuned(toy.task(toy.call(), toy.call(120)))
    assert max(n for line, n in toy.measured().items() if line.endswith(" 3")) <= 2  # once on each of the two calls


DAMAGE = {
    "truncated": lambda text: text[: len(text) // 2],
    "of another form": lambda text: "[1, 2]",
    "with another key": lambda text: json.dumps(json.loads(text) | {"more": 1}),
    "with a choice that is not there": lambda text: json.dumps(json.loads(text) | {"choice": 99}),
    "empty": lambda text: "",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_entry_is_made_again(toy, damage):
    task = toy.task()
    toy.tuned(task)
    (place,) = results.home().glob("*.json")
    place.write_text(DAMAGE[damage](place.read_text()))
    results.forget()
    assert results.choice(task.bucket) is None
    assert toy.tuned(task).chosen.config["us"] == 8


def test_a_cache_that_can_not_be_written_is_told(toy, tmp_path):
    (tmp_path / "cache").write_text("a file where the folder should be")
    fault = toy.fault(toy.task())
    assert fault.startswith("tuned choices can't be kept in ")
    assert fault.endswith("; set TILEOPS_CACHE_DIR")


def _tune(task) -> None:
    search.run([task], [0], {}, lambda progress: None)


def process(task):
    made = multiprocessing.get_context("fork").Process(target=_tune, args=(task,))
    made.start()
    return made


def test_a_killed_run_goes_on_where_it_stopped(toy, monkeypatch, tmp_path):
    monkeypatch.setenv("TOY_SECONDS", "0.2")
    task = toy.task()
    running = process(task)
    while sum(toy.measured().values()) < 3:
        time.sleep(0.02)
    os.kill(running.pid, signal.SIGKILL)
    running.join()
    in_flight = list(toy.measured())[-1]
    monkeypatch.setenv("TOY_SECONDS", "0")
    assert toy.tuned(task).chosen.config["us"] == 8
    repeated = {line for line, n in toy.measured().items() if n > 1}
    assert repeated <= {in_flight}


def test_two_processes_share_the_work(toy):
    task = toy.task()
    both = [process(task), process(task)]
    for running in both:
        running.join()
        assert running.exitcode == 0
    assert set(toy.measured().values()) == {1}
    assert results.read(task.bucket).chosen.config["us"] == 8


def test_gpus_share_the_buckets(toy, tmp_path):
    found = toy.tasks(*(toy.call(M) for M in (8, 100, 200)))
    lines = []
    assert search.run(found, [0, 1], {}, lines.append) == {}
    assert len({line.split()[0] for line in (tmp_path / "log").read_text().splitlines()}) == 2
    assert [(p.done, p.total) for p in lines] == [(i, 15) for i in range(1, 16)]
    assert lines[-1].left == 0


def test_a_child_that_can_not_be_started_ends_the_run(toy, monkeypatch):
    monkeypatch.setattr(search, "MEASURE", "no_such_module:measure")
    with pytest.raises(BackendError, match="No module named 'no_such_module'"):
        _tune(toy.task())


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
