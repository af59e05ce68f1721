"""An entry's checks: a call's params and tensors in, a Call out, or a CheckError that says what was expected."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from threading import Lock
from typing import Any

import attrs

from tileops.core.check.call import Call, TensorMeta, contiguous_strides, is_contiguous
from tileops.core.check.compile import Run, compile_variant, local
from tileops.core.errors import CheckError
from tileops.core.spec.diagnostics import did_you_mean
from tileops.core.spec.expr import Expr, Func, Name, Seq, compile_expr, names, unparse, walk
from tileops.core.spec.model import Entry, Signature, TensorDecl
from tileops.core.spec.solve import FAILURES, solve, tests
from tileops.core.spec.steps import (
    CheckDType,
    Derive,
    Rank,
    Require,
    Solution,
    SolveAxis,
    SolveDType,
    SolveSplice,
    Step,
)
from tileops.core.spec.values import canonical

Metas = Mapping[str, TensorMeta | None]


class Checker:
    """Checks the calls of one entry. Thread-safe; the code of a variant is compiled when a call first has it."""

    def __init__(self, entry: Entry) -> None:
        sig = entry.signature
        self.entry = entry
        self._tests = {t: compile_expr(t) for t in tests(sig)}
        self._whens = {n: compile_expr(d.when.expr) for n, d in sig.inputs.items() if d.when}
        self._variants: dict[tuple[Any, ...], tuple[Solution, dict[bool, Run]]] = {}
        self._lock = Lock()

    def params(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """All params in spec order and canonical form; dtypes are given by name."""
        out = {}
        known = self.entry.signature.params
        for name in given.keys() - known.keys():
            expected = did_you_mean(name, known) or (f"one of {', '.join(known)}" if known else "no params")
            raise CheckError(self.entry.name, name, "an unknown param", expected)
        for name, param in known.items():
            value = given.get(name, param.default)
            if value is attrs.NOTHING:
                raise CheckError(self.entry.name, name, "nothing", str(param.type), f"param {name} has no default")
            try:
                out[name] = canonical(param.type, value)
            except ValueError as e:
                raise CheckError(self.entry.name, name, repr(value), str(e), f"param {name}: {param.type}") from None
        return out

    def variant(
        self, params: Mapping[str, Any], present: Sequence[bool], symbolic: bool = False
    ) -> tuple[Solution, Run]:
        """The solution and compiled code for these params and inputs (in spec order)."""
        inputs = self.entry.signature.inputs
        env = {**params, **{f"present({n})": p for n, p in zip(inputs, present, strict=True)}}
        truth = {t: self._decide(ask, env, t) for t, ask in self._tests.items()}
        key = (*present, *truth.values())
        found = self._variants.get(key)
        if found is None or symbolic not in found[1]:
            with self._lock:
                found = self._variants.get(key)
                if found is None:
                    self._check_presence(env)
                    found = (self._solve(dict(zip(inputs, present, strict=True)), truth, env), {})
                if symbolic not in found[1]:
                    found[1][symbolic] = compile_variant(self.entry, found[0], partial(_explain, self.entry), symbolic)
                self._variants[key] = found
        if self._whens:
            self._check_presence(env)
        return found[0], found[1][symbolic]

    def _decide(self, ask: Callable[[Mapping[str, Any]], Any], env: Mapping[str, Any], test: Expr) -> bool:
        try:
            return bool(ask(env))
        except FAILURES:
            asked = ", ".join(f"{n} = {_show(env[n])}" for n in sorted(names(test)))
            expected = "params for which the condition has a value"
            raise CheckError(self.entry.name, None, asked or "a call", expected, unparse(test)) from None

    def _solve(self, present: Mapping[str, bool], truth: Mapping[Expr, bool], env: Mapping[str, Any]) -> Solution:
        solution = solve(self.entry.signature, present, truth)
        if solution.faults:  # the spec's checks look at many variants, not at all
            _, message = solution.faults[0]
            asked = ", ".join(f"{n} = {_show(v)}" for n, v in env.items() if n in self.entry.signature.params)
            raise CheckError(self.entry.name, None, asked or "a call", "a call that the signature determines", message)
        return solution

    def _check_presence(self, env: Mapping[str, Any]) -> None:
        for name, decl in self.entry.signature.inputs.items():
            given = env[f"present({name})"]
            if decl.when:
                if self._decide(self._whens[name], env, decl.when.expr) != given:
                    got, expected = ("a tensor", "None") if given else ("None", "a tensor")
                    asked = ", ".join(f"{n} = {_show(env[n])}" for n in sorted(names(decl.when.expr)))
                    expected += f" as {asked}" if asked else ""
                    raise CheckError(self.entry.name, name, got, expected, f"when: {decl.when}")
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
        _, run = self.variant(params, present)
        shapes = tuple(None if m is None else m.shape for m in metas.values())
        dtypes = tuple(None if m is None else m.dtype for m in metas.values())
        indices, out_shapes, out_dtypes = run(params, shapes, dtypes)
        for name, meta in metas.items():
            decl = sig.inputs[name]
            if decl.contiguous and meta is not None and not is_contiguous(meta.shape, meta.strides):
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


def dense_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Strides without gaps, nested as ``strides`` are: those that ``torch.empty_like`` gives."""
    if 0 in shape or _is_dense(shape, strides):
        return strides
    order = list(range(len(shape) - 1, -1, -1))  # from the innermost axis
    for i in range(1, len(order)):
        for j in range(i, 0, -1):  # a stride of 0 tells nothing of the order of its axis and another
            inner, outer = order[j - 1], order[j]
            known = strides[inner] and strides[outer]
            if known and (strides[inner], shape[inner]) > (strides[outer], shape[outer]):
                order[j - 1], order[j] = outer, inner
            elif known and strides[inner] < strides[outer]:
                break
    dense, step = [0] * len(shape), 1
    for axis in order:
        dense[axis] = step
        step *= shape[axis]
    return tuple(dense)


