"""The cpu backend: every op runs its declared reference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from tileops.core.check import Call
from tileops.core.errors import BackendError
from tileops.core.reference import arguments, without_autocast
from tileops.core.torch_ops import pack

if TYPE_CHECKING:
    from tileops.core.plan import Plan

device_type = "cpu"


def available() -> str | None:
    return None


def plan(call: Call, last: Any) -> Plan:
    """Run the entry's reference on the tensors as they are, whatever their device; ``last.run`` is set to the plan."""
    from tileops.core.plan import Plan

    if call.entry.reference is None:
        raise BackendError(
            f"{call.entry.name}: the cpu backend runs references, and its spec entry has none; add 'reference'"
        )
    reference = call.entry.reference.load()
    fixed = arguments(call)
    names, kind = tuple(call.inputs), call.device.partition(":")[0]

    def launch(*inputs: Tensor | None) -> Any:
        last.run = (made,)
        with without_autocast(kind):
            return pack(reference(**dict(zip(names, inputs, strict=True)), **fixed))

    made = Plan(call, launch, tuple(m is not None for m in call.outputs.values()))
    return made
