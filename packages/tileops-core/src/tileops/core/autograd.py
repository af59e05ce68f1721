"""Gradients, outside the operators: an ``autograd.Function`` around a call, from the entry's ``grad``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import attrs
import torch
from torch import Tensor

from tileops.core import torch_ops
from tileops.core.errors import TileOpsError
from tileops.core.spec import Entry
from tileops.core.spec.expr import Binary, Expr, Func, Name, compile_expr
from tileops.core.spec.grad import axis_of, sizes_in
from tileops.core.spec.model import GradCall

if TYPE_CHECKING:
    from tileops.core.plan import State


class Sized(NamedTuple):  # which torch.compile can make
    """A backward op whose params depend on sizes: what a call through its operator needs, as a State has it."""

    entry: Entry
    operator: Callable[..., Any]
    values: tuple[Any, ...]
    gradient: None = None
    tune: bool = False  # its operator's State says


@attrs.frozen(eq=False)
class Backward:
    """One backward op of a call. ``sources`` says, for each of its inputs, where it comes from.

    A source is ("grad", i) for the gradient of output i, ("saved", i) for output i, ("input", i), or None. ``gives``
    maps the place of a forward input to what is summed for it: ("output", i) of the backward, or ("grad", i).
    ``params`` gives the op's params from the forward's, ``known``, and from ``sizes``: names of indices, each with the
    input of the backward, and its axis, that has the size.
    """

    entry: Entry
    operator: Callable[..., Any]
    params: tuple[Callable[[Mapping[str, Any]], Any], ...]
    known: Mapping[str, Any]
    sizes: tuple[tuple[str, int, int], ...]
    state: State | None  # where there are no sizes
    sources: tuple[tuple[str, int] | None, ...]
    gives: tuple[tuple[int, tuple[tuple[str, int], ...]], ...]

    def of(self, inputs: Sequence[Any], through_operator: bool) -> State | Sized:
        """The op for these inputs, whose sizes may be symbolic where it is called through its operator."""
        if self.state is not None:
            return self.state
        env = {**self.known, **{name: inputs[i].shape[axis] for name, i, axis in self.sizes}}
        values = tuple([value(env) for value in self.params])
        return Sized(self.entry, self.operator, values) if through_operator else _state(self.entry, values)


@attrs.frozen(eq=False)
class Gradient:
    """How a State is differentiated: the State that also returns what backward needs, and the backward ops.

    ``hidden`` are the places of outputs that only backward asked for; ``sources`` are all that backward ops take.
    """

    forward: State
    backward: tuple[Backward, ...]
    hidden: frozenset[int]
    sources: frozenset[tuple[str, int]]


def gradient_of(state: State) -> Gradient | None:
    """The gradient that an entry declares for these params; None where it declares none."""
    entry = state.entry
    calls = [c for c in entry.grad if c.when is None or compile_expr(c.when.expr)(state.params)]
    if not calls:
        return None
    from tileops.core.plan import state_of

    saved = {n for c in calls for text in c.inputs.values() for n in _named(text.expr, "saved")}
    switches = {n: _switch(entry, n) for n in saved if entry.signature.outputs[n].when}
    hidden = {n for n, switch in switches.items() if not state.params[switch]}
    params = state.params | {switches[n]: True for n in hidden}
    forward = state_of(entry, tuple(params.values())) if hidden else state
    places = frozenset(i for i, n in enumerate(entry.signature.outputs) if n in hidden)
    backward = tuple(_backward(state, c) for c in calls)
    return Gradient(forward, backward, places, frozenset(s for b in backward for s in b.sources if s is not None))


def _switch(entry: Entry, output: str) -> str:
    """The bool param that asks for an output."""
    when = entry.signature.outputs[output].when
    assert when is not None
    if not isinstance(when.expr, Name):
        raise TileOpsError(f"{entry.name}: saved({output}) needs an output with 'when: param', not 'when: {when}'")
    return when.expr.id


def _state(entry: Entry, values: Sequence[Any]) -> State:
    from tileops.core.plan import state_of

    params = torch_ops.checker_of(entry).params(dict(zip(entry.signature.params, values, strict=True)))
    return state_of(entry, tuple(params.values()))


def _backward(state: State, call: GradCall) -> Backward:
    entry, sig = state.entry, state.entry.signature
    inputs, outputs = list(sig.inputs), list(sig.outputs)
    target = torch_ops.entry_of(call.op)

    def source(expr: Expr) -> tuple[str, int]:
        match expr:
            case Func(name="grad" | "saved" as kind, args=(Name(id=output),)):
                return kind, outputs.index(output)
            case Name(id=name):
                return "input", inputs.index(name)
        raise TileOpsError(f"{entry.name}: 'grad' can't take an input of {call.op} from this expression")

    back = list(target.signature.outputs)
    sources = tuple(source(call.inputs[n].expr) if n in call.inputs else None for n in target.signature.inputs)
    gives = []
    for name, text in call.gives.items():
        terms = tuple(
            ("grad", outputs.index(_named(t, "grad")[0])) if isinstance(t, Func) else ("output", back.index(t.id))
            for t in _terms(text.expr)
        )
        gives.append((inputs.index(name), terms))
    params = tuple(
        compile_expr(call.params[n].expr) if n in call.params else partial(_default, p.default)
        for n, p in target.signature.params.items()
    )
    sizes = []
    for name in sizes_in(entry, call):
        found = axis_of(entry, call, name)
        if found is None:
            raise TileOpsError(f"{entry.name}: 'grad' uses '{name}', which no tensor given to {call.op} has as an axis")
        sizes.append((name, list(target.signature.inputs).index(found[0]), found[1]))
    fixed = None if sizes else _state(target, [value(state.params) for value in params])
    operator = torch_ops.operator_of(target)
    return Backward(target, operator, params, state.params, tuple(sizes), fixed, sources, tuple(gives))


def _default(value: Any, env: Mapping[str, Any]) -> Any:
    return value


def _named(expr: Expr, function: str) -> list[str]:
    match expr:
        case Func(name=name, args=(Name(id=id),)) if name == function:
            return [id]
    return []


def _terms(expr: Expr) -> list[Any]:
    if isinstance(expr, Binary) and expr.op == "+":
        return [*_terms(expr.left), *_terms(expr.right)]
    return [expr]


def needed(inputs: Sequence[Tensor | None]) -> bool:
    """Whether a call has to be recorded for a backward."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)


