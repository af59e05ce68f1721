"""Param values in their one canonical form: lists as tuples, dtypes by name, floats where floats are due."""

from __future__ import annotations

import math
from typing import Any

from tileops.core.spec.model import ParamType


def canonical(type_: ParamType, value: Any) -> Any:
    """The value as the checker keeps it; raises ValueError saying what was expected."""
    if value is None and type_.optional:
        return None
    match type_.base:
        case "bool" if isinstance(value, bool):
            return value
        case "int" if _is_int(value):
            return int(value)
        case "float" if isinstance(value, float) or _is_int(value):
            if math.isnan(value):
                raise ValueError("a number")
            return float(value)
        case "literal" | "dtype" if isinstance(value, str) and value in type_.choices:
            return value
        case "list[int]" if _is_int(value):
            return (int(value),)
        case "list[int]" if isinstance(value, (list, tuple)) and all(map(_is_int, value)):
            return tuple(map(int, value))
    raise ValueError(str(type_))


def _is_int(value: Any) -> bool:
    """Whether it is an int, and one of 64 bits, as operators take them."""
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63
