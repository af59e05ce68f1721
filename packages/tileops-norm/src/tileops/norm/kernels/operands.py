"""What forward kernels share whose rows have further operands: their configs, and rows that broadcast."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import tilelang.language as T

from tileops.core.kernel import Form
from tileops.norm.kernels.rms_norm import DEEP, shared
from tileops.norm.kernels.rows import BUSY, OVERHEAD, REGISTERS, WARP, crowded, vector, words

LESS_BUSY = 768  # threads of a multiprocessor, where they need more registers


@attrs.frozen
class Config:
    """``lanes`` threads of each of ``cluster`` blocks hold ``chunks`` vectors each of a row: that is a sum's order.

    The rest has no part in it: a block has ``threads``, loads all operands ``early``, before a row is summed, and
    leaves registers for so many ``resident`` blocks a multiprocessor.
    """

    lanes: int
    chunks: int
    cluster: int
    threads: int
    early: bool
    resident: int


def configs(n: int, dtype: str, held: int, late: int, more: int = 0) -> Iterator[Config]:
    """The configs for rows of a length, the default first; none for rows that no cluster's registers hold.

    A thread holds ``held`` operands from the start, with ``more`` registers for each vector of a row; a vector of the
    others takes ``late`` registers, and they may come after the sum. All configs sum a row in one order.
    """
    found = shared(n, dtype, held, DEEP)
    if found is None:
        return
    lanes, chunks, cluster, threads = found
    at_start, later = chunks * (words(vector(n, dtype), dtype) * held + more), chunks * late
    busy = BUSY if at_start + OVERHEAD <= REGISTERS // BUSY else LESS_BUSY
    resident = max(busy // threads, 2 if threads <= 512 else 1)
    default = Config(lanes, chunks, cluster, threads, early=chunks == 1, resident=resident)
    yield default
    for block, soon, resident in itertools.product(
        (128, 256) if lanes <= WARP else (lanes,), (True, False), (1, 2, 3, 4, 5, 8)
    ):
        config = Config(lanes, chunks, cluster, block, soon, resident)
        if config != default and excluded(config, at_start + soon * later) is None:
            yield config


def excluded(config: Config, registers: int) -> str | None:
    """Why a config, of which a thread holds so many registers of operands, is left out; or None."""
    return crowded(config, registers + OVERHEAD)


@attrs.frozen
class Broadcast:
    """Where the rows of a tensor lie whose leading axes broadcast to another's.

    Of each axis, the outermost first: its size, its stride in elements (None where it is packed) and the other's size.
    Any row's start is a multiple of ``unit`` elements.
    """

    n: int
    axes: tuple[tuple[int | str, int | None, int | str], ...]
    outermost: bool  # whether the first axis is the other's first too
    unit: int

    @classmethod
    def of(cls, form: Form, leading: Sequence[int | str], vec: int) -> "Broadcast":
        """The place of rows that broadcast to rows with these leading axes."""
        *own, n = form.shape
        assert isinstance(n, int)
        *strides, _ = form.strides
        full = leading[len(leading) - len(own) :]
        unit = math.gcd(vec, *(s for s in strides if s is not None))
        return cls(n, tuple(zip(own, strides, full, strict=True)), len(own) == len(leading), unit)

    def start(self, row: Any, sizes: Mapping[str, Any]) -> Any:
        """The offset, in units, of the row that broadcasts to a row of the other tensor."""
        start: Any = T.int64(0)
        step: Any = T.int64(self.n // self.unit)
        for i, (size, stride, full) in reversed(list(enumerate(self.axes))):
            size, full = (sizes[axis] if isinstance(axis, str) else axis for axis in (size, full))
            rest = row if i == 0 and self.outermost else T.truncdiv(row, full)
            index = row if i == 0 and self.outermost else row - rest * full
            step = step if stride is None else T.int64(stride // self.unit)
            start = start + T.cast(T.min(index, size - 1), "int64") * step  # an axis is as long as the other's, or 1
            row, step = rest, step * T.cast(size, "int64")
        return start


@T.macro
def read(into, at, tensor, start, unit, offset, n):
    """``n`` elements that lie ``offset`` behind the ``start``-th unit of a flat tensor, a unit at once."""
    for h in T.unroll(n // unit):
        for v in T.vectorized(unit):
            into[at + h * unit + v] = tensor[start * unit + T.cast(offset, "int64") + h * unit + v]
