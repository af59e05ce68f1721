"""The SM90 kernels of RMSNorm and its backward: dispatch, how rows are dealt, and, on a GPU, that they are right."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from tileops.core import accuracy, program
from tileops.core.backend import cuda, gpu
from tileops.core.check import Call
from tileops.core.kernel import H200, static_of
from tileops.core.op import Op
from tileops.core.testing.programs import recipes as kit_recipes
from tileops.core.torch_ops import checker_of
from tileops.core.workloads import cases, scaled
from tileops.norm import RMSNormBwdOp, RMSNormFwdOp
from tileops.norm.kernels import rms_norm, rms_norm_bwd
from tileops.norm.kernels.rows import MAX_CLUSTER, WARP, Place, vector
from tileops.norm.reference import rms_norm as reference

DEVICE = "cuda"
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
NAN, INF = float("nan"), float("inf")
SM90A = {"kind": "cuda", "arch": "sm_90a"}
LENGTHS = [1, 3, 7, 8, 100, 1000, 1001, 1536, 4095, 8192, 10000, 16384, 20000, 65536, 131072, 262144, 300001]


def meta(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def forward_call(x: Tensor, axes: int = 1, weight: torch.dtype | None = BF16, **params: Any) -> Call:
    shape = tuple(x.shape[-axes:])
    return RMSNormFwdOp(shape, **params).bind(x, None if weight is None else meta(*shape, dtype=weight))


def backward_call(x: Tensor, axes: int = 1, weight: torch.dtype | None = BF16, dy: Tensor | None = None) -> Call:
    shape = tuple(x.shape[-axes:])
    scale = None if weight is None else meta(*shape, dtype=weight)
    return RMSNormBwdOp(shape).bind(x if dy is None else dy, x, scale, meta(*x.shape[:-axes], dtype=F32))


@pytest.mark.parametrize(
    ("call", "kernel", "copies"),
    [
        (forward_call(meta(8, 4096)), "RMSNormRows", ()),
        (forward_call(meta(8, 6144)[:, :4096]), "RMSNormRows", ()),
        (forward_call(meta(8, 4097)[:, :4096]), "RMSNormRows", ()),
        (forward_call(meta(1, 4096).expand(8, 4096)), "RMSNormRows", ()),
        (forward_call(meta(5, 8, 3, 128).transpose(1, 2)), "RMSNormRows", ()),
        (forward_call(meta(4096, 8).t()), "RMSNormRows", ("x",)),
        (forward_call(meta(8, 8192)[:, ::2]), "RMSNormRows", ("x",)),
        (forward_call(meta(4, 32, 8).transpose(1, 2), axes=2), "RMSNormRows", ("x",)),
        (forward_call(meta(3, 524288)), "RMSNormRows", ()),
        (forward_call(meta(3, 524296)), "RMSNormStream", ()),
        (forward_call(meta(3, 300001)), "RMSNormStream", ()),
        (forward_call(meta(3, 262144, dtype=F32), weight=F32), "RMSNormRows", ()),
        (backward_call(meta(8, 4096)), "RMSNormBwdRows", ()),
        (backward_call(meta(8, 4096), dy=meta(8, 5000)[:, :4096]), "RMSNormBwdRows", ()),
        (backward_call(meta(8, 4096), dy=meta(4096, 8).t()), "RMSNormBwdRows", ("dy",)),
        (backward_call(meta(3, 32768)), "RMSNormBwdRows", ()),
        (backward_call(meta(3, 32776)), "RMSNormBwdStream", ()),
        (backward_call(meta(3, 300001)), "RMSNormBwdStream", ()),
    ],
)
def test_which_kernel_serves_and_what_is_copied(call: Call, kernel: str, copies: tuple[str, ...]) -> None:
    choice = gpu.choose(call, H200)
    assert (type(choice.kernel).__name__, choice.copies) == (kernel, copies)


@pytest.mark.semantics("RMSNormFwdOp", "batch-invariant")
@pytest.mark.semantics("RMSNormBwdOp", "batch-invariant")
@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("n", [*LENGTHS, 128, 3584, 5120, 32768, 524288])
def test_the_order_of_a_sum_is_that_of_the_length(n: int, dtype: torch.dtype) -> None:
    """Whatever a tuner may choose deals a row alike, whatever the batch, the rank, the pitch and the weight."""
    calls = [
        forward_call(meta(n, dtype=dtype), weight=None),
        forward_call(meta(70000, n, dtype=dtype), weight=F32, return_rstd=True),
        forward_call(meta(3, 5, n + 1, dtype=dtype)[..., :n], weight=dtype),
    ]
    backwards = [
        backward_call(meta(3, n, dtype=dtype), weight=None),
        backward_call(meta(70000, n, dtype=dtype), weight=F32),
    ]
    for calls_of in (calls, backwards):
        deals = set()
        for call in calls_of:
            for choice in gpu.candidates(call, H200):
                config = choice.config
                if "Stream" in type(choice.kernel).__name__:
                    deals.add(type(choice.kernel))
                    continue
                deals.add((config.lanes, config.chunks, config.cluster))
                held = config.lanes * config.chunks * config.cluster * vector(n, call["T"])
                assert n <= held
                assert config.threads % config.lanes == 0
                assert config.threads % WARP == 0
                assert config.threads <= 1024
                assert config.cluster <= MAX_CLUSTER
                assert config.lanes == config.threads or config.lanes in (1, 2, 4, 8, 16, 32)
        assert len(deals) == 1


@pytest.mark.parametrize(
    ("module", "config", "n", "reason"),
    [
        (rms_norm, rms_norm.Config(256, 4, threads=256, unroll=2), 8192, "a block would sum one by one"),
        (rms_norm, rms_norm.Config(256, 4, threads=256, resident=9), 8192, "more threads"),
        (rms_norm, rms_norm.Config(1024, 8, threads=1024, early=True), 65536, "more registers"),
        (rms_norm_bwd, rms_norm_bwd.Config(256, 4, 1, 256, 132, unroll=2), 8192, "a block would sum one by one"),
        (rms_norm_bwd, rms_norm_bwd.Config(32, 1, 1, 256, 132, resident=9), 256, "more threads"),
        (rms_norm_bwd, rms_norm_bwd.Config(512, 4, 1, 512, 264, resident=2), 16384, "more shared memory"),
        (rms_norm_bwd, rms_norm_bwd.Config(256, 4, 1, 256, 792, resident=6), 1000, "more shared memory"),
        (rms_norm_bwd, rms_norm_bwd.Config(512, 2, 1, 512, 396, resident=3), 8192, "more shared memory"),
        (rms_norm_bwd, rms_norm_bwd.Config(1024, 1, 1, 1024, 264, resident=2), 8192, "more registers"),
    ],
)
def test_what_is_left_out_and_why(module: Any, config: Any, n: int, reason: str) -> None:
    said = module.excluded(config, n, "bfloat16", *([H200] if module is rms_norm_bwd else []))
    assert reason in (said or "")


@pytest.mark.parametrize(
    ("x", "axes", "groups", "unit"),
    [
        (meta(4, 5, 64), 1, ((("B[1]", "B[0]"), 64),), 8),
        (meta(4, 5, 8, 8), 2, ((("B[1]", "B[0]"), 64),), 8),
        (meta(4, 5, 96)[..., :64], 1, ((("B[1]", "B[0]"), 96),), 8),
        (meta(4, 640)[:, :320].view(4, 5, 64), 1, ((("B[1]",), 64), (("B[0]",), 640)), 8),
        (meta(4, 5, 66)[..., :64], 1, ((("B[1]", "B[0]"), 66),), 2),
        (meta(4, 5, 65)[..., :64], 1, ((("B[1]", "B[0]"), 65),), 1),
        (meta(5, 4, 64).transpose(0, 1), 1, ((("B[1]",), 256), (("B[0]",), 64)), 8),
        (meta(1, 64).expand(7, 64), 1, ((("B[0]",), 0),), 8),
        (meta(64), 1, (), 8),
    ],
)
def test_where_rows_lie(x: Tensor, axes: int, groups: Any, unit: int) -> None:
    call = forward_call(x, axes)
    form = static_of(checker_of(call.entry), call).tensor("x")
    assert form is not None
    assert Place.of(form, axes, 8) == Place(groups, unit)


@pytest.mark.parametrize(
    "call",
    [
        forward_call(meta(4, 8192), return_rstd=True),
        forward_call(meta(2, 3, 6144)[..., :128], weight=F32),
        forward_call(meta(2, 131072, dtype=F16), weight=F16, weight_offset=1.0),
        forward_call(meta(2, 300001), weight=None),
        backward_call(meta(4, 1000)),
        backward_call(meta(4, 32768), dy=meta(4, 32770)[:, :32768], weight=F32),
        backward_call(meta(4, 300001)),
    ],
    ids=["block", "lanes", "cluster", "stream", "bwd-block", "bwd-cluster", "bwd-stream"],
)
def test_it_compiles(call: Call, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEOPS_CACHE_DIR", str(tmp_path))
    recipe = gpu.recipe(cuda, call, H200)
    assert recipe is not None
    assert program.compile_only(recipe).exists()


@pytest.mark.parametrize("op", [RMSNormFwdOp, RMSNormBwdOp])
def test_the_cases_of_the_kit_need_few_programs(op: type[Op]) -> None:
    """Each is compiled, so a suite stays affordable."""
    assert len(kit_recipes(op.entry, cuda, H200)) <= 200


def normal(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=DEVICE).to(dtype)


def held(op: Op, *tensors: Tensor | None) -> Any:
    """The op's results, right."""
    returned = op(*tensors)
    call = op.bind(*tensors)
    inputs = dict(zip(call.inputs, tensors, strict=True))
    verdict = accuracy.verify(call, inputs, accuracy.collect(call, returned, inputs))
    assert verdict.ok, str(verdict)
    return returned


