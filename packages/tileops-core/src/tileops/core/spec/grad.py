"""The sizes of a call that the params of its backward op depend on, and the tensors that tell them."""

from __future__ import annotations

from tileops.core.spec.expr import Func, Name, Seq, Star, names
from tileops.core.spec.model import Entry, GradCall


def sizes_in(entry: Entry, call: GradCall) -> list[str]:
    """The indices that a backward op's params depend on."""
    asked = frozenset[str]().union(*(names(text.expr) for text in call.params.values()))
    return sorted(asked - entry.signature.params.keys())


def axis_of(entry: Entry, call: GradCall, index: str) -> tuple[str, int] | None:
    """An input that every call of the backward op has, and its axis, counted from an end, that an index is."""
    for name, text in call.inputs.items():
        match text.expr:
            case Name(id=source):
                decl = entry.signature.inputs[source]
            case Func(args=(Name(id=source),)):
                decl = entry.signature.outputs[source]
        if decl.optional or decl.when or not isinstance(decl.shape.expr, Seq):
            continue
        axes = decl.shape.expr.items
        for at, axis in enumerate(axes):
            if axis == Name(index) and not any(isinstance(a, Star) for a in axes[:at]):
                return name, at
            if axis == Name(index) and not any(isinstance(a, Star) for a in axes[at:]):
                return name, at - len(axes)
    return None
