"""The report: what a page shows of result documents, and what counts as a change from one to another."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tileops.core.cli import main
from tileops.core.errors import TileOpsError
from tileops.core.families import entries
from tileops.core.report import load, render
from tileops.core.report.summary import boards, counted, history, op_of, rated_for, verdict
from tileops.core.roofline import bound, profile
from tileops.core.workloads import calls

GEMM = "GEMMFwdOp"


def row(case: str, us: float = 10.0, torch: float | None = None, **more: Any) -> dict[str, Any]:
    """A made-up row: 200 GFLOP and 1 GB in ``us``, against a rival that takes ``torch``."""
    made = {
        "case": case,
        "op": case.partition("/")[0],
        "label": case.partition("/")[2],
        "dtypes": ["bfloat16"],
        "status": "ok",
        "kernel": "TestKernel",
        "us": {"median": us, "p10": us * 0.995, "p90": us * 1.005, "n": 9},
        "flops": 200e9,
        "bytes": 1e9,
        "tflops": 200e9 / us / 1e6,
        "gbps": 1e9 / us / 1e3,
        "bound_us": us / 2,
        "bound_by": "memory",
        "error": 0.25,
    }
    if torch:
        made |= {"rivals": {"torch": {"status": "ok", "us": torch}}, "fastest": "torch", "ratio": torch / us}
    return made | more


def failed(case: str, reason: str = "the result is wrong") -> dict[str, Any]:
    return {"case": case, "op": case.partition("/")[0], "status": "failed", "reason": reason}


def document(*rows: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A made-up result document."""
    environment = {"gpu": "NVIDIA H200", "driver": "test", "note": "made-up figures of a test"}
    return {"schema": "tileops.results/1", "board": "h200", "environment": environment, "rows": [*rows]} | more


def suite(seed: int, date: str) -> dict[str, Any]:
    """A made-up document of every row of the installed families: times are drawn, work and bounds are the specs'."""
    draw = random.Random(seed)
    return document(
        *(_drawn(call, draw) for entry in entries().values() for call in calls(entry)),
        environment={"gpu": "NVIDIA H200", "date": date, "note": "made-up figures of a test"},
        tree=f"test-{seed}",
    )


def _drawn(call: Any, draw: random.Random) -> dict[str, Any]:
    limit = bound(call, profile("h200"))
    least = (limit.seconds or 0) * 1e6
    us = least / draw.uniform(0.5, 0.92) + 1.5
    dtypes = [call.indices[n] for n, i in call.entry.signature.indices.items() if i.kind == "DType"]
    seen = {
        "dtypes": dtypes,
        "flops": limit.flops,
        "bytes": limit.bytes,
        "bound_us": least,
        "bound_by": limit.by,
        "error": draw.uniform(0.1, 0.6),
    }
    if draw.random() < 0.04:
        return failed(call.id) | seen | {"error": 3.0, "tflops": 1.0}
    rivals: dict[str, dict[str, Any]] = {}
    for name in call.entry.baselines["cuda"].required:
        rivals[name] = {
            "status": "ok",
            "us": us * draw.choice([draw.uniform(0.98, 1.01), draw.uniform(0.85, 1.6), draw.uniform(1.1, 1.9)]),
            "error": 0.4,
        }
        if name in ("quack", "flashinfer") and draw.random() < 0.6:
            rivals[name] = {"status": "missing", "reason": f"{name} can't be imported"}
    for name in call.entry.baselines["cuda"].optional:
        rivals[name] = {"status": "missing", "reason": "no adapter yet"}
    times = {name: rival["us"] for name, rival in rivals.items() if "us" in rival}
    rates = {"tflops": limit.flops / us / 1e6, "gbps": limit.bytes / us / 1e3, "clock_mhz": 1700}
    made = row(call.id, us) | seen | rates | {"rivals": rivals, "host_ratio": draw.uniform(0.6, 0.9)}
    if times:
        fastest = min(times, key=lambda n: times[n])
        made |= {"fastest": fastest, "ratio": times[fastest] / us}
    return made


