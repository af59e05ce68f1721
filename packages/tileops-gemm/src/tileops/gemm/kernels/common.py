"""What the GEMM kernels share: which operands the bulk copy engine can read, and what a TileLang version does well."""

import re
from collections.abc import Mapping
from typing import Any

import tilelang

from tileops.core.check import Call, TensorMeta

ARCHS: Mapping[str, tuple[str, ...]] = {"cuda": ("sm90",)}
CHUNK = 8  # 16-bit elements in 16 bytes: what the copy engine and a vector load want of a row's pitch
# Each kernel guards every access to global memory itself; TileLang's own guards wrap each element of a vector.
UNGUARDED: Mapping[str, Any] = {"TL_DISABLE_SAFE_MEMORY_ACCESS": True}

_version = tuple(int(n) for n in re.findall(r"\d+", tilelang.__version__)[:3])
# 0.1.12 takes gcd(columns, 256) as the columns of one wgmma (192 -> 64, 176 -> 16), up to four times slower; 0.1.15
# takes the widest multiple of 16. What lies between was not run.
ANY_WGMMA_WIDTH = _version >= (0, 1, 15)


def pitch(meta: TensorMeta) -> int:
    """Elements from one row to the next, as a program sees them: a single row is packed."""
    rows, columns = meta.shape
    return meta.strides[0] if rows > 1 else columns


def strided_columns(call: Call) -> str | None:
    """Why a kernel that wants the elements of a row side by side can't take an operand, or None."""
    for name, meta in call.inputs.items():
        if meta is not None and meta.shape[1] > 1 and meta.strides[1] != 1:
            return f"the elements of {name}'s rows are {meta.strides[1]} apart, not side by side"
    return None


def unaligned_rows(call: Call) -> str | None:
    """Why the copy engine can't read an operand, or None: it wants rows side by side, 16-byte multiples apart."""
    reason = strided_columns(call)
    if reason:
        return reason
    for name, meta in call.inputs.items():
        if meta is not None and pitch(meta) % CHUNK:
            return f"{name}'s rows are {2 * pitch(meta)} bytes apart, no multiple of 16"
        # Rows that overlap otherwise it can read; how long those of this very call are, the end of a bucket can't tell.
        if meta is not None and pitch(meta) == 0:
            return f"{name}'s rows are one and the same"
    return None
