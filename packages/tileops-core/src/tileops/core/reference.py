"""How an entry's functions (reference, model) are called: by name, with inputs, params and every dtype index."""

from __future__ import annotations

from typing import Any

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
