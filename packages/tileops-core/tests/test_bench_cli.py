"""``tileops bench`` and ``tileops calibrate``: what is measured, what stands, and how a run ends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tileops.core.bench import document, run
from tileops.core.check import Call
from tileops.core.cli import main
from tileops.core.families import entries
from tileops.core.roofline import profile

GEMM = ("--backend", "cpu", "--op", "GEMMFwdOp")
SQUARE = (*GEMM, "--row", "square-1k")
CASES = ["GEMMFwdOp/square-1k-float16", "GEMMFwdOp/square-1k-bfloat16"]


def tileops(*args: str) -> Result:
    return CliRunner(env={"COLUMNS": "80"}).invoke(main, args)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The cases that were measured, none of them for real."""
    seen: list[str] = []

    def rows(calls: list[Call], bench: Any, cold: bool = False) -> Any:
        for call in calls:
            seen.append(str(call.id))
            yield finished(str(call.id))

    monkeypatch.setattr(run, "run", rows)
    monkeypatch.setattr("tileops.core.bench.rows.floor_us", lambda bench: 1.0)
    return seen


def finished(case: str, **more: Any) -> dict[str, Any]:
    us = {"median": 10.0, "p10": 10.0, "p90": 10.0, "n": 9}
    row = {"case": case, "op": case.partition("/")[0], "status": "ok", "us": us, "rivals": {}, "tflops": 1.0}
    return {**row, "gbps": 1.0, "error": 0.5, "kernel": "reference", **more}


def rows_of(path: Path) -> dict[str, Any]:
    return {row["case"]: row for row in json.loads(path.read_text())["rows"]}


def all_cases(*ops: str) -> list[str]:
    return [
        f"{e.name}/{'-'.join([row.label, *case.values()])}"
        for e in entries().values()
        if not ops or e.name in ops
        for row in e.workloads
        for case in row.dtype_cases or ({},)
    ]


def test_every_row_of_every_installed_operator_is_measured(measured: list[str]) -> None:
    assert tileops("bench", "--backend", "cpu").exit_code == 0
    assert measured == all_cases()


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (("--family", "gemm"), all_cases("GEMMFwdOp")),
        (("--op", "GemmFwdOp", "--row", "square-1k"), CASES),
        (("--row", "square-1k-bfloat16"), CASES[1:]),
        (("--row", CASES[0]), CASES[:1]),
        (("--op", "GEMMFwdOp", "--dtype", "float16"), [c for c in all_cases("GEMMFwdOp") if c.endswith("-float16")]),
        (("--family", "norm", "--quick"), [all_cases(e.name)[0] for e in entries().values() if e.family == "norm"]),
    ],
)
def test_rows_are_chosen_by_family_op_label_and_dtype(
    args: tuple[str, ...], expected: list[str], measured: list[str]
) -> None:
    assert tileops("bench", "--backend", "cpu", *args).exit_code == 0
    assert measured == expected


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--family", "gem"), "no family is called 'gem'; did you mean 'gemm'?"),
        (("--row", "square-1kk"), "did you mean 'square-1k'?"),
        (("--op", "GEMMFwdOp", "--dtype", "float64"), "no dtype of a row is called 'float64'"),
        (("--timer", "graph"), "no timer of cpu is called 'graph'"),
        (("--backend", "tpu"), "no device is called 'tpu'"),
        (("--op", "GEMMFwdOp", "--family", "norm"), "GEMMFwdOp is not of the family norm"),
        (
            ("--row", "square-8k", "--dtype", "float16"),
            "no row of these operators fits --row square-8k",
        ),
    ],
)
def test_what_means_nothing_is_a_usage_error(args: tuple[str, ...], said: str, measured: list[str]) -> None:
    result = tileops("bench", "--backend", "cpu", *args)
    assert result.exit_code == 2
    assert said in result.stderr
    assert measured == []


def test_finished_rows_stand_and_failed_ones_are_tried_again(measured: list[str], tmp_path: Path) -> None:
    into = tmp_path / "gemm.json"
    assert tileops("bench", *SQUARE, "--json", str(into)).exit_code == 0
    assert [*rows_of(into)] == measured == CASES
    held = json.loads(into.read_text())
    held["rows"][1] |= {"status": "failed", "reason": "out of memory"}
    into.write_text(json.dumps(held))
    result = tileops("bench", *SQUARE, "--json", str(into))
    assert measured == [*CASES, CASES[1]]
    assert f"1 rows of {into} stand" in result.stdout
    assert all(row["status"] == "ok" for row in rows_of(into).values())


