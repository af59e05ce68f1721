"""The cuda backend: NVIDIA GPUs."""

from __future__ import annotations

import torch

device_type = "cuda"


def available() -> str | None:
    if torch.version.cuda is None:
        return "this torch is built without CUDA; install a CUDA build of torch"
    if not torch.cuda.is_available():
        return "no CUDA device is visible; check the driver with nvidia-smi, and CUDA_VISIBLE_DEVICES"
    return None
