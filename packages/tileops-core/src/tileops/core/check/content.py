"""What only a metadata tensor's data can tell: its entry's ``requires``, held against values on the host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tileops.core.check.call import Call
from tileops.core.errors import CheckError
from tileops.core.spec.expr import Name, compile_expr
from tileops.core.spec.predicates import PREDICATES, TENSOR_ARGUMENTS
from tileops.core.spec.solve import FAILURES

if TYPE_CHECKING:
    from torch import Tensor

_SHOWN = 8


def check_content(call: Call, tensors: Mapping[str, Tensor | None]) -> None:
    """Hold a call's tensors, by input, to what their entry requires of their content; raises CheckError.

    Copies the metadata to the host, and so waits for the device.
    """
    inputs = call.entry.signature.inputs
    rules = {n: d.requires for n, d in inputs.items() if d.requires}
    needed = {*rules, *(a.id for rule in rules.values() for a in rule.args if isinstance(a, Name) and a.id in inputs)}
    check_values(call, {n: _host(t) for n, t in tensors.items() if n in needed and t is not None})


def check_values(call: Call, content: Mapping[str, Any]) -> None:
    """The same for values on the host, nested tuples by input; what has none is passed over."""
    env = {**call.env, **content}
    for name, decl in call.entry.signature.inputs.items():
        rule = decl.requires
        if rule is None or name not in content or not all(_known(a, env) for a in rule.args):
            continue
        statement = PREDICATES[rule.name]
        args = [compile_expr(a)(env) for a in rule.args]
        try:
            holds = statement.holds(content[name], *args)
        except FAILURES:  # values of another form, as an empty tensor's
            holds = False
        if not holds:
            given = dict(zip(statement.params, args, strict=True))
            values = ", ".join(f"{n} = {v}" for n, v in given.items() if n not in TENSOR_ARGUMENTS)
            expected = f"{statement.meaning}{f', with {values}' if values else ''}"
            raise CheckError(call.entry.name, name, _shown(content[name]), expected, f"requires: {rule.source}")


def _known(arg: Any, env: Mapping[str, Any]) -> bool:
    return all(n in env for n in arg.free)


def _host(tensor: Tensor) -> Any:
    values = _tuples(tensor.detach().cpu().tolist())
    return values if isinstance(values, tuple) else (values,)


def _tuples(values: Any) -> Any:
    return tuple(map(_tuples, values)) if isinstance(values, list) else values


def _shown(values: tuple[Any, ...]) -> str:
    """The first few of the values, and how many there are."""
    if len(values) <= _SHOWN:
        return f"[{', '.join(_shown(v) if isinstance(v, tuple) else str(v) for v in values)}]"
    first = ", ".join(_shown(v) if isinstance(v, tuple) else str(v) for v in values[:_SHOWN])
    return f"[{first}, ... {len(values)} in all]"
