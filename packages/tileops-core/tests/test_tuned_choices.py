"""Where a plan finds a tuned choice, what is shipped, tuning on demand, and the command. No GPU."""

from __future__ import annotations

import json
import re
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
from tileops.core.errors import CaptureError, TileOpsError
from tileops.core.explain import Explanation
from tileops.core.kernel import H200
from tileops.core.program import Program
from tileops.core.roofline import bound
from tileops.core.tune import results, search, shipped
from tileops.core.tune.results import Candidate, Result, Time

# How a plan finds it.


def chosen(toy, call=None, board="h200"):
    return gpu.choose(gpu.bucketed(call or toy.call()), H200, board=board)


def ship(task, kernel="Fast", **config):
    table = shipped.path(gpu.torch_ops.class_of(next(iter(task.calls.values())).entry), "h200")
    entry = shipped.Shipped(
        task.bucket.op, task.bucket.call, kernel, {"us": 9.0, "fault": "", **config}, {"a": [10, 9]}
    )
    shipped.write(table, {"board": "h200"}, {task.bucket.text: entry})
    return table


def test_the_result_cache_comes_before_the_shipped_table_and_that_before_the_default(toy):
    task = toy.task()
    assert (chosen(toy).config.us, chosen(toy).source) == (10, "default")
    ship(task)
    assert (chosen(toy).config.us, chosen(toy).source) == (9, "shipped table h200")
    toy.tuned(task)
    assert (chosen(toy).config.us, chosen(toy).source) == (8, "result cache")
    assert chosen(toy, board="h100").source == chosen(toy, board=None).source == "default"
    assert chosen(toy, toy.call(M=8)).source == "default", "another bucket"
    assert chosen(toy, toy.call(M=17)).source == "result cache", "another length of the bucket"


@pytest.mark.parametrize(
    ("kernel", "config", "N", "reason"),
    [
        ("Gone", {}, 64, "there is no such kernel"),
        ("Fast", {"us": 7.5}, 64, "it has no such config"),
        ("Fast", {"more": 1}, 64, "it has no such config"),
        ("Fast", {}, 128, "N > 64"),
    ],
)
def test_a_tuned_choice_that_is_no_longer_legal_is_ignored_and_told(toy, kernel, config, N, reason):
    call = toy.call(N=N)
    ship(toy.task(call), kernel, **config)
    choice = chosen(toy, call)
    assert choice.source == "default"
    (told,) = choice.ignored
    assert told.startswith(f"{kernel} with {{'us': ")
    assert told.endswith(f"from the shipped table h200: {reason}")
    explained = Explanation(call, "Fast", choice.config, {}, (), bound(call, None), choice.source, choice.ignored)
    assert f"kernel: Fast, {choice.config} (default)\n  ignored: {told}" in str(explained)


def test_files_are_read_once(toy, monkeypatch):
    task = toy.task()
    ship(task)
    reads = []
    read, load = results.read, shipped.yaml.load
    monkeypatch.setattr(results, "read", lambda bucket: reads.append("result") or read(bucket))
    monkeypatch.setattr(shipped.yaml, "load", lambda *a: reads.append("table") or load(*a))
    for _ in range(3):
        chosen(toy)
    assert sorted(reads) == ["result", "table"]


# What is shipped.


def test_a_table_is_small_sorted_and_comes_back_as_it_was(toy):
    found = toy.tasks(*(toy.call(M, eps=1e-5) for M in (200, 8, 100)))
    entries = {t.bucket.text: shipped.entry_of(toy.tuned(t), list(t.calls)) for t in found}
    table = ship(toy.task())
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
def test_gains_within_the_noise_are_not_shipped(toy, us, worth):
    times = {"a": Time(us, us / 10, 9)}
    result = Result("TunedToyFwdOp", {}, "h200", "", "", [Candidate("A", {}, {"a": Time(10, 1, 9)})], 1)
    result.candidates.append(Candidate("B", {}, times))
    assert (shipped.entry_of(result, ["a"]) is not None) is worth
    assert shipped.entry_of(result, ["a"], every=True).us == {"a": [10, us]}


def test_a_malformed_table_says_so(toy):
    table = ship(toy.task())
    table.write_text("choices: [{op: 1}]")
    shipped.entries.cache_clear()
    with pytest.raises(TileOpsError, match=r"h200.yaml: no table of tuned choices: .*; restore it from git"):
        chosen(toy)


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
    last: Any = SimpleNamespace(run=None, settle=lambda *_: None)
    return gpu.plan(pretender, call, (), {}, last, tune).choice


def test_a_call_is_tuned_once_when_it_is_asked_for(toy, pretender, caplog):
    call = toy.call()
    assert plan(pretender, call).source == "default"
    assert not toy.measured()
    seen = []
    for _ in range(2):
        choice = plan(pretender, call, tune=True)
        assert (choice.config.us, choice.source) == (8, "result cache")
        seen.append(toy.measured())
    assert seen[0] == seen[1]
    assert [r.message for r in caplog.records] == [
        "tuning TunedToyFwdOp N=64, T=float32, M=17-128: 5 candidates on meta",
        "tuned: Fast(us=8.0, fault=), x1.250 of the default",
    ]


