"""What the kernels of dense attention share: the arithmetic of the scores, and what TMA can take.

Everything is in base 2: exp(x) is exp2(x * LOG2E), one instruction, and the factor joins the scale.
"""

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import attrs
import tilelang.language as T

from tileops.core.check import Call
from tileops.core.kernel import Static

ARCHS: Mapping[str, tuple[str, ...]] = {"cuda": ("sm90",)}
# Every access is guarded by hand or by TMA: TileLang's own guards wrap each element.
PLAIN: Mapping[str, Any] = {
    "TL_ENABLE_FAST_MATH": True,
    "TL_DISABLE_WARP_SPECIALIZED": True,
    "TL_DISABLE_SAFE_MEMORY_ACCESS": True,
}
# Roles and barriers by hand: no barrier of TileLang's may come between.
ROLES: Mapping[str, Any] = {**PLAIN, "TL_DISABLE_THREAD_STORAGE_SYNC": True}

HALF = ("float16", "bfloat16")
HEADS = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))  # sizes of keys and values that TMA and wgmma serve
LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453
FAR = 2**30  # a window beyond every length
NONE = -float("inf")
LOOSE_CAP = 256.0  # up to which 2**-22 of a cap, what its tanh is off by near 0, is below the rounding of P


@attrs.frozen
class Scores:
    """The scores of a call: what becomes of q . k, and which keys a query sees (-1: no bound on that side)."""

    scale: float
    softcap: float | None
    alibi: bool
    left: int
    right: int
    exact: bool  # near 0 too, as lse and large caps ask

    @classmethod
    def of(cls, static: Static) -> "Scores":
        scale = static["softmax_scale"]
        softcap = static["softcap"]
        right = 0 if static["is_causal"] else static["window_size_right"]
        return cls(
            static["D"] ** -0.5 if scale is None else scale,
            softcap,
            static.tensor("alibi_slopes") is not None,
            min(static["window_size_left"], FAR),
            min(right, FAR),
            static.tensor("lse") is not None or (softcap is not None and softcap > LOOSE_CAP),
        )

    @property
    def bent(self) -> bool:
        """Whether more than a factor, which may follow the row maximum, lies between products and logits."""
        return self.softcap is not None or self.alibi

    @property
    def factor(self) -> float:
        """What makes an entry of S a base 2 logit."""
        return 1.0 if self.bent else self.scale * LOG2E

    def first_key(self, seqlen_q: Any, seqlen_kv: Any) -> Any:
        """The first key that any query of a batch element sees; those before it are not even loaded."""
        return T.max(seqlen_kv - seqlen_q - self.left, 0) if self.left >= 0 else 0

    def masked(self, x: Any, at: Any, key: Any, keys: Any) -> Any:
        """A score, or -inf where a query at ``at`` doesn't see ``key`` of ``keys``.

        All count from the first key that any query sees.
        """
        if self.right < 0:
            seen = key < keys
        elif self.right == 0:
            seen = key <= at  # no query is behind the last key
        else:
            seen = key <= T.min(at + self.right, keys - 1)
        if self.left >= 0:
            seen = T.And(seen, key >= at - self.left)
        return T.if_then_else(seen, x, NONE)

    def bend(self, x: Any, slope: Any, distance: Any) -> Any:
        """The base 2 logit of a product, if ``bent``; ``distance`` is the key's from the query, as float32."""
        if self.softcap is not None:
            # tanh(y) = 1 - 2 / (exp(2y) + 1), which ends at 1 and -1 without a NaN; tanh.approx is off by 2**-11.
            cap, y = self.softcap * LOG2E, x * (self.scale / self.softcap)
            x = cap - 2.0 * cap / (T.exp2(y * (2.0 * LOG2E)) + 1.0)
            if self.exact:
                square = y * y
                near = square * (-1.0 / 3.0 + square * (2.0 / 15.0 - square * (17.0 / 315.0)))
                x = T.if_then_else(square < 0.04, cap * (y + y * near), x)
        else:
            x = x * (self.scale * LOG2E)
        return x - slope * T.abs(distance) if self.alibi else x


def decay(before, top):
    """What a row's sums lose as its maximum rises. Exactly 1 where it doesn't: ``before`` was rounded like ``top``.

    At most 1, also where ``before`` is the 0 of a row that had seen no key.
    """
    return T.exp2(T.min(before - top, 0.0))


def row_state(rows: int, keys: int, width: int, dtype: str) -> SimpleNamespace:
    """Fragments of an online softmax: S and P of a block of keys, O, and what is known of each row."""
    vectors = ("m", "top", "top_before", "alpha", "l", "total", "sink", "log", "slope")
    return SimpleNamespace(
        S=T.alloc_fragment((rows, keys), "float32"),
        P=T.alloc_fragment((rows, keys), dtype),
        O=T.alloc_fragment((rows, width), "float32"),
        **{name: T.alloc_fragment((rows,), "float32") for name in vectors},
    )


