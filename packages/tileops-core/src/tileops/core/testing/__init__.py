"""The test kit: cases of an operator, made from its entry alone, and what holds the operator to each of them.

``-p tileops.core.testing`` makes it a plugin of pytest. The names below are imported when they are first asked for: a
run of pytest that has no use for them imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tileops.core.testing.cases import Case, case_of, edge_cases, workload_cases
    from tileops.core.testing.integration import TorchCase, run_torch_case, torch_cases
    from tileops.core.testing.run import CaseFailure, assert_right, reproduce, run_case

__all__ = [
    "Case",
    "CaseFailure",
    "TorchCase",
    "assert_right",
    "case_of",
    "edge_cases",
    "reproduce",
    "run_case",
    "run_torch_case",
    "torch_cases",
    "workload_cases",
]

_HOMES = {
    "cases": ("Case", "case_of", "edge_cases", "workload_cases"),
    "run": ("CaseFailure", "assert_right", "reproduce", "run_case"),
    "integration": ("TorchCase", "run_torch_case", "torch_cases"),
}


def __getattr__(name: str) -> Any:
    import importlib

    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def pytest_plugin_registered(manager: Any) -> None:
    """As a plugin this package stands for ``plugin``."""
    if not manager.has_plugin("tileops"):
        from tileops.core.testing import plugin

        manager.register(plugin, "tileops")
