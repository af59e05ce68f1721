"""What a signature comes to in one variant of a call: straight steps, as data."""

from __future__ import annotations

from typing import Any

import attrs

from tileops.core.spec.expr import Expr
from tileops.core.spec.model import Rule, TensorDecl


@attrs.frozen
class Position:
    """``fixed`` axes plus the lengths of ``splices``, counted from the front or from the back."""

    fixed: int
    splices: tuple[Expr, ...] = ()
    from_end: bool = False


@attrs.frozen
class Rank:
    """The tensor has ``fixed`` axes plus the lengths of ``known``; at least so many if a splice is ``open``."""

    tensor: str
    fixed: int
    known: tuple[Expr, ...]
    open: bool


@attrs.frozen
class SolveAxis:
    """``scale * name + rest`` is the axis's size; ``rest`` None means nothing is added."""

    tensor: str
    at: Position
    name: str
    scale: int = 1
    rest: Expr | None = None


@attrs.frozen
class SolveSplice:
    tensor: str
    start: Position
    stop: Position
    name: str


@attrs.frozen
class CheckAxis:
    tensor: str
    at: Position
    expr: Expr


@attrs.frozen
class CheckSplice:
    tensor: str
    start: Position
    expr: Expr


@attrs.frozen
class SolveDType:
    tensor: str
    name: str
    choices: tuple[str, ...]


@attrs.frozen
class CheckDType:
    tensor: str
    options: tuple[Expr, ...]


@attrs.frozen
class Derive:
    """A name of ``let``."""

    name: str
    expr: Expr


@attrs.frozen
class Require:
    rule: Rule
    expr: Expr


Step = Rank | SolveAxis | SolveSplice | CheckAxis | CheckSplice | SolveDType | CheckDType | Derive | Require


@attrs.frozen
class Folded:
    """A tensor's axes, dtype and (for outputs) condition in one variant."""

    decl: TensorDecl
    axes: tuple[Expr, ...]
    dtype: Expr
    when: Expr


@attrs.frozen
class Solution:
    """The steps of a variant in order, its tensors, the indices it binds, and what it can't: (place, message) pairs."""

    steps: tuple[Step, ...]
    inputs: tuple[Folded, ...]
    outputs: tuple[Folded, ...]
    bound: tuple[str, ...]
    faults: tuple[tuple[Any, str], ...]
