"""The musa backend: Moore Threads GPUs, through torch_musa."""

from __future__ import annotations

import importlib.util

import torch

device_type = "musa"


def available() -> str | None:
    if importlib.util.find_spec("torch_musa") is None:
        return "torch_musa is not installed; it comes with the vendor's image, not from PyPI"
    if not torch.musa.is_available():
        return "no MUSA device is visible; check the driver with mthreads-gmi, and MUSA_VISIBLE_DEVICES"
    return None