class Page(HTMLParser):
    """A page's tables as lists of cells, its text, its tags in balance."""

    VOID = ("meta", "!doctype")

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tables: list[list[list[str]]] = []
        self.told: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        if tag in self.VOID:
            return
        self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" in self.open or "script" in self.open:
            return
        self.told.append(data)
        if "td" in self.open or "th" in self.open:
            self.tables[-1][-1][-1] += data

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.told).split())

    def rows(self, heading: str) -> list[dict[str, str]]:
        """The first table with this heading, each row by the headings."""
        found = next(t for t in self.tables if heading in t[0])
        return [dict(zip(found[0], cells, strict=True)) for cells in found[1:] if len(cells) == len(found[0])]


Written = Any


@pytest.fixture
def written(tmp_path: Path) -> Written:
    def write(name: str, value: Any) -> Path:
        (tmp_path / f"{name}.json").write_text(value if isinstance(value, str) else json.dumps(value))
        return tmp_path / f"{name}.json"

    return write


def tileops(*args: Any) -> Result:
    return CliRunner(env={"COLUMNS": "120"}).invoke(main, ["report", *map(str, args)])


def test_a_page_of_every_row(written: Written, tmp_path: Path) -> None:
    value = suite(0, "2026-12-01")
    result = tileops(written("all", value), "-o", tmp_path / "page.html")
    assert (result.exit_code, result.stdout) == (0, f"{tmp_path / 'page.html'}\n")
    html = (tmp_path / "page.html").read_text()
    page = Page(html)
    shown = [cells[0] for table in page.tables if table[0][0] == "case" for cells in table[1:]]
    assert sorted(shown) == sorted(r["case"].partition("/")[2] for r in value["rows"])
    plots = re.findall(r"<svg.*?</svg>", html, re.DOTALL)
    assert len(plots) == 3
    marks = sum(svg.count("<circle") for svg in plots if ET.fromstring(svg).tag == "svg")
    assert marks == sum(r["status"] == "ok" for r in value["rows"])


def test_it_loads_nothing(written: Written) -> None:
    page = Page(render([load(written("all", suite(0, "2026-12-01")))]))
    assert [v for k, v in page.attributes if k == "src" or (k == "href" and not str(v).startswith("#"))] == []
    assert any("default-src 'none'" in (v or "") for k, v in page.attributes if k == "content")


def test_it_needs_no_torch(written: Written, tmp_path: Path) -> None:
    path = written("all", suite(0, "2026-12-01"))
    code = f"import sys; sys.modules['torch'] = None; from tileops.core.cli import main; main(['report', '{path}'])"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "report.html\n", "")
    assert "tensor core bfloat16" in Page((tmp_path / "report.html").read_text()).text


def test_the_figures_are_the_documents(written: Written) -> None:
    made = row(f"{GEMM}/a-bfloat16", 250, 240, bound_us=243.1, host_ratio=0.74, clock_mhz=1700, bound_by="compute")
    made["copy"] = {"us": 245, "ratio": 0.98}
    made["rivals"]["cublaslt"] = {"status": "failed", "reason": "no luck"}
    (line,) = Page(render([load(written("a", document(made)))])).rows("kernel")
    assert line == {
        "case": "a-bfloat16",
        "us": "250",
        "p10 - p90": "249 - 251",
        "TFLOP/s": "800",
        "GB/s": "4,000",
        "of bound": "97.2 %",
        "by": "compute",
        "of copy": "98.0 %",
        "at clock": "87.0 %",  # of 4096 FLOP a cycle on 132 SMs at 1700 MHz
        "torch us": "240",
        "cublaslt us": "failed",
        "ratio": "0.960",
        "host ratio": "0.74",
        "error": "0.25",
        "kernel": "TestKernel",
    }


