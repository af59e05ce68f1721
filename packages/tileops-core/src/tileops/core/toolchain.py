"""Where the compilers of the GPU vendors are. Imports nothing but the standard library."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence

NVCC = "nvcc", ("CUDA_HOME", "CUDA_PATH"), "/usr/local/cuda"
MCC = "mcc", ("MUSA_HOME", "MUSA_PATH"), "/usr/local/musa"


def find_compiler(name: str, variables: Sequence[str], usual: str) -> str | None:
    """The compiler's path: in the first of these variables that is set, as TileLang looks, else on PATH or at home."""
    homes = [home for v in variables if (home := os.environ.get(v))]
    places = [f"{homes[0]}/bin"] if homes else [None, f"{usual}/bin"]
    return next((found for place in places if (found := shutil.which(name, path=place))), None)


def where(variables: Sequence[str], usual: str) -> str:
    """Where it was looked for and isn't."""
    homes = [f"not in {v}, {home}" for v in variables if (home := os.environ.get(v))]
    return homes[0] if homes else f"not on PATH, in {variables[0]} or {usual}"
