"""A signature's steps as straight-line Python, one function a variant, compiled once.

The same steps serve plain sizes and symbolic ones (under ``torch.compile``); only the spelling differs.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from tileops.core.errors import CheckError
from tileops.core.spec.expr import FUNCTIONS, Concrete, Const, Expr, Func, IfElse, Name, Star, Symbolic, emit
from tileops.core.spec.model import Entry
from tileops.core.spec.solve import FAILURES
from tileops.core.spec.steps import (
    CheckAxis,
    CheckDType,
    CheckSplice,
    Derive,
    Folded,
    Position,
    Rank,
    Require,
    Solution,
    SolveAxis,
    SolveDType,
    SolveSplice,
    Step,
)

Explain = Callable[[Solution, Step | None, Mapping[str, Any]], CheckError]
Run = Callable[..., tuple[dict[str, Any], tuple[Any, ...], tuple[Any, ...]]]


def local(name: str) -> str:
    """The variable that holds an index, param or ``let`` value."""
    return f"v_{name}"


def compile_variant(entry: Entry, solution: Solution, explain: Explain, symbolic: bool = False) -> Run:
    """``run(params, shapes, dtypes) -> (indices, output shapes, output dtypes)``, None for what is absent.

    A check that doesn't hold raises ``explain(solution, step, locals)``. Under ``symbolic`` a condition that only a run
    can tell goes to ``torch._check``.
    """
    source = _Emitter(entry, solution, symbolic).source()
    scope: dict[str, Any] = {
        **FUNCTIONS,
        "steps": solution.steps,
        "explain": partial(explain, solution),
        "CheckError": CheckError,
        "FAILURES": FAILURES,
    }
    if symbolic:
        from tileops.core.check import symbolic as sym

        scope |= {"sym": sym, "require": sym.requirement(scope["explain"])}
    file = f"<signature of {entry.name} {id(solution):x}>"
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)  # so that a trace shows the line
    exec(compile(source, file, "exec"), scope)
    run: Run = scope["run"]
    return run


class _Emitter:
    def __init__(self, entry: Entry, solution: Solution, symbolic: bool) -> None:
        self.entry, self.solution, self.symbolic = entry, solution, symbolic
        self.spell = Symbolic if symbolic else Concrete
        self.lines: list[str] = []

    def expr(self, node: Expr) -> str:
        return emit(node, local, self.spell)

    def same(self, a: str, b: str) -> str:
        return f"sym.same({a}, {b})" if self.symbolic else f"{a} == {b}"

    def dtype(self, node: Expr) -> str:
        match node:
            case Func(name="same_as", args=(Name(id=id),)):
                return f"d_{id}"
            case IfElse(test=test, then=then, other=other):
                return f"({self.dtype(then)} if {emit(test, local)} else {self.dtype(other)})"
        return emit(node, local)

    def length(self, at: Position) -> str:
        terms = [
            *([str(at.fixed)] if at.fixed or not at.splices else []),
            *(f"len({self.expr(s)})" for s in at.splices),
        ]
        return " + ".join(terms)

    def index(self, at: Position, tensor: str) -> str:
        """Where a position stands, as a number from the front."""
        return f"len(s_{tensor}) - ({self.length(at)})" if at.from_end else self.length(at)

    def axis(self, at: Position, tensor: str) -> str:
        return f"s_{tensor}[{f'-({self.length(at)})' if at.from_end else self.length(at)}]"

    def require(self, i: int, condition: str) -> None:
        checked = f"require({condition}, steps[{i}], locals())"
        self.lines.append(checked if self.symbolic else f"if not ({condition}): raise explain(steps[{i}], locals())")

    def step(self, i: int, step: Step) -> None:
        match step:
            case Rank(tensor=t, fixed=fixed, known=known, open=is_open):
                self.require(i, f"len(s_{t}) {'>=' if is_open else '=='} {self.length(Position(fixed, known))}")
            case SolveAxis(tensor=t, at=at, name=name, scale=1, rest=None):
                self.lines.append(f"{local(name)} = {self.axis(at, t)}")
            case SolveAxis(tensor=t, at=at, name=name, scale=scale, rest=rest):
                size, added = self.axis(at, t), self.expr(rest) if rest else "0"
                self.lines.append(f"{local(name)} = ({size} - {added}) // {scale}")
                self.require(i, self.same(f"{scale} * {local(name)} + {added}", size))
                self.require(i, f"{local(name)} >= 0")
            case SolveSplice(tensor=t, start=start, stop=stop, name=name):
                self.lines.append(f"{local(name)} = s_{t}[{self.index(start, t)}:{self.index(stop, t)}]")
            case CheckAxis(tensor=t, at=at, expr=expr):
                self.require(i, self.same(self.axis(at, t), self.expr(expr)))
            case CheckSplice(tensor=t, start=start, expr=expr):
                begin, what = self.index(start, t), self.expr(expr)
                self.require(i, self.same(f"s_{t}[{begin}:{begin} + len({what})]", what))
            case SolveDType(tensor=t, name=name, choices=choices):
                self.lines.append(f"{local(name)} = d_{t}")
                self.require(i, f"{local(name)} in {choices!r}")
            case CheckDType(tensor=t, options=options):
                self.require(i, " or ".join(f"d_{t} == {self.dtype(o)}" for o in options))
            case Derive(name=name, expr=expr):
                self.lines.append(f"{local(name)} = {self.expr(expr)}")
            case Require(expr=expr):
                self.require(i, self.expr(expr))

    def output(self, out: Folded) -> tuple[str, str]:
        if out.when == Const(False):
            return "None", "None"
        axes = (f"*{self.expr(a.value)}, " if isinstance(a, Star) else f"{self.expr(a)}, " for a in out.axes)
        shape, dtype = f"({''.join(axes)})", self.dtype(out.dtype)
        if out.when == Const(True):
            return shape, dtype
        when = emit(out.when, local)
        return f"{shape} if {when} else None", f"{dtype} if {when} else None"

    def source(self) -> str:
        sig = self.entry.signature
        self.lines = [f"{local(n)} = params[{n!r}]" for n in sig.params]
        for prefix, group in (("s", "shapes"), ("d", "dtypes")):
            self.lines += [f"{''.join(f'{prefix}_{n}, ' for n in sig.inputs)}= {group}"] if sig.inputs else []
        for i, step in enumerate(self.solution.steps):
            if _computes(step):
                self.lines.append(f"at = steps[{i}]")
            self.step(i, step)
        outputs = [self.output(o) for o in self.solution.outputs]
        bound = ", ".join(f"{n!r}: {local(n)}" for n in self.solution.bound)
        shapes, dtypes = (
            "".join(f"{text}, " for text in texts) for texts in ([s for s, _ in outputs], [d for _, d in outputs])
        )
        self.lines += ["at = None", f"return {{{bound}}}, ({shapes}), ({dtypes})"]
        body = "\n        ".join(self.lines)
        return (
            f"def run(params, shapes, dtypes):\n    at = None\n    try:\n        {body}\n"
            "    except CheckError:\n        raise\n"
            "    except FAILURES:\n        raise explain(at, locals()) from None\n"
        )


def _computes(step: Step) -> bool:
    """Whether there is arithmetic in a step, which a call can make impossible: a division by zero, say."""
    match step:
        case Rank(known=splices):
            parts: tuple[Expr | None, ...] = splices
        case SolveAxis(at=at, rest=expr) | CheckAxis(at=at, expr=expr) | CheckSplice(start=at, expr=expr):
            parts = (*at.splices, expr)
        case SolveSplice(start=start, stop=stop):
            parts = (*start.splices, *stop.splices)
        case Derive(expr=expr) | Require(expr=expr):
            parts = (expr,)
        case _:
            parts = ()
    return not all(part is None or isinstance(part, Name | Const) for part in parts)