def recorded(state: State, *inputs: Tensor | None) -> Any:
    """A call of plain tensors that is recorded for a backward."""
    result = torch_ops.pack(apply(state, inputs, through_operator=False))
    if state.gradient is not None:
        state.local.run = state.gradient.forward.local.run
    return result


def traced(state: State, inputs: Sequence[Tensor | None]) -> Any:
    """A call through the operator: under a tracer, a dispatch mode, or with tensors that are not plain."""
    if needed(inputs):
        return torch_ops.pack(apply(state, inputs, True))
    return torch_ops.pack(state.operator(*inputs, *state.values))


def apply(state: State | Sized, inputs: Sequence[Tensor | None], through_operator: bool) -> Any:
    """A call that can be differentiated, or, where the entry declares no ``grad``, whose backward says so.

    An op that gives nothing back has no backward to say it: it raises here.
    """
    if not state.entry.signature.outputs:
        raise no_gradient(state.entry.name)
    if state.gradient is None:
        return _WithoutGradient.apply(state, through_operator, *inputs)
    return _WithGradient.apply(state, through_operator, *inputs)


def _call(state: State | Sized, inputs: Sequence[Tensor | None], through_operator: bool) -> Any:
    """A call below autograd, in the schema's form: every output of the entry, absent ones None."""
    if through_operator or isinstance(state, Sized):
        return state.operator(*inputs, *state.values)
    return state.launched(tuple(inputs))


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, state: State, through_operator: bool, *inputs: Tensor | None) -> Any:
        gradient = state.gradient
        assert gradient is not None
        returned = _call(_tuned_like(state, gradient.forward), inputs, through_operator)
        outputs = returned if isinstance(returned, tuple) else (returned,)
        sources = gradient.sources
        kept = [inputs[i] if ("input", i) in sources else None for i in range(len(inputs))]
        saved = [t if ("saved", i) in sources else None for i, t in enumerate(outputs)]
        ctx.save_for_backward(*kept, *saved)
        ctx.state, ctx.through_operator = state, through_operator
        ctx.present = tuple(t is not None for t in inputs)
        wanted = tuple(None if i in gradient.hidden else t for i, t in enumerate(outputs))
        summed = {term for b in gradient.backward for _, terms in b.gives for term in terms}
        smooth = {i for kind, i in sources | summed if kind == "grad"}
        if rough := [t for i, t in enumerate(wanted) if t is not None and i not in smooth]:
            ctx.mark_non_differentiable(*rough)
        return wanted[0] if len(wanted) == 1 else wanted

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        gradient = ctx.state.gradient
        count = len(ctx.present)
        held = ctx.saved_tensors  # once: each look at them unpacks them, which a checkpoint allows once
        kept, saved = held[:count], held[count:]
        parts = {"grad": grads, "saved": saved, "input": kept}
        given: list[Any] = [None] * count
        for backward in gradient.backward:
            if not any(ctx.needs_input_grad[2 + place] for place, _ in backward.gives):
                continue
            inputs = [None if s is None else parts[s[0]][s[1]] for s in backward.sources]
            call = apply if needed(inputs) else _call  # recorded only for a derivative of this derivative
            target = _tuned_like(ctx.state, backward.of(inputs, ctx.through_operator))
            returned = call(target, inputs, ctx.through_operator)
            outputs = returned if isinstance(returned, tuple) else (returned,)
            sums: dict[Any, Any] = {}  # the same terms, for several inputs, are added once
            for place, terms in backward.gives:
                if terms not in sums:
                    sums[terms] = _sum([grads[i] if kind == "grad" else outputs[i] for kind, i in terms])
                if ctx.present[place]:
                    given[place] = _sum([given[place], sums[terms]])
        return None, None, *given


