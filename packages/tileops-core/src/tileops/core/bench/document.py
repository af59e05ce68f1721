"""The result document: rows with the sources and the environment that they were measured in."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import itertools
import json
import math
import platform
import statistics
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import attrs
import torch

from tileops.core.backend import gpu_backend
from tileops.core.bench import SCHEMA, is_tie
from tileops.core.bench.rows import Bench
from tileops.core.errors import TileOpsError
from tileops.core.families import families
from tileops.core.files import check_writable, write_whole
from tileops.core.roofline import Profile, board_of, boards, profile

# Packages whose versions decide what is measured, by the names that the environment has for them.
PACKAGES = {
    "tilelang": "tilelang",
    "flashinfer": "flashinfer-python",
    "liger": "liger-kernel",
    "nvmath": "nvmath-python",
    "quack": "quack-kernels",
    "fa4": "flash-attn-4",
}

Row = Mapping[str, Any]


def environment(bench: Bench) -> dict[str, Any]:
    """Where and how rows are measured; equal for runs whose rows may stand in one document."""
    found = {name: _version(distribution) for name, distribution in PACKAGES.items()}
    return {
        "gpu": device_name(bench.device),
        "driver": _driver() if bench.device.type == "cuda" else None,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "python": platform.python_version(),
        **found,
        "profile": _named(bench.profile) if bench.profile else None,
        "timer": bench.timer,
        "l2": "unknown" if not bench.l2_bytes else "cold" if bench.cold_l2 else "hot",
        "clock": "sampled" if bench.sampler() else "unknown",
        "protocol": f"cool: {bench.cool}; hot: {bench.hot}",
    }


def document(rows: Iterable[Row], environment: Mapping[str, Any]) -> dict[str, Any]:
    """The document of these rows."""
    name = environment["gpu"]
    return {
        "schema": SCHEMA,
        "board": board_of(name) or name,
        "environment": {**environment, "date": datetime.now(timezone.utc).isoformat(timespec="seconds")},
        "tree": sources_digest(),
        "rows": list(rows),
    }


def write(into: Path, value: Mapping[str, Any]) -> None:
    """Write a document whole, or not at all."""
    write_whole(into, json.dumps(value, indent=1, allow_nan=False) + "\n")


@contextlib.contextmanager
def to_oneself(into: Path) -> Iterator[None]:
    """Have a document to oneself while rows are added to it; raises TileOpsError where another process has it."""
    import filelock

    check_writable(into)
    lock = filelock.FileLock(into.with_name(f".{into.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise TileOpsError(f"another bench writes {into}; name another file, or wait for it") from None
    try:
        yield
    finally:
        Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()


def put_aside(into: Path) -> Path:
    """Move a document to a name that is free."""
    names = (f"{into.stem}.stale{'' if n == 1 else f'-{n}'}{into.suffix}" for n in itertools.count(1))
    aside = next(place for name in names if not (place := into.with_name(name)).exists())
    return into.replace(aside)


@attrs.frozen
class Held:
    """The rows of an earlier document: those that still hold, by case, and why the others don't."""

    rows: dict[str, Row]
    stale: str | None = None


def held(path: Path, environment: Mapping[str, Any]) -> Held:
    """The rows that a run need not repeat; raises TileOpsError for a file that is no result document."""
    if not path.exists():
        return Held({})
    try:
        found = json.loads(path.read_text())
        rows = {row["case"]: row for row in found["rows"]}
        known, tree = found["environment"], found["tree"]
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise TileOpsError(f"{path}: not a result document ({type(e).__name__}: {e}); name another file") from None
    if tree != sources_digest():
        return Held({}, "other sources")
    unlike = sorted(k for k in {*known, *environment} - {"date"} if known.get(k) != environment.get(k))
    return Held({}, f"another environment ({', '.join(unlike)})") if unlike else Held(rows)


def sources_digest() -> str:
    """Of the packages' sources and specs that were measured."""
    digest = hashlib.sha256()
    roots = [Path(__file__).parents[1], *(path.parent for path in families().values())]
    for root in roots:
        for source in sorted((*root.rglob("*.py"), *root.rglob("*.yaml"))):
            digest.update(source.relative_to(root).as_posix().encode() + source.read_bytes())
    return digest.hexdigest()[:16]


def device_name(device: torch.device) -> str:
    """The device's name, by which its board is known; a CPU's machine."""
    backend = gpu_backend(device.type)
    return backend.name(device.index or 0) if backend else f"cpu ({platform.machine()})"


@attrs.frozen
class Summary:
    """Of an operator's rows: the geometric mean of ratios, ties counted as 1, and the worst row."""

    op: str
    rows: int
    ratio: float
    worst: str
    worst_ratio: float


def summaries(rows: Iterable[Row], key: str = "ratio") -> list[Summary]:
    """One for each operator that has a row with a ratio."""
    by_op: dict[str, list[Row]] = {}
    for row in rows:
        if row["status"] == "ok" and key in row:
            by_op.setdefault(row["op"], []).append(row)
    return [_summary(op, found, key) for op, found in by_op.items()]


def counted(ratio: float) -> float:
    """A ratio as summaries count it: 1 where it is a tie."""
    return 1.0 if is_tie(ratio) else ratio


def _summary(op: str, rows: Sequence[Row], key: str) -> Summary:
    worst = min(rows, key=lambda row: float(row[key]))
    mean = math.exp(statistics.fmean(math.log(counted(row[key])) for row in rows))
    return Summary(op, len(rows), mean, worst["case"], worst[key])


def _named(figures: Profile) -> str:
    """A profile by its board, and by what it says where that is not the shipped one."""
    if figures.board in boards() and figures == profile(figures.board):
        return figures.board
    return f"{figures.board}, {hashlib.sha256(repr(figures).encode()).hexdigest()[:8]}"


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout
        return found.splitlines()[0].strip()
    except (OSError, subprocess.SubprocessError, IndexError):
        return None