def test_summaries_are_geometric_means_and_a_tie_is_one(written: Written) -> None:
    times = {"half": 5, "double": 20, "tie": 10.1, "near-tie": 9.9, "eight": 80}
    value = document(*(row(f"{GEMM}/{name}", 10, us) for name, us in times.items()), row(f"{GEMM}/alone", 10))
    held = load(written("a", value)).rows
    op = op_of(GEMM, held)
    assert op.ratio == pytest.approx((0.5 * 2 * 1 * 1 * 8) ** (1 / 5))
    assert [verdict(r) for r in held] == ["slower", "faster", "tie", "tie", "faster", "no rival"]
    assert counted(held[2]) == counted(held[3]) == 1
    (line,) = Page(render([load(written("a", value))])).rows("worst row")
    assert (line["operator"], line["ratio"], line["worst row"]) == (GEMM, "1.516", "half 0.500 against torch")
    assert (line["rows"], line["slower"], line["tie"], line["faster"], line["of bound"]) == (
        "6",
        "1",
        "2",
        "2",
        "50.0 %",
    )


def test_bars_are_worst_first(written: Written) -> None:
    value = document(*(row(f"{GEMM}/{n}", 10, us) for n, us in [("b", 12), ("a", 9), ("d", 10.05), ("c", 15)]))
    html = render([load(written("a", value))])
    assert re.findall(r'class="name">(\w)</span>', html) == ["a", "d", "b", "c"]
    assert re.findall(r"</span><b>([\d.]+)</b></li>", html) == ["0.90", "1.00", "1.20", "1.50"]


def test_what_went_wrong_comes_first(written: Written) -> None:
    missing = {"status": "missing", "reason": "not installed"}
    value = document(
        row(f"{GEMM}/fine", 10, 10, rivals={"cublaslt": missing, "deepgemm": missing}),
        row(f"{GEMM}/fine-too", 10, 10, rivals={"cublaslt": missing}),
        row(f"{GEMM}/magic", 10, 10, bound_us=11),
        row(f"{GEMM}/odd", 50, rivals={"torch": {"status": "suspect", "us": 200, "reason": "at 20% of the bound"}}),
        failed(f"{GEMM}/wrong", "the result is wrong"),
    )
    text = Page(render([load(written("a", value))])).text
    told = [
        f"Failed: 1 {GEMM}/wrong the result is wrong",
        f"Above the bound: 1 {GEMM}/magic 110.0 % of its bound",
        "Required rivals without a time: cublaslt in 2 rows "
        "cublaslt missing, GEMMFwdOp: not installed 2 rows fine, fine-too",
        "Optional rivals without a time: deepgemm in 1 row",
        f"Suspect rivals: 1 {GEMM}/odd torch: at 20% of the bound",
        "By operator",
    ]
    places = [text.find(part) for part in told]
    assert -1 not in places
    assert places == sorted(places)


def test_roofs_are_those_of_the_rows(written: Written) -> None:
    rows = [row(f"{GEMM}/a", 400), row("GQADenseFwdOp/b", 400, dtypes=["float8_e4m3fn"]), row("RMSNormFwdOp/c", 400)]
    held = load(written("a", document(*rows)))
    kinds = [("tensor_core", "bfloat16"), ("tensor_core", "float8_e4m3fn"), ("cuda_core", "float32")]
    assert [rated_for(r) for r in held.rows] == kinds
    text = Page(render([held])).text
    for told in (
        "memory 4.80 TB/s, theoretical memory 4.25 TB/s, calibrated",
        "tensor core bfloat16 989 TFLOP/s, theoretical tensor core bfloat16 820 TFLOP/s, calibrated",
        "tensor core float8_e4m3fn 1,979 TFLOP/s, theoretical",
        "cuda core float32 66.9 TFLOP/s, theoretical",
    ):
        assert told in text


def test_a_board_and_an_op_that_nobody_knows(written: Written) -> None:
    unknown = row("NewFwdOp/a", 10, 12, bound_us=None, bound_by=None)
    page = Page(render([load(written("a", document(unknown, board="NVIDIA Z1")))]))
    assert "NVIDIA Z1 has no profile: no roofs" in page.text
    (line,) = page.rows("kernel")
    assert (line["us"], line["of bound"], line["by"], line["ratio"]) == ("10.0", "-", "-", "1.200")


