"""The musa backend: Moore Threads GPUs, through torch_musa. Nothing of it has run on the hardware."""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

import torch

from tileops.core.kernel import Device
from tileops.core.program import Target
from tileops.core.toolchain import MCC, find_compiler, where

device_type = "musa"
SHARED_BYTES = 192 * 1024  # of one block; torch_musa doesn't report it
L2_BYTES = 60 << 20


def available() -> str | None:
    if importlib.util.find_spec("torch_musa") is None:
        return "torch_musa is not installed; it comes with the vendor's image, not from PyPI"
    if not torch.musa.is_available():
        return "no MUSA device is visible; check the driver with mthreads-gmi, and MUSA_VISIBLE_DEVICES"
    return None


def toolchain() -> str | None:
    if find_compiler(*MCC):
        return None
    return f"mcc, which compiles kernels, is {where(*MCC[1:])}; the vendor's image has it"


@cache
def name(index: int) -> str:
    found: str = torch.musa.get_device_name(index)
    return found


@cache
def device(index: int) -> Device:
    found = torch.musa.get_device_properties(index)
    return Device(device_type, f"mp{found.major}{found.minor}", found.multi_processor_count, SHARED_BYTES, L2_BYTES)


def target(device: Device) -> Target:
    return {"kind": "musa", "arch": f"mp_{device.arch.removeprefix('mp')}"}


def capturing() -> bool:
    found: bool = torch.musa.is_current_stream_capturing()
    return found


def empty(index: int) -> Any:
    return lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device=f"musa:{index}")


def fence(index: int) -> tuple[Any, Any]:
    if torch.musa.device_count() == 1:
        return None, None
    return lambda: torch.musa.current_device() != index, lambda: torch.musa.device(index)
