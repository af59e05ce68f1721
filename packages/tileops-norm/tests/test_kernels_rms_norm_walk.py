"""RMSNormWalk: what it serves, its configs and, on a GPU, that every one of them gives RMSNormRows' bits."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from tileops.core import accuracy, program
from tileops.core.backend import cuda, gpu
from tileops.core.check import Call
from tileops.core.choice import Choice
from tileops.core.kernel import H200, Kernel
from tileops.core.tune.measure import launch_of
from tileops.norm import RMSNormFwdOp
from tileops.norm.kernels.rms_norm import RMSNormRows
from tileops.norm.kernels.rms_norm_walk import RESERVED, Config, RMSNormWalk, configs, excluded
from tileops.norm.kernels.rows import MAX_RESIDENT, REGISTERS, WARP, vector

DEVICE = "cuda"
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
NAN = float("nan")
LENGTHS = [1, 3, 7, 100, 256, 1000, 1001, 4095, 4096, 8192, 16384, 32768, 65536, 65544, 131072, 262144]


def meta(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def call_of(x: Tensor, axes: int = 1, weight: torch.dtype | None = BF16, **params: Any) -> Call:
    shape = tuple(x.shape[-axes:])
    return RMSNormFwdOp(shape, **params).bind(x, None if weight is None else meta(*shape, dtype=weight))


@pytest.mark.parametrize("call", [call_of(meta(1, 8192)), call_of(meta(32768, 8192)), call_of(meta(40000, 131072))])
def test_it_is_a_candidate_behind_the_others(call: Call) -> None:
    """For any number of rows: one plan, and one choice of the tuner, serves all of them."""
    names = list(dict.fromkeys(type(choice.kernel).__name__ for choice in gpu.candidates(call, H200)))
    assert names == ["RMSNormRows", "RMSNormStream", "RMSNormWalk"]


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (call_of(meta(8, 6144)[:, :4096]), None),
        (call_of(meta(8, 4097)[:, :4096]), None),
        (call_of(meta(1, 4096).expand(8, 4096)), None),
        (call_of(meta(5, 8, 3, 128).transpose(1, 2)), None),
        (call_of(meta(4, 8, 16), axes=2, weight=None), None),
        (call_of(meta(3, 524288)), None),
        (call_of(meta(4096, 8).t()), "do not lie side by side"),
        (call_of(meta(3, 524296)), "fits in no cluster's registers"),
        (call_of(meta(3, 300001)), "fits in no cluster's registers"),
    ],
)
def test_what_it_refuses(call: Call, reason: str | None) -> None:
    said = RMSNormWalk().refuse(call, H200)
    assert said is None if reason is None else reason in (said or "")


@pytest.mark.semantics("RMSNormFwdOp", "batch-invariant")
@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("n", LENGTHS)
def test_a_row_is_dealt_as_by_rows(n: int, dtype: torch.dtype) -> None:
    for x, weight in (
        (meta(n, dtype=dtype), None),
        (meta(70000, n, dtype=dtype), F32),
        (meta(3, n, dtype=dtype), dtype),
    ):
        call = call_of(x, weight=weight)
        rows = next(RMSNormRows().configs(call, H200))
        found = list(RMSNormWalk().configs(call, H200))
        assert found
        assert len(set(found)) == len(found)
        for config in found:
            assert (config.lanes, config.chunks, config.cluster) == (rows.lanes, rows.chunks, rows.cluster)
            assert config.threads % config.lanes == 0
            assert config.threads % WARP == 0
            assert config.threads * config.resident <= min(MAX_RESIDENT, REGISTERS)
            assert config.workers >= 1
            staged = config.stages * config.unroll * config.threads * config.chunks * vector(n, call["T"]) * x.itemsize
            assert (staged + RESERVED) * config.resident <= H200.shared_bytes + RESERVED


def config_of(n: int = 8192, **changes: Any) -> Config:
    found = {
        8192: Config(256, 4, 1, 256, 264, resident=2),
        32768: Config(512, 8, 1, 512, 132),
        65536: Config(1024, 8, 1, 1024, 132, stages=1, early=False),
    }[n]
    return attrs.evolve(found, **changes)


@pytest.mark.parametrize("n", [8192, 32768, 65536])
def test_the_default(n: int) -> None:
    assert next(configs(n, "bfloat16", "bfloat16", H200)) == config_of(n)


@pytest.mark.parametrize(
    ("config", "n", "weight", "reason"),
    [
        (config_of(unroll=2), 8192, "bfloat16", "a block would sum one by one"),
        (config_of(resident=9), 8192, "bfloat16", "more threads"),
        (config_of(stages=4, resident=4), 8192, "bfloat16", "more shared memory"),
        (config_of(32768, stages=4), 32768, "bfloat16", "more shared memory"),
        (config_of(65536, stages=2), 65536, "bfloat16", "more shared memory"),
        (config_of(65536, early=True), 65536, "bfloat16", "more registers"),
        (config_of(resident=4), 8192, "float32", "more registers"),
        (config_of(early=True), 8192, None, "no weight"),
        (config_of(early=False), 8192, "bfloat16", "a weight read for each row"),
        (config_of(early=False), 8192, None, None),
    ],
)
def test_what_is_left_out_and_why(config: Config, n: int, weight: str | None, reason: str | None) -> None:
    said = excluded(config, n, "bfloat16", weight, H200)
    assert said is None if reason is None else reason in (said or "")


def choice_of(config: Any, kernel: Kernel | None = None) -> Choice:
    return Choice(kernel or RMSNormWalk(), config, {}, ())


@pytest.mark.parametrize(
    "call",
    [
        call_of(meta(4, 8192), return_rstd=True),
        call_of(meta(2, 3, 6144)[..., :100], weight=F32, weight_offset=1.0),
        call_of(meta(2, 131072, dtype=F16), weight=None),
    ],
    ids=["block", "lanes", "cluster"],
)
def test_it_compiles(call: Call, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEOPS_CACHE_DIR", str(tmp_path))
    config = next(RMSNormWalk().configs(call, H200))
    recipe = gpu.recipe_of(choice_of(config), call, H200, cuda.target(H200))
    assert program.compile_only(recipe).exists()


def normal(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=DEVICE).to(dtype)


def held(op: RMSNormFwdOp, x: Tensor, weight: Tensor | None = None, config: Config | None = None) -> Any:
    """Results of a config, by default the default, with the bits of RMSNormRows' default."""
    call = op.bind(x, weight)
    device = cuda.device(0)
    config = config or next(RMSNormWalk().configs(call, device))
    rows = choice_of(next(RMSNormRows().configs(call, device)), RMSNormRows())
    found, expected = (launch_of(cuda, call, c, 0, poisoned=True)(x, weight) for c in (choice_of(config), rows))
    for got, wanted in zip(*((r if isinstance(r, tuple) else (r,)) for r in (found, expected)), strict=True):
        assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8)), config  # NaN too
    return found