def held_forward(x: Tensor, weight: Tensor | None = None, axes: int = 1, **params: Any) -> Any:
    return held(RMSNormFwdOp(tuple(x.shape[-axes:]), **params), x, weight)


def statistics(x: Tensor, axes: int = 1, eps: float = 1e-6) -> Tensor:
    shape = tuple(x.shape[-axes:])
    _, rstd = reference(x, normalized_shape=shape, eps=eps, weight_offset=0.0, return_rstd=True, T=x.dtype)
    assert rstd is not None
    return rstd


def held_backward(dy: Tensor, x: Tensor, weight: Tensor | None = None, axes: int = 1, **params: Any) -> Any:
    return held(RMSNormBwdOp(tuple(x.shape[-axes:]), **params), dy, x, weight, statistics(x, axes))


def rows_of(op: type[Op]) -> list[Any]:
    return [
        pytest.param(row, case, id="-".join([row.label, *case.values()]))
        for row in op.entry.workloads
        for case in cases(row)
    ]


@pytest.mark.cuda
@pytest.mark.parametrize(("row", "case"), rows_of(RMSNormFwdOp))
def test_forward_rows(row: Any, case: Any) -> None:
    call = scaled(checker_of(RMSNormFwdOp.entry), row, case, math.inf, 2**30)
    x, weight = (None if m is None else normal(*m.shape, dtype=getattr(torch, m.dtype)) for m in call.inputs.values())
    held(RMSNormFwdOp(**call.params), x, weight)


