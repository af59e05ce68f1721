"""What the TileOPs operator libraries share: specs, checks, rooflines, plans.

``Op`` and ``Call`` are at hand here and imported when they are first asked for, so that reading specs imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tileops.core.check import Call, TensorMeta
    from tileops.core.op import Op

__all__ = ["Call", "Op", "TensorMeta"]


def __getattr__(name: str) -> Any:
    import importlib

    modules = {"Call": "tileops.core.check", "TensorMeta": "tileops.core.check", "Op": "tileops.core.op"}
    if name not in modules:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(modules[name]), name)
