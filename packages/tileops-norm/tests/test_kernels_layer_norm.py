"""The SM90 kernels of LayerNorm and its backward: dispatch, how rows are dealt, and, on a GPU, that they are right."""

from __future__ import annotations

import math
import random
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tileops.core import accuracy, program
from tileops.core.backend import cuda, gpu
from tileops.core.check import Call
from tileops.core.kernel import H200
from tileops.core.op import Op
from tileops.core.testing.programs import recipes as kit_recipes
from tileops.core.torch_ops import checker_of
from tileops.core.workloads import cases, scaled
from tileops.norm import LayerNormBwdOp, LayerNormFwdOp
from tileops.norm.kernels import layer_norm, layer_norm_bwd
from tileops.norm.kernels.rows import vector
from tileops.norm.reference import layer_norm as reference

DEVICE = "cuda"
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
NAN, INF = float("nan"), float("inf")
LENGTHS = [1, 3, 7, 8, 100, 1000, 1001, 1536, 4095, 8192, 10000, 16384, 20000, 65536, 131072, 262144, 300001]
DTypes = torch.dtype | None


def meta(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def forward_call(x: Tensor, axes: int = 1, weight: DTypes = BF16, bias: DTypes = BF16, **params: Any) -> Call:
    shape = tuple(x.shape[-axes:])
    affine = (None if dtype is None else meta(*shape, dtype=dtype) for dtype in (weight, bias))
    return LayerNormFwdOp(shape, **params).bind(x, *affine)


def backward_call(
    x: Tensor, axes: int = 1, weight: DTypes = BF16, bias: DTypes = BF16, dy: Tensor | None = None
) -> Call:
    shape = tuple(x.shape[-axes:])
    w, b = (None if dtype is None else meta(*shape, dtype=dtype) for dtype in (weight, bias))
    row = meta(*x.shape[:-axes], dtype=F32)
    return LayerNormBwdOp(shape).bind(x if dy is None else dy, x, w, row, row, b)


@pytest.mark.parametrize(
    ("call", "kernel", "copies"),
    [
        (forward_call(meta(8, 4096)), "LayerNormRows", ()),
        (forward_call(meta(8, 6144)[:, :4096]), "LayerNormRows", ()),
        (forward_call(meta(8, 4097)[:, :4096]), "LayerNormRows", ()),
        (forward_call(meta(1, 4096).expand(8, 4096)), "LayerNormRows", ()),
        (forward_call(meta(5, 8, 3, 128).transpose(1, 2)), "LayerNormRows", ()),
        (forward_call(meta(4096, 8).t()), "LayerNormRows", ("x",)),
        (forward_call(meta(8, 8192)[:, ::2]), "LayerNormRows", ("x",)),
        (forward_call(meta(4, 32, 8).transpose(1, 2), axes=2), "LayerNormRows", ("x",)),
        (forward_call(meta(3, 524288)), "LayerNormRows", ()),
        (forward_call(meta(3, 524296)), "LayerNormStream", ()),
        (forward_call(meta(3, 300001)), "LayerNormStream", ()),
        (forward_call(meta(3, 262144, dtype=F32), weight=F32, bias=F32), "LayerNormRows", ()),
        (backward_call(meta(8, 4096)), "LayerNormBwdRows", ()),
        (backward_call(meta(8, 4096), dy=meta(8, 5000)[:, :4096]), "LayerNormBwdRows", ()),
        (backward_call(meta(8, 4096), dy=meta(4096, 8).t()), "LayerNormBwdRows", ("dy",)),
        (backward_call(meta(3, 32768)), "LayerNormBwdRows", ()),
        (backward_call(meta(3, 32776)), "LayerNormBwdStream", ()),
        (backward_call(meta(3, 300001)), "LayerNormBwdStream", ()),
    ],
)
def test_which_kernel_serves_and_what_is_copied(call: Call, kernel: str, copies: tuple[str, ...]) -> None:
    choice = gpu.choose(call, H200)
    assert (type(choice.kernel).__name__, choice.copies) == (kernel, copies)


@pytest.mark.semantics("LayerNormFwdOp", "batch-invariant")
@pytest.mark.semantics("LayerNormBwdOp", "batch-invariant")
@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("n", [*LENGTHS, 128, 3584, 5120, 32768, 524288])
def test_the_order_of_a_sum_is_that_of_the_length(n: int, dtype: torch.dtype) -> None:
    """Whatever a tuner may choose deals a row alike, whatever the batch, the rank, the pitch, weight and bias."""
    forwards = [
        forward_call(meta(n, dtype=dtype), weight=None, bias=None),
        forward_call(meta(70000, n, dtype=dtype), weight=F32, bias=F32, return_stats=True),
        forward_call(meta(3, 5, n + 1, dtype=dtype)[..., :n], weight=dtype, bias=None),
    ]
    backwards = [
        backward_call(meta(3, n, dtype=dtype), weight=None, bias=None),
        backward_call(meta(70000, n, dtype=dtype), weight=F32, bias=F32),
    ]
    for calls in (forwards, backwards):
        choices = [choice for call in calls for choice in gpu.candidates(call, H200)]
        assert len({type(choice.kernel) for choice in choices}) == 1
        found = [choice.config for choice in choices if "Rows" in type(choice.kernel).__name__]
        assert len({(c.lanes, c.chunks, c.cluster) for c in found}) <= 1
        assert all(n <= c.lanes * c.chunks * c.cluster * vector(n, calls[0]["T"]) for c in found)
        assert all(c.lanes == c.threads or 32 % c.lanes == 0 for c in found)


@pytest.mark.parametrize("n", [1000, 8192, 16384])
def test_few_rows_have_their_weights_early_and_are_summed_as_many_are(n: int) -> None:
    """What a bucket's largest call says holds for all of it."""
    few = [(1,), (1, 1), (64,), (16, 1), (1, 64)]
    many = [(65,), (70000,), (16, 16), (2, 70000), (3, 5, 7)]
    found = {lead: gpu.choose(forward_call(meta(*lead, n, dtype=BF16)), H200).config for lead in few + many}
    assert len({found[lead] for lead in few}) == len({found[lead] for lead in many}) == 1
    assert found[1,].early
    assert attrs.evolve(found[65,], early=True, resident=1) == found[1,]


def test_a_config_that_leaves_no_registers_for_a_bias_is_left_out() -> None:
    forward = next(layer_norm.configs(16384, "bfloat16", few=False))
    assert layer_norm.excluded(forward, 16384, "bfloat16") is None
    crowded = attrs.evolve(forward, early=True, resident=2)
    assert layer_norm.excluded(crowded, 16384, "bfloat16") is None
    crowded = attrs.evolve(forward, early=True, resident=3)
    assert layer_norm.excluded(crowded, 16384, "bfloat16") == "more registers than a thread has"
    backward = next(layer_norm_bwd.configs(16384, "bfloat16", H200))
    assert layer_norm_bwd.excluded(backward, 16384, "bfloat16") is None
    crowded = attrs.evolve(backward, resident=2)
    assert layer_norm_bwd.excluded(crowded, 16384, "bfloat16") == "more registers than a thread has"


@pytest.mark.parametrize(
    "call",
    [
        forward_call(meta(4, 8192), return_stats=True),
        forward_call(meta(2, 3, 6144)[..., :128], weight=F32, bias=None),
        forward_call(meta(2, 1001), weight=None, bias=F32),
        forward_call(meta(2, 131072, dtype=F16), weight=None, bias=None),
        forward_call(meta(2, 300001)),
        backward_call(meta(4, 1000)),
        backward_call(meta(4, 128), bias=None),
        backward_call(meta(4, 32768), dy=meta(4, 32770)[:, :32768], weight=F32, bias=F32),
        backward_call(meta(4, 300001), weight=None),
    ],
    ids=["block", "lanes", "ragged", "cluster", "stream", "bwd-block", "bwd-lanes", "bwd-cluster", "bwd-stream"],
)
def test_it_compiles(call: Call, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEOPS_CACHE_DIR", str(tmp_path))
    recipe = gpu.recipe(cuda, call, H200)
    assert recipe is not None
    assert program.compile_only(recipe).exists()


@pytest.mark.parametrize(("weight", "bias"), [(BF16, BF16), (BF16, None), (None, F32), (None, None)])
@pytest.mark.parametrize("n", [1024, 131080])
def test_a_program_takes_each_tensor_of_the_call_and_of_the_workspace_once(
    n: int, weight: DTypes, bias: DTypes
) -> None:
    call = backward_call(meta(4, n), weight=weight, bias=bias)
    recipe = gpu.recipe(cuda, call, H200)
    assert recipe is not None
    function = recipe.kernel.program(recipe.static, recipe.config, H200)
    tensors = [m for m in (*call.inputs.values(), *call.outputs.values()) if m is not None]
    workspace = recipe.kernel.workspace(call, recipe.config)
    assert len(function.params) == len(tensors) + len(workspace)
    assert len({b.data for b in function.buffer_map.values()}) == len(function.params)


@pytest.mark.parametrize("op", [LayerNormFwdOp, LayerNormBwdOp])
def test_the_cases_of_the_kit_need_few_programs(op: type[Op]) -> None:
    """Each is compiled, so a suite stays affordable."""
    assert len(kit_recipes(op.entry, cuda, H200)) <= 250


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


def held_forward(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, axes: int = 1, **params: Any
) -> Any:
    return held(LayerNormFwdOp(tuple(x.shape[-axes:]), **params), x, weight, bias)


def statistics(x: Tensor, axes: int = 1) -> tuple[Tensor, Tensor]:
    shape = tuple(x.shape[-axes:])
    _, mean, rstd = reference(x, normalized_shape=shape, eps=1e-5, return_stats=True, T=x.dtype)
    assert mean is not None
    assert rstd is not None
    return mean, rstd


def held_backward(
    dy: Tensor, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, axes: int = 1
) -> Any:
    return held(LayerNormBwdOp(tuple(x.shape[-axes:])), dy, x, weight, *statistics(x, axes), bias)


def rows_of(op: type[Op]) -> list[Any]:
    return [
        pytest.param(row, case, id="-".join([row.label, *case.values()]))
        for row in op.entry.workloads
        for case in cases(row)
    ]


@pytest.mark.cuda
@pytest.mark.parametrize(("row", "case"), rows_of(LayerNormFwdOp))
def test_forward_rows(row: Any, case: Any) -> None:
    call = scaled(checker_of(LayerNormFwdOp.entry), row, case, math.inf, 2**30)
    given = (
        None if m is None else normal(*m.shape, dtype=getattr(torch, m.dtype), seed=i)
        for i, m in enumerate(call.inputs.values())
    )
    held(LayerNormFwdOp(**call.params), *given)


@pytest.mark.cuda
@pytest.mark.parametrize(("row", "case"), rows_of(LayerNormBwdOp))
def test_backward_rows(row: Any, case: Any) -> None:
    call = scaled(checker_of(LayerNormBwdOp.entry), row, case, math.inf, 2**30)
    dy, x, weight, _, _, bias = (
        None if m is None else normal(*m.shape, dtype=getattr(torch, m.dtype), seed=i)
        for i, m in enumerate(call.inputs.values())
    )
    assert dy is not None
    assert x is not None
    held_backward(dy, x, weight, bias, len(call.params["normalized_shape"]))


@pytest.mark.cuda
@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_any_length(n: int, dtype: torch.dtype) -> None:
    weight, bias = normal(n, dtype=dtype, seed=1), normal(n, dtype=dtype, seed=3)
    held_forward(normal(7, n, dtype=dtype), weight, bias, return_stats=True)
    if n >= 100:  # shorter rows leave so little of dx that both it and the yardstick are mostly rounding
        held_backward(normal(7, n, dtype=dtype, seed=2), normal(7, n, dtype=dtype), weight, bias)


@pytest.mark.cuda
@pytest.mark.parametrize("n", [1, 3, 7, 8])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_the_backward_of_short_rows(n: int, dtype: torch.dtype) -> None:
    dy, x, weight = normal(70, n, dtype=dtype, seed=2), normal(70, n, dtype=dtype), normal(n, dtype=dtype, seed=1)
    mean, rstd = statistics(x)
    dx, dweight, dbias = LayerNormBwdOp(n)(dy, x, weight, mean, rstd, weight)
    r = rstd.double()[:, None]
    g, xhat = dy.double() * weight.double(), (x.double() - mean.double()[:, None]) * r
    exact = (g - g.mean(-1, keepdim=True) - xhat * (g * xhat).mean(-1, keepdim=True)) * r
    size = (g.abs() * (1 + xhat.square()) * r).amax(-1, keepdim=True)
    assert ((dx.double() - exact).abs() <= torch.finfo(dtype).eps * exact.abs() + 2**-20 * size).all()
    for got, terms in ((dweight, dy.double() * xhat), (dbias, dy.double())):
        torch.testing.assert_close(got.double(), terms.sum(0), rtol=4 * torch.finfo(dtype).eps, atol=1e-4)


@pytest.mark.cuda
@pytest.mark.parametrize("given", ["weight", "bias", "neither"])
@pytest.mark.parametrize("n", [96, 8192, 65536, 300001])
def test_with_a_part_of_weight_and_bias_and_of_other_dtypes(n: int, given: str) -> None:
    x, dy = normal(9, n), normal(9, n, seed=2)
    weight = normal(n, dtype=F32, seed=1) if given == "weight" else None
    bias = normal(n, dtype=F32, seed=3) if given == "bias" else None
    held_forward(x, weight, bias)
    held_backward(dy, x, weight, bias)


@pytest.mark.cuda
@pytest.mark.parametrize("rows", [1, 2, 133, 65535, 65536, 65537])
@pytest.mark.parametrize("n", [64, 512])
def test_any_number_of_rows(rows: int, n: int) -> None:
    x, weight, bias = normal(rows, n), normal(n, seed=1), normal(n, seed=3)
    held_forward(x, weight, bias)
    held_backward(normal(rows, n, seed=2), x, weight, bias)


@pytest.mark.cuda
@pytest.mark.parametrize(("rows", "n"), [(133, 32776), (41, 32769)])
def test_the_backward_of_more_long_rows_than_its_slabs_have_at_once(rows: int, n: int) -> None:
    x, dy = normal(rows, n), normal(rows, n, seed=2)
    held_backward(dy, x, normal(n, seed=1), normal(n, seed=3))


@pytest.mark.cuda
def test_many_long_rows_after_few() -> None:
    """What is allocated for the first call's rows has room for no others."""
    op, n = LayerNormBwdOp(40000), 40000
    for rows in (2, 500, 17):
        x, dy, weight = normal(rows, n), normal(rows, n, seed=2), normal(n, seed=1)
        held(op, dy, x, weight, *statistics(x), weight)


@pytest.mark.cuda
def test_one_program_serves_all_numbers_of_rows() -> None:
    weight, bias = normal(640, seed=1), normal(640, seed=3)
    held_forward(normal(3, 640), weight, bias, return_stats=True)
    held_backward(normal(3, 640, seed=2), normal(3, 640), weight, bias)
    before = program.compilations, len(program._programs)
    for rows in random.Random(0).sample(range(1, 5000), 50):
        held_forward(normal(rows, 640), weight, bias, return_stats=True)
        held_backward(normal(rows, 640, seed=2), normal(rows, 640), weight, bias)
    assert (program.compilations, len(program._programs)) == before


def _padded(x: Tensor, more: int) -> Tensor:
    return F.pad(x, (0, more), value=NAN)[..., : x.shape[-1]]


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
@pytest.mark.parametrize("n", [1024, 131072, 524296])
def test_any_strides_and_the_same_bits(layout: str, n: int) -> None:
    x, dy, weight, bias = normal(5, 3, n), normal(5, 3, n, seed=2), normal(n, seed=1), normal(n, seed=3)
    x, dy = LAYOUTS[layout](x), LAYOUTS[layout](dy)
    plain = x.contiguous()
    assert torch.equal(held_forward(x, weight, bias), LayerNormFwdOp(n)(plain, weight, bias))
    expected = LayerNormBwdOp(n)(dy.contiguous(), plain, weight, *statistics(plain), bias)
    for got, same in zip(held_backward(dy, x, weight, bias), expected, strict=True):
        assert torch.equal(got, same)


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("shape", "axes"), [((96,), 1), ((2, 3, 8, 16), 2), ((4, 5, 6), 3), ((2, 1, 3, 40), 1), ((3, 1), 1)]
)
def test_any_rank(shape: tuple[int, ...], axes: int) -> None:
    x = normal(*shape, dtype=F32)
    held_forward(x, normal(*shape[-axes:], dtype=F32, seed=1), normal(*shape[-axes:], dtype=F32, seed=2), axes)
    held_forward(x, None, None, axes, return_stats=True)


@pytest.mark.cuda
@pytest.mark.semantics("LayerNormFwdOp", "batch-invariant")
@pytest.mark.semantics("LayerNormBwdOp", "batch-invariant", "deterministic")
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("n", [100, 128, 1001, 5120, 65536, 131072, 300001])
def test_a_row_alone_has_the_bits_it_has_in_a_batch(n: int, dtype: torch.dtype) -> None:
    x, dy = normal(300, n, dtype=dtype), normal(300, n, dtype=dtype, seed=2)
    weight, bias = normal(n, dtype=dtype, seed=1), normal(n, dtype=dtype, seed=3)
    forward, backward, (mean, rstd) = LayerNormFwdOp(n, return_stats=True), LayerNormBwdOp(n), statistics(x)
    whole, (dx, *summed) = forward(x, weight, bias), backward(dy, x, weight, mean, rstd, bias)
    for rows in (slice(0, 1), slice(17, 20), slice(299, 300)):
        for got, expected in zip(forward(x[rows].clone(), weight, bias), whole, strict=True):
            assert torch.equal(got, expected[rows])
        alone = backward(dy[rows].clone(), x[rows].clone(), weight, mean[rows].clone(), rstd[rows].clone(), bias)
        assert torch.equal(alone[0], dx[rows])
    for _ in range(5):
        again = backward(dy, x, weight, mean, rstd, bias)[1:]
        assert all(torch.equal(a, s) for a, s in zip(again, summed, strict=True))


@pytest.mark.cuda
@pytest.mark.semantics("LayerNormFwdOp", "row-isolation")
@pytest.mark.semantics("LayerNormBwdOp", "row-isolation")
@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("n", [64, 1001, 16384, 131072, 300001])
def test_a_bad_row_leaves_the_others_alone(bad: float, n: int) -> None:
    x, dy, weight = normal(9, n), normal(9, n, seed=2), normal(n, seed=1)
    y, dx = LayerNormFwdOp(n)(x, weight), LayerNormBwdOp(n)(dy, x, weight, *statistics(x))[0]
    x[4, n // 2] = bad
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    spoilt = held_forward(x, weight)
    assert torch.equal(spoilt[others], y[others])
    assert spoilt[4].isnan().all()
    assert torch.equal(LayerNormBwdOp(n)(dy, x, weight, *statistics(x))[0][others], dx[others])


@pytest.mark.cuda
@pytest.mark.semantics("LayerNormFwdOp", "constant")
@pytest.mark.parametrize("n", [100, 1001, 1536, 16384, 131072, 300001])
@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_constant_rows_and_rows_far_from_zero(n: int, dtype: torch.dtype) -> None:
    values = torch.tensor([0.0, 1234.0, -0.1, 40000.0, 1e-7] + ([1e15] if dtype != F16 else []), device=DEVICE)
    x, bias = values.to(dtype)[:, None].expand(-1, n).contiguous(), normal(n, dtype=dtype)
    y, mean, rstd = LayerNormFwdOp(n, eps=1e-12, return_stats=True)(x, None, bias)
    assert torch.equal(y, bias.expand_as(y))
    assert torch.equal(mean, x[:, 0].float())
    torch.testing.assert_close(rstd, torch.full_like(rstd, 1e6))
    held_forward(80000.0 + torch.arange(n, device=DEVICE).expand(3, -1) % 4 if dtype == F32 else x)


@pytest.mark.cuda
def test_inputs_stay_as_they_are() -> None:
    given = normal(5, 1001), normal(1001, seed=1), normal(1001, seed=3)
    before = [t.clone() for t in given]
    held_forward(*given)
    held_backward(normal(5, 1001, seed=2), *given)
    assert all(torch.equal(t, b) for t, b in zip(given, before, strict=True))


@pytest.mark.cuda
@pytest.mark.parametrize("n", [1536, 131080])
def test_autograd(n: int) -> None:
    ours = [normal(*shape, dtype=F32, seed=i).requires_grad_() for i, shape in enumerate([(33, n), (n,), (n,)])]
    dy = normal(33, n, dtype=F32, seed=9)
    LayerNormFwdOp(n)(*ours).backward(dy)
    exact = [t.detach().double().requires_grad_() for t in ours]
    F.layer_norm(exact[0], (n,), *exact[1:]).backward(dy.double())
    for got, true in zip(ours, exact, strict=True):
        torch.testing.assert_close(got.grad.double(), true.grad, rtol=1e-5, atol=1e-5)
