"""FusedAddRMSNormQuantFwdOp through its front door: every case that its entry gives, and calls that don't fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tileops.core.errors import CheckError, TileOpsError
from tileops.core.testing import Case, TorchCase, assert_right, case_of, run_case, run_torch_case
from tileops.norm import FusedAddRMSNormQuantFwdOp

pytestmark = pytest.mark.op("FusedAddRMSNormQuantFwdOp")

FP8, INT8 = torch.float8_e4m3fn, torch.int8
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NAN = float("nan")


def test_rows(workload_case: Case, device: str) -> None:
    run_case(workload_case, device)


def test_edges(edge_case: Case, device: str) -> None:
    run_case(edge_case, device)


def test_torch(torch_case: TorchCase, device: str) -> None:
    run_torch_case(torch_case, device)


@pytest.mark.parametrize("compiled", [False, True])
def test_it_has_no_gradient(compiled: bool, device: str) -> None:
    torch._dynamo.reset()
    op: Any = FusedAddRMSNormQuantFwdOp()
    run = torch.compile(lambda *inputs: op(*inputs), fullgraph=True, backend="aot_eager") if compiled else op
    x, weight = normal(3, 8, device=device).requires_grad_(), normal(8, device=device)
    with pytest.raises(TileOpsError, match="FusedAddRMSNormQuantFwdOp has no gradient"):
        run(x, None, weight)[1].sum().backward()


def normal(*shape: int, device: str = "cpu", dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def same(a: Tensor, b: Tensor) -> bool:
    """Equal to the bit: torch compares no float8."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("quant", ["per_token", "block128"])
@pytest.mark.parametrize("T", DTYPES)
@pytest.mark.parametrize("N", [1, 3, 127, 128, 129, 190, 1000, 5120, 65536])
def test_any_length(N: int, T: torch.dtype, quant: str, device: str) -> None:
    """Lengths that are no multiple of a block, nor of a vector."""
    op = FusedAddRMSNormQuantFwdOp(quant)
    run_case(case_of(op.bind((3, N), (3, N), (N,), T=T, weight=T), f"N={N}"), device)


def test_rows_that_do_not_lie_in_a_row(device: str) -> None:
    x, residual, weight = (normal(*s, device=device, seed=i) for i, s in enumerate([(300, 96), (96, 300), (300,)]))
    for quant in ("per_token", "block128"):
        op = FusedAddRMSNormQuantFwdOp(quant, INT8)
        assert_right(op, x.t(), residual, weight)
        assert_right(op, residual[:, 1:290:2], None, weight[:145])


@pytest.mark.semantics("FusedAddRMSNormQuantFwdOp", "batch-invariant")
@pytest.mark.parametrize("quant", ["per_token", "block128"])
@pytest.mark.parametrize("N", [128, 5120, 100_003])
def test_a_row_alone_has_the_bits_it_has_in_a_batch(N: int, quant: str, device: str) -> None:
    B = 300 if N < 5000 else 17
    x, residual, weight = normal(B, N, device=device), normal(B, N, device=device, seed=1), normal(N, device=device)
    op = FusedAddRMSNormQuantFwdOp(quant)
    whole = op(x, residual, weight)
    for rows in (slice(0, 1), slice(3, 5), slice(-1, None), slice(2, 2)):
        for alone, batched in zip(op(x[rows], residual[rows], weight), whole, strict=True):
            assert same(alone, batched[rows])


@pytest.mark.semantics("FusedAddRMSNormQuantFwdOp", "row-isolation", "codes")
@pytest.mark.parametrize("dtype", [FP8, INT8])
def test_a_bad_row_leaves_the_others_alone(dtype: torch.dtype, device: str) -> None:
    x, residual, weight = (normal(*s, device=device, seed=i) for i, s in enumerate([(5, 1000), (5, 1000), (1000,)]))
    op = FusedAddRMSNormQuantFwdOp(quant_dtype=dtype)
    clean = op(x, residual, weight)
    residual[2, 7] = NAN
    q, scale, residual_out = op(x, residual, weight)
    for now, before in zip((q, scale, residual_out), clean, strict=True):
        assert same(now[[0, 1, 3, 4]], before[[0, 1, 3, 4]])
    assert scale[2].isnan()
    assert q[2].float().isnan().all() if dtype == FP8 else not q[2].any()


@pytest.mark.semantics("FusedAddRMSNormQuantFwdOp", "least-scale")
@pytest.mark.parametrize("quant", ["per_token", "block128"])
@pytest.mark.parametrize("dtype", [FP8, INT8])
def test_rows_of_zeros(quant: str, dtype: torch.dtype, device: str) -> None:
    x = torch.zeros(3, 300, device=device)
    q, scale = FusedAddRMSNormQuantFwdOp(quant, dtype)(x, None, torch.ones(300, device=device))
    assert (scale == 2.0**-126).all()
    assert not q.float().any()


@pytest.mark.parametrize(("quant", "count"), [("per_token", 2), ("block128", 2), ("per_tensor", 1)])
def test_what_is_returned(quant: str, count: int, device: str) -> None:
    x, weight = normal(3, 300, device=device), normal(300, device=device)
    given = [torch.ones(1, device=device)] if quant == "per_tensor" else []
    returned: Any = FusedAddRMSNormQuantFwdOp(quant)(x, None, weight, *given)
    assert isinstance(returned, Tensor) if count == 1 else len(returned) == count
    assert len(FusedAddRMSNormQuantFwdOp(quant)(x, x, weight, *given)) == count + 1


@pytest.mark.parametrize(
    ("params", "shapes", "message"),
    [
        ({}, [(3, 8), (3, 7), (8,), None], r"residual: got shape \(3, 7\), expected .*8"),
        ({}, [(3, 8), None, (7,), None], r"weight: got shape \(7,\), expected .*8"),
        ({}, [(3, 8), None, (8,), (1,)], r"scale_in: got a tensor, expected None"),
        ({"quant": "per_tensor"}, [(3, 8), None, (8,), None], r"scale_in: got None, expected"),
        ({"quant": "per_tensor"}, [(3, 8), None, (8,), (2,)], r"scale_in: got shape \(2,\)"),
        ({"quant": "per_tensor", "scale_ub": 1.0}, [(3, 8), None, (8,), (1,)], r"none with per_tensor"),
        ({"scale_ub": 0.0}, [(3, 8), None, (8,), None], r"expected a positive scale_ub"),
        ({"eps": -1.0}, [(3, 8), None, (8,), None], r"eps = -1.0, expected an eps that is not negative"),
        ({}, [(3, 0), None, (0,), None], r"N = 0, expected a last axis that is not empty"),
    ],
)
def test_calls_that_do_not_fit(params: dict[str, Any], shapes: list[Any], message: str, device: str) -> None:
    x, residual, weight, scale = (None if shape is None else normal(*shape, device=device) for shape in shapes)
    with pytest.raises(CheckError, match=message):
        FusedAddRMSNormQuantFwdOp(**params)(x, residual, weight, None if scale is None else scale.float())


@pytest.mark.parametrize("name", ["quant", "quant_dtype"])
def test_words_that_mean_nothing(name: str) -> None:
    with pytest.raises(CheckError, match=rf"{name}"):
        FusedAddRMSNormQuantFwdOp(**{name: {"quant": "per_row", "quant_dtype": torch.uint8}[name]})
