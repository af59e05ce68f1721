"""What a spec says, as frozen values. No torch here: dtypes are torch's names as strings."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, Literal

import attrs

from tileops.core.spec.diagnostics import Place
from tileops.core.spec.expr import Expr

_NOWHERE = Place("<spec>")


def _place() -> Any:
    return attrs.field(default=_NOWHERE, eq=False, repr=False, kw_only=True)


@attrs.frozen
class FuncRef:
    """``module:function``, resolved when it is first asked for."""

    target: str
    place: Place = _place()

    def load(self) -> Callable[..., Any]:
        """Import the function; raises ImportError or AttributeError."""
        module, _, name = self.target.partition(":")
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
        return function


@attrs.frozen
class Text:
    """An expression together with how its author wrote it."""

    expr: Expr
    source: str
    place: Place = _place()

    def __str__(self) -> str:
        return self.source


@attrs.frozen
class Index:
    """A name of ``forall``: a Dim (int >= 0), a Shape (tuple of them) or a DType out of ``choices``."""

    name: str
    kind: Literal["Dim", "Shape", "DType"]
    choices: tuple[str, ...] = ()
    place: Place = _place()


@attrs.frozen
class ParamType:
    """``base`` is bool, int, float, literal, dtype or list[int]; ``choices`` holds literals or dtypes."""

    base: Literal["bool", "int", "float", "literal", "dtype", "list[int]"]
    choices: tuple[str, ...] = ()
    optional: bool = False

    def __str__(self) -> str:
        shown = {"literal": " | ".join(map(repr, self.choices)), "dtype": " | ".join(self.choices)}.get(
            self.base, self.base
        )
        return f"{shown} | None" if self.optional else shown


@attrs.frozen
class Param:
    """A field of the op. ``default`` is NOTHING where the caller must give it."""

    name: str
    type: ParamType
    default: Any = attrs.NOTHING
    place: Place = _place()


@attrs.frozen
class Predicate:
    """A named statement about a metadata tensor's content, such as ``offsets(T_q)``."""

    name: str
    args: tuple[Expr, ...]
    source: str
    place: Place = _place()


@attrs.frozen
class TensorDecl:
    """An input or output. ``dtype`` and ``shape`` are in the expression language."""

    name: str
    dtype: Text
    shape: Text
    optional: bool = False
    when: Text | None = None
    mutated: Text | None = None
    contiguous: bool = False
    layout: str | None = None
    requires: Predicate | None = None
    values: Predicate | None = None
    place: Place = _place()


@attrs.frozen
class NamedType:
    """``Mat[t, R, C]``: a shape with parameters."""

    name: str
    params: tuple[str, ...]
    body: Expr


@attrs.frozen
class Rule:
    """A refinement of ``where``; ``hint`` is its author's own message."""

    text: Text
    hint: str | None = None


@attrs.frozen
class Symbolic:
    """An index that changes from call to call, under ``when`` if there is a condition."""

    index: str
    when: Text | None = None


@attrs.frozen
class Signature:
    indices: Mapping[str, Index]
    params: Mapping[str, Param]
    types: Mapping[str, NamedType]
    let: Mapping[str, Text]
    inputs: Mapping[str, TensorDecl]
    outputs: Mapping[str, TensorDecl]
    where: tuple[Rule, ...] = ()
    symbolic: tuple[Symbolic, ...] = ()


@attrs.frozen
class Row:
    """A workload. ``values`` gives indices and params, ``content`` how metadata is generated.

    ``dim_order`` has the axes of an input as they lie in memory, the outermost first, where not in their own order.
    """

    label: str
    values: Mapping[str, Any]
    some: tuple[str, ...] = ()
    dtype_cases: tuple[Mapping[str, str], ...] = ()
    content: Mapping[str, Predicate] = attrs.field(factory=dict)
    dim_order: Mapping[str, tuple[int, ...]] = attrs.field(factory=dict)
    place: Place = _place()


@attrs.frozen
class Roofline:
    """Work of a call: expressions, or functions of the call. ``bytes`` None means each present tensor once."""

    flops: Text | FuncRef
    bytes: Text | FuncRef | None = None
    unit: Literal["tensor_core", "cuda_core"] | None = None
    dtype: str | None = None
    place: Place = _place()


@attrs.frozen
class GradCall:
    """One backward op: how its params and inputs come from the forward, and which gradients it gives."""

    op: str
    inputs: Mapping[str, Text]
    gives: Mapping[str, Text]
    params: Mapping[str, Text] = attrs.field(factory=dict)
    when: Text | None = None
    place: Place = _place()


@attrs.frozen
class Baselines:
    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


@attrs.frozen
class Entry:
    """One operator."""

    name: str
    family: str
    summary: str
    status: Literal["implemented", "spec-only"]
    signature: Signature
    workloads: tuple[Row, ...] = ()
    aliases: tuple[str, ...] = ()
    ref_api: str | None = None
    reference: FuncRef | None = None
    model: FuncRef | None = None
    absolute: FuncRef | None = None
    semantics: Mapping[str, str] = attrs.field(factory=dict)
    accuracy: Mapping[str, Any] | None = None
    baselines: Mapping[str, Baselines] = attrs.field(factory=dict)
    roofline: Roofline | None = None
    grad: tuple[GradCall, ...] = ()
    composition: tuple[str, ...] = ()
    fullgraph: bool = True
    fullgraph_reason: str | None = None
    source: Mapping[str, str] = attrs.field(factory=dict)
    form: Literal["newer", "older"] = "newer"
    place: Place = _place()

    @property
    def implemented(self) -> bool:
        return self.status == "implemented"

    def __hash__(self) -> int:
        return hash((self.name, self.place))
