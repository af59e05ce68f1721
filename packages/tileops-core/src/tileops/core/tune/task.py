"""What is to be tuned: buckets of calls with the kernels and configs that may serve them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import attrs

from tileops.core.backend import gpu
from tileops.core.backend.gpu import Gpu
from tileops.core.check import Call
from tileops.core.choice import Choice
from tileops.core.kernel import Device
from tileops.core.program import Recipe
from tileops.core.tune.bucket import Bucket, plain
from tileops.core.tune.results import Candidate, Result
from tileops.core.tune.trial import Trial

LIMIT = 16  # configs of a kernel


@attrs.define(eq=False)
class Task:
    """A bucket, the calls that it is measured on by name, and its candidates, the default first."""

    bucket: Bucket
    backend: Gpu
    calls: dict[str, Call]
    candidates: list[Choice]

    def recipe(self, choice: Choice) -> Recipe:
        """What a candidate's program is made from, for all calls alike."""
        call = next(iter(self.calls.values()))
        return gpu.recipe_of(choice, call, self.bucket.device, self.backend.target(self.bucket.device))

    def trial(self, case: str, choice: Choice, index: int) -> Trial:
        """A candidate on one of the calls."""
        kind = self.backend.device_type
        return Trial(attrs.evolve(self.calls[case], device=f"{kind}:{index}"), choice, kind, index)

    def due(self, result: Result | None) -> list[tuple[str, Choice]]:
        """The cases and candidates of which neither a time nor a reason is known."""
        known = {} if result is None else {c.name: c for c in result.candidates}
        found = ((case, c, known.get(name_of(c))) for case in self.calls for c in self.candidates)
        return [(case, c) for case, c, held in found if held is None or not held.done(case)]

    def finished(self, result: Result | None) -> bool:
        """Whether there is a choice, made among all candidates."""
        return result is not None and result.choice is not None and not self.due(result)


def name_of(choice: Choice) -> str:
    """What a choice's time is kept under."""
    return Candidate(type(choice.kernel).__name__, plain(choice.config)).name


def tasks(
    backend: Gpu, calls: Iterable[Call], device: Device, board: str, limit: int = LIMIT, misaligned: Sequence[str] = ()
) -> list[Task]:
    """The buckets of some calls, in order; those of empty calls, and of calls that no kernel serves, are left out.

    A candidate serves all calls of its bucket.
    """
    found: dict[str, Task] = {}
    for call in calls:
        kind = gpu.bucketed(call)
        first = None if gpu.is_empty(call) else next(gpu.candidates(kind, device, misaligned), None)
        if first is None:
            continue
        bucket = gpu.bucket_of(gpu.packed(kind, first.copies), device, board)
        if bucket.key not in found:
            best = list(_best(gpu.candidates(kind, device, misaligned), limit))
            found[bucket.key] = Task(bucket, backend, {}, best)
        else:
            legal = {name_of(c) for c in gpu.candidates(kind, device, misaligned)}
            found[bucket.key].candidates = [c for c in found[bucket.key].candidates if name_of(c) in legal]
        found[bucket.key].calls[call.id or str(call)] = call
    return [task for task in found.values() if task.candidates]


def _best(candidates: Iterable[Choice], limit: int) -> Iterator[Choice]:
    """The first of each kernel."""
    seen: Counter[str] = Counter()
    for choice in candidates:
        seen[type(choice.kernel).__name__] += 1
        if seen[type(choice.kernel).__name__] <= limit:
            yield choice
