"""The dtypes of the language: torch's names, without torch."""

from __future__ import annotations

BITS = {
    "float64": 64,
    "float32": 32,
    "float16": 16,
    "bfloat16": 16,
    "float8_e4m3fn": 8,
    "float8_e5m2": 8,
    "int64": 64,
    "int32": 32,
    "int16": 16,
    "int8": 8,
    "uint8": 8,
    "bool": 8,
}


def itemsize(dtype: str) -> int:
    """Bytes of one element."""
    return BITS[dtype] // 8
