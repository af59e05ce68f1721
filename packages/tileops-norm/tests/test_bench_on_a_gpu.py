"""The bench on a GPU: timers agree, a rival that can't be captured spoils nothing, a row has its figures."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from click.testing import CliRunner

from tileops.core.bench import rows, run
from tileops.core.bench.rows import measure
from tileops.core.bench.timers import TIMERS, flusher
from tileops.core.bench.timing import COOL, alternate, quick
from tileops.core.cli import main
from tileops.core.families import find_entry
from tileops.core.workloads import labelled

pytestmark = pytest.mark.cuda
CUDA = torch.device("cuda")


@pytest.mark.parametrize("other", ["events", "cupti"])
def test_timers_agree_on_a_long_kernel(other: str) -> None:
    if other == "cupti":
        pytest.importorskip("cupti")
    a, b = (torch.rand(1 << 28, device=CUDA) for _ in range(2))
    before = flusher(CUDA, 1 << 27)
    bursts = {t: TIMERS[t]([lambda: a.copy_(b)], COOL.calls, CUDA, before) for t in ("graph", other)}
    seen = {t: statistics.median(lap.us for lap in laps) for t, laps in alternate(bursts, COOL).items()}
    assert seen[other] == pytest.approx(seen["graph"], rel=0.05)


def test_a_rival_that_cannot_be_captured_is_timed_otherwise_and_the_others_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def plain(call: Any, inputs: Any) -> Any:
        x, weight, shape = inputs["x"], inputs["weight"], call["normalized_shape"]
        return lambda: torch.nn.functional.rms_norm(x, shape, weight, 2.0**-23)

    def waits(call: Any, inputs: Any) -> Any:
        run = plain(call, inputs)

        def waiting() -> Any:
            y = run()
            y.flatten()[0].item()
            return y

        return waiting

    monkeypatch.setattr(rows, "rivals_of", lambda entry, backend: {"waits": waits, "torch": plain})
    call = labelled(find_entry("RMSNormFwdOp"), "llama-8b-prefill")[0]
    bench = run.prepare(CUDA, "graph", cold_l2=True, brief=True)
    row = measure(call, attrs.evolve(bench, cool=quick(COOL)))
    assert row["status"] == "ok"
    assert row["rivals"]["waits"]["timer"] in ("cupti", "events")
    assert row["rivals"]["torch"]["status"] == "ok"
    assert "timer" not in row["rivals"]["torch"]


def test_a_row(tmp_path: Path) -> None:
    into = tmp_path / "norm.json"
    args = ["bench", "--op", "RMSNormFwdOp", "--row", "llama-8b-prefill-bfloat16", "--json", str(into)]
    result = CliRunner().invoke(main, args)
    assert result.exit_code == 0, result.output
    found = json.loads(into.read_text())
    (row,) = found["rows"]
    assert (found["environment"]["timer"], found["environment"]["l2"]) == ("graph", "cold")
    assert 0 < row["percent"] <= 100
    assert 0 < row["floor_us"] < row["us"]["median"]
    assert row["first_call"]["cold_s"] > row["first_call"]["warm_s"] > 0
    assert row["extra_bytes"] < 1 << 20
    assert row["rivals"]["torch"]["status"] == row["rivals"]["compile"]["status"] == "ok"
