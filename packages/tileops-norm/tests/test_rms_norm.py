"""RMSNormFwdOp through its front door: every case that its entry gives, and inputs that broke others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tileops.core.errors import CheckError
from tileops.core.testing import Case, TorchCase, assert_right, case_of, run_case, run_torch_case
from tileops.norm import RMSNormFwdOp

pytestmark = pytest.mark.op("RMSNormFwdOp")

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NAN = float("nan")


def test_rows(workload_case: Case, device: str) -> None:
    run_case(workload_case, device)


def test_edges(edge_case: Case, device: str) -> None:
    run_case(edge_case, device)


def test_torch(torch_case: TorchCase, device: str) -> None:
    run_torch_case(torch_case, device)


def normal(*shape: int, device: str = "cpu", dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


@pytest.mark.parametrize("T", DTYPES)
@pytest.mark.parametrize("N", [1, 3, 127, 1000, 1536, 3000, 5120, 8192, 16384, 32768, 65536])
def test_any_length(N: int, T: torch.dtype, device: str) -> None:
    """Lengths that are no power of two, and rows that outgrow shared memory."""
    op = RMSNormFwdOp(N, eps=1e-6, return_rstd=True)
    run_case(case_of(op.bind((3, N), (N,), T=T, weight=T), f"N={N}"), device)


@pytest.mark.parametrize("rows", [65535, 65536, 65537])
def test_more_rows_than_a_grid_axis(rows: int, device: str) -> None:
    x = normal(7, 64, device=device)
    op = RMSNormFwdOp(64)
    y = op(x.repeat(rows // 7 + 1, 1)[:rows])
    assert torch.equal(y[[0, -1]], op(x)[[0, (rows - 1) % 7]])


@pytest.mark.parametrize("T", DTYPES)
def test_rows_that_do_not_lie_in_a_row(T: torch.dtype, device: str) -> None:
    x = normal(40, 96, device=device, dtype=T)
    assert_right(RMSNormFwdOp(40), x.t())
    assert_right(RMSNormFwdOp(48), x[:, ::2])
    assert_right(RMSNormFwdOp(47), x[1::3, 1::2][:, :47])
    assert_right(RMSNormFwdOp((40, 96)), x.t().contiguous().t())


@pytest.mark.parametrize("D", [64, 128])
def test_heads_split_from_qkv(D: int, device: str) -> None:
    """They are views into qkv; what lies beside them, here NaN, is neither read nor written."""
    heads, kv_heads = 8, 2
    qkv = normal(5, (heads + 2 * kv_heads) * D, device=device)
    qkv[:, (heads + kv_heads) * D :] = NAN
    before = qkv.clone()
    q, k, _ = qkv.split([heads * D, kv_heads * D, kv_heads * D], dim=1)
    op, weight = RMSNormFwdOp(D, eps=1e-6), normal(D, device=device, seed=1)
    for x in (q.view(5, heads, D), k.view(5, kv_heads, D)):
        assert torch.equal(assert_right(op, x, weight), op(x.contiguous(), weight))
    assert torch.equal(qkv.view(torch.int16), before.view(torch.int16))


@pytest.mark.parametrize("T", DTYPES)
def test_the_input_is_still_what_it_was(T: torch.dtype, device: str) -> None:
    """Where ``x.float()`` is x itself, work in place would reach the caller's residual."""
    x, weight = normal(4, 64, device=device, dtype=T), normal(64, device=device, dtype=T, seed=1)
    before = x.clone(), weight.clone()
    y = RMSNormFwdOp(64, weight_offset=1.0)(x, weight)
    y.zero_()
    assert torch.equal(x, before[0])
    assert torch.equal(weight, before[1])


@pytest.mark.semantics("RMSNormFwdOp", "batch-invariant")
@pytest.mark.parametrize("N", [128, 4096, 5120, 100_003])
def test_a_row_alone_has_the_bits_it_has_in_a_batch(N: int, device: str) -> None:
    x, weight = normal(300 if N < 5000 else 17, N, device=device), normal(N, device=device, seed=1)
    op = RMSNormFwdOp(N, return_rstd=True)
    y, rstd = op(x, weight)
    for rows in (slice(0, 1), slice(3, 5), slice(-1, None), slice(2, 2)):
        alone = op(x[rows], weight)
        assert torch.equal(alone[0], y[rows])
        assert torch.equal(alone[1], rstd[rows])


