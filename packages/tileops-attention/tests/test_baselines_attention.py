"""The rivals of the attention operators mean what the operators mean, and say what they lack.

Libraries that need a GPU are stood in for by this package's reference behind signatures of theirs.
"""

from __future__ import annotations

import math
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tileops.attention import GQADenseFwdOp, baselines
from tileops.core.accuracy import collect, verify
from tileops.core.bench.rivals import Missing, outputs, rivals_of
from tileops.core.check import Call
from tileops.core.families import find_entry
from tileops.core.inputs import make_inputs
from tileops.core.torch_ops import checker_of
from tileops.core.workloads import cases, row_call, scaled

ENTRY = find_entry("GQADenseFwdOp")
CALLS = [scaled(checker_of(ENTRY), row, case, 2**21) for row in ENTRY.workloads for case in cases(row)]


def attend(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, left: int, cap: float | None, scale: float | None, sinks: Any = None
) -> tuple[Tensor, Tensor]:
    """``o`` and ``lse`` of a batch, ``[B, S, H, D]``, with a mask aligned at the bottom right."""
    op = GQADenseFwdOp(
        is_causal=causal, window_size_left=left, softcap=cap or None, softmax_scale=scale, return_lse=True
    )
    return op(q, k, v, sinks)


class Ragged:
    """FlashInfer's prefill: packed sequences with offsets; logarithms of base 2, ``[tokens, H]``."""

    def __init__(self, workspace: Tensor, layout: str) -> None:
        assert layout == "NHD"

    def plan(self, qo: Tensor, kv: Tensor, H: int, H_kv: int, D: int, D_v: int, **options: Any) -> None:
        self.offsets, self.heads, self.options = (qo, kv), (H, H_kv, D, D_v), options
        assert options["q_data_type"] in (torch.float16, torch.bfloat16)

    def run(self, q: Tensor, k: Tensor, v: Tensor, return_lse: bool) -> Any:
        assert (q.shape[1], k.shape[1], q.shape[2], v.shape[2]) == self.heads
        qo, kv = (o.tolist() for o in self.offsets)
        assert (qo[-1], kv[-1]) == (len(q), len(k))
        options = self.options
        mask = options["causal"], options["window_left"], options["logits_soft_cap"], options["sm_scale"]
        found = [
            attend(q[None, a:b], k[None, c:d], v[None, c:d], *mask)
            for (a, b), (c, d) in zip(pairwise(qo), pairwise(kv), strict=True)
        ]
        return joined(found, return_lse)


class Paged:
    """FlashInfer's decode: one query a sequence, the cache by a table of pages."""

    def __init__(self, workspace: Tensor, layout: str, use_tensor_cores: bool) -> None:
        assert layout == "NHD"

    def plan(
        self, offsets: Tensor, indices: Tensor, last: Tensor, H: int, H_kv: int, D: int, page: int, **options: Any
    ) -> None:
        self.table, self.page, self.options = (offsets.tolist(), indices, last.tolist()), page, options

    def run(self, q: Tensor, pages: tuple[Tensor, Tensor], return_lse: bool) -> Any:
        options = self.options
        mask = options["window_left"], options["logits_soft_cap"], options["sm_scale"]
        return joined([attend(q[i, None, None], k, v, False, *mask) for i, (k, v) in self.caches(pages)], return_lse)

    def caches(self, pages: tuple[Tensor, Tensor]) -> Any:
        offsets, indices, last = self.table
        for i, (begin, end) in enumerate(pairwise(offsets)):
            length = (end - begin - 1) * self.page + last[i]
            yield i, [t[indices[begin:end].long()].flatten(0, 1)[None, :length] for t in pages]


class WithSinks(Paged):
    """FlashInfer's kernel with sinks: several queries a sequence, sinks and the scale given at each run."""

    def __init__(self, workspace: Tensor, layout: str, **options: Any) -> None:
        self.window = options["window_left"]

    def plan(self, qo: Tensor, *table: Any, **options: Any) -> None:
        self.qo = qo.tolist()
        assert options["window_left"] == self.window
        super().plan(*table, **options)

    def run(self, q: Tensor, pages: tuple[Tensor, Tensor], sinks: Tensor, scale: float, return_lse: bool) -> Any:
        causal, left = self.options["causal"], self.window
        found = [
            attend(q[None, self.qo[i] : self.qo[i + 1]], k, v, causal, left, None, scale, sinks)
            for i, (k, v) in self.caches(pages)
        ]
        return joined(found, return_lse)


