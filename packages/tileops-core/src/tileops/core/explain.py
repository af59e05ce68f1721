"""Which kernel serves a call and why: what ``op.explain(...)`` gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from tileops.core.backend import gpu, gpu_backend
from tileops.core.check import Call
from tileops.core.errors import NoKernelError
from tileops.core.roofline import Bound, board_of, bound, profile


@attrs.frozen
class Explanation:
    """``kernel`` is None where none serves the call; ``refusals`` has the reason of each kernel that was asked."""

    call: Call
    kernel: str | None
    config: Any
    refusals: Mapping[str, str]
    copies: tuple[str, ...]
    bound: Bound

    def __str__(self) -> str:
        lines = [f"{self.call} on {self.call.device}"]
        lines.append(f"  kernel: {self.kernel or 'none'}" + (f", {self.config}" if self.config is not None else ""))
        lines += [f"  refused by {name}: {reason}" for name, reason in self.refusals.items()]
        if self.copies:
            lines.append(f"  copied first: {', '.join(self.copies)}")
        if self.bound.seconds is not None:
            lines.append(f"  bound: {self.bound.seconds * 1e6:.1f} us, by {self.bound.by}")
        return "\n".join(lines)


def explain(call: Call, misaligned: Sequence[str] = ()) -> Explanation:
    """Explain a checked call; its device decides. A call without a device is explained for the CPU."""
    kind, _, index = call.device.partition(":")
    backend = gpu_backend(kind)
    if backend is None or backend.available():
        return Explanation(call, "reference", None, {}, (), bound(call, None))
    board = board_of(backend.name(int(index or 0)))
    limit = bound(call, profile(board) if board else None)
    try:
        choice = gpu.choose(gpu.bucketed(call), backend.device(int(index or 0)), misaligned)
    except NoKernelError as e:
        return Explanation(call, None, None, e.refusals, (), limit)
    return Explanation(call, type(choice.kernel).__name__, choice.config, choice.refusals, choice.copies, limit)
