"""The bench on a GPU: timers agree, they say what ncu says, a row has its figures."""

from __future__ import annotations

import csv
import json
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from click.testing import CliRunner

from tileops.core import workloads
from tileops.core.backend import cuda
from tileops.core.bench import rows, run, timers
from tileops.core.bench.rows import measure
from tileops.core.bench.timers import TIMERS, flusher
from tileops.core.bench.timing import COOL, alternate, copies_for_cold_l2, quick
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
    # No copy_: a graph makes that a copy of memory, which is another and slower thing than the kernel of a plain call.
    bursts = {t: TIMERS[t]([lambda: torch.neg(a, out=b)], COOL.calls, CUDA, before) for t in ("graph", other)}
    seen = {t: statistics.median(lap.us for lap in laps) for t, laps in alternate(bursts, COOL).items()}
    assert seen[other] == pytest.approx(seen["graph"], rel=0.05)


def test_a_host_that_takes_its_time_is_in_no_figure() -> None:
    x = torch.rand(1 << 20, device=CUDA)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        for _ in range(100):
            x.neg_()

    def slowly() -> None:
        time.sleep(3e-4)
        captured.replay()

    bursts = {f.__name__: timers._between_events(f, 100, CUDA, lambda: None) for f in (captured.replay, slowly)}
    seen = {name: statistics.median(lap.us for lap in laps) for name, laps in alternate(bursts, COOL).items()}
    assert seen["slowly"] == pytest.approx(seen["replay"], rel=0.02)


SHAPES = {"short": (64, 4096), "long": (32768, 8192)}  # some 7 us and 400 us of torch's RMSNorm
KERNEL = "layer_norm"  # in the name of torch's kernel for it
UNDER_NCU = """
import sys, torch
rows, n, copies = map(int, sys.argv[1:])
xs = [torch.randn(rows, n, device="cuda").bfloat16() for _ in range(copies)]
weight = torch.randn(n, device="cuda").bfloat16()
for x in (xs * 5)[:20]:
    torch.nn.functional.rms_norm(x, (n,), weight)
torch.cuda.synchronize()
"""


@pytest.mark.nightly  # needs ncu, which comes with the CUDA toolkit
@pytest.mark.parametrize("which", SHAPES)
def test_a_kernel_of_torch_takes_what_ncu_says(which: str) -> None:
    """With inputs that come from memory and code that is warm, as ncu sees it where it leaves the caches alone."""
    rows, n = SHAPES[which]
    copies = copies_for_cold_l2(4 * rows * n, cuda.device(0).l2_bytes)
    weight = torch.randn(n, device=CUDA).bfloat16()
    xs = [torch.randn(rows, n, device=CUDA).bfloat16() for _ in range(copies)]
    calls = [partial(torch.nn.functional.rms_norm, x, (n,), weight) for x in xs]
    burst = TIMERS["graph"](calls, max(copies, COOL.calls), CUDA, lambda: None)
    ours = statistics.median(lap.us for lap in alternate({"torch": burst}, COOL)["torch"])
    options = ["--clock-control", "none", "--cache-control", "none", "--kernel-name", f"regex:{KERNEL}", "--csv"]
    command = ["ncu", *options, "--metrics", "gpu__time_duration.sum", sys.executable, "-c", UNDER_NCU]
    said = subprocess.run([*command, *map(str, (rows, n, copies))], capture_output=True, text=True, check=True).stdout
    table = list(csv.DictReader(line for line in said.splitlines() if line.startswith('"')))
    assert {row["Metric Unit"] for row in table} == {"ns"}
    theirs = statistics.median(float(row["Metric Value"].replace(",", "")) / 1e3 for row in table)
    assert ours == pytest.approx(theirs, rel=0.05)


@pytest.mark.parametrize("label", ["llama-8b-decode-bfloat16", "llama-8b-prefill-bfloat16", "throughput-8192-bfloat16"])
def test_a_row_measured_three_times_says_the_same(label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "rivals_of", lambda entry, backend: {})
    (call,) = (c for c in workloads.calls(find_entry("RMSNormFwdOp")) if c.id == f"RMSNormFwdOp/{label}")
    bench = run.prepare(CUDA, None, cold_l2=True, brief=False)
    found = list(run.run([call] * 3, bench))
    seen = [row["us"]["median"] for row in found]
    assert max(seen) <= 1.03 * min(seen), [(row["us"], row.get("clock_mhz")) for row in found]


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
