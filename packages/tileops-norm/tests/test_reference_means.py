"""Every reference that takes off a mean, on equal values, which are their own mean, and on values far from zero."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from tileops.norm import reference as r

# Each normalizes the rows of ``[3, n]``, which are rows, groups or channels; y comes first, then perhaps statistics.
REFERENCES: Mapping[str, Callable[..., Any]] = {
    "layer_norm": lambda x, **k: r.layer_norm(x, normalized_shape=tuple(x.shape[-1:]), return_stats=True, **k),
    "fused_add_layer_norm": lambda x, **k: r.fused_add_layer_norm(x, 0 * x, *both(x), return_stats=True, **k),
    "ada_layer_norm": lambda x, **k: r.ada_layer_norm(x, 0 * x, 0 * x, **k),
    "ada_layer_norm_zero": lambda x, **k: r.ada_layer_norm_zero(x, 0 * x, 0 * x, 0 * x + 1, **k),
    "group_norm": lambda x, **k: r.group_norm(x[None], num_groups=3, **k)[0],
    "instance_norm": lambda x, **k: r.instance_norm(x[None], use_input_stats=True, momentum=0.1, **k)[0],
    "batch_norm": lambda x, **k: r.batch_norm(channels(x), training=True, momentum=0.1, return_stats=True, **k),
}
each = pytest.mark.parametrize("name", REFERENCES)
lengths = pytest.mark.parametrize("n", [12, 3000, 16384])


def both(x: Tensor) -> tuple[Tensor, Tensor]:
    """A weight of ones and a bias of zeros."""
    return torch.ones_like(x[0]), torch.zeros_like(x[0])


def channels(x: Tensor) -> Tensor:
    """Rows as the channels of a batch of four."""
    return x.unflatten(1, (4, -1)).transpose(0, 1)


def results(name: str, x: Tensor, T: torch.dtype | None = None) -> tuple[Tensor, list[Tensor]]:
    """The results as rows, and the statistics."""
    returned = REFERENCES[name](x, eps=1e-5, T=T or x.dtype)
    y, *statistics = returned if isinstance(returned, tuple) else (returned,)
    y = y.transpose(0, 1).flatten(1) if name == "batch_norm" else y
    return y, [s for s in statistics if s.shape == x.shape[:1]]


@each
@lengths
@pytest.mark.parametrize("T", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_equal_values_are_their_own_mean(name: str, n: int, T: torch.dtype) -> None:
    """A rounding of the mean would be divided by the root of eps: y was 0.08 for 1234.1."""
    x = torch.tensor([1234.1, -0.1, 0.0], dtype=T)[:, None].expand(3, n)
    y, statistics = results(name, x)
    assert torch.equal(y, torch.zeros_like(y))
    if statistics:
        mean, rstd = statistics
        assert torch.equal(mean, x[:, 0].to(mean.dtype))
        torch.testing.assert_close(rstd, torch.full_like(rstd, 1e-5**-0.5))


@each
@lengths
def test_values_far_from_zero_keep_their_digits(name: str, n: int) -> None:
    """float32 has steps of 1e-4 here, a tenth of the deviation."""
    noise = torch.randn(3, n, generator=torch.Generator().manual_seed(0))
    x = 1234.1 + 1e-3 * noise
    y, _ = results(name, x)
    exact, _ = results(name, x.double(), torch.float32)
    torch.testing.assert_close(y.double(), exact, rtol=1e-5, atol=1e-5)


@lengths
def test_running_statistics_of_values_far_from_zero(n: int) -> None:
    x = 1234.1 + 1e-3 * torch.randn(3, n, generator=torch.Generator().manual_seed(0))
    params = {"momentum": 0.3, "eps": 1e-5, "T": torch.float32}
    for given, run in (
        (channels(x), lambda *t: r.batch_norm(*t, training=True, return_stats=False, **params)),
        (x[None], lambda *t: r.instance_norm(*t, use_input_stats=True, **params)),
    ):
        ours = torch.zeros(3), torch.zeros(3)
        run(given, *ours)
        wide = x.double()
        torch.testing.assert_close(ours[0].double(), 0.3 * wide.mean(1), rtol=2e-7, atol=0)
        torch.testing.assert_close(ours[1].double(), 0.3 * wide.var(1), rtol=1e-5, atol=0)