@pytest.mark.cuda
@pytest.mark.parametrize(("row", "case"), rows_of(RMSNormBwdOp))
def test_backward_rows(row: Any, case: Any) -> None:
    call = scaled(checker_of(RMSNormBwdOp.entry), row, case, math.inf, 2**30)
    dy, x, weight, _ = (
        None if m is None else normal(*m.shape, dtype=getattr(torch, m.dtype), seed=i)
        for i, m in enumerate(call.inputs.values())
    )
    assert dy is not None
    assert x is not None
    held_backward(dy, x, weight, len(call.params["normalized_shape"]), weight_offset=call.params["weight_offset"])


@pytest.mark.cuda
@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_any_length(n: int, dtype: torch.dtype) -> None:
    weight = normal(n, dtype=dtype, seed=1)
    held_forward(normal(7, n, dtype=dtype), weight, return_rstd=True, weight_offset=1.0)
    if n >= 100:  # shorter rows leave so little of dx that both it and the yardstick are mostly rounding
        held_backward(normal(7, n, dtype=dtype, seed=2), normal(7, n, dtype=dtype), weight)


@pytest.mark.cuda
@pytest.mark.parametrize("n", [1, 3, 7, 8])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_the_backward_of_short_rows(n: int, dtype: torch.dtype) -> None:
    dy, x, weight = normal(70, n, dtype=dtype, seed=2), normal(70, n, dtype=dtype), normal(n, dtype=dtype, seed=1)
    rstd = statistics(x)
    dx, dweight = RMSNormBwdOp(n)(dy, x, weight, rstd)
    g, xhat = dy.double() * weight.double(), x.double() * rstd.double()[:, None]
    exact = (g - xhat * (g * xhat).mean(-1, keepdim=True)) * rstd.double()[:, None]
    size = (g.abs() * rstd.double()[:, None]).amax(-1, keepdim=True)
    assert ((dx.double() - exact).abs() <= torch.finfo(dtype).eps * exact.abs() + 2**-20 * size).all()
    torch.testing.assert_close(
        dweight.double(), (dy.double() * xhat).sum(0), rtol=4 * torch.finfo(dtype).eps, atol=1e-4
    )


