"""How an entry's functions (reference, model) are called: by name, with inputs, params and every dtype index."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from tileops.core.check import Call
from tileops.core.dtypes import torch_dtype


def arguments(call: Call) -> dict[str, Any]:
    """The call's params and dtype indices as keyword arguments; dtypes are torch's."""
    sig = call.entry.signature
    params = {
        n: torch_dtype(v) if v is not None and sig.params[n].type.base == "dtype" else v for n, v in call.params.items()
    }
    return params | {
        n: torch_dtype(call.indices[n]) for n, i in sig.indices.items() if i.kind == "DType" and n in call.indices
    }


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """A context in which an entry's functions compute as they are written, whatever their caller's autocast is."""
    on = torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)
    return torch.autocast(device_type, enabled=False) if on else nullcontext()
