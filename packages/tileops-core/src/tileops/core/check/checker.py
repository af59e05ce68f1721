"""An entry's checks: a call's params and tensors in, a Call out, or a CheckError that says what was expected."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any

import attrs

from tileops.core.check.call import Call, TensorMeta, contiguous_strides
from tileops.core.check.compile import Run, compile_variant, local
from tileops.core.errors import CheckError
from tileops.core.spec.expr import Expr, Func, IfElse, Name, compile_expr, names, unparse
from tileops.core.spec.model import Entry, TensorDecl
from tileops.core.spec.solve import (
    CheckDType,
    Derive,
    Rank,
    Require,
    Solution,
    SolveAxis,
    SolveDType,
    SolveSplice,
    Step,
    solve,
    tests,
)
from tileops.core.spec.values import canonical

Metas = Mapping[str, TensorMeta | None]


class Checker:
    """Checks the calls of one entry. Thread-safe; the code of a variant is compiled when a call first has it."""

    def __init__(self, entry: Entry) -> None:
        sig = entry.signature
        self.entry = entry
        self._tests = tests(sig)
        self._ask: Callable[[Mapping[str, Any]], list[bool]] = _asker(self._tests)
        self._whens = {n: compile_expr(d.when.expr) for n, d in sig.inputs.items() if d.when}
        self._variants: dict[tuple[Any, ...], tuple[Solution, dict[bool, Run]]] = {}
        self._lock = Lock()

    # -- params --

    def params(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """All params in spec order and canonical form; dtypes are given by name."""
        out = {}
        for name, param in self.entry.signature.params.items():
            value = given.get(name, param.default)
            if value is attrs.NOTHING:
                raise CheckError(self.entry.name, name, "nothing", str(param.type), f"param {name} has no default")
            try:
                out[name] = canonical(param.type, value)
            except ValueError as e:
                raise CheckError(self.entry.name, name, repr(value), str(e), f"param {name}: {param.type}") from None
        return out

    # -- calls --

    def variant(
        self, params: Mapping[str, Any], present: Sequence[bool], symbolic: bool = False
    ) -> tuple[Solution, Run]:
        """The solution and compiled code for these params and inputs (in spec order)."""
        names_ = self.entry.signature.inputs
        env = {**params, **{f"present({n})": p for n, p in zip(names_, present, strict=True)}}
        for name in self.entry.signature.outputs:
            env[f"present({name})"] = True
        key = (*present, *self._ask(env))
        found = self._variants.get(key)
        if found is None or symbolic not in found[1]:
            with self._lock:
                found = self._variants.get(key)
                if found is None:
                    self._check_presence(env)
                    truth = dict(zip(self._tests, key[len(present) :], strict=True))
                    found = (solve(self.entry.signature, dict(zip(names_, present, strict=True)), truth), {})
                if symbolic not in found[1]:
                    found[1][symbolic] = compile_variant(self.entry, found[0], self._fail, symbolic)
                self._variants[key] = found
        if self._whens:
            self._check_presence(env)
        return found[0], found[1][symbolic]

    def _check_presence(self, env: Mapping[str, Any]) -> None:
        for name, decl in self.entry.signature.inputs.items():
            given = env[f"present({name})"]
            if name in self._whens:
                assert decl.when is not None
                wanted = bool(self._whens[name](env))
                if wanted != given:
                    got, expected = ("a tensor", "None") if given else ("None", "a tensor")
                    asked = ", ".join(f"{n} = {env[n]!r}" for n in sorted(names(decl.when.expr)))
                    raise CheckError(
                        self.entry.name, name, got, expected + (f" as {asked}" if asked else ""), f"when: {decl.when}"
                    )
            elif not given and not decl.optional:
                raise CheckError(self.entry.name, name, "None", "a tensor", f"{name} is not optional")

    def bind(
        self,
        params: Mapping[str, Any],
        inputs: Metas,
        device: str = "meta",
        content: Mapping[str, Any] | None = None,
        id: str | None = None,
    ) -> Call:
        """The Call of canonical params and the inputs' metas (absent ones None or left out)."""
        sig = self.entry.signature
        metas = {n: inputs.get(n) for n in sig.inputs}
        present = [m is not None for m in metas.values()]
        solution, run = self.variant(params, present)
        shapes = tuple(None if m is None else m.shape for m in metas.values())
        dtypes = tuple(None if m is None else m.dtype for m in metas.values())
        indices, out_shapes, out_dtypes = run(params, shapes, dtypes)
        for name, meta in metas.items():
            decl = sig.inputs[name]
            if decl.contiguous and meta is not None and meta.strides != contiguous_strides(meta.shape) and meta.numel:
                raise CheckError(
                    self.entry.name, name, f"strides {meta.strides}", "a contiguous tensor", "contiguous: true"
                )
        outputs = {
            name: None if shape is None else TensorMeta(shape, dtype, self._strides(decl, shape, metas))
            for (name, decl), shape, dtype in zip(sig.outputs.items(), out_shapes, out_dtypes, strict=True)
        }
        return Call(self.entry, params, indices, metas, outputs, device, content, id)

    def _strides(self, decl: TensorDecl, shape: tuple[int, ...], inputs: Metas) -> tuple[int, ...]:
        like = inputs.get(decl.layout) if decl.layout else None
        if like is None or len(like.shape) != len(shape):
            return contiguous_strides(shape)
        return dense_strides(shape, like.strides)

    # -- errors --

    def _fail(self, solution: Solution, step: Step | None, scope: Mapping[str, Any]) -> None:
        raise _explain(self.entry, solution, step, scope)