def right(op: RMSNormFwdOp, x: Tensor, weight: Tensor | None = None) -> None:
    """The same, and right by the accuracy rule."""
    call, inputs = op.bind(x, weight), {"x": x, "weight": weight}
    verdict = accuracy.verify(call, inputs, accuracy.collect(call, held(op, x, weight), inputs))
    assert verdict.ok, str(verdict)


@pytest.mark.cuda
@pytest.mark.semantics("RMSNormFwdOp", "batch-invariant")
@pytest.mark.parametrize(
    ("n", "dtype", "weight", "params"),
    [
        (3, F16, F16, {}),
        (100, F32, F32, {"return_rstd": True}),
        (256, BF16, F32, {"weight_offset": 1.0}),
        (1001, BF16, BF16, {"return_rstd": True}),
        (4095, BF16, None, {}),
        (4096, F16, F16, {"return_rstd": True}),
        (8192, BF16, F32, {"weight_offset": 1.0}),
        (8192, F32, None, {"return_rstd": True}),
        (16384, F16, F16, {}),
        (65528, BF16, BF16, {}),
        (65544, BF16, BF16, {"return_rstd": True}),
        (65536, F32, F32, {"return_rstd": True}),
        (131072, F16, None, {"return_rstd": True}),
        (262144, BF16, F32, {"weight_offset": 1.0}),
        (524288, BF16, BF16, {}),
    ],
)
def test_the_bits_of_rows(n: int, dtype: torch.dtype, weight: torch.dtype | None, params: dict[str, Any]) -> None:
    right(RMSNormFwdOp(n, **params), normal(150, n, dtype=dtype), None if weight is None else normal(n, dtype=weight))


@pytest.mark.cuda
@pytest.mark.semantics("RMSNormFwdOp", "batch-invariant")
@pytest.mark.parametrize("rows", [1, 2, 131, 132, 133, 1000, 40000])
@pytest.mark.parametrize("n", [256, 1001, 8192, 32768, 131072])
def test_any_number_of_rows(rows: int, n: int) -> None:
    rows = min(rows, 2**29 // n)
    held(RMSNormFwdOp(n, return_rstd=True), normal(rows, n), normal(n, seed=1))


@pytest.mark.cuda
@pytest.mark.parametrize("n", [128, 8192, 32768, 131072])
def test_the_configs(n: int) -> None:
    """Six or so of each list, over rows that are several turns of each block."""
    op, x, weight = RMSNormFwdOp(n), normal(min(9000, 2**28 // n), n), normal(n, seed=1)
    found = list(RMSNormWalk().configs(op.bind(x, weight), cuda.device(0)))
    for config in found[:: max(len(found) // 6, 1)]:
        held(op, x, weight, config)


LAYOUTS = {
    "pitch-16-bytes": lambda x: torch.cat([x, torch.full_like(x[..., :8], NAN)], -1)[..., : x.shape[-1]],
    "pitch-8-bytes": lambda x: torch.cat([x, torch.full_like(x[..., :4], NAN)], -1)[..., : x.shape[-1]],
    "pitch-2-bytes": lambda x: torch.cat([x, torch.full_like(x[..., :3], NAN)], -1)[..., : x.shape[-1]],
    "permuted": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "expanded": lambda x: x[:1].expand(x.shape),
}


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("layout", "n"), [*((layout, n) for layout in LAYOUTS for n in (128, 8192)), ("pitch-8-bytes", 131072)]
)
def test_any_strides(layout: str, n: int) -> None:
    x, weight = LAYOUTS[layout](normal(67, 9, n)), normal(n, seed=1)
    op = RMSNormFwdOp(n, return_rstd=True)
    for got, plain in zip(held(op, x, weight), held(op, x.contiguous(), weight), strict=True):
        assert torch.equal(got, plain)


@pytest.mark.cuda
@pytest.mark.parametrize("n", [128, 8192, 131072])
def test_calls_one_after_another_and_bad_rows(n: int) -> None:
    """No row reaches another, nor a call the next."""
    op, x, weight = RMSNormFwdOp(n), normal(1000, n), normal(n, seed=1)
    y = held(op, x, weight)
    x[[0, 500, 999], n // 2] = NAN
    others = [i for i in range(1000) if i not in (0, 500, 999)]
    for _ in range(5):
        spoilt = held(op, x, weight)
        assert torch.equal(spoilt[others], y[others])
        assert spoilt[[0, 500, 999]].isnan().any(1).all()
