"""Board profiles: every figure is sourced, what is unknown stays unknown, and faults are told in one error."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

from tileops.core.errors import TileOpsError
from tileops.core.roofline import Figure, Profile, board_of, boards, peak_at_clock, peak_figure, profile

ROOM = Path(__file__).parents[1] / "src/tileops/core/roofline/profiles"


def figures(value: Any, path: str) -> Iterator[tuple[str, Figure]]:
    """Every figure under a value, with its path."""
    if isinstance(value, Figure):
        yield path, value
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from figures(part, f"{path}.{key}")
    elif attrs.has(type(value)):
        for field in attrs.fields(type(value)):
            yield from figures(getattr(value, field.name), f"{path}.{field.name}")


SHIPPED = [(path, figure) for board in boards() for path, figure in figures(profile(board), board)]


def test_boards_are_those_that_ship() -> None:
    assert boards() == ("a100", "h100", "h200", "s5000")
    assert all(profile(b).board == b for b in boards())


@pytest.mark.parametrize(("path", "figure"), SHIPPED, ids=[p for p, _ in SHIPPED])
def test_every_figure_has_source_and_confidence(path: str, figure: Figure) -> None:
    assert figure.source.strip()
    assert (figure.confidence == "unknown") == (figure.value is None)


def test_only_measurements_are_calibrated() -> None:
    calibrated = {path: f for path, f in SHIPPED if ".calibrated" in path and f.value is not None}
    assert {path: (f.value, f.confidence) for path, f in calibrated.items()} == {
        "h200.bandwidth.calibrated": (4.25e12, "measured"),
        "h200.peak.tensor_core.bfloat16.calibrated": (820e12, "measured"),
        "s5000.bandwidth.calibrated": (1309e9, "reported"),
    }
    for path in calibrated:
        assert calibrated[path].value < dict(SHIPPED)[path.replace("calibrated", "theoretical")].value


@pytest.mark.parametrize(
    ("board", "unit", "dtype", "value"),
    [
        ("h200", "tensor_core", "bfloat16", 989.4e12),
        ("h200", "tensor_core", "float8_e4m3fn", 1978.9e12),
        ("h200", "cuda_core", "float32", 66.9e12),
        ("h100", "tensor_core", "float16", 989.4e12),
        ("a100", "tensor_core", "bfloat16", 312e12),
        ("a100", "tensor_core", "float8_e4m3fn", None),
        ("a100", "cuda_core", "float32", 19.5e12),
        ("s5000", "tensor_core", "float8_e4m3fn", 1000e12),
        ("s5000", "cuda_core", "float32", None),
        ("s5000", "cuda_core", "float64", None),
    ],
)
def test_peaks(board: str, unit: Any, dtype: str, value: float | None) -> None:
    figure = peak_figure(profile(board), unit, dtype)
    assert figure.value == value
    assert figure.confidence != "unknown" or figure.source


def test_other_figures() -> None:
    h200 = profile("h200")
    assert h200.bandwidth.known.value == 4.8e12
    assert (h200.sm_count.theoretical.value, h200.l2_bytes.theoretical.value) == (132, 60 * 2**20)
    assert h200.max_clock_hz.theoretical.value == 1.98e9
    assert profile("h100").bandwidth.theoretical.value == 3.35e12
    assert profile("a100").bandwidth.theoretical.value == 2.039e12
    assert profile("s5000").l2_bytes.theoretical.value == 60 * 2**20
    assert all(profile(b).launch_floor_s.theoretical.value is None for b in boards())


@pytest.mark.parametrize(
    ("board", "unit", "clock_hz"),
    [("h200", "tensor_core", 1.83e9), ("h100", "cuda_core", 1.98e9), ("a100", "tensor_core", 1.41e9)],
)
def test_flop_per_cycle_agrees_with_the_peak(board: str, unit: Any, clock_hz: float) -> None:
    for dtype, peak in profile(board).peak[unit].items():
        if peak.theoretical.value and dtype != "float64":
            assert peak_at_clock(profile(board), unit, dtype, clock_hz) == pytest.approx(
                peak.theoretical.value, rel=3e-3
            )


def test_peak_at_a_measured_clock() -> None:
    assert peak_at_clock(profile("h200"), "tensor_core", "bfloat16", 1.5e9) == 4096 * 132 * 1.5e9
    assert peak_at_clock(profile("s5000"), "tensor_core", "bfloat16", 1.5e9) is None
    assert peak_at_clock(profile("h200"), "cuda_core", "int8", 1.5e9) is None


@pytest.mark.parametrize(
    ("device_name", "board"),
    [
        ("NVIDIA H200", "h200"),
        ("nvidia h200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("MTT S5000", "s5000"),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA H200 MIG 1g.18gb", None),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA A100-SXM4-40GB", None),
        ("cpu", None),
    ],
)
def test_board_of_a_device(device_name: str, board: str | None) -> None:
    assert board_of(device_name) == board


def test_unknown_board_names_the_known_ones() -> None:
    with pytest.raises(TileOpsError) as e:
        profile("b200")
    assert str(e.value) == "unknown board 'b200'; known are a100, h100, h200, s5000, and any profile by its path"


def write(folder: Path, change: tuple[str, str] = ("", "")) -> Path:
    path = folder / "own.yaml"
    text = (ROOM / "a100.yaml").read_text()
    assert change[0] in text
    path.write_text(text.replace(*change, 1))
    return path


def test_own_profile_by_path(tmp_path: Path) -> None:
    path = write(tmp_path, ("2039.0e+9", "1.5e12"))
    for own in (profile(path), profile(str(path))):
        assert isinstance(own, Profile)
        assert own.bandwidth.theoretical.value == 1.5e12


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("board: a100", "boarb: a100"), "'board' is missing @ profile.board"),
        (("board: a100", "boarb: a100"), "unknown key 'boarb' @ profile"),
        (
            ("value: 108", "value: -108"),
            "a figure must be positive and finite, not -108 @ profile.sm_count.theoretical",
        ),
        (("value: 108", "value: true"), "not a number @ profile.sm_count.theoretical.value"),
        (("value: 108", "value: null"), "a figure is 'unknown' exactly if its value is null"),
        (("source: NVIDIA A100 datasheet}", "source: ''}"), "a figure needs a source, or the reason why there is none"),
        (("confidence: datasheet", "confidence: rumour"), "rumour not in literal"),
        (("    int8:", "    int9:"), "'int9' is no dtype"),
        (("board: a100", "board: [a100"), "expected ',' or ']'"),
    ],
)
def test_malformed_profile(tmp_path: Path, change: tuple[str, str], said: str) -> None:
    path = write(tmp_path, change)
    with pytest.raises(TileOpsError, match=re.escape(said)) as e:
        profile(path)
    lines = str(e.value).splitlines()
    assert lines[0] == f"{path}: malformed board profile"
    assert 2 <= len(lines) <= 5


@pytest.mark.parametrize("text", ["", "3", "[]"])
def test_a_file_that_is_no_mapping(tmp_path: Path, text: str) -> None:
    path = tmp_path / "own.yml"
    path.write_text(text)
    with pytest.raises(TileOpsError, match="malformed board profile"):
        profile(path)


def test_unreadable_profile(tmp_path: Path) -> None:
    with pytest.raises(TileOpsError, match="can't read this profile"):
        profile(tmp_path / "absent.yaml")
