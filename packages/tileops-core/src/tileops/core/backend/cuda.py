"""The cuda backend: NVIDIA GPUs."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from tileops.core.kernel import Device
from tileops.core.program import Target
from tileops.core.toolchain import NVCC, find_compiler, where

device_type = "cuda"

try:
    from torch._C._dynamo.guards import _empty_strided_cuda
except ImportError:  # private: its absence costs speed only
    _empty_strided_cuda = None


def available() -> str | None:
    if torch.version.cuda is None:
        return "this torch is built without CUDA; install a CUDA build of torch"
    if not torch.cuda.is_available():
        return "no CUDA device is visible; check the driver with nvidia-smi, and CUDA_VISIBLE_DEVICES"
    return None


def toolchain() -> str | None:
    if find_compiler(*NVCC):
        return None
    return f"nvcc, which compiles kernels, is {where(*NVCC[1:])}; put it on PATH or set CUDA_HOME"


@cache
def name(index: int) -> str:
    """The device's name, by which its board is known."""
    found: str = torch.cuda.get_device_name(index)
    return found


@cache
def device(index: int) -> Device:
    found = torch.cuda.get_device_properties(index)
    arch = f"sm{found.major}{found.minor}"
    return Device(
        device_type, arch, found.multi_processor_count, found.shared_memory_per_block_optin, found.L2_cache_size
    )


def target(device: Device) -> Target:
    """TileLang's target; SM90's own instructions need the ``a``."""
    number = device.arch.removeprefix("sm")
    return {"kind": "cuda", "arch": f"sm_{number}a" if number == "90" else f"sm_{number}"}


def capturing() -> bool:
    return bool(torch.cuda.is_current_stream_capturing())


def empty(index: int) -> Any:
    """``empty(size, stride, dtype)`` on a device that is current."""
    if _empty_strided_cuda is not None:
        return _empty_strided_cuda
    return lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device=f"cuda:{index}")


def fence(index: int) -> tuple[Any, Any]:
    """Where there are several GPUs: whether another one is current, and a context that makes this one so."""
    if torch.cuda.device_count() == 1:
        return None, None
    current = torch._C._cuda_getDevice
    return lambda: current() != index, lambda: torch.cuda.device(index)
