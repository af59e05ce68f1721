"""What a backward takes from its forward, ``values: forward(rstd)``, as the forward's reference computes it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from tileops.core import torch_ops
from tileops.core.accuracy import collect
from tileops.core.check import Call
from tileops.core.errors import TileOpsError
from tileops.core.families import entries
from tileops.core.reference import arguments
from tileops.core.spec import Entry
from tileops.core.spec.expr import Func, Name
from tileops.core.spec.model import GradCall


def forward_outputs(call: Call, tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """The inputs of a backward call that its forward's reference computes, by name, from the inputs that are there."""
    wanted = {
        name: decl.values.args[0].id
        for name, decl in call.entry.signature.inputs.items()
        if decl.values is not None and decl.values.name == "forward" and isinstance(decl.values.args[0], Name)
    }
    if not wanted:
        return {}
    forward, grad = _forward_of(call.entry, wanted)
    checker = torch_ops.checker_of(forward)
    given = {t.expr.id: call.params[n] for n, t in grad.params.items() if isinstance(t.expr, Name)}
    switches = (grad.when, *(forward.signature.outputs[output].when for output in wanted.values()))
    given |= {when.expr.id: True for when in switches if when is not None and isinstance(when.expr, Name)}
    sources = {t.expr.id: n for n, t in grad.inputs.items() if isinstance(t.expr, Name)}
    inputs = {n: tensors.get(sources[n]) if n in sources else None for n in forward.signature.inputs}
    metas = {n: None if x is None else torch_ops.meta_of(x) for n, x in inputs.items()}
    made = checker.bind(checker.params(given), metas, call.device)
    assert forward.reference is not None
    with torch.no_grad():
        returned: Any = forward.reference.load()(**inputs, **arguments(made))
    outputs = collect(made, returned, inputs)
    return {name: x for name, output in wanted.items() if (x := outputs[output]) is not None}


def _forward_of(backward: Entry, wanted: Collection[str]) -> tuple[Entry, GradCall]:
    """A forward whose inputs are among the backward's, so that it can be run for the rest."""
    for entry in (*torch_ops.defined(), *entries().values()):
        for grad in entry.grad:
            saved = {n for n, t in grad.inputs.items() if isinstance(t.expr, Func) and t.expr.name == "saved"}
            if grad.op == backward.name and entry.reference is not None and saved <= set(wanted):
                return entry, grad
    raise TileOpsError(f"{backward.name}: no operator's 'grad' names it, so what its forward computes can't be made")
