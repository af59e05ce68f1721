"""The unit in the last place, and which rule an output is held to."""

from __future__ import annotations

from typing import Literal

import attrs
import torch
from torch import Tensor

from tileops.core.check.call import Call
from tileops.core.dtypes import torch_dtype
from tileops.core.spec.expr import Name, compile_expr, parse
from tileops.core.spec.model import Text

Kind = Literal["slices", "statistic", "codes", "exact"]

_EXPONENT = 0x7FF0_0000_0000_0000  # of a float64
_CODES = ("int8", "float8_e4m3fn", "float8_e5m2")


def ulp(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The spacing of ``dtype`` at each value, as float64; at a power of two the spacing above, for integers 1.

    Near zero it is that of the subnormals, beyond the largest number that of the largest number.
    """
    if not dtype.is_floating_point:
        return torch.ones_like(values, dtype=torch.float64)
    info = torch.finfo(dtype)
    size = values.to(torch.float64).abs().clamp(info.smallest_normal, info.max)
    return (size.view(torch.int64) & _EXPONENT).view(torch.float64) * info.eps


@attrs.frozen
class Tolerance:
    """The rule of one output.

    ``terms`` is how many products an element sums, 0 where it is no contraction; ``strays`` whether a few elements may
    be off by more than their bound.
    """

    kind: Kind
    factor: float
    floor: float
    terms: int = 0
    strays: bool = False


def tolerance(call: Call, name: str) -> Tolerance:
    """The rule for an output or mutated input of a call that has it."""
    override = (call.entry.accuracy or {}).get(name, {})

    def value(key: str, default: float) -> float:
        said = override.get(key, default)
        expr = said.expr if isinstance(said, Text) else parse(str(said))
        return float(compile_expr(expr)(call.env))

    meta = call.outputs.get(name) or call.inputs[name]
    assert meta is not None
    kind = override.get("rule") or _default_kind(call, name, meta.dtype)
    floor = value("floor", 4 if kind == "statistic" else 1)
    strays = kind == "slices" and (call.entry.model is not None or meta.dtype == "float32")
    return Tolerance(kind, value("factor", 2), floor, int(value("contraction", 0)), strays)


def _default_kind(call: Call, name: str, dtype: str) -> Kind:
    signature = call.entry.signature
    decl = signature.outputs.get(name) or signature.inputs[name]
    if dtype in _CODES:
        return "codes"
    if not torch_dtype(dtype).is_floating_point:
        return "exact"
    return "statistic" if decl.dtype.expr == Name("float32") else "slices"
