"""What a call costs on the host, apart from the work itself: ``python -m tileops.core.bench.host`` prints it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import attrs
from rich.console import Console
from rich.table import Table

from tileops.core.families import entries, op_class
from tileops.core.inputs import make_inputs
from tileops.core.torch_ops import checker_of
from tileops.core.workloads import cases, scaled

ROUNDS, CALLS = 9, 300


@attrs.frozen
class HostCost:
    """Microseconds a call, the launch itself left out: a guard recognises it, the keyed plans do, or a plan is made."""

    hit: float
    keyed: float
    miss: float


def host_cost(op: Any, inputs: tuple[Any, ...]) -> HostCost:
    """The cost of ``op(*inputs)``; the three ways are timed in turn, so that a drifting host weighs on all alike."""
    state = op._state
    op(*inputs)
    plan = attrs.evolve(state.local.plan, launch=lambda *inputs: None)

    def miss() -> None:
        state.plans.clear()
        state.recognise(inputs, state.plan(inputs))

    ways: dict[str, Callable[[], Any]] = {"hit": lambda: op(*inputs), "keyed": lambda: state.plan(inputs), "miss": miss}
    seen: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, call in ways.items():
            state.guards = ()
            state.recognise(inputs, plan)
            seen[name].append(_microseconds(call))
    state.guards = ()
    state.plans.clear()
    return HostCost(**{name: statistics.median(values) for name, values in seen.items()})


def _microseconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - start) / CALLS * 1e6


def main() -> None:
    """Print the host cost of every installed op on its first row, scaled down to next to no work."""
    table = Table("op", "tensors", "hit us", "keyed us", "miss us", title="Host cost of a call, its launch left out")
    for entry in entries().values():
        row = entry.workloads[0]
        call = scaled(checker_of(entry), row, cases(row)[0], max_flops=2**10)
        inputs = tuple(make_inputs(call, "cpu").values())
        cost = host_cost(op_class(entry)(**call.params), inputs)
        count = sum(t is not None for t in inputs)
        table.add_row(entry.name, str(count), *(f"{us:.2f}" for us in attrs.astuple(cost)))
    Console().print(table)


if __name__ == "__main__":
    main()
