"""Rows scaled down to small machines."""

import math
from typing import Any

import pytest

from tileops.core.check import Call, Checker
from tileops.core.roofline import work
from tileops.core.spec.load import parse_spec
from tileops.core.workloads import cases, row_call, scaled

SPEC = """
ToyFwdOp:
  family: toy
  summary: Sizes of a batch and of a model.
  status: spec-only
  signature:
    forall: {B: Shape, M: Dim, H: Dim, K: Dim}
    params: {turned: {type: bool, default: false}}
    inputs:
      a: {dtype: bfloat16, shape: "[*B, M, K]"}
      b: {dtype: bfloat16, shape: "[K, 2 * H]"}
    outputs: {y: {dtype: bfloat16, shape: "[*B, M, 2 * H]"}}
    where: ["K % 16 == 0"]
    symbolic: [B, M, {K: turned}]
  workloads:
  - {label: straight, B: [4, 2048], M: 128, H: 4096, K: 1024}
  - {label: turned, B: [1], M: 128, H: 4096, K: 4096, turned: true}
  - {label: tiny, B: [], M: 1, H: 1, K: 16}
  roofline: {flops: "4 * prod(B) * M * H * K", unit: tensor_core, dtype: bfloat16}
"""


def reduced(label: str, max_flops: float = math.inf, max_bytes: float = math.inf) -> Call:
    file = parse_spec(SPEC)
    assert not file.errors, file.errors
    entry = file.entries["ToyFwdOp"]
    row = next(r for r in entry.workloads if r.label == label)
    (case,) = cases(row)
    checker = Checker(entry)
    call = scaled(checker, row, case, max_flops, max_bytes)
    assert call == row_call(checker, row, case, {n: call[n] for n in row.values})
    return call


def sizes(call: Call) -> dict[str, Any]:
    return {n: call[n] for n in ("B", "M", "H", "K")}


def test_without_limits_nothing_changes() -> None:
    assert sizes(reduced("straight")) == {"B": (4, 2048), "M": 128, "H": 4096, "K": 1024}


@pytest.mark.parametrize(("flops", "bytes"), [(1e10, math.inf), (1e6, math.inf), (math.inf, 1e7), (1e9, 1e5)])
def test_both_limits_hold(flops: float, bytes: float) -> None:
    needed = work(reduced("straight", flops, bytes))
    assert needed.flops <= flops
    assert needed.bytes <= bytes


def test_what_changes_from_call_to_call_is_halved_first() -> None:
    assert sizes(reduced("straight", 3e11)) == {"B": (4, 64), "M": 64, "H": 4096, "K": 1024}


def test_a_size_is_symbolic_under_its_condition() -> None:
    assert sizes(reduced("turned", 1e8)) == {"B": (1,), "M": 64, "H": 4096, "K": 64}


def test_rules_hold_and_end_it() -> None:
    assert sizes(reduced("tiny", 1)) == {"B": (), "M": 1, "H": 1, "K": 16}
