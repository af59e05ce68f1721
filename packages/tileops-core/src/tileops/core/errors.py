"""Every error class of the public contract. Messages are one to five lines and stand without a trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tileops.core.spec.diagnostics import Diagnostic


class TileOpsError(Exception):
    """Root of all errors that TileOPs raises on purpose."""


class SpecError(TileOpsError):
    """A malformed spec; ``diagnostics`` holds every finding, sorted by place."""

    def __init__(self, diagnostics: Sequence[Diagnostic]):
        self.diagnostics = tuple(diagnostics)
        super().__init__("\n".join(str(d) for d in self.diagnostics))

    def __reduce__(self) -> tuple[type[SpecError], tuple[tuple[Diagnostic, ...]]]:
        return type(self), (self.diagnostics,)


class CheckError(TileOpsError, ValueError):
    """A call outside the signature.

    ``op``, ``argument``, ``got``, ``expected`` and ``rule`` (the text in the spec) are also in the message.
    """

    def __init__(self, op: str, argument: str | None, got: str, expected: str, rule: str | None = None):
        self.op, self.argument, self.got, self.expected, self.rule = op, argument, got, expected, rule
        subject = f"{op}: {argument}" if argument else op
        lines = [f"{subject}: got {got}, expected {expected}"]
        if rule:
            lines.append(f"  rule: {rule}")
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[type[CheckError], tuple[str, str | None, str, str, str | None]]:
        return type(self), (self.op, self.argument, self.got, self.expected, self.rule)


class NoKernelError(TileOpsError):
    """No kernel serves this legal call; ``refusals`` maps each kernel to its reason."""

    def __init__(self, op: str, call: str, refusals: dict[str, str]):
        self.op, self.call, self.refusals = op, call, refusals
        reasons = [f"  {kernel}: {reason}" for kernel, reason in refusals.items()] or ["  it has no kernel yet"]
        super().__init__("\n".join([f"{op}: no kernel serves {call}", *reasons]))

    def __reduce__(self) -> tuple[type[NoKernelError], tuple[str, str, dict[str, str]]]:
        return type(self), (self.op, self.call, self.refusals)


class BackendError(TileOpsError):
    """A device, compiler, driver or package that is absent; the message ends with the mend."""


class CompileError(TileOpsError):
    """A kernel did not compile; the compiler's message is kept and the source saved."""


class CaptureError(TileOpsError):
    """A program would have to be compiled or loaded inside a graph capture."""
