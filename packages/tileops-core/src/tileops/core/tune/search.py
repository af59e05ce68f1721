"""The search: all candidates of some buckets compiled, then measured by one process a GPU, the best of them kept."""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

import attrs

from tileops.core.choice import Choice
from tileops.core.errors import BackendError, TileOpsError
from tileops.core.program import Recipe, stored
from tileops.core.tune import results
from tileops.core.tune.bucket import plain
from tileops.core.tune.child import Child, Rejected, Stopped
from tileops.core.tune.results import Candidate, Result, Time
from tileops.core.tune.task import Task

BUILD, MEASURE = "tileops.core.tune.build:build", "tileops.core.tune.measure:measure"
DEADLINE = 120.0  # seconds for one answer, the reference in float64 on a large call included
ROUNDS, FINAL_ROUNDS = 3, 9
SLOWER = 1.3  # than the best so far, in its first round: a candidate is dropped
FINALISTS, CLOSE = 3, 1.05  # so many, if within this of the best, are timed again
TIE = 0.01  # a choice must beat the default by more
PROTOCOL = (
    "cool: bursts of 12 calls or 1 ms in a CUDA graph, 40 ms pauses, in turn with the default, cold L2; "
    f"{ROUNDS} rounds each, {FINAL_ROUNDS} of the best {FINALISTS}"
)


@attrs.frozen
class Progress:
    """``done`` of ``total`` in this phase, ``seconds`` after its start, and what was done last."""

    phase: str
    done: int
    total: int
    seconds: float
    last: str

    @property
    def left(self) -> float:
        """Seconds to go, if it goes on like this."""
        return self.seconds / self.done * (self.total - self.done)


Report = Callable[[Progress], None]


@attrs.frozen
class Built:
    """What compiling took: seconds for so many programs; ``failures`` by a program's key."""

    seconds: float
    count: int
    failures: Mapping[str, str]


def build(todo: Sequence[Task], workers: int | None, report: Report) -> Built:
    """Compile what is still to be measured and not on disk; what is done stays, whatever happens."""
    there = {place.name for place in stored()}
    recipes: dict[str, Recipe] = {}
    for task in todo:
        result = results.read(task.bucket)
        wanted = [] if task.finished(result) else [task.recipe(choice) for _, choice in task.due(result)]
        recipes |= {r.key: r for r in wanted if r.key not in there}
    failures, start = {}, time.monotonic()
    with Child(BUILD) as child:
        answers = child.ask(list(recipes.values()), workers) if recipes else ()
        for done, (key, failure) in enumerate(answers, 1):
            if failure is not None:
                failures[key] = failure
            said = f"{recipes[key].static.op}, {type(recipes[key].kernel).__name__}: {_line(failure or 'compiled')}"
            report(Progress("compiling", done, len(recipes), time.monotonic() - start, said))
    return Built(time.monotonic() - start, len(recipes), failures)


def run(todo: Sequence[Task], gpus: Sequence[int], failures: Mapping[str, str], report: Report) -> dict[str, str]:
    """Measure all candidates and keep each bucket's choice; gives by bucket key why one could not be measured.

    ``failures`` are those of ``build``. An interruption loses only what is being measured at the moment.
    """
    queue, counter = deque(todo), _Counter(todo, report)
    faults: dict[str, str] = {}
    children = [Child(MEASURE) for _ in gpus]

    def work(child: Child, index: int) -> None:
        with child:
            while True:
                try:
                    task = queue.popleft()
                except IndexError:
                    return
                try:
                    _Search(task, child, index, failures, counter).run()
                except BackendError:
                    raise
                except TileOpsError as e:
                    faults[task.bucket.key] = str(e)
                    counter.say(task, 0, str(e))

    with ThreadPoolExecutor(len(gpus)) as pool:
        running = [pool.submit(work, *pair) for pair in zip(children, gpus, strict=True)]
        try:
            wait(running, return_when=FIRST_EXCEPTION)
        finally:
            for child in children:
                child.stop()
    for error in (e for f in running if (e := f.exception()) is not None and not isinstance(e, Stopped)):
        raise error
    return faults


class _Counter:
    """Counts what is done on all GPUs: of each task it is told how much is left."""

    def __init__(self, todo: Sequence[Task], report: Report) -> None:
        self.report, self.lock, self.start = report, threading.Lock(), time.monotonic()
        held = {task.bucket.key: (task, results.read(task.bucket)) for task in todo}
        self.due = {key: 0 if task.finished(r) else len(task.due(r)) for key, (task, r) in held.items()}
        self.total = sum(self.due.values())

    def say(self, task: Task, left: int, said: str) -> None:
        with self.lock:
            if left != self.due[task.bucket.key]:
                self.due[task.bucket.key] = left
                done = self.total - sum(self.due.values())
                self.report(Progress("measuring", done, self.total, time.monotonic() - self.start, said))