@pytest.mark.cuda
@pytest.mark.parametrize("rows", [1, 2, 133, 65535, 65536, 65537])
@pytest.mark.parametrize("n", [64, 512])
def test_any_number_of_rows(rows: int, n: int) -> None:
    x, weight = normal(rows, n), normal(n, seed=1)
    held_forward(x, weight)
    held_backward(normal(rows, n, seed=2), x, weight)


@pytest.mark.cuda
@pytest.mark.parametrize(("rows", "n"), [(133, 32776), (41, 32769)])
def test_the_backward_of_more_long_rows_than_its_slabs_have_at_once(rows: int, n: int) -> None:
    x, dy = normal(rows, n), normal(rows, n, seed=2)
    held_backward(dy, x, normal(n, seed=1))


@pytest.mark.cuda
def test_many_long_rows_after_few() -> None:
    """What is allocated for the first call's rows has room for no others."""
    op, n = RMSNormBwdOp(40000), 40000
    for rows in (2, 500, 17):
        x, dy, weight = normal(rows, n), normal(rows, n, seed=2), normal(n, seed=1)
        held(op, dy, x, weight, statistics(x))


@pytest.mark.cuda
def test_one_program_serves_all_numbers_of_rows() -> None:
    held_forward(normal(3, 640), normal(640), return_rstd=True)
    held_backward(normal(3, 640, seed=2), normal(3, 640), normal(640, seed=1))
    before = program.compilations, len(program._programs)
    for rows in random.Random(0).sample(range(1, 5000), 50):
        held_forward(normal(rows, 640), normal(640), return_rstd=True)
        held_backward(normal(rows, 640, seed=2), normal(rows, 640), normal(640, seed=1))
    assert (program.compilations, len(program._programs)) == before


def _padded(x: Tensor, more: int) -> Tensor:
    buffer = torch.full((*x.shape[:-1], x.shape[-1] + more), NAN, dtype=x.dtype, device=x.device)
    buffer[..., : x.shape[-1]] = x
    return buffer[..., : x.shape[-1]]


LAYOUTS = {
    "pitch-16-bytes": lambda x: _padded(x, 8),
    "pitch-8-bytes": lambda x: _padded(x, 4),
    "pitch-2-bytes": lambda x: _padded(x, 3),
    "permuted": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "expanded": lambda x: x[:1].expand(x.shape),
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "every-other": lambda x: x.repeat_interleave(2, dim=-1)[..., ::2],
    "misaligned": lambda x: torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape),
}


@pytest.mark.cuda
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("n", [1024, 131072])
def test_any_strides_and_the_same_bits(layout: str, n: int) -> None:
    x, dy, weight = normal(5, 3, n), normal(5, 3, n, seed=2), normal(n, seed=1)
    held_in = LAYOUTS[layout](x)
    plain, dy_in = held_in.contiguous(), LAYOUTS[layout](dy)
    y = held_forward(held_in, weight)
    assert torch.equal(y, RMSNormFwdOp(n)(plain, weight))
    dx, dweight = held_backward(dy_in, held_in, weight)
    expected = RMSNormBwdOp(n)(dy_in.contiguous(), plain, weight, statistics(plain))
    assert torch.equal(dx, expected[0])
    assert torch.equal(dweight, expected[1])


@pytest.mark.cuda
def test_heads_split_from_qkv() -> None:
    """They are views into qkv, which are not copied; what lies beside them, here NaN, is not theirs."""
    heads, heads_kv, D = 32, 8, 128
    qkv = normal(67, (heads + 2 * heads_kv) * D)
    qkv[:, (heads + heads_kv) * D :] = NAN
    q, k, _ = qkv.split([heads * D, heads_kv * D, heads_kv * D], dim=1)
    for x in (q.view(67, heads, D), k.view(67, heads_kv, D)):
        held_forward(x, normal(D, seed=1))
        call = RMSNormFwdOp(D).bind(x, None)
        assert gpu.choose(call, cuda.device(0)).copies == ()


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("shape", "axes"), [((96,), 1), ((2, 3, 8, 16), 2), ((4, 5, 6), 3), ((2, 1, 3, 40), 1), ((3, 1), 1)]
)
def test_any_rank(shape: tuple[int, ...], axes: int) -> None:
    x = normal(*shape, dtype=F32)
    held_forward(x, normal(*shape[-axes:], dtype=F32, seed=1), axes)
    if math.prod(shape[-axes:]) > 8:
        held_forward(x, None, axes, eps=1e-6)


