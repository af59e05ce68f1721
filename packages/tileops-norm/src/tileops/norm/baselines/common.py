"""What the rivals' adapters share."""

from __future__ import annotations

import math
from typing import Any

LIGER_LONGEST = 65536  # elements of a row, one block of Triton's


def rows_of(call: Any, inputs: Any) -> dict[str, Any]:
    """The inputs as matrices and vectors, for a library that normalizes the last axis: one row of all that are."""
    n = math.prod(call["normalized_shape"])
    return {name: t if t is None else t.reshape(-1, n) for name, t in inputs.items() if name in ("x", "dy")} | {
        name: t if t is None else t.flatten() for name, t in inputs.items() if name in ("weight", "rstd")
    }
