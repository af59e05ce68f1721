"""What a tuned choice is kept for: a bucket of calls, on a board, as plain data that people can read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

import attrs

from tileops.core import program
from tileops.core.kernel import Device, Kernel, Static
from tileops.core.launch import LARGEST, Bounds, Interval
from tileops.core.spec import Entry
from tileops.core.spec.expr import Name


@attrs.frozen(eq=False, slots=False)
class Bucket:
    """Calls that one choice serves.

    ``call`` holds params unlike their defaults, dtypes and fixed sizes by name, and the interval of each size that
    moves: ``{"T": "bfloat16", "N": 4096, "K": 7168, "M": [1793, 2048]}``. ``sources`` is a digest of the kernels and
    ``versions`` names the compiler's.
    """

    op: str
    call: Mapping[str, Any]
    board: str
    device: Device
    sources: str
    versions: str

    @classmethod
    def of(
        cls, entry: Entry, static: Static, bounds: Bounds, kernels: Iterable[Kernel], device: Device, board: str
    ) -> Bucket:
        """The bucket of calls with this static part and these bounds, which any of these kernels may serve."""
        modules = sorted({type(kernel).__module__ for kernel in kernels})
        sources = hashlib.sha256("".join(map(program.sources_digest, modules)).encode()).hexdigest()
        return cls(entry.name, _described(entry, static, bounds), board, device, sources, program._versions())

    @property
    def text(self) -> str:
        """The op and the call, the same for equal buckets whatever the kernels are: a shipped table's key."""
        return text_of(self.op, self.call)

    @cached_property
    def key(self) -> str:
        """Stands for all of it: the result cache's key."""
        parts = self.text, self.board, repr(self.device), self.sources, self.versions
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:40]

    def __str__(self) -> str:
        return f"{self.op} {', '.join(f'{n}={_short(v)}' for n, v in self.call.items())}"


def text_of(op: str, call: Mapping[str, Any]) -> str:
    """An op and a bucket's ``call`` as one string."""
    return json.dumps([op, call], sort_keys=True)


def plain(config: Any) -> dict[str, Any]:
    """A config's values as JSON and YAML hold them."""
    values: dict[str, Any] = attrs.asdict(config)
    return values


def _described(entry: Entry, static: Static, bounds: Bounds) -> dict[str, Any]:
    signature, values = entry.signature, dict(static.values)
    call = {n: _plain(values[n]) for n, p in signature.params.items() if values[n] != p.default}
    call |= {n: _plain(values[n]) for n in signature.indices if n in values}
    call |= {axis: _shown(interval) for axis, interval in bounds.items()}
    for name, decl in signature.inputs.items():
        form = static.tensor(name)
        if form is None:
            continue
        if decl.optional or decl.when or not isinstance(decl.dtype.expr, Name):
            call[name] = form.dtype
        if not form.packed:
            call[f"{name}.strides"] = list(form.strides)
    return call


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _shown(interval: Interval) -> list[Any]:
    """``[1793, 2048]``; without an upper end ``[1, max]``; ``[1, max, by 8]`` for multiples of 8 only."""
    shown: list[Any] = [interval.low, "max" if interval.high == LARGEST else interval.high]
    if interval.step > 1:
        shown.append(f"{'' if interval.multiples else 'not '}by {interval.step}")
    return shown


def _short(value: Any) -> str:
    return "-".join(map(str, value)) if isinstance(value, list) else str(value)
