"""Files are written whole or not at all, and what can't be written is known before the work is done."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tileops.core.cli import main
from tileops.core.errors import TileOpsError
from tileops.core.files import check_writable, write_whole

RESULTS = Path(__file__).parents[3] / "docs/results/h200/foundation.json"


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "new/page.html"
    for text in ("one", "two \ud800"):
        write_whole(path, text)
    assert path.read_text() == "two ?"
    assert [p.name for p in path.parent.iterdir()] == ["page.html"]


@pytest.mark.parametrize("write", [lambda path: write_whole(path, "new"), check_writable])
def test_what_can_not_be_written_stays_as_it_was(write, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    with pytest.raises(TileOpsError, match=r"file/page.html can't be written: (Not a directory|File exists)"):
        write(tmp_path / "file/page.html")
    assert (tmp_path / "file").read_text() == "old"


def test_a_check_leaves_nothing_behind(tmp_path: Path) -> None:
    check_writable(tmp_path / "page.html")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    "args",
    [
        ("report", str(RESULTS), "-o"),
        ("bench", "--backend", "cpu", "--op", "GEMMFwdOp", "--json"),
        ("calibrate", "--backend", "cpu", "--yaml"),
    ],
)
def test_commands_say_it_before_they_work(args: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = CliRunner().invoke(main, [*args, str(tmp_path / "file/out.json")])
    assert done.exit_code == 1
    assert "out.json can't be written" in done.stderr
    assert "us" not in done.stdout


def test_the_committed_page_is_what_the_report_makes(tmp_path: Path) -> None:
    """`tileops report docs/results/h200/NAME.json -o docs/results/h200/NAME.html` renews one."""
    pages = sorted(RESULTS.parent.glob("*.html"))
    assert pages
    for page in pages:
        made = tmp_path / page.name
        assert CliRunner().invoke(main, ["report", str(page.with_suffix(".json")), "-o", str(made)]).exit_code == 0
        assert made.read_text() == page.read_text()
        assert json.loads(page.with_suffix(".json").read_text())["rows"]