def _is_dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether the elements fill a stretch of memory, one each."""
    step = 1
    for stride, n in sorted((s, n) for s, n in zip(strides, shape, strict=True) if n > 1):
        if stride != step:
            return False
        step *= n
    return True


def _explain(entry: Entry, solution: Solution, step: Step | None, scope: Mapping[str, Any]) -> CheckError:
    sig = entry.signature
    known = {n: scope[local(n)] for n in (*sig.params, *sig.indices, *sig.let) if local(n) in scope}
    match step:
        case Require(rule=rule):
            values = _values(rule.text.expr, known, scope)
            expected = rule.hint or "a call for which the rule holds"
            return CheckError(entry.name, None, values or "a call", expected, str(rule.text))
        case Derive(name=name):
            text = sig.let[name]
            expected = f"sizes for which '{name}' has a value"
            return CheckError(entry.name, None, _values(text.expr, known, scope), expected, f"let {name}: {text}")
        case None:
            values = ", ".join(f"{n} = {_show(v)}" for n, v in known.items())
            return CheckError(entry.name, None, values, "sizes that give outputs")
    decl = sig.inputs[step.tensor]
    folded = next(t for t in solution.inputs if t.decl is decl)
    match step:
        case SolveDType(choices=choices):
            got = scope[f"d_{decl.name}"]
            return CheckError(entry.name, decl.name, got, " or ".join(choices), f"dtype {decl.dtype}")
        case CheckDType(options=options):
            allowed = dict.fromkeys(a for option in options for a in _dtype_values(option, known, scope, sig))
            return CheckError(
                entry.name, decl.name, scope[f"d_{decl.name}"], " or ".join(allowed), f"dtype {decl.dtype}"
            )
    shape = scope[f"s_{decl.name}"]
    solved = {s.name: s.tensor for s in solution.steps if isinstance(s, SolveAxis | SolveSplice | SolveDType)}
    wanted = Seq(folded.axes)
    here = getattr(step, "name", None)  # an index that this very axis should have given
    given = [n for n in sorted(names(wanted)) if n in known and n != here and solved.get(n) != decl.name]
    values = ", ".join(f"{n} = {_show(known[n])}{f' (from {solved[n]})' if n in solved else ''}" for n in given)
    what = f"rank {len(shape)}, shape {tuple(shape)}" if isinstance(step, Rank) else f"shape {tuple(shape)}"
    expected = unparse(wanted) + (f" with {values}" if values else "")
    return CheckError(entry.name, decl.name, what, expected, f"shape {decl.shape}")


def _values(expr: Expr, known: Mapping[str, Any], scope: Mapping[str, Any]) -> str:
    """What a failing expression saw: values of its names, presence of its tensors."""
    asked = (n.args[0] for n in walk(expr) if isinstance(n, Func) and n.name == "present")
    tensors = dict.fromkeys(t.id for t in asked if isinstance(t, Name))
    there = [f"{'a' if scope[f's_{t}'] is not None else 'no'} {t}" for t in tensors]
    return ", ".join([*there, *(f"{n} = {_show(known[n])}" for n in sorted(names(expr)) if n in known)])


def _show(value: Any) -> str:
    return f"[{', '.join(map(str, value))}]" if isinstance(value, tuple) else str(value)


def _dtype_values(option: Expr, known: Mapping[str, Any], scope: Mapping[str, Any], sig: Signature) -> list[str]:
    match option:
        case Name(id=id):
            source = f" (as {id})" if id in sig.indices else ""
            return [f"{known.get(id, id)}{source}"]
        case Func(name="same_as", args=(Name(id=id),)):
            return [f"{scope[f'd_{id}']} (as {id})"]
    return [unparse(option)]