@pytest.mark.semantics("RMSNormFwdOp", "row-isolation")
def test_a_bad_row_leaves_the_others_alone(device: str) -> None:
    x, op = normal(5, 1000, device=device), RMSNormFwdOp(1000)
    clean = op(x)
    x[2, 7] = NAN
    y = op(x)
    assert torch.equal(y[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])
    assert y[2].isnan().all()


def test_rows_of_large_and_nearly_equal_values(device: str) -> None:
    x = torch.tensor([[40000.0, 40001.0, 40002.0, 40003.0], [8e4, 8e4 + 1, 8e4 + 2, 8e4 + 3]], device=device)
    assert_right(RMSNormFwdOp(4, eps=1e-5), x)
    assert_right(RMSNormFwdOp(256), torch.full((3, 256), 1234.0, device=device))
    assert_right(RMSNormFwdOp(256, eps=1e-12), torch.full((3, 256), 3.0, device=device).half())


@pytest.mark.parametrize("shape", [(0, 8), (0,), (2, 0, 8), (0, 0, 8)])
@pytest.mark.parametrize("return_rstd", [False, True])
def test_no_rows(shape: tuple[int, ...], return_rstd: bool, device: str) -> None:
    if shape == (0,):
        with pytest.raises(CheckError, match=r"normalized_shape = \[0\], expected at least one axis"):
            RMSNormFwdOp(0, return_rstd=return_rstd)(normal(0, device=device))
    else:
        run_case(case_of(RMSNormFwdOp(8, return_rstd=return_rstd).bind(shape, T=torch.bfloat16), "empty"), device)


@pytest.mark.parametrize(
    ("params", "x", "weight", "message"),
    [
        ({"normalized_shape": 8}, (3, 7), None, r"x: got shape \(3, 7\), expected .*8"),
        ({"normalized_shape": (4, 8)}, (8,), None, r"x: got rank 1, shape \(8,\)"),
        ({"normalized_shape": 8}, (3, 8), (7,), r"weight: got shape \(7,\), expected .*8"),
        ({"normalized_shape": 8}, (3, 8), (1, 8), r"weight: got rank 2"),
        ({"normalized_shape": ()}, (3, 8), None, r"expected at least one axis to normalize over"),
        ({"normalized_shape": 8, "eps": -1.0}, (3, 8), None, r"eps = -1.0, expected an eps that is not negative"),
        ({"normalized_shape": 8, "weight_offset": 1.0}, (3, 8), None, r"expected a weight for weight_offset"),
    ],
)
def test_calls_that_do_not_fit(
    params: dict[str, Any], x: tuple[int, ...], weight: tuple[int, ...] | None, message: str, device: str
) -> None:
    with pytest.raises(CheckError, match=message):
        RMSNormFwdOp(**params)(normal(*x, device=device), normal(*weight, device=device) if weight else None)


@pytest.mark.parametrize(
    ("x", "weight", "message"),
    [
        (torch.float64, torch.float64, r"x: got float64, expected float32 or float16 or bfloat16"),
        (torch.float16, torch.bfloat16, r"weight: got bfloat16, expected float16.* or float32"),
        (torch.float32, torch.float16, r"weight: got float16, expected float32"),
    ],
)
def test_dtypes_that_do_not_fit(x: torch.dtype, weight: torch.dtype, message: str, device: str) -> None:
    with pytest.raises(CheckError, match=message):
        RMSNormFwdOp(8)(normal(3, 8, device=device, dtype=x), normal(8, device=device, dtype=weight))


def test_a_weight_on_another_device(device: str) -> None:
    with pytest.raises(CheckError, match=r"weight: got a tensor on meta, expected .*, where x is"):
        RMSNormFwdOp(8)(normal(3, 8, device=device), normal(8, device="meta"))
