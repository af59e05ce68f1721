"""What holds for every kernel of the family: scratch memory, grids by clusters, numbers that int32 holds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import attrs
import pytest
import tilelang.language as T
import torch
from torch import Tensor

import tileops.norm as family
from tileops.core import workloads
from tileops.core.backend import cuda, gpu
from tileops.core.check import Call
from tileops.core.errors import NoKernelError
from tileops.core.kernel import H200, static_of
from tileops.core.launch import LARGEST
from tileops.core.op import Op
from tileops.core.torch_ops import checker_of
from tileops.norm import (
    AdaLayerNormFwdOp,
    BatchNormFwdOp,
    FusedAddLayerNormFwdOp,
    FusedAddRMSNormFwdOp,
    FusedAddRMSNormQuantFwdOp,
    GatedRMSNormFwdOp,
    GroupNormFwdOp,
    InstanceNormFwdOp,
    LayerNormBwdOp,
    LayerNormFwdOp,
    RMSNormBwdOp,
    RMSNormFwdOp,
)

F32, BF16 = torch.float32, torch.bfloat16
OPS: list[type[Op]] = [getattr(family, name) for name in family.__all__]


def meta(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def row_calls(*B: int, n: int = 8, dtype: torch.dtype = BF16) -> Iterator[Call]:
    """A call of each op over rows."""
    x, w, row = meta(*B, n, dtype=dtype), meta(n, dtype=dtype), meta(*B, dtype=F32)
    yield RMSNormFwdOp(n).bind(x, w)
    yield LayerNormFwdOp(n).bind(x, w, w)
    yield RMSNormBwdOp(n).bind(x, x, w, row)
    yield LayerNormBwdOp(n).bind(x, x, w, row, row, w)
    yield FusedAddRMSNormFwdOp().bind(x, x, w)
    yield FusedAddLayerNormFwdOp().bind(x, x, w, w)
    yield FusedAddRMSNormQuantFwdOp().bind(x, x, w, None)
    yield AdaLayerNormFwdOp().bind(x, w, w)
    yield GatedRMSNormFwdOp().bind(x, x, w)


def instances(*shape: int) -> Call:
    running = meta(shape[1], dtype=F32)
    return InstanceNormFwdOp().bind(meta(*shape), running, running, None, None)


def largest(call: Call, unbounded: int | None) -> Call:
    """The largest call of a bucket; a size that has no bound in it is made so large, or stays."""
    static = static_of(checker_of(call.entry), call)
    bounds = gpu.intervals(call, static)
    if unbounded is not None:
        bounds = {axis: attrs.evolve(b, high=unbounded) if b.high == LARGEST else b for axis, b in bounds.items()}
    return gpu.largest(call, static, bounds)


def workspaces(kind: Call, call: Call) -> Iterator[tuple[str, list[int]]]:
    """The sizes of the scratch tensors for a call, by each kernel and config that may serve its bucket."""
    for choice in gpu.candidates(kind, H200):
        scratch = choice.kernel.workspace(call, choice.config)
        yield type(choice.kernel).__name__, [math.prod(s.shape) for s in scratch]


LONG = [call for B in ((2,), (3, 5)) for n in (40_000, 65_537) for call in row_calls(*B, n=n)]


@pytest.mark.parametrize(
    "call",
    [*(call for op in OPS for call in workloads.calls(op.entry)), *LONG, instances(3, 64, 9, 9), instances(3, 2, 4096)],
    ids=str,
)
def test_the_largest_call_of_a_bucket_decides_what_scratch_memory_there_is(call: Call) -> None:
    """Core allocates for that one, whatever the call: no call that a plan serves may need more."""
    kind = largest(call, None)
    assert list(workspaces(kind, kind)) == list(workspaces(kind, largest(call, 2**15)))
    for (_, enough), (name, needed) in zip(workspaces(kind, kind), workspaces(kind, call), strict=True):
        assert all(a >= b for a, b in zip(enough, needed, strict=True)), name


def test_scratch_memory_that_depends_on_the_batch_is_among_them() -> None:
    some, more = ([*row_calls(B, n=40_000), instances(B, 64, 9, 9), instances(B, 2, 2**21)] for B in (2, 500))
    found = set()
    for a, b in zip(some, more, strict=True):
        pairs = zip(workspaces(a, a), workspaces(a, b), strict=True)
        found |= {name for (name, few), (_, many) in pairs if few != many}
    assert found == {"RMSNormBwdStream", "LayerNormBwdStream", "GroupNormHeld", "GroupNormWalk"}


def grids(call: Call, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Any]]:
    """The first axis of each launch's grid, and the cluster that it asks for."""
    found: list[tuple[int, Any]] = []
    recipe = gpu.recipe(cuda, call, H200)
    assert recipe is not None

    def launch(plain: Any, *blocks: Any, **options: Any) -> Any:
        found.append((blocks[0], options.get("cluster_dims")))
        return plain(*blocks, **options)

    with monkeypatch.context() as m:
        for name in ("Kernel", "ClusterKernel"):
            m.setattr(T, name, partial(launch, getattr(T, name)))
        recipe.kernel.program(recipe.static, recipe.config, H200)
    return found


CLUSTERS = [
    call
    for n, dtype in ((20_000, BF16), (32_760, BF16), (10_000, F32))
    for call in row_calls(7, n=n, dtype=dtype)
    if call.entry.name in ("RMSNormBwdOp", "LayerNormBwdOp")
]


@pytest.mark.parametrize("call", [*CLUSTERS, instances(2, 65, 128, 256), instances(2, 1, 2048, 2048)], ids=str)
def test_later_launches_are_by_the_clusters_of_the_first(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """TileLang launches all kernels of a function so, and a grid must be a multiple of its cluster."""
    (_, cluster), *later = grids(call, monkeypatch)
    assert cluster[0] > 1
    assert later
    assert all(blocks % cluster[0] == 0 for blocks, _ in later)


@pytest.mark.parametrize("B", [(2**30,), (2**15, 2**15), (1, 2**20, 2**10, 3)])
def test_rows_beyond_int32_are_refused(B: tuple[int, ...]) -> None:
    for call in row_calls(*B):
        with pytest.raises(NoKernelError, match=r"2\*\*30 rows or more"):
            gpu.choose(call, H200)


@pytest.mark.parametrize("B", [(2**30 - 1,), (2**15, 2**15 - 1)])
def test_all_others_are_served(B: tuple[int, ...]) -> None:
    assert all(gpu.choose(call, H200) for call in row_calls(*B))


@pytest.mark.parametrize("op", [GroupNormFwdOp(1), BatchNormFwdOp(training=True)])
@pytest.mark.parametrize(("L", "served"), [((2**17, 2**17 - 8), False), ((2**17 - 8, 2**17 - 8), True)])
def test_the_vectors_of_a_set_and_of_its_last_step_are_numbered_by_int32(
    op: Op, L: tuple[int, ...], served: bool
) -> None:
    call = op.bind(meta(1, 1, *L), *[None] * (len(op.entry.signature.inputs) - 1))
    if served:
        for choice in gpu.candidates(call, H200):
            assert choice.config.threads * choice.config.chunks * choice.config.cluster <= 2**17
        return
    with pytest.raises(NoKernelError, match=r"2\*\*31 - 2\*\*17 vectors or more"):
        gpu.choose(call, H200)
