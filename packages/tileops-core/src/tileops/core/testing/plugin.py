"""The pytest plugin: what a run selects, and an op's cases as arguments of its tests.

A test is on a device by its marker, ``cuda`` or ``musa``, else on the cpu; and in a tier by ``smoke`` or ``nightly``,
else in full. A run takes the tests of ``--device`` (cpu) up to ``--tier`` (full). Where ``-m`` names a device, or a
tier, it decides itself: ``-m cuda``, ``-m smoke`` and ``-m "smoke and cuda"`` do what they say. A device that the
selected tests need and that isn't there fails the run.

A test marked ``op("GEMMFwdOp")`` runs once for every case that it asks for by the name of an argument::

    @pytest.mark.op("GEMMFwdOp")
    def test_edges(edge_case, device):
        run_case(edge_case, device)

The names are ``workload_case``, ``edge_case`` and ``torch_case``; a case comes with its tier's and its device's marker.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

TIERS = ("smoke", "full", "nightly")
DEVICES = ("cpu", "cuda", "musa")
KERNEL_TESTS = "test_kernels_"
KEPT_BYTES = 2**31
CASES = ("workload_case", "edge_case", "torch_case")
MARKERS = (
    "smoke: the quick core of a suite",
    "full: every row and every dtype case",
    "nightly: too long for each change",
    "cuda: needs an NVIDIA GPU",
    "musa: needs a Moore Threads GPU",
    "op(*names): the operators whose cases a test takes",
    "semantics(op, *ids): the sentences of an entry's 'semantics' that a test holds it to",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tileops", "TileOPs operators")
    group.addoption("--tier", choices=TIERS, help="the most that is run: smoke, full (the default) or nightly")
    group.addoption("--device", choices=DEVICES, help="whose tests are run: cpu (the default), cuda or musa")
    group.addoption("--outcomes", type=Path, metavar="FILE", help="add a line of JSON for each test as it ends")
    group.addoption("--resume", action="store_true", help="leave out what has passed by the lines of --outcomes")


def pytest_configure(config: pytest.Config) -> None:
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    if config.option.outcomes and not hasattr(config, "workerinput"):  # a worker's reports reach its controller
        config.pluginmanager.register(_Outcomes(config.option.outcomes))


class _Outcomes:
    """What became of each test, on disk when it is known: a run that is killed loses none of it."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = path.open("a", encoding="utf-8", buffering=1)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.outcome == "passed":
            return
        crash = getattr(report.longrepr, "reprcrash", None)
        said = crash.message if crash else str(report.longrepr or "")
        line = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 3)}
        self.file.write(json.dumps(line | ({"message": " ".join(said.split())[:500]} if said else {})) + "\n")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("op")
    if marker is None or "device" not in metafunc.fixturenames:
        return
    asked = [kind for kind in CASES if kind in metafunc.fixturenames]
    devices = _devices(metafunc.config)
    if asked:
        (kind,) = asked
        metafunc.parametrize((kind, "device"), list(_parameters(kind, marker.args, devices)))
    else:
        metafunc.parametrize("device", [pytest.param(d, marks=_marks(d)) for d in devices])


def _parameters(kind: str, ops: Sequence[str], devices: Sequence[str]) -> Iterator[object]:
    from tileops.core import testing
    from tileops.core.families import find_entry

    for op in ops:
        for device in devices:
            for case in getattr(testing, f"{kind}s")(find_entry(op), device=device):
                name = case.id if len(ops) > 1 else case.id.partition("/")[2]
                yield pytest.param(case, device, id=f"{device}-{name}", marks=_marks(device, case.tier))


def _marks(device: str, *tier: str) -> list[pytest.MarkDecorator]:
    return [getattr(pytest.mark, name) for name in (device, *tier) if name != "cpu"]


def _devices(config: pytest.Config) -> tuple[str, ...]:
    """The devices whose tests may be selected."""
    if config.option.device:
        return (config.option.device,)
    return ("cpu", *_named(config, DEVICES[1:]))


def _named(config: pytest.Config, markers: Sequence[str]) -> list[str]:
    """Those markers that the expression of ``-m`` names."""
    words = re.findall(r"\w+", config.option.markexpr)
    return [m for m in markers if m in words]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    device = config.option.device or (None if _named(config, DEVICES) else "cpu")
    tier = config.option.tier or ("nightly" if _named(config, TIERS) else "full")
    done = _passed(config.option.outcomes) if config.option.resume else ()
    taken = [i for i in items if _is_on(i, device) and _is_within(i, tier) and i.nodeid not in done]
    if len(taken) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in set(taken)])
        items[:] = taken


def _passed(outcomes: Path | None) -> set[str]:
    if outcomes is None:
        raise pytest.UsageError("--resume needs --outcomes FILE")
    lines = map(json.loads, outcomes.read_text(encoding="utf-8").splitlines() if outcomes.exists() else ())
    last = {line["test"]: line["outcome"] for line in lines}
    return {test for test, outcome in last.items() if outcome == "passed"}


def _is_on(item: pytest.Item, device: str | None) -> bool:
    marked = [d for d in DEVICES[1:] if item.get_closest_marker(d)]
    return device is None or (device in marked if marked else device == "cpu")


def _is_within(item: pytest.Item, tier: str) -> bool:
    match tier:
        case "smoke":
            return item.get_closest_marker("smoke") is not None
        case "full":
            return item.get_closest_marker("nightly") is None
    return True


def pytest_collection_finish(session: pytest.Session) -> None:
    if session.config.option.collectonly:
        return
    for device in DEVICES[1:]:
        if any(item.get_closest_marker(device) for item in session.items):
            from tileops.core.backend import BACKENDS

            reason = BACKENDS[device].available()
            if reason:
                raise pytest.UsageError(f"the tests of {device} can't run: {reason}")


def pytest_runtest_teardown() -> None:
    """Give a GPU's memory back where a test took much of it: workers share the device."""
    torch = sys.modules.get("torch")
    if torch and torch.cuda.is_initialized() and torch.cuda.memory_reserved() > KEPT_BYTES:
        torch.cuda.empty_cache()


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Tests of kernels import them, and so TileLang: where it is missing they are left out, as the header says."""
    return True if collection_path.name.startswith(KERNEL_TESTS) and _tilelang_is_missing() else None


def pytest_report_header() -> str | None:
    return (
        "kernels: not tested, for TileLang is not installed; see nox -s test-kernels"
        if _tilelang_is_missing()
        else None
    )


def _tilelang_is_missing() -> bool:
    return importlib.util.find_spec("tilelang") is None
