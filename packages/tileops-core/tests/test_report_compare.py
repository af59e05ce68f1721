"""What counts as a change from one result document to another, and how ``tileops report --compare`` ends."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tileops.core.cli import main

GEMM = "GEMMFwdOp"


def row(case: str, us: float = 10.0, torch: float | None = None, spread: float = 0.0) -> dict[str, Any]:
    """A made-up row, p10 and p90 ``spread`` of its median away, against a rival that takes ``torch``."""
    measured = {"median": us, "p10": us * (1 - spread), "p90": us * (1 + spread), "n": 9}
    made = {"case": case, "op": GEMM, "status": "ok", "us": measured}
    if torch:
        made |= {"rivals": {"torch": {"status": "ok", "us": torch}}, "fastest": "torch", "ratio": torch / us}
    return made


def failed(case: str) -> dict[str, Any]:
    return {"case": case, "op": GEMM, "status": "failed", "reason": "the result is wrong"}


def document(*rows: dict[str, Any], **more: Any) -> dict[str, Any]:
    environment = {"gpu": "NVIDIA H200", "driver": "test"}
    return {"schema": "tileops.results/1", "board": "h200", "environment": environment, "rows": [*rows]} | more


Written = Any


@pytest.fixture
def written(tmp_path: Path) -> Written:
    def write(name: str, value: Any) -> Path:
        (tmp_path / f"{name}.json").write_text(json.dumps(value))
        return tmp_path / f"{name}.json"

    return write


def tileops(*args: Any) -> Result:
    return CliRunner(env={"COLUMNS": "120"}).invoke(main, ["report", *map(str, args)])


def outcomes(result: Result) -> dict[str, str]:
    return {r["case"].rpartition("/")[2]: r["outcome"] for r in json.loads(result.stdout)["rows"]}


def test_a_regression_ends_with_one(written: Written) -> None:
    old = written("old", document(row(f"{GEMM}/a", 100, 100), row(f"{GEMM}/b", 100, 100), tree="1"))
    new = written("new", document(row(f"{GEMM}/a", 110, 100), row(f"{GEMM}/b", 90, 100), tree="2"))
    result = tileops("--compare", old, new)
    assert result.exit_code == 1
    assert re.search(rf"regression +{GEMM}/a +100 +110 +1.100 +2% +0.909", result.stdout)
    assert re.search(rf"improvement +{GEMM}/b +100 +90 +0.900 +2% +1.111", result.stdout)
    assert "tree: 1 -> 2" in result.stdout
    assert "2 rows in both: 1 regression, 1 improvement" in result.stdout
    assert tileops("--compare", old, old).exit_code == 0
    assert tileops(new, "--compare", old).exit_code == 1


@pytest.mark.parametrize(
    ("factor", "rival", "spread", "outcome"),
    [
        (1.015, 100, 0.0, "same"),  # at least 2 % is noise
        (1.03, 100, 0.0, "regression"),
        (0.97, 100, 0.0, "improvement"),
        (1.03, 100, 0.02, "same"),  # +-2 % around each median are noise up to 4 %
        (1.05, 100, 0.02, "regression"),
        (1.05, 105, 0.0, "drift"),  # the rival is as much slower: the machine is
        (1.00, 95, 0.0, "drift"),  # the rival has become faster
        (1.03, None, 0.0, "regression"),
    ],
)
def test_what_counts_as_a_change(
    factor: float, rival: float | None, spread: float, outcome: str, written: Written
) -> None:
    old = written("old", document(row(f"{GEMM}/a", 100, rival and 100, spread)))
    new = written("new", document(row(f"{GEMM}/a", 100 * factor, rival, spread)))
    result = tileops("--compare", old, new, "--json")
    assert outcomes(result) == {"a": outcome}
    assert result.exit_code == (outcome == "regression")


def test_rows_that_fail_or_come_and_go(written: Written) -> None:
    old = document(row(f"{GEMM}/a"), failed(f"{GEMM}/b"), failed(f"{GEMM}/c"), row(f"{GEMM}/gone"))
    new = document(failed(f"{GEMM}/a"), row(f"{GEMM}/b"), failed(f"{GEMM}/c"), row(f"{GEMM}/new"), board="h200")
    paths = written("old", old), written("new", new | {"environment": {"gpu": "NVIDIA H200", "driver": "another"}})
    result = tileops("--compare", *paths, "--json")
    assert result.exit_code == 1
    assert outcomes(result) == {"a": "regression", "c": "failed", "b": "improvement"}
    found = json.loads(result.stdout)
    assert (found["only_old"], found["only_new"]) == ([f"{GEMM}/gone"], [f"{GEMM}/new"])
    assert found["environment"]["driver"] == {"old": "test", "new": "another"}
    assert "gpu" not in found["environment"]


def test_rows_that_are_gone_end_with_one(written: Written) -> None:
    """As a run leaves them that stopped on a lost device; --partial says that they were not to be measured."""
    old = written("old", document(row(f"{GEMM}/a"), row(f"{GEMM}/b")))
    new = written("new", document(row(f"{GEMM}/a")))
    result = tileops("--compare", old, new)
    assert result.exit_code == 1
    assert "1 rows in both: 1 same; 1 in the old document only" in result.stdout
    assert tileops("--compare", old, new, "--partial").exit_code == 0
    assert tileops("--compare", new, old).exit_code == 0
    none = tileops("--compare", old, written("none", document()))
    assert none.exit_code == 2
    assert "no row is in both" in none.stderr


def test_command_lines_that_are_wrong(written: Written) -> None:
    one, other = written("one", document()), written("other", document(board="h100"))
    for args, told in (
        ((), "Missing argument"),
        ((one.with_name("none.json"),), "does not exist"),
        ((one, "--json"), "--json is for --compare"),
        ((one, "--partial"), "--partial is for --compare"),
        (("--compare", one, one, one), "two documents"),
        (("--compare", one, one, "-o", "page.html"), "writes no page"),
        (("--compare", one, other), "compare runs on one board"),
    ):
        result = tileops(*args)
        assert result.exit_code == 2
        assert told in result.stderr
