"""The dense attention reference, held to hand-written numbers, to its definition in Python and to torch's SDPA."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from tileops.attention import GQADenseFwdOp, reference
from tileops.attention.reference import gqa_dense, gqa_dense_model
from tileops.attention.roofline import gqa_dense_bytes
from tileops.core.check.call import TensorMeta
from tileops.core.errors import CheckError

INF, NAN = float("inf"), float("nan")
DEFAULTS = {
    "is_causal": False, "window_size_left": -1, "window_size_right": -1, "softmax_scale": None, "softcap": None,
    "return_lse": True, "out_dtype": None,
}  # fmt: skip


def attend(q: Tensor, k: Tensor, v: Tensor, **call: Any) -> tuple[Tensor, Tensor]:
    """The reference with the entry's defaults, but always with lse."""
    o, lse = gqa_dense(q, k, v, **{**DEFAULTS, "T": q.dtype, **call})
    assert lse is not None
    return o, lse


def normal(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def qkv(
    B: int = 1, S_q: int = 1, S_kv: int = 1, H: int = 1, H_kv: int = 1, D: int = 8, D_v: int = 8,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return (
        normal(B, S_q, H, D, dtype=dtype),
        normal(B, S_kv, H_kv, D, dtype=dtype, seed=1),
        normal(B, S_kv, H_kv, D_v, dtype=dtype, seed=2),
    )


def column(*values: float, dtype: torch.dtype = torch.float64) -> Tensor:
    """One value a position: ``[1, len(values), 1, 1]``."""
    return torch.tensor(values, dtype=dtype).reshape(1, -1, 1, 1)


def seen(i: int, S_q: int, S_kv: int, is_causal: bool = False, left: int = -1, right: int = -1) -> list[int]:
    """The keys that query i sees, as the entry says it."""
    at = i + S_kv - S_q
    return [
        j for j in range(S_kv)
        if not (is_causal and j > at) and (left < 0 or at - left <= j) and (right < 0 or j <= at + right)
    ]  # fmt: skip


def by_definition(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None, alibi_slopes: Tensor | None = None, **call: Any
) -> tuple[Tensor, Tensor]:
    """One query, one head and one key at a time, in Python's numbers."""
    (B, S_q, H, D), (S_kv, H_kv, D_v) = q.shape, v.shape[1:]
    call = {**DEFAULTS, **call}
    scale, cap = call["softmax_scale"] or 1 / math.sqrt(D), call["softcap"]
    o, lse = torch.zeros(B, S_q, H, D_v, dtype=torch.float64), torch.full((B, H, S_q), -INF, dtype=torch.float64)
    for b, i, h in torch.cartesian_prod(*map(torch.arange, (B, S_q, H))).tolist():
        g = h // (H // H_kv)
        logits = {}
        for j in seen(i, S_q, S_kv, call["is_causal"], call["window_size_left"], call["window_size_right"]):
            s = scale * sum(x * y for x, y in zip(q[b, i, h].tolist(), k[b, j, g].tolist(), strict=True))
            s = cap * math.tanh(s / cap) if cap else s
            logits[j] = s - float(alibi_slopes[h]) * abs(i + S_kv - S_q - j) if alibi_slopes is not None else s
        total = sum(map(math.exp, logits.values())) + (math.exp(sinks[h]) if sinks is not None else 0.0)
        for j, s in logits.items():
            o[b, i, h] += math.exp(s) / total * v[b, j, g].double()
        lse[b, h, i] = math.log(total) if total else -INF
    return o, lse


def by_sdpa(q: Tensor, k: Tensor, v: Tensor, **mask: Any) -> Tensor:
    """Torch's attention in float64 with the mask written out and K and V repeated over their group."""
    (S_q, H), (S_kv, H_kv) = q.shape[1:3], k.shape[1:3]
    keep = torch.zeros(S_q, S_kv, dtype=torch.bool)
    for i in range(S_q):
        keep[i, seen(i, S_q, S_kv, **mask)] = True
    k, v = (x.repeat_interleave(H // H_kv, dim=2) for x in (k, v))
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=keep).transpose(1, 2)


def assert_rounded(o: Tensor, exact: Tensor) -> None:
    """One rounding to o's dtype away from ``exact``, give or take float32's arithmetic."""
    atol = 1e-12 if o.dtype == torch.float64 else 2e-6
    torch.testing.assert_close(o.double(), exact, rtol=0.51 * torch.finfo(o.dtype).eps, atol=atol)


# Masks by (is_causal, left, right); sizes by (S_q, S_kv): square, decode, chunk of a context, more queries than keys.
MASKS = [(False, -1, -1), (True, -1, -1), (False, 2, 1), (True, 1, -1), (True, 0, 3), (False, -1, 0), (False, 0, -1)]
SIZES = [(6, 6), (1, 7), (3, 8), (7, 3)]


@pytest.mark.semantics("GQADenseFwdOp", "causal-bottom-right")
@pytest.mark.semantics("GQADenseFwdOp", "window-inclusive")
@pytest.mark.semantics("GQADenseFwdOp", "lse")
@pytest.mark.parametrize("extras", ["", "softcap", "alibi", "sinks", "softcap alibi sinks"])
@pytest.mark.parametrize(("is_causal", "left", "right"), MASKS)
@pytest.mark.parametrize(("S_q", "S_kv"), SIZES)
def test_every_option_equals_the_definition(
    S_q: int, S_kv: int, is_causal: bool, left: int, right: int, extras: str
) -> None:
    q, k, v = qkv(B=2, S_q=S_q, S_kv=S_kv, H=6, H_kv=2, D=3, D_v=4)
    call: dict[str, Any] = {"is_causal": is_causal, "window_size_left": left, "window_size_right": right}
    call |= {"softcap": 0.7} if "softcap" in extras else {"softmax_scale": 1.3}
    call |= {"alibi_slopes": torch.tensor([0.0, 0.1, 0.2, 0.4, 0.8, 1.6])} if "alibi" in extras else {}
    call |= {"sinks": torch.tensor([-1.0, 0.0, 0.5, 1.0, 2.0, 3.0])} if "sinks" in extras else {}
    o, lse = attend(q, k, v, **call)
    expected = by_definition(q, k, v, **call)
    torch.testing.assert_close(o, expected[0], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(lse, expected[1], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("T", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("D", "D_v"), [(64, 64), (96, 96), (192, 128), (1, 3)])
@pytest.mark.parametrize("mask", [{}, {"is_causal": True}, {"left": 17, "right": 5}], ids=["full", "causal", "window"])
def test_larger_calls_equal_sdpa(mask: dict[str, Any], D: int, D_v: int, T: torch.dtype) -> None:
    q, k, v = qkv(B=2, S_q=70, S_kv=131, H=4, H_kv=2, D=D, D_v=D_v, dtype=T)
    call = {{"left": "window_size_left", "right": "window_size_right"}.get(name, name): x for name, x in mask.items()}
    o, lse = attend(q, k, v, **call)
    assert o.dtype == T
    assert lse.dtype == (torch.float64 if T is torch.float64 else torch.float32)
    assert_rounded(o, by_sdpa(q, k, v, **mask))


@pytest.mark.parametrize("S_kv", [1, 5, 127, 129, 1000, 4095])
def test_decode_of_any_length(S_kv: int) -> None:
    q, k, v = qkv(B=2, S_q=1, S_kv=S_kv, H=8, H_kv=2, D=16, D_v=16, dtype=torch.bfloat16)
    assert_rounded(attend(q, k, v)[0], by_sdpa(q, k, v))


@pytest.mark.semantics("GQADenseFwdOp", "gqa-heads")
def test_neighbouring_query_heads_share_a_kv_head() -> None:
    """Four query heads on two KV heads: 0, 0, 1, 1 and not 0, 1, 0, 1."""
    v = torch.tensor([5.0, 7.0]).reshape(1, 1, 2, 1).expand(1, 3, 2, 1)
    o, _ = attend(torch.zeros(1, 1, 4, 2), torch.zeros(1, 3, 2, 2), v, T=torch.float16)
    assert o.flatten().tolist() == [5.0, 5.0, 7.0, 7.0]


@pytest.mark.semantics("GQADenseFwdOp", "gqa-heads")
@pytest.mark.parametrize(("H", "H_kv"), [(4, 4), (4, 1), (10, 2), (12, 2), (28, 4), (64, 4)])
def test_any_number_of_heads_a_group(H: int, H_kv: int) -> None:
    q, k, v = qkv(B=2, S_q=3, S_kv=9, H=H, H_kv=H_kv)
    torch.testing.assert_close(attend(q, k, v, is_causal=True)[0], by_sdpa(q, k, v, is_causal=True))


@pytest.mark.semantics("GQADenseFwdOp", "scale")
def test_the_scale_is_one_over_the_root_of_d_or_what_is_given() -> None:
    """Scores of 0 and q . k = 2 log 3, with D = 4: 1 part against 3, and against 9 without the scale."""
    q = torch.tensor([2.0, 0, 0, 0], dtype=torch.float64).reshape(1, 1, 1, 4)
    k = torch.tensor([[0.0, 5, 5, 5], [math.log(3), -5, 5, 0]], dtype=torch.float64).reshape(1, 2, 1, 4)
    v = column(0.0, 1.0)
    assert attend(q, k, v)[0].item() == pytest.approx(3 / 4)
    assert attend(q, k, v, softmax_scale=1.0)[0].item() == pytest.approx(9 / 10)


@pytest.mark.semantics("GQADenseFwdOp", "scale")
def test_the_cap_comes_after_the_scale() -> None:
    """Scores of 100 and 0 under a cap of log 3: tanh saturates."""
    q, k, v = column(100.0), column(0.0, 1.0), column(0.0, 1.0)
    assert attend(q, k, v, softcap=math.log(3))[0].item() == pytest.approx(3 / 4)
    small = 1.5 * math.tanh(2.0 / 1.5)  # a scale of 0.02 leaves a score of 2
    o, _ = attend(q, k, v, softcap=1.5, softmax_scale=0.02)
    assert o.item() == pytest.approx(math.exp(small) / (1 + math.exp(small)))


@pytest.mark.semantics("GQADenseFwdOp", "scale")
@pytest.mark.parametrize("cap", [30.0, 50.0])
def test_the_cap_is_not_ignored(cap: float) -> None:
    q, k, v = qkv(S_q=5, S_kv=9, H=2, D=16)
    q = 12 * q
    o, _ = attend(q, k, v.expand(1, 9, 1, 8), softcap=cap)
    s = cap * torch.tanh(torch.einsum("bihd,bjd->bhij", q, k[:, :, 0]) / 4 / cap)
    torch.testing.assert_close(o, torch.einsum("bhij,bjd->bihd", s.softmax(-1), v[:, :, 0]))
    assert not torch.allclose(o, attend(q, k, v)[0], rtol=1e-3)


@pytest.mark.semantics("GQADenseFwdOp", "scale")
def test_alibi_is_added_to_capped_scores_and_counts_distance_on_both_sides() -> None:
    """Equal capped scores and a slope of log 2: each step away from the query halves a weight."""
    slope = torch.tensor([math.log(2)], dtype=torch.float64)
    q, k, v = column(9.0), column(9.0, 9.0, 9.0), column(1.0, 10.0, 100.0)
    o, _ = attend(q, k, v, alibi_slopes=slope, softcap=1.0)
    assert o.item() == pytest.approx((1 * 1 + 2 * 10 + 4 * 100) / 7)
    o, _ = attend(column(0.0, 0.0, 0.0), k, v, alibi_slopes=slope)
    assert o[0, 1].item() == pytest.approx((1 * 1 + 2 * 10 + 1 * 100) / 4)


def visibility(S_q: int, S_kv: int, **mask: Any) -> list[str]:
    """Which keys each query weighs, read off with equal scores and one-hot values."""
    v = torch.eye(S_kv, dtype=torch.float64).reshape(1, S_kv, 1, S_kv)
    zeros = torch.zeros(1, max(S_q, S_kv), 1, 1, dtype=torch.float64)
    o, _ = attend(zeros[:, :S_q], zeros[:, :S_kv], v, **mask)
    return ["".join(".x"[weight > 0] for weight in row) for row in o[0, :, 0].tolist()]


@pytest.mark.semantics("GQADenseFwdOp", "causal-bottom-right")
def test_the_last_query_stands_at_the_last_key() -> None:
    assert visibility(3, 3, is_causal=True) == ["x..", "xx.", "xxx"]
    assert visibility(2, 4, is_causal=True) == ["xxx.", "xxxx"]
    assert visibility(1, 8, is_causal=True) == ["xxxxxxxx"]
    assert visibility(5, 2, is_causal=True) == ["..", "..", "..", "x.", "xx"]


@pytest.mark.semantics("GQADenseFwdOp", "causal-bottom-right")
def test_sdpa_causal_is_the_same_for_squares_only() -> None:
    """Torch aligns its mask at the top left: its single query of a decode sees the first key alone."""
    q, k, v = qkv(S_q=8, S_kv=8)
    torch_o = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)
    torch.testing.assert_close(attend(q, k, v, is_causal=True)[0], torch_o)
    decode = q[:, :1].transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    torch_o = F.scaled_dot_product_attention(*decode, is_causal=True).transpose(1, 2)
    torch.testing.assert_close(torch_o, v[:, :1])
    assert not torch.allclose(attend(q[:, :1], k, v, is_causal=True)[0], torch_o)


@pytest.mark.semantics("GQADenseFwdOp", "window-inclusive")
def test_both_ends_of_a_window_are_inside() -> None:
    assert visibility(5, 5, window_size_left=2, window_size_right=0) == ["x....", "xx...", "xxx..", ".xxx.", "..xxx"]
    assert visibility(5, 5, window_size_left=0, window_size_right=0) == ["x....", ".x...", "..x..", "...x.", "....x"]
    assert visibility(5, 5, window_size_left=1, window_size_right=1) == ["xx...", "xxx..", ".xxx.", "..xxx", "...xx"]
    assert visibility(2, 5, window_size_left=2) == [".xxxx", "..xxx"]
    assert visibility(2, 5, window_size_right=0) == ["xxxx.", "xxxxx"]


@pytest.mark.semantics("GQADenseFwdOp", "window-inclusive")
def test_causal_closes_the_right_side_and_a_wide_window_hides_nothing() -> None:
    for right in (-1, 0, 4):
        assert visibility(3, 3, is_causal=True, window_size_right=right) == ["x..", "xx.", "xxx"]
    assert visibility(3, 3, window_size_left=3, window_size_right=9) == ["xxx"] * 3
    assert visibility(4, 2, window_size_left=0) == ["xx", "xx", "xx", ".x"]


@pytest.mark.semantics("GQADenseFwdOp", "window-inclusive")
@pytest.mark.parametrize("left", [0, 1, 100, 1000])
@pytest.mark.parametrize("S", [128, 300])
def test_windows_narrower_than_a_tile(S: int, left: int) -> None:
    q, k, v = qkv(S_q=S, S_kv=S, H=8, H_kv=1, D=128, D_v=16, dtype=torch.bfloat16)
    o, _ = attend(q, k, v, is_causal=True, window_size_left=left)
    assert_rounded(o, by_sdpa(q, k, v, is_causal=True, left=left))


@pytest.mark.semantics("GQADenseFwdOp", "sinks")
def test_a_sink_takes_weight_and_gives_no_value() -> None:
    """One score of 0 beside a sink of log 3, which neither the scale nor the cap touches."""
    sinks = torch.tensor([math.log(3)], dtype=torch.float64)
    o, lse = attend(column(0.0), column(1.0), column(8.0), sinks=sinks, softmax_scale=0.1, softcap=0.1)
    assert o.item() == pytest.approx(2.0)
    assert lse.item() == pytest.approx(math.log(4))


@pytest.mark.semantics("GQADenseFwdOp", "sinks")
def test_a_sink_is_its_heads_own_and_like_a_key_of_zero_value() -> None:
    q, k, v = qkv(B=2, S_q=4, S_kv=5, H=2, H_kv=1)
    sinks = torch.tensor([-1.0, 2.0])
    o, lse = attend(q, k, v, sinks=sinks)
    s = torch.einsum("bihd,bjd->bhij", q, k[:, :, 0]) / 8**0.5
    s = torch.cat([s, sinks.double().reshape(1, 2, 1, 1).expand(2, 2, 4, 1)], -1)
    torch.testing.assert_close(o, torch.einsum("bhij,bjd->bihd", s.softmax(-1)[..., :5], v[:, :, 0]))
    torch.testing.assert_close(lse, s.logsumexp(-1))


@pytest.mark.semantics("GQADenseFwdOp", "sinks")
@pytest.mark.parametrize(("sink", "expected"), [(1000.0, (0.0, 1000.0)), (-1000.0, (8.0, 0.0)), (-INF, (8.0, 0.0))])
def test_sinks_far_from_the_scores(sink: float, expected: tuple[float, float]) -> None:
    o, lse = attend(torch.zeros(1, 1, 1, 1).half(), column(1.0).half(), column(8.0).half(), sinks=torch.tensor([sink]))
    assert (o.item(), lse.item()) == expected


@pytest.mark.semantics("GQADenseFwdOp", "empty-row")
@pytest.mark.parametrize("T", [torch.float16, torch.bfloat16, torch.float64])
def test_a_query_before_every_key(T: torch.dtype) -> None:
    q, k, v = qkv(B=2, S_q=5, S_kv=2, H=4, H_kv=2, dtype=T)
    o, lse = attend(q, k, v, is_causal=True)
    assert torch.equal(o[:, :3], torch.zeros(2, 3, 4, 8, dtype=T))
    assert (lse[:, :, :3] == -INF).all()
    assert_rounded(o[:, 3:], by_sdpa(q, k, v, is_causal=True)[:, 3:])
    assert lse[:, :, 3:].isfinite().all()


@pytest.mark.semantics("GQADenseFwdOp", "empty-row")
@pytest.mark.parametrize("sink", [None, -200.0, 0.5, 200.0])
@pytest.mark.parametrize(("S_q", "S_kv"), [(3, 0), (3, 2)])
def test_a_query_without_a_key_has_the_sink_alone(S_q: int, S_kv: int, sink: float | None) -> None:
    q, k, v = qkv(B=2, S_q=S_q, S_kv=S_kv, H=2, H_kv=1, dtype=torch.bfloat16)
    o, lse = attend(q, k, v, is_causal=True, sinks=None if sink is None else torch.tensor([sink, sink]))
    assert torch.equal(o[:, 0], torch.zeros(2, 2, 8, dtype=torch.bfloat16))
    assert (lse[:, :, 0] == (-INF if sink is None else sink)).all()


@pytest.mark.semantics("GQADenseFwdOp", "empty-row")
def test_the_gradients_of_a_query_without_a_key_are_zero() -> None:
    q, k, v = (x.requires_grad_() for x in qkv(S_q=4, S_kv=2))
    o, _ = attend(q, k, v, is_causal=True)
    o.sum().backward()
    assert q.grad is not None
    assert (q.grad[:, :2] == 0).all()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in (q, k, v))


@pytest.mark.semantics("GQADenseFwdOp", "lse")
def test_lse_is_a_natural_logarithm() -> None:
    """Scores log 1, log 2, log 5 sum to 8; the layout is ``[B, H, S_q]``."""
    k = column(0.0, math.log(2), math.log(5), dtype=torch.float64)
    assert attend(column(1.0), k, k)[1].item() == pytest.approx(math.log(8))
    q, k, v = qkv(B=2, S_q=3, S_kv=5, H=4, H_kv=2, dtype=torch.float16)
    lse = attend(q, k, v)[1]
    assert (lse.shape, lse.dtype) == ((2, 4, 3), torch.float32)
    s = torch.einsum("bihd,bjhd->bhij", q.double(), k.double().repeat_interleave(2, 2)) / 8**0.5
    torch.testing.assert_close(lse.double(), s.logsumexp(-1), rtol=1e-6, atol=1e-6)
    assert gqa_dense(q, k, v, **{**DEFAULTS, "return_lse": False, "T": q.dtype})[1] is None


@pytest.mark.semantics("GQADenseFwdOp", "masked-values")
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("T", [torch.float16, torch.float64])
def test_keys_that_nobody_sees_may_hold_anything(T: torch.dtype, bad: float) -> None:
    """Three queries with a window of 1 to the left see the last four of ten keys."""
    q, k, v = qkv(B=2, S_q=3, S_kv=10, H=2, H_kv=1, dtype=T)
    clean = attend(q, k, v, is_causal=True, window_size_left=1)
    k[:, :6], v[:, :6] = bad, bad
    o, lse = attend(q, k, v, is_causal=True, window_size_left=1)
    assert torch.equal(o, clean[0])
    assert torch.equal(lse, clean[1])
    v[:, 6, :, 0] = NAN  # the first that is seen
    assert attend(q, k, v, is_causal=True, window_size_left=1)[0][:, 0, :, 0].isnan().all()


@pytest.mark.semantics("GQADenseFwdOp", "masked-values")
def test_a_bad_key_stays_in_its_batch_element_and_head() -> None:
    q, k, v = qkv(B=2, S_q=3, S_kv=4, H=4, H_kv=2)
    clean, _ = attend(q, k, v)
    k[1, 2, 1], v[1, 2, 1] = NAN, NAN
    o, _ = attend(q, k, v)
    assert torch.equal(o[0], clean[0])
    assert torch.equal(o[1, :, :2], clean[1, :, :2])
    assert o[1, :, 2:].isnan().all()


@pytest.mark.semantics("GQADenseFwdOp", "masked-values")
@pytest.mark.parametrize("T", [torch.float16, torch.float64])
def test_what_lies_between_and_behind_the_rows_is_not_read(T: torch.dtype) -> None:
    """A cache of 6 slots with 4 in use, its rows padded: all the rest is NaN."""
    q, k, v = qkv(B=2, S_q=2, S_kv=4, H=2, H_kv=1, dtype=T)
    clean, _ = attend(q, k, v)
    caches = torch.full((2, 2, 6, 1, 11), NAN, dtype=T)
    caches[0, :, :4, :, 1:9], caches[1, :, :4, :, 1:9] = k, v
    k, v = caches[0, :, :4, :, 1:9], caches[1, :, :4, :, 1:9]
    assert torch.equal(attend(q, k, v)[0], clean)


@pytest.mark.semantics("GQADenseFwdOp", "max-exact")
@pytest.mark.parametrize("low", [-50.0, -6e4, -1e15, -1e30])
def test_any_finite_scores_give_their_softmax(low: float) -> None:
    """Equal scores weigh the same, however negative they all are, and lower ones that come first weigh nothing."""
    q, k = column(1.0, dtype=torch.bfloat16), column(*[low] * 300, dtype=torch.bfloat16)
    v = torch.arange(300.0).remainder(2).bfloat16().reshape(1, 300, 1, 1)
    o, lse = attend(q, k, v)
    assert o.item() == 0.5
    assert lse.item() == pytest.approx(k[0, 0].item() + math.log(300), rel=1e-6)
    k[:, :200] *= 1.5
    v[:, 200:] = 3.0
    assert attend(q, k, v)[0].item() == 3.0


@pytest.mark.semantics("GQADenseFwdOp", "max-exact")
def test_scores_below_any_float16() -> None:
    """Scores -60000 and -60001 weigh as 0 and -1 do."""
    q = torch.tensor([200.0, 1.0]).half().reshape(1, 1, 1, 2)
    k = torch.tensor([[-300.0, 0.0], [-300.0, -1.0]]).half().reshape(1, 2, 1, 2)
    o, _ = attend(q, k, column(0.0, 1.0).half(), softmax_scale=1.0)
    assert o.item() == pytest.approx(1 / (1 + math.e), rel=2**-10)


@pytest.mark.semantics("GQADenseFwdOp", "max-exact")
def test_seven_heads_a_group_with_all_scores_near_minus_50() -> None:
    c = normal(1, 1, 1, 64, dtype=torch.float16).abs() + 1
    q, k = c.expand(1, 88, 14, 64), -c.expand(1, 448, 2, 64)
    v = normal(1, 448, 2, 64, dtype=torch.float16, seed=3)
    assert_rounded(attend(q, k, v, is_causal=True)[0], by_sdpa(q, k, v, is_causal=True))


@pytest.mark.semantics("GQADenseFwdOp", "scales")
def test_scales_multiply() -> None:
    """With q_scale 2 and k_scale log(3) / 2 the scores are log 3 and 0; v_scale triples the values."""
    q, k, v = (x.to(torch.float8_e4m3fn) for x in (column(1.0), column(1.0, 0.0), column(4.0, 0.0)))
    scales = {f"{n}_scale": torch.tensor([[x]]) for n, x in (("q", 2.0), ("k", math.log(3) / 2), ("v", 3.0))}
    o, lse = attend(q, k, v, **scales)
    assert (o.item(), o.dtype) == (9.0, torch.bfloat16)
    assert lse.item() == pytest.approx(math.log(4))
    assert attend(q, k, v, **scales, out_dtype=torch.float16)[0].dtype == torch.float16


@pytest.mark.semantics("GQADenseFwdOp", "scales")
def test_scales_are_their_batch_elements_and_kv_heads_own() -> None:
    q, k, v = (x.to(torch.float8_e4m3fn) for x in qkv(B=2, S_q=3, S_kv=5, H=4, H_kv=2, dtype=torch.float32))
    scales = [torch.tensor([[0.5, 1.0], [2.0, 4.0]]) + n for n in range(3)]
    o, _ = attend(q, k, v, q_scale=scales[0], k_scale=scales[1], v_scale=scales[2], out_dtype=torch.float16)
    q, k, v = (x.double() for x in (q, k, v))
    q = q * scales[0].repeat_interleave(2, 1)[:, None, :, None]
    k, v = k * scales[1][:, None, :, None], v * scales[2][:, None, :, None]
    assert_rounded(o, by_sdpa(q, k, v))


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("order", [(0, 2, 1, 3), (1, 0, 2, 3), (2, 1, 0, 3), (3, 1, 2, 0)])
def test_any_order_of_axes_in_memory(which: int, order: tuple[int, int, int, int]) -> None:
    tensors = list(qkv(B=2, S_q=62, S_kv=62, H=4, H_kv=2, D=16, D_v=16, dtype=torch.bfloat16))
    expected, _ = attend(*tensors)
    tensors[which] = tensors[which].permute(order).contiguous().permute(order)  # each order is its own inverse
    assert not tensors[which].is_contiguous()
    o, _ = attend(*tensors)
    assert o.is_contiguous()
    assert torch.equal(o, expected)


def test_an_expanded_kv_head() -> None:
    q, k, v = qkv(B=2, S_q=3, S_kv=5, H=4)
    wide = attend(q, k.expand(-1, -1, 4, -1), v.expand(-1, -1, 4, -1))[0]
    torch.testing.assert_close(wide, attend(q, k, v)[0])


@pytest.mark.parametrize("sizes", [{"B": 0}, {"S_q": 0}, {"B": 0, "S_kv": 0}, {"S_q": 0, "S_kv": 0}, {"H": 0}])
@pytest.mark.parametrize("is_causal", [True, False])
def test_empty_outputs_keep_their_shape(sizes: dict[str, int], is_causal: bool) -> None:
    sizes = {"B": 2, "S_q": 10, "S_kv": 16, "H": 4, "H_kv": 2, **sizes}
    o, lse = attend(*qkv(**sizes, dtype=torch.float16), is_causal=is_causal)
    assert o.shape == (sizes["B"], sizes["S_q"], sizes["H"], 8)
    assert lse.shape == (sizes["B"], sizes["H"], sizes["S_q"])


def test_more_batch_elements_than_a_grid_axis() -> None:
    q, k, v = (x.repeat(16384, 1, 1, 1) for x in qkv(B=4, S_q=2, S_kv=2, D=2, D_v=2, dtype=torch.float16))
    o, _ = attend(q, k, v)
    assert torch.equal(o[[0, 65534, 65535]], attend(q[[0, 2, 3]], k[[0, 2, 3]], v[[0, 2, 3]])[0])


@pytest.mark.parametrize("budget", [1, 20, 100])
@pytest.mark.parametrize(("is_causal", "left", "right"), MASKS)
@pytest.mark.parametrize(("S_q", "S_kv"), [*SIZES, (4, 0)])
def test_tiles_change_nothing(
    S_q: int, S_kv: int, is_causal: bool, left: int, right: int, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = qkv(B=2, S_q=S_q, S_kv=S_kv, H=4, H_kv=2)
    call = {"is_causal": is_causal, "window_size_left": left, "window_size_right": right, "sinks": torch.arange(4.0)}
    whole = attend(q, k, v, **call)
    monkeypatch.setattr(reference, "_BUDGET", budget)
    torch.testing.assert_close(attend(q, k, v, **call), whole)


def test_inputs_stay_as_they_are() -> None:
    tensors = qkv(S_q=3, S_kv=5, H=2, dtype=torch.float64)
    before = [x.clone() for x in tensors]
    attend(*tensors, is_causal=True, softcap=1.0)
    assert all(map(torch.equal, tensors, before))


@pytest.mark.parametrize("T", [torch.float16, torch.bfloat16])
def test_the_model_rounds_p(T: torch.dtype) -> None:
    """Scores 0 and -1: exp(-1) is rounded before it meets the value, and not in the denominator."""
    q, k, v = column(1.0), column(0.0, -1.0), column(0.0, 1.0)
    o, _ = gqa_dense_model(q=q, k=k, v=v, **DEFAULTS, T=T)
    assert o.item() == torch.tensor(math.exp(-1)).to(T).item() / (1 + math.exp(-1))
    o, _ = gqa_dense_model(q=q.to(T), k=k.to(T), v=v.to(T), **DEFAULTS, T=T)
    assert o.dtype == T


def test_the_model_of_float8_rounds_p_to_float8() -> None:
    """The two neighbours of exp(-1) = 0.3679 in e4m3 are 0.34375 and 0.375."""
    q, k, v = column(1.0), column(0.0, -1.0), column(0.0, 1.0)
    ones = dict.fromkeys(["q_scale", "k_scale", "v_scale"], torch.ones(1, 1))
    o, _ = gqa_dense_model(q=q, k=k, v=v, **ones, **DEFAULTS, T=torch.float8_e4m3fn)
    assert o.item() == pytest.approx(0.375 / (1 + math.exp(-1)))


@pytest.mark.parametrize(("S_q", "S_kv"), [(64, 64), (1, 5000), (3000, 40)])
def test_shapes_alone_are_enough_and_every_flop_counts(S_q: int, S_kv: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_BUDGET", 2**16)
    B, H, D, D_v = 2, 6, 24, 16
    q, k, v = (x.to("meta") for x in qkv(B=B, S_q=S_q, S_kv=S_kv, H=H, H_kv=2, D=D, D_v=D_v, dtype=torch.bfloat16))
    with FlopCounterMode(display=False) as counter:
        o, lse = attend(q, k, v)
    assert (o.device.type, o.shape, o.dtype) == ("meta", (B, S_q, H, D_v), torch.bfloat16)
    assert (lse.shape, lse.dtype) == ((B, H, S_q), torch.float32)
    assert counter.get_total_flops() == 2 * B * H * S_q * S_kv * (D + D_v)


@pytest.mark.parametrize(("is_causal", "left", "right"), MASKS)
@pytest.mark.parametrize(("S_q", "S_kv"), [*SIZES, (2, 9), (9, 2), (0, 4), (4, 0)])
def test_the_bytes_of_a_call_are_those_that_some_query_needs(
    S_q: int, S_kv: int, is_causal: bool, left: int, right: int
) -> None:
    rows = [seen(i, S_q, S_kv, is_causal, left, right) for i in range(S_q)]
    queries, keys = sum(map(bool, rows)), len(set().union(*rows))
    B, H, H_kv, D, D_v = 2, 4, 2, 8, 16
    op = GQADenseFwdOp(is_causal=is_causal, window_size_left=left, window_size_right=right, return_lse=True)
    call = op.bind((B, S_q, H, D), (B, S_kv, H_kv, D), (B, S_kv, H_kv, D_v), (H,), T="float16")
    read = 2 * B * (queries * H * D + keys * H_kv * (D + D_v)) + 4 * H
    assert gqa_dense_bytes(call) == read + 2 * B * S_q * H * D_v + 4 * B * H * S_q


def test_an_expanded_kv_head_is_read_once() -> None:
    expanded = TensorMeta((2, 5, 4, 8), "float16", strides=(40, 8, 0, 1))
    call = GQADenseFwdOp().bind((2, 3, 4, 8), expanded, expanded, T="float16")
    assert gqa_dense_bytes(call) == 2 * (2 * 3 * 4 * 8 + 2 * 2 * 5 * 8 + 2 * 3 * 4 * 8)


HALF = ((1, 4, 6, 64), (1, 4, 2, 64), (1, 4, 2, 64))


@pytest.mark.parametrize(
    ("params", "shapes", "T", "said"),
    [
        ({}, ((1, 4, 33, 64), *HALF[1:]), "float16", "H = 33, H_kv = 2"),
        ({}, ((1, 4, 3, 64), *HALF[1:]), "float16", "H = 3, H_kv = 2"),
        ({}, (HALF[0], (1, 4, 0, 64), (1, 4, 0, 64)), "float16", "H_kv = 0"),
        ({}, ((1, 4, 6, 0), (1, 4, 2, 0), HALF[2]), "float16", "D = 0"),
        ({"window_size_left": -2}, HALF, "float16", "window_size_left = -2"),
        ({"window_size_right": -2}, HALF, "float16", "window_size_right = -2"),
        ({"softmax_scale": 0.0}, HALF, "float16", "softmax_scale = 0.0"),
        ({"softcap": 0.0}, HALF, "float16", r"None \(not 0\)"),
        ({"out_dtype": torch.float16}, HALF, "float16", "out_dtype = float16"),
        ({}, HALF, "float8_e4m3fn", "q_scale, k_scale and v_scale"),
        ({}, (*HALF, None, None, *[(1, 2)] * 3), "float16", "q_scale, k_scale and v_scale"),
        ({}, (*HALF, None, None, (1, 2), (1, 2)), "float8_e4m3fn", "v_scale: got None"),
        ({}, (*HALF, None, None, *[(1, 6)] * 3), "float8_e4m3fn", "q_scale: got shape"),
    ],
)
def test_calls_outside_the_signature_say_what_is_wrong(
    params: dict[str, Any], shapes: tuple[Any, ...], T: str, said: str
) -> None:
    with pytest.raises(CheckError, match=said):
        GQADenseFwdOp(**params).bind(*shapes, T=T)