def joined(found: list[tuple[Tensor, Tensor]], return_lse: bool) -> Any:
    o = torch.cat([o.flatten(0, 1) for o, _ in found])
    lse = torch.cat([lse[0].T for _, lse in found]) / math.log(2)
    return (o, lse) if return_lse else o


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """FlashAttention-4's: a pair, whose second is None unless lse is asked for; None leaves a window's side open."""
    left, right = (-1 if side is None else side for side in options["window_size"])
    op = GQADenseFwdOp(
        is_causal=options["causal"],
        window_size_left=left,
        window_size_right=right,
        softcap=options["softcap"] or None,
        softmax_scale=options["softmax_scale"],
        return_lse=True,
    )
    o, lse = op(q, k, v, options["learnable_sink"])
    return o, lse if options["return_lse"] else None


LIBRARY = SimpleNamespace(
    BatchPrefillWithRaggedKVCacheWrapper=Ragged,
    BatchDecodeWithPagedKVCacheWrapper=Paged,
    BatchAttentionWithAttentionSinkWrapper=WithSinks,
    flash_attn_func=flash_attn_func,
)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU where all libraries are there, for heads of any size."""
    monkeypatch.setattr(baselines, "on_gpu", lambda inputs, who: None)
    monkeypatch.setattr(baselines, "package", lambda module, distribution: LIBRARY)
    monkeypatch.setattr(baselines, "_workspace", lambda device: torch.zeros(1))
    heads = {(call["D"], call["D_v"]) for call in CALLS}
    monkeypatch.setattr(baselines, "FLASHINFER_HEADS", heads)


def lacks(call: Call, *features: str) -> bool:
    used = {
        "float8": call.inputs["q_scale"] is not None,
        "alibi": call.inputs["alibi_slopes"] is not None,
        "right window": call["window_size_right"] >= 0,
    }
    return any(used[f] for f in features)


def test_every_rival_has_an_adapter() -> None:
    assert all(callable(make) for make in rivals_of(ENTRY, "cuda").values())


@pytest.mark.parametrize("name", ["cudnn", "fa2", "flashinfer", "fa4"])
def test_what_needs_a_gpu_says_so(name: str) -> None:
    with pytest.raises(Missing, match=f"{name} needs a CUDA device"):
        baselines.RIVALS["GQADenseFwdOp"][name](CALLS[0], make_inputs(CALLS[0]))


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.id)
@pytest.mark.parametrize(
    ("name", "features"), [("flashinfer", ("float8", "alibi", "right window")), ("fa4", ("float8", "alibi"))]
)
def test_rows(name: str, features: tuple[str, ...], call: Call, gpu: None) -> None:
    inputs = make_inputs(call)
    make = baselines.RIVALS["GQADenseFwdOp"][name]
    if lacks(call, *features):
        with pytest.raises(Missing, match=r"has no (right window|ALiBi|float8)"):
            make(call, inputs)
        return
    assert verify(call, inputs, collect(call, outputs(make(call, inputs)), inputs))


@pytest.mark.parametrize(
    ("label", "name", "reason"),
    [
        ("softcap50", "cudnn", "torch's cuDNN attention has no softcap"),
        ("sinks-w128", "cudnn", "torch's cuDNN attention has no window and no sinks"),
        ("q-lt-kv", "cudnn", "torch's cuDNN attention has no mask aligned at the bottom right"),
        ("softcap50", "fa2", "torch's FlashAttention-2 has no softcap"),
        ("mla-prefill-4k", "fa2", "torch's FlashAttention-2 has one head size"),
        ("d96-4k", "flashinfer", "flashinfer has no kernel for D = 96, D_v = 96"),
    ],
)
def test_what_a_library_lacks_is_named(label: str, name: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "on_gpu", lambda inputs, who: None)
    (row,) = [row for row in ENTRY.workloads if row.label == label]
    call = row_call(checker_of(ENTRY), row, cases(row)[0])
    given = {n: None if m is None else torch.empty(0) for n, m in call.inputs.items()}
    with pytest.raises(Missing) as missing:
        baselines.RIVALS["GQADenseFwdOp"][name](call, given)
    assert str(missing.value) == reason
