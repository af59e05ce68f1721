"""Every op as one operator of the torch namespace ``tileops``: schema and fake function come from its entry.

``torch.ops.tileops`` is private: an operator has no autograd formula; the front door (``Op.run``) puts one around it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tileops.core.check import Checker, TensorMeta
from tileops.core.dtypes import dtype_name, torch_dtype
from tileops.core.errors import CheckError, TileOpsError
from tileops.core.spec import Entry

if TYPE_CHECKING:
    from tileops.core.op import Op

NAMESPACE = "tileops"
LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
_SCHEMA_TYPES = {"bool": "bool", "int": "int", "float": "float", "literal": "str", "dtype": "str", "list[int]": "int[]"}
_TAKEN = ("mode", "ctx")  # torch's higher-order operators have these beside the arguments of what they wrap
_STAND_IN = torch.uint16  # of an absent output of an operator that mutates; no dtype of the language
_defined: dict[str, tuple[Entry, type[Op]]] = {}


@cache
def checker_of(entry: Entry) -> Checker:
    """The one Checker of an entry."""
    return Checker(entry)


def operator_of(entry: Entry) -> Callable[..., Any]:
    """The torch operator of a defined entry: inputs, then params, in spec order."""
    operator: Callable[..., Any] = getattr(getattr(torch.ops, NAMESPACE), entry.name).default
    return operator


def meta_of(t: Tensor) -> TensorMeta:
    """Shape, dtype and strides of a tensor."""
    return TensorMeta(tuple(t.shape), dtype_name(t.dtype), t.stride())


def check_strided(entry: Entry, name: str, t: Tensor) -> None:
    """Raise CheckError for a tensor that has no strides."""
    if t.layout is not torch.strided or t.is_nested:
        given = "a nested tensor" if t.is_nested else f"a tensor of layout {t.layout}"
        raise CheckError(entry.name, name, given, "a strided tensor")


def home_of(entry: Entry, tensors: Sequence[Tensor | None]) -> torch.device | None:
    """The device of the inputs, None without any; raises CheckError where they are on several."""
    home: tuple[str, torch.device] | None = None
    for name, t in zip(entry.signature.inputs, tensors, strict=False):
        if t is None:
            continue
        home = home or (name, t.device)
        if t.device != home[1]:
            raise CheckError(entry.name, name, f"a tensor on {t.device}", f"{home[1]}, where {home[0]} is")
    return home and home[1]


def schema(entry: Entry) -> str:
    """The operator's schema, such as ``f(Tensor a, Tensor? w, bool r) -> (Tensor, Tensor?)``.

    Torch functionalizes no operator that mutates and has optional results; such a one returns empty stand-ins.
    """
    sig = entry.signature
    arguments = []
    for i, tensor in enumerate(sig.inputs.values()):
        alias = f"(a{i}!)" if tensor.mutated else ""
        arguments.append(f"Tensor{alias}{'?' if tensor.optional or tensor.when else ''} {tensor.name}")
    for param in sig.params.values():
        arguments.append(f"{_SCHEMA_TYPES[param.type.base]}{'?' if param.type.optional else ''} {param.name}")
    arguments = [f"{a}_" if a.split()[-1] in _TAKEN else a for a in arguments]
    results = [f"Tensor{'?' if output.when and not _mutates(entry) else ''}" for output in sig.outputs.values()]
    shown = results[0] if len(results) == 1 else f"({', '.join(results)})"
    return f"{entry.name}({', '.join(arguments)}) -> {shown}"


def _mutates(entry: Entry) -> bool:
    return any(tensor.mutated for tensor in entry.signature.inputs.values())


def _absent(entry: Entry, like: Tensor) -> Tensor | None:
    """What the operator returns for an absent output."""
    return torch.empty(0, dtype=_STAND_IN, device=like.device) if _mutates(entry) else None


def entry_of(name: str) -> Entry:
    """The entry of a defined operator; raises TileOpsError for a name that nothing defines."""
    if name not in _defined:
        raise TileOpsError(f"no operator is called '{name}'; import the family that defines it")
    return _defined[name][0]


def defined() -> tuple[Entry, ...]:
    """The entries of all defined operators."""
    return tuple(entry for entry, _ in _defined.values())


def class_of(entry: Entry) -> type[Op]:
    """The class of a defined operator."""
    return _defined[entry.name][1]


def define(entry: Entry, cls: type[Op]) -> None:
    """Register an entry's operator, once; another entry of the same name is refused with a TileOpsError."""
    known = _defined.get(entry.name, (None,))[0]
    if known is not None:
        if known != entry:
            raise TileOpsError(
                f"{entry.name} is defined already, by {known.place}; {entry.place} has another entry of that name"
            )
        return
    LIBRARY.define(schema(entry), tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(entry.name, _implementation(entry), "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{entry.name}", _fake(entry), lib=LIBRARY)
    _defined[entry.name] = entry, cls


def _implementation(entry: Entry) -> Callable[..., Any]:
    from tileops.core.plan import state_of

    count = len(entry.signature.inputs)

    def run(*args: Any) -> Any:
        home_of(entry, args[:count])
        state = state_of(entry, tuple(tuple(a) if isinstance(a, list) else a for a in args[count:]))
        plan = state.plan(args[:count])
        some = next(t for t in args if t is not None)
        return unpack(plan.launch(*args[:count]), plan.outputs, lambda: _absent(entry, some))

    return run


def _fake(entry: Entry) -> Callable[..., Any]:
    """Output tensors without data, from the same checks as a real call, sizes possibly symbolic."""
    sig = entry.signature
    count = len(sig.inputs)

    def fake(*args: Any) -> Any:
        tensors: Sequence[Tensor | None] = args[:count]
        home_of(entry, tensors)
        params = dict(zip(sig.params, (tuple(a) if isinstance(a, list) else a for a in args[count:]), strict=True))
        some = next(t for t in tensors if t is not None)
        _, run = checker_of(entry).variant(params, [t is not None for t in tensors], symbolic=True)
        shapes = [None if t is None else tuple(t.shape) for t in tensors]
        dtypes = [None if t is None else dtype_name(t.dtype) for t in tensors]
        _, out_shapes, out_dtypes = run(params, shapes, dtypes)
        by_name = dict(zip(sig.inputs, tensors, strict=True))
        outputs: list[Tensor | None] = []
        for output, shape, dtype in zip(sig.outputs.values(), out_shapes, out_dtypes, strict=True):
            like = by_name[output.layout] if output.layout else None
            if shape is None:
                outputs.append(_absent(entry, some))
            elif like is not None:
                outputs.append(torch.empty_like(like, dtype=torch_dtype(dtype)))
            else:
                outputs.append(torch.empty(shape, dtype=torch_dtype(dtype), device=some.device))
        return outputs[0] if len(outputs) == 1 else tuple(outputs) or None

    return fake


def pack(returned: Any) -> Any:
    """An operator's (or a reference's) return as the caller gets it: absent outputs left out, a single one bare."""
    values = returned if isinstance(returned, (tuple, list)) else (returned,)
    present = tuple(r for r in values if r is not None and r.dtype is not _STAND_IN)
    return present[0] if len(present) == 1 else present or None


def unpack(packed: Any, present: Sequence[bool], absent: Callable[[], Tensor | None] = lambda: None) -> Any:
    """The reverse: in the schema's form, absent outputs too."""
    values = iter(packed if isinstance(packed, tuple) else (packed,))
    outputs = [next(values) if p else absent() for p in present]
    return outputs[0] if len(outputs) == 1 else tuple(outputs) or None