@T.macro
def begin_rows(f):
    """``top`` is the maximum ``m`` in base 2, and 0 where no key is seen yet; ``l`` is the sum."""
    T.fill(f.m, NONE)
    T.fill(f.top, 0.0)
    T.fill(f.l, 0.0)
    T.clear(f.O)


@T.macro
def add_block(f, factor):
    """The next block's S becomes P; the sums and O lose what the maximum has risen by."""
    T.copy(f.top, f.top_before)
    T.reduce_max(f.S, f.m, dim=1, clear=False)
    for i in T.Parallel(f.S.shape[0]):
        f.top[i] = T.if_then_else(f.m[i] == NONE, 0.0, f.m[i] * factor)
        f.alpha[i] = decay(f.top_before[i], f.top[i])
    for i, j in T.Parallel(f.S.shape[0], f.S.shape[1]):
        f.S[i, j] = T.exp2(f.S[i, j] * factor - f.top[i])
    T.reduce_sum(f.S, f.total, dim=1)
    for i in T.Parallel(f.S.shape[0]):
        f.l[i] = f.l[i] * f.alpha[i] + f.total[i]
    for i, j in T.Parallel(f.O.shape[0], f.O.shape[1]):
        f.O[i, j] *= f.alpha[i]
    T.copy(f.S, f.P)


@T.macro
def row_factors(factor, top, total, sink, has_sinks, rows, loop=T.Parallel):
    """What each row of O is multiplied by: one over the softmax's denominator.

    The denominator of a row is ``total * 2**top``, and ``2**sink`` with it.
    """
    for i in loop(rows):
        factor[i] = total[i]
        if has_sinks:
            factor[i] += T.exp2(sink[i] - top[i])
        factor[i] = 1.0 / factor[i]


def output(o, factor, total):
    """An entry of O times its row's factor. A row that sees no key has 0 even where V holds a NaN."""
    return T.if_then_else(total == 0.0, 0.0, o * factor)


@T.macro
def row_logs(log, top, total, sink, has_sinks, rows, loop=T.Parallel):
    """The natural logarithm of the same denominator. Each step is stored: nested, TileLang takes minutes over them."""
    for i in loop(rows):
        log[i] = T.log2(total[i])
        log[i] += (total[i] * T.exp2(-log[i]) - 1.0) * LOG2E  # Newton: the instruction is off by 2**-22 of its result
        log[i] = T.if_then_else(total[i] == 0.0, NONE, log[i] + top[i])
        if has_sinks:
            distance = T.if_then_else(sink[i] == NONE, NONE, -T.abs(log[i] - sink[i]))
            log[i] = T.max(log[i], sink[i]) + T.log2(1.0 + T.exp2(distance))
        log[i] *= LN2


def heads_refused(call: Call) -> str | None:
    """Why no kernel on TMA serves the dtype or the head sizes."""
    if call["T"] not in HALF:
        return "serves 16-bit inputs only"
    if (call["D"], call["D_v"]) not in HEADS:
        return f"serves head sizes {', '.join(f'{d}/{d_v}' for d, d_v in HEADS)} of keys and values"
    return None


def lengths_refused(call: Call, names: Iterable[str] = ("q", "k", "v")) -> str | None:
    """Why a program for these strides might serve one length only.

    A step of N rows from head to head, or from element to element, is that of a cache for N tokens or of N tokens
    packed head by head, and a bucket's end doesn't tell which. A cache has room for a round number: multiples of a
    sixteenth of the end are taken, which are few programs even where they are lengths.
    """
    for name in names:
        meta = call.inputs[name]
        assert meta is not None
        _, row, *inner = meta.strides
        bucket = row * meta.shape[1]
        for step, n in zip(inner, meta.shape[2:], strict=True):
            if n > 1 and row < step < bucket and 16 * step % bucket:
                return f"{name} has a step of {step // row} rows: if that is its length, each is a program of its own"
    return None


def strides_refused(call: Call, names: Iterable[str] = ("q", "k", "v")) -> str | None:
    """Why TMA can't walk these inputs, or should not."""
    for name in names:
        meta = call.inputs[name]
        assert meta is not None
        if meta.strides[3] != 1 and meta.shape[3] > 1:
            return f"{name}'s heads are not contiguous"
        if any(step == 0 or step % 8 for step, n in zip(meta.strides[:3], meta.shape[:3], strict=True) if n > 1):
            return f"TMA needs steps of whole 16 bytes from head to head, row to row and batch to batch of {name}"
    return lengths_refused(call, names)
