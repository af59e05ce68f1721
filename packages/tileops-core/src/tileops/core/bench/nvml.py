"""What the driver says of a GPU while it works: clock, power, and why the clock is held down."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import attrs
import torch

# The bits of NVML's clock event reasons that mean less than full speed.
_REASONS = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
}


@attrs.frozen
class Sample:
    """SM clock in MHz, power in W (the driver's mean of about a second), reasons for less than the full clock."""

    clock_mhz: int
    power_w: float
    throttle: tuple[str, ...] = ()


Sampler = Callable[[], Sample | None]


def sampler(device: torch.device) -> Sampler:
    """What reads a GPU's state, in under a millisecond; gives None where NVML or its Python package is missing."""
    try:
        import pynvml as nvml

        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    except Exception:  # no package, no driver, a virtual GPU: figures without a clock are still figures
        return lambda: None

    def read() -> Sample | None:
        with suppress(nvml.NVMLError):
            clock = nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)
            power = nvml.nvmlDeviceGetPowerUsage(handle) / 1e3
            bits = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
            return Sample(clock, power, tuple(name for bit, name in _REASONS.items() if bits & bit))
        return None

    return read


def state(samples: Sequence[Sample]) -> dict[str, Any]:
    """The medians of samples, and every reason that came up; empty where there are none."""
    if not samples:
        return {}
    return {
        "clock_mhz": statistics.median(s.clock_mhz for s in samples),
        "power_w": statistics.median(s.power_w for s in samples),
        "throttle": sorted({reason for s in samples for reason in s.throttle}),
    }