def test_the_environment_asks_for_every_bucket(toy, pretender, monkeypatch):
    monkeypatch.setenv("TILEOPS_TUNE", "1")
    assert plan(pretender, toy.call()).source == "result cache"
    assert plan(pretender, toy.call(8)).source == "result cache"


def test_a_capture_can_not_wait_for_it(toy, pretender):
    call = toy.call()
    pretender.is_capturing = True
    with pytest.raises(CaptureError, match=r"this call is to be tuned.*call it once, or op.warmup"):
        plan(pretender, call, tune=True)
    assert not toy.measured()
    pretender.is_capturing = False
    plan(pretender, call, tune=True)
    pretender.is_capturing = True
    assert plan(pretender, call, tune=True).source == "result cache"


def test_a_fault_leaves_the_default_and_is_logged(toy, pretender, monkeypatch, caplog):
    monkeypatch.setattr(search, "MEASURE", "no_such_module:measure")
    assert plan(pretender, toy.call(), tune=True).source == "default"
    assert "not tuned: no_such_module:measure can't be started" in caplog.text


def test_a_request_is_for_all_equal_ops_and_for_later_calls(toy, pretender, monkeypatch):
    from tileops.core import backend

    monkeypatch.setattr(backend, "plan", lambda *args: gpu.plan(pretender, *args))
    op, x = toy.op(eps=0.125), torch.ones(100, 64)
    op(x, None)
    state = op._state
    assert state.local.run[0].choice.source == "default"
    toy.op(eps=0.125).request_tune()
    op(x, None)
    assert state.local.run[0].choice.source == "result cache"


def test_a_call_in_flight_brings_no_earlier_plan_back(toy, pretender, monkeypatch):
    """One that began before the request, of a known kind or of an unknown one."""
    from tileops.core import backend

    monkeypatch.setattr(backend, "plan", lambda *args: gpu.plan(pretender, *args))
    op, x = toy.op(eps=0.375), torch.ones(100, 64)
    state = op._state
    op(x, None)
    before = state.local.run[0]
    op.request_tune()
    state.settle(before, (x, None))
    assert state.guards == ()

    def interrupted(*args):
        made = gpu.plan(pretender, *args)
        op.request_tune()
        return made

    monkeypatch.setattr(backend, "plan", interrupted)
    op(x, None)
    assert (state.guards, state.behind, len(state.plans), state.kinds) == ((), (), 0, {})


def test_on_a_cpu_it_does_nothing(toy, monkeypatch):
    monkeypatch.setenv("TILEOPS_TUNE", "1")
    op, x = toy.op(eps=0.25), torch.ones(100, 64)
    op.request_tune()
    assert torch.equal(op(x, None), x)
    assert not toy.measured()


# The command.


@pytest.fixture
def tileops(toy, monkeypatch):
    monkeypatch.setattr(
        command, "_devices", lambda: [("h200", H200), ("h200", H200), ("a100", attrs.evolve(H200, arch="sm80"))]
    )
    monkeypatch.setattr(output, "entry_of", lambda name: toy.op.entry)
    monkeypatch.setattr(families, "op_class", lambda entry: toy.op)
    return lambda *args: CliRunner(env={"COLUMNS": "200"}).invoke(main, ["tune", "TunedToyFwdOp", "--gpus", "0", *args])


def test_the_command_tunes_rows_and_says_what_it_gained(tileops, tmp_path):
    done = tileops("--json", str(tmp_path / "out.json"))
    assert done.exit_code == 0, done.output
    assert "compiling [10/10] 0:00:00 left" in done.output
    assert re.search(r"compiled 10 in \d+ s: \d+\.", done.output)
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


def test_rows_and_dtypes_select_buckets(toy, tileops):
    assert tileops("--row", "short", "--dtype", "float16").exit_code == 0
    assert {line.split()[2] for line in toy.measured()} == {"TunedToyFwdOp/short-float16"}
    assert tileops("--row", "long").exit_code == 0
    assert {line.split()[2].partition("/")[2] for line in toy.measured()} == {
        "short-float16",
        "long-float32",
        "longer-float32",
    }


def test_ship_writes_the_familys_table(toy, tileops):
    done = tileops("--ship")
    assert done.exit_code == 0, done.output
    table = toy.table
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
        (("--dtype", "float15"), 2, "no dtype of a row is called 'float15'; did you mean 'float16'?"),
        (("--gpus", "a"), 2, "--gpus is 'all' or numbers such as '0,1', not 'a'"),
        (("--gpus", "7"), 3, "there is no GPU 7: 3 are visible; name fewer with --gpus"),
        (("--gpus", "all"), 2, "the GPUs are not alike (0: h200, 1: h200, 2: a100); name those of one kind"),
    ],
)
def test_what_can_not_be_tuned_is_said(tileops, args, code, message):
    done = tileops(*args)
    assert done.exit_code == code
    assert message in done.output


def test_a_fault_is_shown_and_fails_the_command(toy, tileops):
    toy.space((10.0,), (8.0, "out of memory"))
    done = tileops("--row", "short", "--dtype", "float16")
    assert done.exit_code == 1
    assert "OutOfMemoryError: another process has it" in done.output
