"""The backends, one a device type: what they need, and how they run a checked call."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING, Protocol

from tileops.core.backend import cpu, cuda, musa
from tileops.core.check import Call
from tileops.core.errors import BackendError, NoKernelError

if TYPE_CHECKING:
    from tileops.core.plan import Plan, State


class Backend(Protocol):
    """What a backend module or object provides."""

    device_type: str

    def available(self) -> str | None:
        """None, or why calls can't run here, ending with the mend."""


BACKENDS: dict[str, Backend] = {b.device_type: b for b in (cpu, cuda, musa)}


def plan(state: State, call: Call) -> Plan:
    """What runs a checked call on its device; raises BackendError or NoKernelError."""
    kind = call.device.partition(":")[0]
    backend = BACKENDS.get(kind)
    if backend is None:
        raise BackendError(f"{call.entry.name}: no backend for device '{call.device}'; there are {', '.join(BACKENDS)}")
    if backend is cpu:
        return cpu.plan(call)
    reason = backend.available()
    if reason:
        raise BackendError(f"{call.entry.name}: {reason}")
    if os.environ.get("TILEOPS_FALLBACK") == "reference":
        warnings.warn(f"{call.entry.name} runs its reference on {kind}: TILEOPS_FALLBACK=reference", stacklevel=4)
        return cpu.plan(call)
    raise NoKernelError(call.entry.name, str(call), {})
