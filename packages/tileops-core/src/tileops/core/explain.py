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
    """``kernel`` is None where none serves the call; ``refusals`` has the reason of each kernel that was asked.

    ``source`` says where the config comes from: the result cache, a shipped table or the kernel's default; ``ignored``
    has the tuned choices that are no longer legal, each with why.
    """

    call: Call
    kernel: str | None
    config: Any
    refusals: Mapping[str, str]
    copies: tuple[str, ...]
    bound: Bound
    source: str | None = None
    ignored: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.call} on {self.call.device}"]
        chosen = "" if self.config is None else f", {self.config} ({self.source})"
        lines.append(f"  kernel: {self.kernel or 'none'}{chosen}")
        lines += [f"  ignored: {tuned}" for tuned in self.ignored]
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
    at = int(index or 0)
    board = board_of(backend.name(at))
    limit = bound(call, profile(board) if board else None)
    try:
        choice = gpu.choose(gpu.bucketed(call), backend.device(at), misaligned, gpu.board_at(backend, at))
    except NoKernelError as e:
        return Explanation(call, None, None, e.refusals, (), limit)
    name = type(choice.kernel).__name__
    return Explanation(call, name, choice.config, choice.refusals, choice.copies, limit, choice.source, choice.ignored)
