"""The conditioned layer normalizations through their front doors: every case of their entries, and known traps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tileops.core.errors import CheckError
from tileops.core.testing import Case, TorchCase, assert_right, case_of, run_case, run_torch_case
from tileops.norm import AdaLayerNormFwdOp, AdaLayerNormZeroFwdOp

pytestmark = pytest.mark.op("AdaLayerNormFwdOp", "AdaLayerNormZeroFwdOp")

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NAN = float("nan")
OPS: Any = [(AdaLayerNormFwdOp, 2), (AdaLayerNormZeroFwdOp, 3)]  # and how many tensors condition them
each_op = pytest.mark.parametrize(("cls", "count"), OPS, ids=["scale-shift", "gate"])


def test_rows(workload_case: Case, device: str) -> None:
    run_case(workload_case, device)


def test_edges(edge_case: Case, device: str) -> None:
    run_case(edge_case, device)


def test_torch(torch_case: TorchCase, device: str) -> None:
    run_torch_case(torch_case, device)


def normal(*shape: int, device: str = "cpu", dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def condition(count: int, *shape: int, **options: Any) -> list[Tensor]:
    return [normal(*shape, seed=seed, **options) for seed in range(1, count + 1)]


@each_op
@pytest.mark.parametrize("T", DTYPES)
@pytest.mark.parametrize("N", [1, 3, 127, 1000, 1536, 3000, 5120, 8192, 16384, 32768, 65536])
def test_any_length(cls: Any, count: int, N: int, T: torch.dtype, device: str) -> None:
    """Lengths that are no power of two, and rows that outgrow shared memory."""
    run_case(case_of(cls().bind((3, N), *[(1, N)] * count, T=T), f"N={N}"), device)


@each_op
@pytest.mark.parametrize("S", [(), (1,), (3,), (2, 1), (1, 3), (2, 3), (1, 2, 1), (4, 1, 3), (4, 2, 3)])
def test_every_way_to_broadcast(cls: Any, count: int, S: tuple[int, ...], device: str) -> None:
    assert_right(cls(), normal(4, 2, 3, 40, device=device), *condition(count, *S, 40, device=device))


@each_op
def test_views_of_one_projection(cls: Any, count: int, device: str) -> None:
    """Models chunk one linear layer's result; the pieces have a pitch of the whole."""
    x = normal(2, 5, 64, device=device)
    chunks = normal(2, 6 * 64, device=device, seed=1).unflatten(1, (6, 64)).unbind(1)
    y = assert_right(cls(), x, *(c.unsqueeze(1) for c in chunks[1 : 1 + count]))
    assert torch.equal(y, cls()(x, *(c.unsqueeze(1).clone() for c in chunks[1 : 1 + count])))


@each_op
@pytest.mark.parametrize("T", DTYPES)
def test_rows_that_do_not_lie_in_a_row(cls: Any, count: int, T: torch.dtype, device: str) -> None:
    x, given = normal(40, 96, device=device, dtype=T), condition(count, 40, device=device, dtype=T)
    assert_right(cls(), x.t(), *given)
    assert_right(cls(), x[:, 16::2], *given)
    assert_right(cls(), x[:, 1:41], *(t.expand(40, 40) for t in given))


@each_op
@pytest.mark.parametrize("T", DTYPES)
def test_inputs_stay_as_they_are(cls: Any, count: int, T: torch.dtype, device: str) -> None:
    tensors = [normal(4, 64, device=device, dtype=T), *condition(count, 64, device=device, dtype=T)]
    before = [t.clone() for t in tensors]
    cls()(*tensors).zero_()
    assert all(torch.equal(t, b) for t, b in zip(tensors, before, strict=True))


@each_op
@pytest.mark.parametrize("N", [128, 5120, 100_003])
def test_a_row_alone_has_the_bits_it_has_in_a_batch(cls: Any, count: int, N: int, device: str) -> None:
    x, given = normal(17, N, device=device), condition(count, 17, N, device=device)
    y = cls()(x, *given)
    for rows in (slice(0, 1), slice(3, 5), slice(-1, None), slice(2, 2)):
        assert torch.equal(cls()(x[rows], *(t[rows] for t in given)), y[rows])


@each_op
def test_a_bad_row_leaves_the_others_alone(cls: Any, count: int, device: str) -> None:
    x, given = normal(5, 1000, device=device), condition(count, 1000, device=device)
    clean = cls()(x, *given)
    x[2, 7] = NAN
    y = cls()(x, *given)
    assert torch.equal(y[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])
    assert y[2].isnan().all()


@each_op
def test_large_and_nearly_equal_values(cls: Any, count: int, device: str) -> None:
    x = torch.tensor([[40000.0, 40001.0, 40002.0, 40003.0], [8e4, 8e4 + 1, 8e4 + 2, 8e4 + 3]], device=device)
    assert_right(cls(), x, *condition(count, 4, device=device, dtype=torch.float32))
    given = condition(count, 256, device=device, dtype=torch.float32)
    assert_right(cls(), torch.full((3, 256), 1234.0, device=device), *given)
    assert_right(cls(eps=1e-12), torch.full((3, 256), 3.0, device=device).half(), *(t.half() for t in given))


@each_op
def test_no_rows(cls: Any, count: int, device: str) -> None:
    for S in ((), (1,), (0,)):
        run_case(case_of(cls().bind((0, 8), *[(*S, 8)] * count, T=torch.bfloat16), "empty"), device)


@each_op
@pytest.mark.parametrize(
    ("eps", "x", "given", "message"),
    [
        (1e-5, (3, 8), (7,), r"scale: got shape \(7,\), expected .*8"),
        (1e-5, (3, 8), (2, 8), r"expected leading axes of scale.* that broadcast to those of x"),
        (1e-5, (3, 8), (2, 1, 8), r"expected leading axes of scale.* that broadcast to those of x"),
        (1e-5, (1, 8), (3, 8), r"expected leading axes of scale.* that broadcast to those of x"),
        (1e-5, (3, 0), (0,), r"expected rows that are not empty"),
        (-1.0, (3, 8), (8,), r"expected an eps that is not negative"),
    ],
)
def test_calls_that_do_not_fit(
    cls: Any, count: int, eps: float, x: tuple[int, ...], given: tuple[int, ...], message: str, device: str
) -> None:
    with pytest.raises(CheckError, match=message):
        cls(eps=eps)(normal(*x, device=device), *condition(count, *given, device=device))


@each_op
def test_dtypes_that_do_not_fit(cls: Any, count: int, device: str) -> None:
    x, *given = normal(3, 8, device=device), *condition(count, 8, device=device)
    with pytest.raises(CheckError, match=r"shift: got float32, expected bfloat16"):
        cls()(x, given[0], given[1].float(), *given[2:])