def dense_strides(shape: tuple[int, ...], order: tuple[int, ...]) -> tuple[int, ...]:
    """Strides without gaps for ``shape``, its axes nested as the strides ``order`` nest them."""
    strides, step = [0] * len(shape), 1
    for axis in sorted(range(len(shape)), key=lambda i: (order[i], -i)):
        strides[axis] = step
        step *= max(shape[axis], 1)
    return tuple(strides)


def _asker(tests: Sequence[Expr]) -> Callable[[Mapping[str, Any]], list[bool]]:
    functions = [compile_expr(t) for t in tests]
    return lambda env: [bool(f(env)) for f in functions]


def _explain(entry: Entry, solution: Solution, step: Step | None, scope: Mapping[str, Any]) -> CheckError:
    sig = entry.signature
    known = {n: scope[local(n)] for n in (*sig.params, *sig.indices, *sig.let) if local(n) in scope}
    match step:
        case Require(rule=rule):
            values = ", ".join(f"{n} = {_show(known[n])}" for n in sorted(names(rule.text.expr)) if n in known)
            return CheckError(
                entry.name, None, values or "a call", rule.hint or "a call for which the rule holds", str(rule.text)
            )
        case Derive(name=name):
            text = sig.let[name]
            values = ", ".join(f"{n} = {_show(known[n])}" for n in sorted(names(text.expr)) if n in known)
            return CheckError(
                entry.name, None, values, f"sizes for which '{name}' can be derived", f"let {name}: {text}"
            )
        case None:
            return CheckError(
                entry.name, None, ", ".join(f"{n} = {_show(v)}" for n, v in known.items()), "sizes that give outputs"
            )
    decl = sig.inputs[step.tensor]
    match step:
        case SolveDType(choices=choices):
            return CheckError(
                entry.name, decl.name, scope[f"d_{decl.name}"], " or ".join(choices), f"dtype {decl.dtype}"
            )
        case CheckDType(options=options):
            allowed = []
            for option in options:
                allowed += _dtype_values(option, known, scope)
            where = f" ({decl.dtype} = {allowed[0]})" if isinstance(options[0], Name) and len(options) == 1 else ""
            expected = " or ".join(dict.fromkeys(allowed))
            return CheckError(entry.name, decl.name, scope[f"d_{decl.name}"], expected, f"dtype {decl.dtype}{where}")
    shape = scope[f"s_{decl.name}"]
    solved = {s.name: s.tensor for s in solution.steps if isinstance(s, SolveAxis | SolveSplice | SolveDType)}
    here = getattr(step, "name", None)  # an index that this very axis should have given
    given = [n for n in sorted(names(decl.shape.expr)) if n in known and n != here and solved.get(n) != decl.name]
    values = ", ".join(f"{n} = {_show(known[n])}{f' (from {solved[n]})' if n in solved else ''}" for n in given)
    what = f"rank {len(shape)}, shape {tuple(shape)}" if isinstance(step, Rank) else f"shape {tuple(shape)}"
    expected = _shape_text(decl, known, scope) + (f" with {values}" if values else "")
    return CheckError(entry.name, decl.name, what, expected, f"shape {decl.shape}")


def _show(value: Any) -> str:
    return f"[{', '.join(map(str, value))}]" if isinstance(value, tuple) else str(value)


def _dtype_values(option: Expr, known: Mapping[str, Any], scope: Mapping[str, Any]) -> list[str]:
    match option:
        case Name(id=id):
            return [str(known.get(id, id))]
        case Func(name="same_as", args=(Name(id=id),)):
            return [f"{scope[f'd_{id}']} (as {id})"]
        case IfElse(then=then, other=other):
            return _dtype_values(then, known, scope) + _dtype_values(other, known, scope)
    return [unparse(option)]


def _shape_text(decl: TensorDecl, known: Mapping[str, Any], scope: Mapping[str, Any]) -> str:
    """The shape as this call's params fold it, such as [N, K]."""
    expr = decl.shape.expr
    while isinstance(expr, IfElse):
        env = {**known, **{f"present({n[2:]})": v is not None for n, v in scope.items() if n.startswith("s_")}}
        expr = expr.then if compile_expr(expr.test)(env) else expr.other
    return unparse(expr)