def test_what_the_document_says_is_text(written: Written, tmp_path: Path) -> None:
    evil = "<script>alert('\ud800')</script>\"&"
    made = row(f"{GEMM}/{evil}", 10, 12, kernel=evil, rivals={evil: {"status": evil, "reason": evil}}, bound_by=evil)
    value = document(made, failed(f"Op{evil}/b", evil), environment={evil: evil}, board=evil)
    place = tmp_path / "page.html"
    assert tileops(written("a", value), written("b", value), "-o", place).exit_code == 0
    page = Page(place.read_text())
    assert page.text.count("<script>alert('?')</script>\"&") > 10
    assert place.read_text().count("<script>") == 1


def test_history_is_over_the_rows_that_all_have(written: Written) -> None:
    first = document(row(f"{GEMM}/a", 10, 20), row(f"{GEMM}/gone", 10, 10))
    second = document(row(f"{GEMM}/a", 10, 30), row(f"{GEMM}/new", 10, 80), row("RMSNormFwdOp/once", 10, 10))
    held = [load(written(n, value)) for n, value in (("first", first), ("second", second))]
    (board,) = boards(held)
    assert [(d.name.rpartition("/")[2], v) for d, v in history(board)[GEMM]] == [
        ("first", pytest.approx(2)),
        ("second", pytest.approx(3)),
    ]
    assert [*history(board)] == [GEMM]
    assert {r.case: r.ratio for r in board.rows}[f"{GEMM}/a"] == 3
    assert [*board.stale] == [f"{GEMM}/gone"]
    assert "gone from" in Page(render(held)).text


def test_documents_with_dates_are_ordered_by_them(written: Written) -> None:
    dates = ["2026-12-15", "2026-12-01", "2026-12-08"]
    held = [load(written(d, document(row(f"{GEMM}/a", 10, 11), environment={"date": d}))) for d in dates]
    (board,) = boards(held)
    assert [d.date for d in board.documents] == sorted(dates)
    bare = load(written("bare", document(row(f"{GEMM}/a", 10, 11))))
    assert boards([*held, bare])[0].documents == (*held, bare)


def test_two_boards_are_two_articles(written: Written) -> None:
    held = [load(written(b, document(row(f"{GEMM}/a", 10, 11), board=b))) for b in ("h200", "h100")]
    page = Page(render(held))
    ids = [v for k, v in page.attributes if k == "id"]
    assert len(ids) == len(set(ids)) == 4
    assert "History" not in page.text


def test_an_empty_document(written: Written) -> None:
    assert "The document holds no rows." in Page(render([load(written("a", document()))])).text


def test_unknown_keys_are_left_out(written: Written) -> None:
    plain = document(row(f"{GEMM}/a", 10, 12))
    more = document(row(f"{GEMM}/a", 10, 12, weather="fair", rivals=plain["rows"][0]["rivals"]), mood={"good": 1})
    assert load(written("a", more)).rows == load(written("a", plain)).rows


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("{", "can't read this result document"),
        ([], "its schema is None, expected 'tileops.results/1'"),
        (document(schema="tileops.results/2"), "its schema is 'tileops.results/2', expected 'tileops.results/1'"),
        (
            document(row(f"{GEMM}/a") | {"us": {"median": "fast", "p10": 1, "p90": 1}}),
            "got 'fast', expected a number @ document.rows[0].us.median",
        ),
        (document(row(f"{GEMM}/a", ratio=0)), "'ratio' must be > 0"),
        (document(row(f"{GEMM}/a", flops=float("nan"))), "'flops' must be"),
        (document({"op": GEMM, "status": "ok"}), "'case' is missing"),
        (document(row(f"{GEMM}/a") | {"us": None}), f"{GEMM}/a is ok but has no us"),
        (document(row(f"{GEMM}/a"), row(f"{GEMM}/a")), f"two rows are called {GEMM}/a"),
    ],
)
def test_documents_that_are_none(value: Any, told: str, written: Written) -> None:
    path = written("bad", value)
    with pytest.raises(TileOpsError, match=re.escape(told)):
        load(path)
    for args in ((path,), (path, "--compare", written("good", document()))):
        result = tileops(*args)
        assert result.exit_code == 2
        assert str(path) in result.stderr.replace("\n", "")