def test_rows_of_other_sources_are_measured_again_and_kept_aside(
    measured: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    into = tmp_path / "gemm.json"
    tileops("bench", *GEMM, "--row", "square-8k", "--json", str(into))
    before = into.read_text()
    monkeypatch.setattr(document, "sources_digest", lambda: "0123456789abcdef")
    result = tileops("bench", *GEMM, "--row", "square-8k", "--json", str(into))
    assert measured == ["GEMMFwdOp/square-8k-bfloat16"] * 2
    assert "rows of other sources are measured again" in result.stdout
    assert json.loads(into.read_text())["tree"] == "0123456789abcdef"
    assert (tmp_path / "gemm.stale.json").read_text() == before


def test_rows_of_another_environment_are_measured_again(measured: list[str], tmp_path: Path) -> None:
    into = tmp_path / "gemm.json"
    tileops("bench", *SQUARE, "--json", str(into))
    result = tileops("bench", *SQUARE, "--quick", "--json", str(into))
    assert measured == [*CASES, CASES[0]]
    assert "another environment (protocol)" in result.stdout
    assert [*rows_of(into)] == CASES[:1]


def test_no_document_that_was_put_aside_is_lost(measured: list[str], tmp_path: Path) -> None:
    into = tmp_path / "gemm.json"
    for flops in ("4e6", "3e6", "2e6"):
        tileops("bench", *SQUARE, "--max-flops", flops, "--json", str(into))
    kept = {p.name: json.loads(p.read_text())["environment"]["max_flops"] for p in tmp_path.glob("*.json")}
    assert kept == {"gemm.json": 2e6, "gemm.stale.json": 4e6, "gemm.stale-2.json": 3e6}


def test_two_runs_write_no_document_together(measured: list[str], tmp_path: Path) -> None:
    into = tmp_path / "gemm.json"
    with document.to_oneself(into):
        result = tileops("bench", *SQUARE, "--json", str(into))
    assert result.exit_code == 1
    assert f"another bench writes {into}" in result.stderr
    assert measured == []
    assert tileops("bench", *SQUARE, "--json", str(into)).exit_code == 0
    assert [p.name for p in tmp_path.iterdir()] == ["gemm.json"]


def test_the_figures_of_a_profile_are_part_of_the_environment(measured: list[str], tmp_path: Path) -> None:
    into, board = tmp_path / "gemm.json", tmp_path / "board.yaml"
    shipped = (Path(profile.__code__.co_filename).parent / "profiles/h200.yaml").read_text()
    for text in (shipped, shipped.replace("4.8e+12", "4.7e+12")):
        board.write_text(text)
        tileops("bench", *SQUARE, "--profile", str(board), "--json", str(into))
    assert measured == CASES * 2
    assert json.loads(into.read_text())["environment"]["profile"].startswith("h200, ")
    assert json.loads((tmp_path / "gemm.stale.json").read_text())["environment"]["profile"] == "h200"


def test_what_is_no_result_document_is_left_alone(measured: list[str], tmp_path: Path) -> None:
    into = tmp_path / "notes.json"
    into.write_text('{"rows": 3}')
    result = tileops("bench", *SQUARE, "--json", str(into))
    assert result.exit_code == 1
    assert "not a result document" in result.stderr
    assert into.read_text() == '{"rows": 3}'


def test_ctrl_c_keeps_finished_rows(measured: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    into = tmp_path / "gemm.json"

    def rows(calls: list[Call], bench: Any, cold: bool = False) -> Any:
        yield finished(str(calls[0].id))
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "run", rows)
    assert tileops("bench", *SQUARE, "--json", str(into)).exit_code == 130
    assert [*rows_of(into)] == CASES[:1]


def test_a_failed_row_fails_the_run(measured: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    into = tmp_path / "gemm.json"

    def rows(calls: list[Call], bench: Any, cold: bool = False) -> Any:
        yield {"case": str(calls[0].id), "op": "GEMMFwdOp", "status": "failed", "reason": "the result is wrong"}
        yield finished(str(calls[1].id))

    monkeypatch.setattr(run, "run", rows)
    result = tileops("bench", *SQUARE, "--json", str(into))
    assert result.exit_code == 1
    assert f"[1/2, 0 min left] {CASES[0]}: failed: the result is wrong" in result.stdout
    assert [row["status"] for row in rows_of(into).values()] == ["failed", "ok"]


def test_what_is_built_is_known_before_any_family_is_imported() -> None:
    code = """
import torch
from tileops.core import torch_ops
from tileops.core.backend import cuda
from tileops.core.bench import run
from tileops.core.cli.rows import workloads
from tileops.core.families import entries
cuda.device, cuda.name = lambda index: "H200", lambda index: "NVIDIA H200"
run.gpu.recipe = lambda backend, call, device, board: (torch_ops.class_of(call.entry).__name__, device)
print({made for made in run.recipes((w.call(1e6) for w in workloads(entries().values())), torch.device("cuda"))})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert all(f"('{op}', 'H200')" in done.stdout for op in entries())


def test_the_programs_of_what_is_due_are_built_first(measured: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def recipe(call: Call) -> Any:
        return SimpleNamespace(key=call.id, static=SimpleNamespace(op=call.entry.name), kernel="kernel")

    def build(recipes: list[Any]) -> Any:
        assert measured == []
        assert [r.key for r in recipes] == CASES
        yield recipes[0], None
        yield recipes[1], "ptxas: too many registers\nline 3"

    monkeypatch.setattr(run, "recipes", lambda calls, device: [recipe(call) for call in calls])
    monkeypatch.setattr("tileops.core.program.build", build)
    result = tileops("bench", *SQUARE)
    assert "GEMMFwdOp, str: ptxas: too many registers\n" in result.stdout
    assert measured == CASES


def test_a_summary_counts_ties_as_one_and_names_the_worst_row() -> None:
    rows = [finished(f"GEMMFwdOp/{n}", ratio=ratio) for n, ratio in (("a", 0.995), ("b", 1.21), ("c", 1.0), ("d", 0.9))]
    rows += [finished("GEMMFwdOp/none"), {"case": "GEMMFwdOp/x", "op": "GEMMFwdOp", "status": "failed", "ratio": 0.1}]
    (summary,) = document.summaries(rows)
    assert (summary.rows, summary.worst, summary.worst_ratio) == (4, "GEMMFwdOp/d", 0.9)
    assert summary.ratio == pytest.approx((1.21 * 0.9) ** 0.25)


def test_the_whole_way_on_a_cpu(tmp_path: Path) -> None:
    into = tmp_path / "gemm.json"
    result = tileops("bench", *GEMM, "--quick", "--json", str(into))
    assert result.exit_code == 0, result.output
    found = json.loads(into.read_text())
    (row,) = found["rows"]
    assert (found["schema"], found["environment"]["timer"], found["board"][:3]) == ("tileops.results/1", "wall", "cpu")
    assert row["scaled"] == {"N": 264, "K": 448}
    assert row["rivals"]["torch"]["status"] == "ok"
    assert row["rivals"]["cublaslt"] == {"status": "missing", "reason": "cublaslt needs a CUDA device"}
    assert row["fastest"] == "torch"
    assert row["first_call"]["warm_s"] > 0


def test_calibrate_writes_a_profile_that_loads_and_bounds(tmp_path: Path) -> None:
    as_yaml, as_json = tmp_path / "cpu.yaml", tmp_path / "cpu.json"
    result = tileops("calibrate", "--backend", "cpu", "--quick", "--yaml", str(as_yaml), "--json", str(as_json))
    assert result.exit_code == 0, result.output
    made = profile(as_yaml)
    assert made == profile(as_json)
    assert made.bandwidth.calibrated.confidence == made.launch_floor_s.calibrated.confidence == "measured"
    assert all(name in made.bandwidth.calibrated.source for name in ("copy", "read", "triad"))
    assert made.bandwidth.theoretical.value is None
    assert made.peak["cuda_core"]["float32"].calibrated.value > 1e8
    assert tileops("bench", *GEMM, "--quick", "--profile", str(as_yaml)).exit_code == 0
