"""Inputs made for a call: their values, strides and content."""

from typing import Any

import pytest
import torch

from tileops.core.check import Checker, TensorMeta
from tileops.core.errors import SpecError, TileOpsError
from tileops.core.inputs import make_inputs
from tileops.core.spec.load import parse_spec
from tileops.core.spec.predicates import PREDICATES
from tileops.core.workloads import calls

SPEC = """
PagedFwdOp:
  family: toy
  summary: Every kind of input.
  status: spec-only
  signature:
    forall:
      {B: Dim, P: Dim, S: Dim, N: Dim,
       T: "DType[float32 | float16 | bfloat16 | float8_e4m3fn | int8 | int32 | uint8 | bool]"}
    inputs:
      x: {dtype: T, shape: "[N, S]"}
      scale: {dtype: float32, shape: "[N]", requires: positive}
      lengths: {dtype: int32, shape: "[B]", requires: lengths(4 * P)}
      table: {dtype: int32, shape: "[B, P]", requires: "page_ids(B * P, lengths, 4)"}
      maybe: {dtype: T, shape: "[N]", optional: true}
    outputs:
      y: {dtype: T, shape: "[N, S]"}
  workloads:
  - {label: toy, B: 3, P: 5, S: 64, N: 128, dtype_cases: [{T: float32}], values: {lengths: "lengths([7, 20, 1])"}}
  roofline: {flops: "N"}
BackFwdOp:
  family: toy
  summary: An input that the forward computes.
  status: spec-only
  signature:
    forall: {N: Dim}
    inputs: {lse: {dtype: float32, shape: "[N]", values: forward(lse)}}
    outputs: {y: {dtype: float32, shape: "[N]"}}
  workloads: [{label: toy, N: 3}]
  roofline: {flops: "N"}
"""


def entry(name: str = "PagedFwdOp") -> Any:
    file = parse_spec(SPEC)
    assert not file.errors, file.errors
    return file.entries[name]


def paged(dtype: str = "float32", strides: tuple[int, ...] = (64, 1)) -> Any:
    metas = {
        "x": TensorMeta((128, 64), dtype, strides),
        "scale": TensorMeta((128,), "float32"),
        "lengths": TensorMeta((3,), "int32"),
        "table": TensorMeta((3, 5), "int32"),
    }
    return Checker(entry()).bind({}, metas)


def make(call: Any, seed: int = 0) -> Any:
    return make_inputs(call, seed=seed)


def test_values_are_normal_and_follow_the_seed() -> None:
    made = make(paged(), seed=3)
    assert made["maybe"] is None
    assert abs(made["x"].mean()) < 0.05
    assert abs(made["x"].std() - 1) < 0.05
    assert made["scale"].min() > 0
    assert abs(made["scale"].median() - 1) < 0.1
    assert torch.equal(made["x"], make(paged(), seed=3)["x"])
    assert not torch.equal(made["x"], make(paged(), seed=4)["x"])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn"])
def test_narrow_floats(dtype: str) -> None:
    x = make(paged(dtype))["x"]
    assert x.dtype == getattr(torch, dtype)
    assert abs(x.float().std() - 1) < 0.05


@pytest.mark.parametrize(("dtype", "values"), [("int8", 256), ("uint8", 256), ("int32", 256), ("bool", 2)])
def test_integers_take_every_code(dtype: str, values: int) -> None:
    x = make(paged(dtype))["x"]
    assert x.dtype == getattr(torch, dtype)
    assert len(x.unique()) == values


@pytest.mark.parametrize("strides", [(1, 128), (80, 1), (0, 1), (1, 1)])
def test_strides_are_the_calls(strides: tuple[int, ...]) -> None:
    x = make(paged(strides=strides))["x"]
    assert (x.shape, x.stride()) == ((128, 64), strides)
    assert x[0].std() > 0


def test_content_is_the_rows() -> None:
    (call,) = calls(entry())
    made = make(call)
    assert made["lengths"].tolist() == [7, 20, 1]
    assert made["table"].tolist() == [list(row) for row in call.content["table"]]


def test_content_is_made_where_a_call_has_none() -> None:
    made = make(paged())
    lengths, table = made["lengths"].tolist(), made["table"].tolist()
    assert PREDICATES["lengths"].holds(lengths, 20)
    assert PREDICATES["page_ids"].holds(table, 15, lengths, 4)


def test_an_empty_tensor() -> None:
    metas = dict(paged().inputs) | {"x": TensorMeta((128, 0), "float32", (3, 1))}
    x = make(Checker(entry()).bind({}, metas))["x"]
    assert x.shape == (128, 0)


def test_a_backward_without_forward_is_refused() -> None:
    (call,) = calls(entry("BackFwdOp"))
    with pytest.raises(TileOpsError, match=r"BackFwdOp: no operator's 'grad' names it"):
        make(call)


def test_what_a_forward_gives_its_backward() -> None:
    from tileops.norm import RMSNormBwdOp

    call = RMSNormBwdOp((3, 2), weight_offset=1.0).bind((5, 3, 2), (5, 3, 2), (3, 2), (5,), T="float32")
    inputs = make(call)
    x, rstd = inputs["x"], inputs["rstd"]
    assert x is not None
    torch.testing.assert_close(rstd, (x.square().mean((-2, -1)) + 2.0**-23).rsqrt())


def test_a_rows_tensors_lie_as_it_says() -> None:
    def rows(order: str) -> Any:
        text = SPEC.replace("{label: toy, B: 3", f"{{label: toy, dim_order: {{x: {order}}}, B: 3")
        return parse_spec(text).entries["PagedFwdOp"]

    (call,) = calls(rows("[1, 0]"))
    x, meta = make_inputs(call)["x"], call.inputs["x"]
    assert x is not None
    assert meta is not None
    assert (meta.strides, x.stride()) == ((1, 128), (1, 128))
    assert [c.inputs["x"] for c in calls(rows("[0, 1]"))] == [c.inputs["x"] for c in calls(entry())]
    with pytest.raises(SpecError, match=r"row 'toy' can't be made into a call: dim_order has 3 axes of x, which has 2"):
        list(calls(rows("[0, 1, 2]")))