@pytest.mark.cuda
@pytest.mark.semantics("RMSNormFwdOp", "batch-invariant")
@pytest.mark.semantics("RMSNormBwdOp", "batch-invariant", "deterministic")
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("n", [100, 128, 1001, 5120, 65536, 131072, 300001])
def test_a_row_alone_has_the_bits_it_has_in_a_batch(n: int, dtype: torch.dtype) -> None:
    x, weight, dy = normal(300, n, dtype=dtype), normal(n, dtype=dtype, seed=1), normal(300, n, dtype=dtype, seed=2)
    forward, backward, rstd = RMSNormFwdOp(n, return_rstd=True), RMSNormBwdOp(n), statistics(x)
    whole, (dx, dweight) = forward(x, weight), backward(dy, x, weight, rstd)
    for rows in (slice(0, 1), slice(17, 20), slice(299, 300)):
        for got, expected in zip(forward(x[rows].clone(), weight), whole, strict=True):
            assert torch.equal(got, expected[rows])
        assert torch.equal(backward(dy[rows].clone(), x[rows].clone(), weight, rstd[rows].clone())[0], dx[rows])
    for _ in range(5):
        assert torch.equal(backward(dy, x, weight, rstd)[1], dweight)


@pytest.mark.cuda
@pytest.mark.semantics("RMSNormFwdOp", "row-isolation")
@pytest.mark.semantics("RMSNormBwdOp", "row-isolation")
@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("n", [64, 1024, 16384, 131072])
def test_a_bad_row_leaves_the_others_alone(bad: float, n: int) -> None:
    x, dy, weight = normal(9, n), normal(9, n, seed=2), normal(n, seed=1)
    y, dx = RMSNormFwdOp(n)(x, weight), RMSNormBwdOp(n)(dy, x, weight, statistics(x))[0]
    x[4, n // 2] = bad
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    spoilt = held_forward(x, weight)
    assert torch.equal(spoilt[others], y[others])
    assert spoilt[4, n // 2].isnan()
    assert torch.equal(RMSNormBwdOp(n)(dy, x, weight, statistics(x))[0][others], dx[others])


@pytest.mark.cuda
@pytest.mark.parametrize("n", [256, 16384])
@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_constant_and_large_rows(n: int, dtype: torch.dtype) -> None:
    rows = [0.0, 1234.0, 40000.0, 1e-7] + ([1e15, 1e18] if dtype != F16 else [])
    x = torch.tensor(rows, device=DEVICE).to(dtype)[:, None].expand(-1, n).contiguous()
    y, rstd = held_forward(x, None, eps=1e-12, return_rstd=True)
    assert y.isfinite().all()
    assert rstd[0] == 1e6


@pytest.mark.cuda
def test_squares_beyond_float32_give_what_the_reference_gives() -> None:
    """Their sum is infinite in float32 and rstd 0, so y is 0; with torch's own rms_norm too."""
    x = torch.full((3, 1024), 1e30, device=DEVICE)
    x[1] = 1.0
    y = RMSNormFwdOp(1024)(x)
    assert torch.equal(
        y, reference(x, normalized_shape=(1024,), eps=None, weight_offset=0.0, return_rstd=False, T=F32)[0]
    )
    assert y[:, 0].tolist() == [0.0, pytest.approx(1.0), 0.0]


@pytest.mark.cuda
def test_inputs_stay_as_they_are_and_nothing_is_written_beside_outputs() -> None:
    x, weight = normal(5, 1001), normal(1001, seed=1)
    before = x.clone(), weight.clone()
    held_forward(x, weight)
    held_backward(normal(5, 1001, seed=2), x, weight)
    assert torch.equal(x, before[0])
    assert torch.equal(weight, before[1])


@pytest.mark.cuda
def test_autograd() -> None:
    x, weight = normal(33, 1536, dtype=F32).requires_grad_(), normal(1536, dtype=F32, seed=1).requires_grad_()
    dy = normal(33, 1536, dtype=F32, seed=2)
    RMSNormFwdOp(1536, eps=1e-6, weight_offset=1.0)(x, weight).backward(dy)
    expected = [t.detach().double().requires_grad_() for t in (x, weight)]
    torch.nn.functional.rms_norm(expected[0], (1536,), expected[1] + 1.0, eps=1e-6).backward(dy.double())
    for got, exact in zip((x, weight), expected, strict=True):
        torch.testing.assert_close(got.grad.double(), exact.grad, rtol=1e-5, atol=1e-5)
