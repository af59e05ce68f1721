"""What a call costs on the host, apart from the work itself: ``python -m tileops.core.bench.host`` prints it.

On a CPU the launch is left out; on a GPU calls are enqueued and never waited for, and a rival's are timed beside them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import attrs
import torch
from rich.console import Console
from rich.table import Table

from tileops.core import guards, workloads
from tileops.core.bench.rivals import Missing, rivals_of
from tileops.core.check import Call
from tileops.core.families import entries, op_class
from tileops.core.inputs import make_inputs
from tileops.core.roofline import work
from tileops.core.torch_ops import checker_of
from tileops.core.workloads import cases, scaled

ROUNDS, CALLS = 27, 100
FEWER = {"new_plan": 10, "new_bucket": 3}  # calls of those that take a hundred times as long


def round_robin(
    ways: Mapping[str, Callable[[], Any]], prepare: Callable[[str], Any] = lambda name: None
) -> dict[str, list[float]]:
    """Microseconds a call in each round; the ways take turns, so that a drifting host weighs on all alike."""
    seen: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, call in ways.items():
            prepare(name)
            count = FEWER.get(name, CALLS)
            start = time.perf_counter()
            for _ in range(count):
                call()
            seen[name].append((time.perf_counter() - start) / count * 1e6)
    return seen


def medians(seen: Mapping[str, list[float]]) -> dict[str, float]:
    """Of all rounds, by way."""
    return {name: statistics.median(values) for name, values in seen.items()}


def ratios(seen: Mapping[str, list[float]]) -> dict[str, float]:
    """Of ours to the rival's, each the median of the rounds' own."""
    pairs = ("cached", "torch"), ("unguarded", "torch"), ("training", "torch_training")
    return {
        f"{ours}_ratio": statistics.median(a / b for a, b in zip(seen[ours], seen[theirs], strict=True))
        for ours, theirs in pairs
        if ours in seen and theirs in seen
    }


@attrs.frozen
class HostCost:
    """Microseconds a call, the launch itself left out: a guard recognises it, the keyed plans do, or a plan is made."""

    hit: float
    keyed: float
    miss: float


def host_cost(op: Any, inputs: tuple[Any, ...]) -> HostCost:
    """The cost of ``op(*inputs)``."""
    state = op._state
    op(*inputs)
    known = attrs.evolve(state.local.run[0], launch=lambda *inputs: None)

    def prepare(name: str) -> None:
        state.guards = ()
        state.recognise(inputs, known, state.kinds)

    def miss() -> None:
        state.plans.clear()
        state.recognise(inputs, state.plan(inputs), state.kinds)

    ways = {"hit": lambda: op(*inputs), "keyed": lambda: state.plan(inputs), "miss": miss}
    found = medians(round_robin(ways, prepare))
    state.guards = ()
    state.plans.clear()
    return HostCost(**found)


def gpu_cost(call: Call, device: str = "cuda") -> dict[str, float]:
    """Microseconds a call of an op on a GPU, by how it is found, and of the first rival that is there.

    ``cached`` is the call as users make it, ``unguarded`` the same where torch has no private guard, ``new_length`` one
    of a kind whose guard is in front no longer, ``new_plan`` one of a kind that has no guard, ``new_bucket`` one of
    which only the program is known, ``training`` one that records its gradient. ``<name>_ratio`` is the median over the
    rounds of its time over the rival's: a host that drifts by half moves both.
    """
    op: Any = op_class(call.entry)(**call.params)
    state, given = op._state, make_inputs(call, device)
    inputs = tuple(given.values())

    def new_length() -> None:
        state.guards = ()
        op(*inputs)

    def new_plan() -> None:
        state.guards = state.behind = ()
        state.plans.clear()
        op(*inputs)

    def new_bucket() -> None:
        state.forget()
        op(*inputs)

    cached = partial(op, *inputs)
    ways: dict[str, Callable[[], Any] | None] = {
        "cached": cached, "torch": _first_rival(call, given), "unguarded": cached,
        "new_length": new_length, "new_plan": new_plan, "new_bucket": new_bucket,
    }  # fmt: skip
    if call.entry.grad:
        trained = {n: None if x is None else x.clone().requires_grad_() for n, x in given.items()}
        ways["training"], ways["torch_training"] = partial(op, *trained.values()), _first_rival(call, trained)
    held, present = guards.tensor_guards, {name: way for name, way in ways.items() if way is not None}

    def prepare(name: str) -> None:
        guards.tensor_guards = None if name == "unguarded" else held
        state.guards = state.behind = ()
        for plan in state.plans.values():
            plan.settled.clear()
        for _ in range(3):  # the second tells that the sizes stay, the third is recognised by them
            present[name]()
        torch.cuda.synchronize()

    try:
        seen = round_robin(present, prepare)
    finally:
        guards.tensor_guards = held
    return medians(seen) | ratios(seen)


def _first_rival(call: Call, inputs: Mapping[str, Any]) -> Any:
    for make in rivals_of(call.entry, "cuda").values():
        with suppress(Missing):
            return None if isinstance(make, str) else make(call, inputs)
    return None


def main() -> None:
    """Print the host cost of every installed op: on its smallest row on a GPU, else on next to no work."""
    gpu = torch.cuda.is_available()
    table = Table(title="Host cost of a call, us" + ("" if gpu else ", its launch left out"))
    columns: dict[str, None] = {}
    rows = {}
    for entry in entries().values():
        if gpu:
            call = min(workloads.calls(entry), key=lambda call: work(call).bytes)
            cost = gpu_cost(call)
        else:
            row = entry.workloads[0]
            call = scaled(checker_of(entry), row, cases(row)[0], max_flops=2**10)
            cost = attrs.asdict(host_cost(op_class(entry)(**call.params), tuple(make_inputs(call, "cpu").values())))
        rows[str(call.id)] = cost
        columns |= dict.fromkeys(cost)
    for name in ("call", *columns):
        table.add_column(name.replace("_", " "), justify="left" if name == "call" else "right")
    for name, cost in rows.items():
        table.add_row(name, *(f"{cost[c]:.2f}" if c in cost else "-" for c in columns))
    Console().print(table)


if __name__ == "__main__":
    main()
