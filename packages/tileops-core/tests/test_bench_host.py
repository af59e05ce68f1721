"""What a call costs on the host: ways take turns, and a host that drifts leaves the ratio alone."""

from __future__ import annotations

import pytest

from tileops.core.bench import host


def test_the_ways_take_turns_and_those_that_plan_are_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "ROUNDS", 2)
    monkeypatch.setattr(host, "CALLS", 3)
    monkeypatch.setattr(host, "FEWER", {"plans": 1})
    said: list[str] = []
    ways = {name: (lambda name=name: said.append(name)) for name in ("cached", "plans")}
    seen = host.round_robin(ways, lambda name: said.append(f"prepare {name}"))
    assert said == ["prepare cached", *["cached"] * 3, "prepare plans", "plans"] * 2
    assert {name: len(values) for name, values in seen.items()} == {"cached": 2, "plans": 2}


def test_a_host_that_slows_down_leaves_the_ratio_alone() -> None:
    slow = [1.0, 1.0, 1.7, 1.7, 1.7]
    torch = [10.0 * s for s in slow[1:]] + [10.0]  # it slowed down between the two in one round
    seen = {"cached": [7.0 * s for s in slow], "torch": torch, "unguarded": [9.0 * s for s in slow]}
    shifted = seen | {"torch": [10.0 * s for s in slow]}
    assert host.ratios(shifted) == {"cached_ratio": pytest.approx(0.7), "unguarded_ratio": pytest.approx(0.9)}
    assert host.ratios(seen)["cached_ratio"] == pytest.approx(0.7)
    assert host.ratios({"cached": [1.0], "new_length": [2.0]}) == {}
