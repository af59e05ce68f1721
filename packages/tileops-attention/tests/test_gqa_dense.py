"""GQADenseFwdOp through its front door: every case that its entry gives, and inputs that broke others."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tileops.attention import GQADenseFwdOp
from tileops.core.check import Call
from tileops.core.errors import CheckError
from tileops.core.testing import Case, TorchCase, assert_right, case_of, run_case, run_torch_case

pytestmark = pytest.mark.op("GQADenseFwdOp")

CAUSAL = GQADenseFwdOp(is_causal=True, return_lse=True)
NAN, INF = float("nan"), float("inf")


def test_rows(workload_case: Case, device: str) -> None:
    run_case(workload_case, device)


def test_edges(edge_case: Case, device: str) -> None:
    run_case(edge_case, device)


def test_torch(torch_case: TorchCase, device: str) -> None:
    run_torch_case(torch_case, device)


def call(
    op: GQADenseFwdOp, S_q: int, S_kv: int, B: int = 1, H: int = 8, H_kv: int = 2, D: int = 64, D_v: int = 64,
    T: torch.dtype = torch.bfloat16,
) -> Call:  # fmt: skip
    return op.bind((B, S_q, H, D), (B, S_kv, H_kv, D), (B, S_kv, H_kv, D_v), T=T)


def normal(*shape: int, device: str, dtype: torch.dtype = torch.float16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def qkv(
    S_q: int, S_kv: int, device: str, B: int = 1, H: int = 1, H_kv: int = 1, D: int = 64
) -> tuple[Tensor, Tensor, Tensor]:
    q, k = normal(B, S_q, H, D, device=device), normal(B, S_kv, H_kv, D, device=device, seed=1)
    return q, k, normal(B, S_kv, H_kv, D, device=device, seed=2)


@pytest.mark.parametrize("S_kv", [1, 5, 127, 129, 1000, 4095])
def test_decode_of_any_length(S_kv: int, device: str) -> None:
    run_case(case_of(call(GQADenseFwdOp(return_lse=True), 1, S_kv, B=2), f"decode-{S_kv}"), device)


@pytest.mark.semantics("GQADenseFwdOp", "causal-bottom-right")
@pytest.mark.parametrize(("S_q", "S_kv"), [(1, 8), (5, 2), (70, 131), (131, 70), (88, 448), (256, 1)])
def test_causal_with_more_or_fewer_queries_than_keys(S_q: int, S_kv: int, device: str) -> None:
    run_case(case_of(call(CAUSAL, S_q, S_kv, H=14), f"causal-{S_q}-{S_kv}"), device)


@pytest.mark.semantics("GQADenseFwdOp", "empty-row")
def test_the_first_queries_of_more_than_keys_see_none(device: str) -> None:
    o, lse = CAUSAL(*qkv(5, 2, device, B=2, H=4, H_kv=2))
    assert (o[:, :3] == 0).all()
    assert (lse[:, :, :3] == -INF).all()
    assert lse[:, :, 3:].isfinite().all()


@pytest.mark.semantics("GQADenseFwdOp", "empty-row")
@pytest.mark.parametrize("bad", [NAN, INF])
def test_queries_that_see_no_key_have_nothing_of_a_value_that_others_see(bad: float, device: str) -> None:
    q, k, v = qkv(5, 2, device, H=4, H_kv=2)
    v[:, 1] = bad
    for sinks in (None, torch.zeros(4, device=device)):
        o, _ = CAUSAL(q, k, v, sinks)
        assert (o[:, :3] == 0).all()
        assert not o[:, -1].isfinite().any()


@pytest.mark.semantics("GQADenseFwdOp", "window-inclusive")
@pytest.mark.parametrize("left", [0, 1, 2, 100, 1000])
@pytest.mark.parametrize("S", [8, 128, 300])
def test_windows_narrower_than_a_tile_and_wider_than_the_keys(S: int, left: int, device: str) -> None:
    op = GQADenseFwdOp(is_causal=True, window_size_left=left)
    run_case(case_of(call(op, S, S, H=8, H_kv=1, D=32, D_v=32), f"window-{left}-{S}"), device)


@pytest.mark.semantics("GQADenseFwdOp", "gqa-heads")
@pytest.mark.parametrize(("H", "H_kv"), [(10, 2), (12, 2), (28, 4), (64, 4), (7, 7), (9, 1)])
@pytest.mark.parametrize("S_q", [1, 3])
def test_any_number_of_heads_a_group(H: int, H_kv: int, S_q: int, device: str) -> None:
    run_case(case_of(call(CAUSAL, S_q, 130, B=2, H=H, H_kv=H_kv, D=32, D_v=32), f"group-{H}-{H_kv}"), device)


@pytest.mark.semantics("GQADenseFwdOp", "gqa-heads")
def test_neighbouring_query_heads_share_a_kv_head(device: str) -> None:
    """Four query heads on two KV heads: 0, 0, 1, 1 and not 0, 1, 0, 1."""
    q, k, _ = qkv(1, 3, device, H=4, H_kv=2)
    v = torch.tensor([5.0, 7.0], device=device, dtype=torch.float16).reshape(1, 1, 2, 1).expand(1, 3, 2, 64)
    assert GQADenseFwdOp()(q, k, v)[0, 0, :, 0].tolist() == [5.0, 5.0, 7.0, 7.0]


@pytest.mark.parametrize(("H", "H_kv"), [(33, 2), (3, 2), (2, 4)])
def test_heads_that_do_not_divide(H: int, H_kv: int, device: str) -> None:
    """Others read past the KV heads, or left query heads unwritten."""
    with pytest.raises(CheckError, match=f"H = {H}, H_kv = {H_kv}, expected a number of query heads"):
        GQADenseFwdOp()(*qkv(4, 4, device, H=H, H_kv=H_kv))


@pytest.mark.parametrize(
    "sizes", [{"B": 0, "S_q": 10, "S_kv": 395}, {"S_q": 0, "S_kv": 5}, {"S_q": 5, "S_kv": 0}, {"S_q": 0, "S_kv": 0}]
)
@pytest.mark.parametrize("op", [GQADenseFwdOp(), CAUSAL], ids=["full", "causal"])
def test_nothing_to_attend(op: GQADenseFwdOp, sizes: dict[str, int], device: str) -> None:
    run_case(case_of(call(op, H=16, H_kv=16, T=torch.float16, **sizes), "empty"), device)


@pytest.mark.parametrize("which", ["q", "k", "v"])
@pytest.mark.parametrize("layout", ["permuted", "transposed", "odd-pitch", "misaligned", "expanded2"])
def test_each_tensor_alone_in_another_layout(which: str, layout: str, device: str) -> None:
    """``permuted`` is ``[B, H, S, D]`` in memory."""
    case = case_of(call(CAUSAL, 62, 62, H=16, H_kv=4, D=128, D_v=128), f"{which}-{layout}", {which: layout})
    run_case(case, device)


@pytest.mark.parametrize("S", [62, 128])
def test_q_k_and_v_split_from_one_tensor(S: int, device: str) -> None:
    H, H_kv, D = 8, 2, 64
    packed = normal(2, S, (H + 2 * H_kv) * D, device=device)
    q, k, v = (x.unflatten(-1, (-1, D)) for x in packed.split([H * D, H_kv * D, H_kv * D], dim=-1))
    assert_right(CAUSAL, q, k, v)


@pytest.mark.semantics("GQADenseFwdOp", "masked-values")
@pytest.mark.parametrize(("S_q", "used"), [(1, 1), (1, 3), (4, 70), (70, 129)])
def test_what_lies_behind_the_used_part_of_a_cache(S_q: int, used: int, device: str) -> None:
    q, k, v = qkv(S_q, 256, device, B=2, H=4, H_kv=2)
    k[:, used:], v[:, used:] = NAN, NAN
    o, lse = assert_right(CAUSAL, q, k[:, :used], v[:, :used])
    assert o.isfinite().all()
    assert not lse.isnan().any()


@pytest.mark.semantics("GQADenseFwdOp", "masked-values")
@pytest.mark.parametrize("bad", [NAN, INF])
def test_keys_outside_every_window_may_hold_anything(bad: float, device: str) -> None:
    q, k, v = qkv(3, 300, device, H=4, H_kv=2)
    op = GQADenseFwdOp(is_causal=True, window_size_left=1)
    clean = op(q, k, v)
    k[:, :296], v[:, :296] = bad, bad
    assert torch.equal(op(q, k, v), clean)


@pytest.mark.semantics("GQADenseFwdOp", "max-exact")
def test_seven_heads_a_group_with_all_scores_near_minus_50(device: str) -> None:
    """A running maximum that starts at 0 stays there."""
    c = normal(1, 1, 1, 64, device=device).abs() + 1
    k = -c.expand(1, 448, 2, 64)
    assert_right(CAUSAL, c.expand(1, 88, 14, 64), k, normal(1, 448, 2, 64, device=device, seed=3))


@pytest.mark.semantics("GQADenseFwdOp", "max-exact")
def test_scores_below_any_stand_in_for_minus_infinity(device: str) -> None:
    """Every score is below -5e4; they are whole numbers, which float32 adds exactly."""
    q = torch.full((1, 4, 2, 128), 448.0, device=device, dtype=torch.bfloat16)
    steps = torch.arange(200, device=device).remainder(3).to(torch.bfloat16)
    k = torch.full((1, 200, 1, 128), -1880.0, device=device, dtype=torch.bfloat16) + 8 * steps.reshape(1, 200, 1, 1)
    v = normal(1, 200, 1, 128, device=device, dtype=torch.bfloat16)
    o, lse = assert_right(GQADenseFwdOp(return_lse=True, softmax_scale=1.0), q, k, v)
    assert (lse < -5e4).all()
    torch.testing.assert_close(o[0, 0, 0], v[0, steps == 2, 0].float().mean(0).bfloat16(), rtol=2**-7, atol=2**-9)


@pytest.mark.semantics("GQADenseFwdOp", "scale")
@pytest.mark.parametrize("cap", [1e6, 1e10])
def test_a_cap_far_above_the_scores_changes_nothing(cap: float, device: str) -> None:
    q, k, v = qkv(40, 90, device, H=4, H_kv=2)
    capped = assert_right(GQADenseFwdOp(is_causal=True, softcap=cap), q, k, v)
    torch.testing.assert_close(capped, GQADenseFwdOp(is_causal=True)(q, k, v), rtol=2**-9, atol=2**-10)


@pytest.mark.semantics("GQADenseFwdOp", "scale")
@pytest.mark.parametrize("cap", [30.0, 50.0])
def test_the_cap_is_not_ignored(cap: float, device: str) -> None:
    q, k, v = qkv(40, 90, device, H=4, H_kv=2)
    capped = assert_right(GQADenseFwdOp(is_causal=True, softcap=cap), 12 * q, k, v)
    assert not torch.allclose(capped, GQADenseFwdOp(is_causal=True)(12 * q, k, v), rtol=0.05)


@pytest.mark.semantics("GQADenseFwdOp", "sinks")
@pytest.mark.parametrize("sink", [-INF, -1000.0, 0.0, 1000.0])
def test_sinks_far_from_the_scores(sink: float, device: str) -> None:
    sinks = torch.full((4,), sink, device=device)
    assert_right(CAUSAL, *qkv(5, 130, device, H=4, H_kv=2), sinks)
    assert_right(CAUSAL, *qkv(5, 2, device, H=4, H_kv=2), sinks)


def test_more_batch_elements_than_a_grid_axis(device: str) -> None:
    q, k, v = (x.repeat(16384, 1, 1, 1) for x in qkv(2, 2, device, B=4, D=8))
    op = GQADenseFwdOp(is_causal=True)
    assert torch.equal(op(q, k, v)[[0, 65534, 65535]], op(q[:4], k[:4], v[:4])[[0, 2, 3]])


@pytest.mark.semantics("GQADenseFwdOp", "scales")
@pytest.mark.parametrize("given", [(), ("q",), ("q", "k"), ("k", "v")])
def test_scales_come_with_float8_and_all_three(given: tuple[str, ...], device: str) -> None:
    q, k, v = (x.to(torch.float8_e4m3fn) for x in qkv(3, 5, device))
    scales = {f"{name}_scale": torch.ones(1, 1, device=device) for name in given}
    with pytest.raises(CheckError, match="scale"):
        GQADenseFwdOp()(q, k, v, **scales)


@pytest.mark.parametrize(
    ("params", "shapes", "message"),
    [
        ({}, [(4, 2, 8), (1, 4, 2, 8), (1, 4, 2, 8)], r"q: got rank 3"),
        ({}, [(2, 4, 2, 8), (1, 4, 2, 8), (1, 4, 2, 8)], r"k: got shape \(1, 4, 2, 8\), expected .* B = 2"),
        ({}, [(1, 4, 2, 8), (1, 4, 2, 16), (1, 4, 2, 8)], r"k: got shape .*, expected .* D = 8"),
        ({}, [(1, 4, 2, 8), (1, 4, 2, 8), (1, 5, 2, 8)], r"v: got shape .*, expected .* S_kv = 4"),
        ({}, [(1, 4, 2, 8), (1, 4, 1, 8), (1, 4, 2, 8)], r"v: got shape .*, expected .* H_kv = 1"),
        ({}, [(1, 4, 2, 0), (1, 4, 2, 0), (1, 4, 2, 8)], r"D = 0.*, expected heads with at least one element"),
        ({"window_size_left": -2}, [(1, 4, 2, 8)] * 3, r"window_size_left = -2, expected"),
        ({"softcap": 0.0}, [(1, 4, 2, 8)] * 3, r"softcap = 0.0, expected a positive bound"),
        ({"softmax_scale": -1.0}, [(1, 4, 2, 8)] * 3, r"softmax_scale = -1.0, expected a positive factor"),
        ({"softmax_scale": NAN}, [(1, 4, 2, 8)] * 3, r"softmax_scale.* nan, expected a "),
        ({"softcap": NAN}, [(1, 4, 2, 8)] * 3, r"softcap.* nan, expected a "),
        *(
            ({name: value}, [(1, 4, 2, 8)] * 3, rf"{name} = {value}, expected a positive .* 1e-10 to 1e1?[06], or None")
            for name in ("softmax_scale", "softcap")
            for value in (INF, 2e10, 1e-40)
        ),
        ({"out_dtype": torch.float16}, [(1, 4, 2, 8)] * 3, r"out_dtype = float16.*, expected no out_dtype"),
    ],
)
def test_calls_that_do_not_fit(
    params: dict[str, Any], shapes: list[tuple[int, ...]], message: str, device: str
) -> None:
    with pytest.raises(CheckError, match=message):
        GQADenseFwdOp(**params)(*(normal(*shape, device=device) for shape in shapes))


def test_dtypes_and_devices_that_do_not_fit(device: str) -> None:
    q, k, v = qkv(3, 5, device)
    with pytest.raises(CheckError, match=r"v: got bfloat16, expected float16"):
        GQADenseFwdOp()(q, k, v.bfloat16())
    with pytest.raises(CheckError, match=r"q: got float32, expected float16"):
        GQADenseFwdOp()(q.float(), k.float(), v.float())
    with pytest.raises(CheckError, match=r"sinks: got float16, expected float32"):
        GQADenseFwdOp()(q, k, v, q[0, 0, :, 0])
    with pytest.raises(CheckError, match=r"k: got a tensor on meta, expected .*, where q is"):
        GQADenseFwdOp()(q, k.to("meta"), v)


def test_decode_sees_the_whole_cache_where_torchs_mask_sees_one_key(device: str) -> None:
    """Torch aligns its causal mask at the top left."""
    q, k, v = qkv(1, 8, device)
    o = assert_right(GQADenseFwdOp(is_causal=True), q, k, v)
    scores = (q[0, 0, 0].float() @ k[0, :, 0].float().T) / math.sqrt(64)
    torch.testing.assert_close(o[0, 0, 0].float(), scores.softmax(-1) @ v[0, :, 0].float(), rtol=2**-9, atol=2**-11)
