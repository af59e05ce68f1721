"""What the kernels of dense attention share: the arithmetic of the scores, and what TMA can take.

Everything is in base 2: exp(x) is exp2(x * LOG2E), one instruction, and the factor joins the scale.
"""

from collections.abc import Iterable, Mapping
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
LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453
FAR = 2**30  # a window beyond every length
NONE = -float("inf")


@attrs.frozen
class Scores:
    """The scores of a call: what becomes of q . k, and which keys a query sees (-1: no bound on that side)."""

    scale: float
    softcap: float | None
    alibi: bool
    left: int
    right: int
    exact: bool  # near 0 too, as lse asks

    @classmethod
    def of(cls, static: Static) -> "Scores":
        scale = static["softmax_scale"]
        right = 0 if static["is_causal"] else static["window_size_right"]
        return cls(
            static["D"] ** -0.5 if scale is None else scale,
            static["softcap"],
            static.tensor("alibi_slopes") is not None,
            min(static["window_size_left"], FAR),
            min(right, FAR),
            static.tensor("lse") is not None,
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


@T.macro
def row_factors(factor, top, total, sink, has_sinks, rows, loop=T.Parallel):
    """What each row of O is multiplied by: one over the softmax's denominator, 0 where that is 0.

    The denominator of a row is ``total * 2**top``, and ``2**sink`` with it.
    """
    for i in loop(rows):
        factor[i] = total[i]
        if has_sinks:
            factor[i] += T.exp2(sink[i] - top[i])
        factor[i] = T.if_then_else(factor[i] == 0.0, 0.0, 1.0 / factor[i])


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


def strides_refused(call: Call, names: Iterable[str] = ("q", "k", "v")) -> str | None:
    """Why TMA can't walk these inputs, or should not."""
    for name in names:
        meta = call.inputs[name]
        assert meta is not None
        _, row, head, last = meta.strides
        _, seqlen, heads, dim = meta.shape
        if last != 1 and dim > 1:
            return f"{name}'s heads are not contiguous"
        if any(step == 0 or step % 8 for step, n in zip(meta.strides[:3], meta.shape[:3], strict=True) if n > 1):
            return f"TMA needs steps of whole 16 bytes from head to head, row to row and batch to batch of {name}"
        if heads > 1 and row < head < row * seqlen:
            return f"{name}'s step from head to head follows its length: every length would be a program of its own"
    return None