class _Search:
    """One bucket on one GPU. ``pairs`` are its candidates and what is known of each."""

    def __init__(
        self,
        task: Task,
        child: Child,
        index: int,
        failures: Mapping[str, str],
        counter: _Counter,
    ) -> None:
        self.task, self.child, self.index = task, child, index
        self.failures, self.counter = failures, counter
        self.result: Result
        self.pairs: list[tuple[Choice, Candidate]]

    def run(self) -> None:
        bucket = self.task.bucket
        with results.locked(bucket, self.child.check):  # another process may be at it
            self.result = results.read(bucket) or Result(
                bucket.op, dict(bucket.call), bucket.board, bucket.sources, bucket.versions
            )
            if self.task.finished(self.result):
                self.counter.say(self.task, 0, f"{bucket}: known already")
                return
            self.result.choice = None
            self.pairs = [(choice, self._known(choice)) for choice in self.task.candidates]
            for case in self.task.calls:
                for choice, candidate in self.pairs:
                    if not candidate.done(case):
                        self._measure(case, choice, candidate, ROUNDS)
                        left = len(self.task.due(self.result))
                        self.counter.say(self.task, left, f"{case}: {candidate}: {_said(candidate, case)}")
            self._choose()

    def _known(self, choice: Choice) -> Candidate:
        new = Candidate(type(choice.kernel).__name__, plain(choice.config))
        held = next((c for c in self.result.candidates if c.name == new.name), None)
        if held is None:
            self.result.candidates.append(new)
        return held or new

    def _right(self, case: str) -> list[tuple[Choice, Candidate]]:
        """Those that are in and have a time, the reference first."""
        return [p for p in self.pairs if p[1].reason is None and case in p[1].times]

    def _measure(self, case: str, choice: Choice, candidate: Candidate, rounds: int) -> None:
        """Time a candidate in turn with the reference, and keep what comes of it."""
        right = self._right(case)
        reference = right[0][0] if right and right[0][0] is not choice else None
        slowest = SLOWER * min(c.times[case].ratio for _, c in right) if right and rounds == ROUNDS else None
        failure = self.failures.get(self.task.recipe(choice).key)
        try:
            if failure is not None:
                raise Rejected(f"it does not compile: {_line(failure)}")
            trial = self.task.trial(case, choice, self.index)
            other = reference and self.task.trial(case, reference, self.index)
            (taken,) = self.child.ask(trial, other, rounds, slowest, deadline=DEADLINE)
            us, ratio = statistics.median(us for us, _ in taken), statistics.median(us / other for us, other in taken)
            candidate.times[case] = Time(us, ratio, rounds)
        except Rejected as e:
            candidate.reason = str(e)
        self._refer()
        results.write(self.task.bucket, self.result)

    def _refer(self) -> None:
        """Have all ratios be to the first candidate that is in: another than before where that one fell."""
        for case in {case for _, candidate in self.pairs for case in candidate.times}:
            right = [candidate.times for _, candidate in self._right(case)]
            unit = right[0][case].ratio if right else 1.0
            for times in right:
                times[case] = attrs.evolve(times[case], ratio=times[case].ratio / unit)

    def _choose(self) -> None:
        """Time the best again, for longer, and keep the fastest of them."""
        cases = list(self.task.calls)
        while due := [(c, *p) for p in self._finalists() for c in cases if p[1].times[c].rounds < FINAL_ROUNDS]:
            for case, choice, candidate in due:
                if candidate.reason is None:
                    self._measure(case, choice, candidate, FINAL_ROUNDS)
        reference, *others = (candidate for _, candidate in self._finalists())
        best = min((reference, *others), key=lambda c: c.score(cases))
        if best.score(cases) >= (1 - TIE) * reference.score(cases):
            best = reference
        self.result.choice = self.result.candidates.index(best)
        results.write(self.task.bucket, self.result)

    def _finalists(self) -> list[tuple[Choice, Candidate]]:
        """The reference, then the best of the others; raises TileOpsError where no candidate is right."""
        cases = list(self.task.calls)
        right = [p for p in self.pairs if p[1].reason is None]
        if not right:
            reasons = [f"  {c}: {c.reason}" for _, c in self.pairs]
            raise TileOpsError("\n".join([f"{self.task.bucket}: no candidate is right", *reasons]))
        ranked = sorted(right[1:], key=lambda p: p[1].score(cases))
        limit = CLOSE * min(c.score(cases) for _, c in right)
        return [right[0], *(p for p in ranked[:FINALISTS] if p[1].score(cases) <= limit)]


def _said(candidate: Candidate, case: str) -> str:
    if candidate.reason is not None:
        return _line(candidate.reason)
    time = candidate.times[case]
    return f"{time.us:.1f} us, x{1 / time.ratio:.3f}"


def _line(text: str) -> str:
    return text.strip().splitlines()[0][:300]
