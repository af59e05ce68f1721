"""torch's dtypes and their names in the spec language."""

from __future__ import annotations

from typing import Any

import torch

from tileops.core.spec.dtypes import BITS

BY_NAME: dict[str, torch.dtype] = {name: getattr(torch, name) for name in BITS}
NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in BY_NAME.items()}


def dtype_name(value: Any) -> Any:
    """A torch dtype as its name; anything else as it is."""
    return NAMES.get(value, str(value).removeprefix("torch.")) if isinstance(value, torch.dtype) else value


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a name in the language."""
    return BY_NAME[name]
