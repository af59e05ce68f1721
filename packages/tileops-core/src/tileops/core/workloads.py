"""The calls that an entry's rows declare, and smaller ones of the same kind for small machines. Needs no torch."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tileops.core.check import Call, Checker, TensorMeta, ordered_strides
from tileops.core.errors import CheckError, SpecError, TileOpsError
from tileops.core.roofline import work
from tileops.core.spec import Diagnostic, Entry, Row, TensorDecl
from tileops.core.spec.diagnostics import did_you_mean
from tileops.core.spec.dtypes import BITS
from tileops.core.spec.expr import Binary, Expr, IfElse, Name, compile_expr, names
from tileops.core.spec.model import Predicate
from tileops.core.spec.predicates import PREDICATES
from tileops.core.spec.solve import plain_dtype

Case = Mapping[str, str]  # dtypes by index name or, for a dtype of its own, by input name

_FEW = 64  # below this a symbolic size is no longer large, as a batch of decode steps is none


def cases(row: Row) -> tuple[Case, ...]:
    """A row's dtype cases; one empty case where it names none."""
    return row.dtype_cases or ({},)


def call_id(entry: Entry, row: Row, case: Case) -> str:
    """The stable id of a workload: ``Op/label-dtype-dtype``."""
    return f"{entry.name}/{'-'.join([row.label, *case.values()])}"


def calls(entry: Entry) -> Iterator[Call]:
    """The calls of all rows, each with its id; raises SpecError for a row that its own signature refuses."""
    checker = Checker(entry)
    for row in entry.workloads:
        for case in cases(row):
            yield row_call(checker, row, case)


def labelled(entry: Entry, label: str) -> list[Call]:
    """The calls of one row, one for each dtype case; raises TileOpsError for a label that the entry lacks."""
    rows = [row for row in entry.workloads if row.label == label]
    if not rows:
        hint = did_you_mean(label, [row.label for row in entry.workloads]) or "see tileops show"
        raise TileOpsError(f"{entry.name} has no row '{label}'; {hint}")
    return [row_call(Checker(entry), row, case) for row in rows for case in cases(row)]


def row_call(checker: Checker, row: Row, case: Case, values: Mapping[str, Any] | None = None) -> Call:
    """One call of a row; ``values`` replaces the row's sizes and params. Raises SpecError with the row's place."""
    entry = checker.entry
    values = row.values if values is None else values
    try:
        return _bind(checker, row, case, values)
    except CheckError as e:
        message = f"row '{row.label}' is no legal call: {'; '.join(str(e).splitlines())}"
    except (KeyError, TypeError, ArithmeticError, ValueError) as e:
        message = f"row '{row.label}' can't be made into a call: {_reason(e)}"
    raise SpecError([Diagnostic(row.place, "error", "S304", f"{entry.name}: {message}")]) from None


def _reason(e: Exception) -> str:
    return f"it lacks a value for '{e.args[0]}'" if isinstance(e, KeyError) else str(e)


def _bind(checker: Checker, row: Row, case: Case, values: Mapping[str, Any]) -> Call:
    entry = checker.entry
    sig = entry.signature
    params = checker.params({n: v for n, v in values.items() if n in sig.params})
    env: dict[str, Any] = {n: v for n, v in values.items() if n not in sig.params} | params
    for index in sig.indices.values():
        if index.kind == "DType" and (index.name in case or len(index.choices) == 1):
            env[index.name] = case.get(index.name, index.choices[0])
    for name, decl in sig.inputs.items():
        env[f"present({name})"] = decl.when is None and (not decl.optional or name in row.some)
    for name, decl in sig.inputs.items():
        if decl.when:
            env[f"present({name})"] = bool(compile_expr(decl.when.expr)(env))
    _derive(entry, env)
    metas: dict[str, TensorMeta] = {}
    for name, decl in sig.inputs.items():
        if env[f"present({name})"]:
            shape = tuple(compile_expr(decl.shape.expr)(env))
            order = row.dim_order.get(name, range(len(shape)))
            if len(order) != len(shape):
                raise ValueError(f"dim_order has {len(order)} axes of {name}, which has {len(shape)}")
            metas[name] = TensorMeta(shape, _dtype(decl, env, metas, case), ordered_strides(shape, order))
    content = {n: _content(entry, row, n, m, env) for n, m in metas.items() if _generator(row, sig.inputs[n])}
    call = checker.bind(params, metas, content=content or None, id=call_id(entry, row, case))
    for name, value in values.items():
        if name in call.indices and call.indices[name] != value:
            raise ValueError(f"it says {name} = {value}, but its tensors give {call.indices[name]}")
    return call


