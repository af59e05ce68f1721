"""The backends, one a device type: what they need, and how they run a checked call."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from tileops.core.backend import cpu, cuda, gpu, musa
from tileops.core.check import Call
from tileops.core.errors import BackendError, NoKernelError

if TYPE_CHECKING:
    from tileops.core.plan import Plan


class Backend(Protocol):
    """What a backend module or object provides."""

    device_type: str

    def available(self) -> str | None:
        """None, or why calls can't run here, ending with the mend."""


BACKENDS: dict[str, Backend] = {b.device_type: b for b in (cpu, cuda, musa)}


def plan(call: Call, misaligned: Sequence[str], last: Any) -> Plan:
    """What runs a checked call on its device; raises BackendError, NoKernelError, CompileError or CaptureError.

    ``misaligned`` names the inputs whose address is no multiple of 16; a launch leaves its moving sizes in ``last``.
    """
    kind = call.device.partition(":")[0]
    backend = BACKENDS.get(kind)
    if backend is None:
        raise BackendError(f"{call.entry.name}: no backend for device '{call.device}'; there are {', '.join(BACKENDS)}")
    if backend is cpu:
        return cpu.plan(call)
    reason = backend.available()
    if reason:
        raise BackendError(f"{call.entry.name}: {reason}")
    try:
        return gpu.plan(backend, call, misaligned, last)
    except NoKernelError as e:
        if os.environ.get("TILEOPS_FALLBACK") != "reference":
            raise
        warnings.warn(f"TILEOPS_FALLBACK=reference: {e}", stacklevel=5)
        return cpu.plan(call)
