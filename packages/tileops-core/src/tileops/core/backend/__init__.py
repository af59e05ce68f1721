"""The backends, one a device type: what they need, and how they run a checked call."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from tileops.core.backend import cpu, cuda, gpu, musa
from tileops.core.backend.gpu import Gpu
from tileops.core.check import Call
from tileops.core.errors import BackendError, NoKernelError

if TYPE_CHECKING:
    from tileops.core.plan import Plan

BACKENDS: dict[str, Any] = {b.device_type: b for b in (cpu, cuda, musa)}


@cache
def gpu_backend(device_type: str) -> Gpu | None:
    """The backend of a GPU's device type: ours, or one that a package adds as an entry point ``tileops.backends``."""
    found: Gpu | None = BACKENDS.get(device_type)
    for point in entry_points(group="tileops.backends", name=device_type) if found is None else ():
        found = point.load()
    return found if device_type != cpu.device_type else None


def default_device() -> str:
    """The device type of the first backend that runs here, GPUs before the CPU."""
    return next(name for name, b in reversed(BACKENDS.items()) if b.available() is None)


def plan(call: Call, misaligned: Sequence[str], kinds: dict[Any, Plan], last: Any, tune: bool = False) -> Plan:
    """What runs a checked call on its device; raises BackendError, NoKernelError, CompileError or CaptureError.

    ``misaligned`` names the inputs whose address is no multiple of 16; ``kinds`` are the plans that a GPU backend keeps
    for an op value; a launch leaves its plan and moving sizes in ``last.run``; ``tune`` has a GPU backend tune new
    buckets.
    """
    kind = call.device.partition(":")[0]
    if kind == cpu.device_type:
        return cpu.plan(call, last)
    backend = gpu_backend(kind)
    if backend is None:
        raise BackendError(f"{call.entry.name}: no backend for device '{call.device}'; there are {', '.join(BACKENDS)}")
    reason = backend.available()
    if reason:
        raise BackendError(f"{call.entry.name}: {reason}")
    try:
        return gpu.plan(backend, call, misaligned, kinds, last, tune)
    except NoKernelError as e:
        if os.environ.get("TILEOPS_FALLBACK") != "reference":
            raise
        warnings.warn(f"TILEOPS_FALLBACK=reference: {e}", stacklevel=5)
        return cpu.plan(call, last)
