"""The result cache: one JSON file a bucket with every candidate's time or the reason why it is out.

A file is written beside its place and moved there whole, after every candidate, so that nothing measured is lost; one
that can't be read is as good as none.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs

from tileops.core.errors import TileOpsError
from tileops.core.program import cache_dir
from tileops.core.tune.bucket import Bucket, text_of

MAX_KEPT = 4096  # buckets whose choice a process remembers


@attrs.frozen
class Time:
    """Microseconds of a call, their ratio to the reference candidate's in turn with them, and the rounds of both."""

    us: float
    ratio: float
    rounds: int


@attrs.define
class Candidate:
    """A kernel and a config, with its time in each case, or with the reason why it is out."""

    kernel: str
    config: dict[str, Any]
    times: dict[str, Time] = attrs.field(factory=dict)
    reason: str | None = None

    @property
    def name(self) -> str:
        """The same for equal kernels and configs."""
        return text_of(self.kernel, self.config)

    def done(self, case: str) -> bool:
        """Whether nothing more is to be learnt in a case."""
        return self.reason is not None or case in self.times

    def __str__(self) -> str:
        return f"{self.kernel}({', '.join(f'{n}={v}' for n, v in self.config.items())})"

    def score(self, cases: Sequence[str]) -> float:
        """The geometric mean of its ratios; infinite if it is out or some case is not measured."""
        if self.reason is not None or any(c not in self.times for c in cases):
            return math.inf
        return math.exp(sum(math.log(self.times[c].ratio) for c in cases) / len(cases))


@attrs.define
class Result:
    """What is known about a bucket; candidates in the order of their kernels' own ranking, the default first.

    ``choice`` is None until all are done.
    """

    op: str
    call: dict[str, Any]
    board: str
    sources: str
    versions: str
    candidates: list[Candidate] = attrs.field(factory=list)
    choice: int | None = None

    @property
    def chosen(self) -> Candidate | None:
        return None if self.choice is None else self.candidates[self.choice]

    def times(self, case: str) -> tuple[float | None, float | None]:
        """Microseconds of the default and of the choice, as they ran in turn; None where there is no such time."""
        time = self.chosen.times.get(case) if self.chosen else None
        if time is None:
            return None, None
        return (time.us / time.ratio if self.candidates[0].reason is None else None), time.us

    def gain(self, case: str) -> float | None:
        """How many times as fast as the default the choice is; None where the default is out, or nothing is chosen."""
        default, choice = self.times(case)
        return default / choice if default and choice else None


def home() -> Path:
    """Where results are kept."""
    return cache_dir().parent / "tuned"


def read(bucket: Bucket) -> Result | None:
    """What is kept about a bucket."""
    try:
        value = json.loads((home() / f"{bucket.key}.json").read_text())
    except (OSError, ValueError):
        return None
    import cattrs  # here, since it is slow to import and a process without results needs it not

    with contextlib.suppress(Exception):
        result = cattrs.Converter(forbid_extra_keys=True).structure(value, Result)
        if result.choice is None or 0 <= result.choice < len(result.candidates):
            return result
    return None


def write(bucket: Bucket, result: Result) -> None:
    """Keep what is known about a bucket; raises TileOpsError where nothing can be kept."""
    with _writing() as folder:
        handle, fresh = tempfile.mkstemp(dir=folder, prefix=".new-")
        with os.fdopen(handle, "w") as f:
            json.dump(attrs.asdict(result), f, indent=1)
        os.replace(fresh, folder / f"{bucket.key}.json")
    _choices.pop(bucket.key, None)


@contextlib.contextmanager
def locked(bucket: Bucket, waiting: Callable[[], None]) -> Iterator[None]:
    """Have a bucket to oneself, among all processes; ``waiting`` is called now and then until one has."""
    import filelock

    with _writing() as folder:
        lock = filelock.FileLock(folder / f"{bucket.key}.lock")
        while not lock.is_locked:
            try:
                lock.acquire(timeout=0.5)
            except filelock.Timeout:  # an OSError, too
                waiting()
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def _writing() -> Iterator[Path]:
    folder = home()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
    except OSError as e:
        raise TileOpsError(f"tuned choices can't be kept in {folder}: {e}; set TILEOPS_CACHE_DIR") from None


_choices: dict[str, Candidate | None] = {}


def choice(bucket: Bucket) -> Candidate | None:
    """The candidate chosen for a bucket; its file is read once in a process."""
    if bucket.key not in _choices:
        if len(_choices) >= MAX_KEPT:
            _choices.clear()
        result = read(bucket)
        _choices[bucket.key] = None if result is None else result.chosen
    return _choices[bucket.key]


def forget() -> None:
    """Have files read again that other processes may have written since."""
    _choices.clear()