def _derive(entry: Entry, env: dict[str, Any]) -> None:
    for name, text in entry.signature.let.items():
        if names(text.expr) <= env.keys():
            env[name] = compile_expr(text.expr)(env)


def _dtype(decl: TensorDecl, env: Mapping[str, Any], metas: Mapping[str, TensorMeta], case: Case) -> str:
    """The dtype a case gives to an input; the first of a union that the case leaves open."""
    if decl.name in case and decl.name not in env:
        return case[decl.name]
    return _evaluate(plain_dtype(decl.dtype.expr), env, metas)


def _evaluate(dtype: Expr, env: Mapping[str, Any], metas: Mapping[str, TensorMeta]) -> str:
    match dtype:
        case IfElse(test=test, then=then, other=other):
            return _evaluate(then if compile_expr(test)(env) else other, env, metas)
        case Binary(op="|", left=first):
            return _evaluate(first, env, metas)
        case Name(id=id) if id in BITS:
            return id
        case Name(id=id):
            return str(env[id])
    (source,) = dtype.args  # type: ignore[attr-defined] # same_as(x): the reader admits nothing else
    return metas[source.id].dtype


def bare_meta(
    entry: Entry,
    name: str,
    shape: Sequence[int],
    case: Case,
    params: Mapping[str, Any],
    metas: Mapping[str, TensorMeta | None],
) -> TensorMeta:
    """A tensor given by its shape alone: its dtype by ``case``, or by params and the tensors before it."""
    if not isinstance(shape, list | tuple) or not all(isinstance(n, int) and n >= 0 for n in shape):
        raise CheckError(entry.name, name, repr(shape), "a tensor, or a shape: a tuple of sizes")
    decl = entry.signature.inputs[name]
    choices = {n: i.choices[0] for n, i in entry.signature.indices.items() if i.kind == "DType" and len(i.choices) == 1}
    try:
        given = {n: v for n, v in case.items() if n in entry.signature.indices}
        dtype = _dtype(decl, {**params, **choices, **given}, {n: m for n, m in metas.items() if m}, case)
    except KeyError as e:
        raise CheckError(
            entry.name, name, "a shape without dtype", f"{e.args[0]}=..., or a tensor", f"dtype {decl.dtype}"
        ) from None
    return TensorMeta(tuple(shape), dtype)


def _generator(row: Row, decl: TensorDecl) -> Predicate | None:
    """What generates a tensor's content: the row's word, else the entry's; ``forward(...)`` is for the runner."""
    generator = row.content.get(decl.name) or decl.values or decl.requires
    return generator if generator and generator.name in PREDICATES and generator.name != "positive" else None


def _content(entry: Entry, row: Row, name: str, meta: TensorMeta, env: dict[str, Any]) -> Any:
    generator = _generator(row, entry.signature.inputs[name])
    assert generator is not None
    args = [compile_expr(a)(env) for a in generator.args]
    rng = random.Random(f"{entry.name}/{row.label}/{name}")
    made = PREDICATES[generator.name].make(rng, meta.shape, *args)
    env[name] = made  # later tensors' content may refer to it
    return made


def scaled(checker: Checker, row: Row, case: Case, max_flops: float, max_bytes: float = math.inf) -> Call:
    """The row's call with its sizes halved, as the rules allow, until its work is within both limits.

    First those that change from call to call, which keeps a model's own sizes, then the largest.
    """
    values = dict(row.values)
    call = row_call(checker, row, case)
    while (needed := work(call)).flops > max_flops or needed.bytes > max_bytes:
        for name, at in _to_halve(call, values):
            smaller = {**values, name: _halved(values[name], at)}
            try:
                call = row_call(checker, row, case, smaller)
            except SpecError:
                continue
            values = smaller
            break
        else:
            return call
    return call


def _to_halve(call: Call, values: Mapping[str, Any]) -> list[tuple[str, int | None]]:
    signature = call.entry.signature
    sizes: list[tuple[bool, int, str, int | None]] = []
    for name, value in values.items():
        if name in signature.params and signature.params[name].type.base != "list[int]":
            continue
        axes = enumerate(value) if isinstance(value, tuple) else [(None, value)] if isinstance(value, int) else ()
        sizes += [(name in call.symbolic and n > _FEW, n, name, at) for at, n in axes if n > 1]
    return [(name, at) for _, _, name, at in sorted(sizes, key=lambda s: s[:2], reverse=True)]


def _halved(value: Any, at: int | None) -> Any:
    return -(-value // 2) if at is None else tuple(-(-n // 2) if i == at else n for i, n in enumerate(value))