def _tuned_like(state: State | Sized, target: State | Sized) -> State | Sized:
    """``target``, tuned where that was asked of ``state``."""
    if state.tune and not target.tune and not isinstance(target, Sized):
        target.request_tune()
    return target


def _sum(terms: Sequence[Tensor | None]) -> Tensor | None:
    """The sum of the terms that are there."""
    total = None
    for term in terms:
        total = term if total is None else total if term is None else total + term
    return total


class _WithoutGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, state: State, through_operator: bool, *inputs: Tensor | None) -> Any:
        ctx.name, ctx.through_operator = state.entry.name, through_operator
        if through_operator:
            ctx.save_for_backward(*inputs)
        return _call(state, inputs, through_operator)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if not ctx.through_operator:
            raise no_gradient(ctx.name)
        refuse = torch.ops.tileops.refuse_gradient
        grad = next(g for g in grads if g is not None)
        return None, None, *(None if t is None else refuse(t, grad, ctx.name) for t in ctx.saved_tensors)


def no_gradient(name: str) -> TileOpsError:
    reason = "its spec entry declares no 'grad'; call it under torch.no_grad(), or detach its inputs"
    return TileOpsError(f"{name} has no gradient: {reason}")


def _refuse_gradient(like: Tensor, grad: Tensor, op: str) -> Tensor:
    raise no_gradient(op)


# A traced backward may be built without ever being run: the refusal must wait until it is. It takes ``grad`` because
# what a backward computes without one is moved into the forward.
torch_ops.LIBRARY.define(
    "refuse_gradient(Tensor like, Tensor grad, str op) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
)
torch_ops.LIBRARY.impl("refuse_gradient", _refuse_gradient, "CompositeExplicitAutograd")
torch.library.register_fake(
    f"{torch_ops.NAMESPACE}::refuse_gradient", lambda like, grad, op: torch.empty_like(like), lib=torch_ops.LIBRARY
)
