"""What is learnt about the calls of an op value: cached plans, and guards in front of them.

A plan is a checked call bound to what runs it. Eight guards, newest first, recognise the latest calls in one check
each; a call that comes twice in a row gets one of its very sizes, whose launch has nothing left to read. Behind them
are the guards of all kinds of calls whose sizes may change, and then plans that are keyed by every tensor's shape,
strides, dtype, device and alignment. All are bounded.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import chain
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.autograd import forward_ad

from tileops.core import autograd, backend, torch_ops
from tileops.core.check import Call, Checker
from tileops.core.check.content import check_content
from tileops.core.errors import CheckError, TileOpsError
from tileops.core.guards import Guard, guard, recording_guard
from tileops.core.kernel import ALIGNMENT, Form
from tileops.core.launch import MISS
from tileops.core.spec import Entry

MAX_GUARDS = 8
MAX_BEHIND = 64  # guards of kinds
MAX_PLANS = 1024
MAX_STATES = 1024
MAX_SETTLED = 64  # of a plan

_PLAIN = (Tensor, torch.nn.Parameter)
_functorch = torch._C._functorch.peek_interpreter_stack
_VMAP = torch._C._functorch.TransformType.Vmap
_dispatch_modes = torch._C._len_torch_dispatch_stack
Inputs = tuple[Tensor | None, ...]
Recognised = tuple[Guard, Callable[..., Any]]  # what runs the calls that a guard lets pass


@attrs.frozen(eq=False)
class Plan:
    """``launch`` gives what the caller gets, or MISS where a call is not of its kind; ``outputs`` says what that holds.

    ``forms`` has the inputs that may differ in another call of the kind, and how; the others must be the same.
    A launch leaves the plan and the sizes that ``moving`` names in ``State.local.run``. Of a kernel's plan ``choice``
    says which kernel it is and why, and ``settle`` makes the plan of a call of these very sizes, which has less to do.
    """

    call: Call
    launch: Callable[..., Any]
    outputs: tuple[bool, ...]
    forms: Mapping[str, Form] = attrs.field(factory=dict)
    moving: tuple[str, ...] = ()
    choice: Any = None
    settle: Callable[[Call], Plan] | None = None
    settled: dict[Any, Recognised] = attrs.field(factory=dict)


class Local(threading.local):
    """What a launch leaves behind in its thread, and whom it tells of a call like the one before."""

    run: tuple[Any, ...] | None = None

    def __init__(self, settle: Callable[[Plan, Inputs], None]) -> None:
        self.settle = settle


class State:
    """The plans of one op value. Shared by equal ops; thread-safe.

    ``kinds`` is another dict after ``forget``: what a call began with an earlier one has learnt is not kept.
    """

    def __init__(self, entry: Entry, values: tuple[Any, ...]) -> None:
        self.entry = entry
        self.checker: Checker = torch_ops.checker_of(entry)
        self.values = values
        self.params = dict(zip(entry.signature.params, values, strict=True))
        self.operator = torch_ops.operator_of(entry)
        self.guards: tuple[Recognised, ...] = ()
        self.behind: tuple[Recognised, ...] = ()
        self.plans: OrderedDict[Any, Plan] = OrderedDict()
        self.kinds: dict[Any, Plan] = {}
        self.tune = False
        self.local = Local(self.settle)
        self.lock = threading.Lock()
        self.gradient: autograd.Gradient | None = None
        self.linked = False  # whether the gradient is known

    def slow(self, inputs: Inputs) -> Any:
        """Everything that no guard recognised."""
        self._check_types(inputs)
        if refused := self._untransformable(inputs):
            raise TileOpsError(f"{self.entry.name}: {refused}")
        if _dispatch_modes() or _functorch() is not None or not all(t is None or _is_plain(t) for t in inputs):
            return autograd.traced(self, inputs)
        kinds = self.kinds
        if autograd.needed(inputs):
            result = autograd.recorded(self, *inputs)
            self._put_in_front((recording_guard(inputs), partial(autograd.recorded, self)), kinds)
            return result
        if (result := self._of_known_kind(inputs, kinds)) is not MISS:
            return result
        plan = self.plan(inputs)
        self.recognise(inputs, plan, kinds)
        return plan.launch(*inputs)

    def launched(self, inputs: Inputs) -> Any:
        """A call below autograd, in the schema's form: every output of the entry, absent ones None."""
        kinds = self.kinds
        for matches, launch in chain(self.guards, self.behind):
            if matches(*inputs) and (result := launch(*inputs)) is not MISS:
                assert self.local.run is not None
                return torch_ops.unpack(result, self.local.run[0].outputs)
        plan = self.plan(inputs)
        self.recognise(inputs, plan, kinds)
        return torch_ops.unpack(plan.launch(*inputs), plan.outputs)

    def plan(self, inputs: Inputs) -> Plan:
        """The plan of a call, made if need be."""
        key = tuple(None if t is None else _tensor_key(t) for t in inputs)
        kinds = self.kinds
        plan = self.plans.get(key)
        if plan is None:
            plan = backend.plan(self.bind(inputs), self.misaligned(inputs), kinds, self.local, self.tune)
            if os.environ.get("TILEOPS_DEBUG") == "1":
                plan = attrs.evolve(plan, launch=self._debugged(plan.launch))
        with self.lock:
            if kinds is self.kinds:
                self.plans[key] = plan
                self.plans.move_to_end(key)
                if len(self.plans) > MAX_PLANS:
                    self.plans.popitem(last=False)
        return plan

    def bind(self, inputs: Inputs) -> Call:
        """The checked Call of tensors on one device."""
        named = zip(self.entry.signature.inputs, inputs, strict=True)
        metas = {n: None if t is None else torch_ops.meta_of(t) for n, t in named}
        device = next(t.device for t in inputs if t is not None)
        return self.checker.bind(self.params, metas, str(device))

    def _debugged(self, launch: Callable[..., Any]) -> Callable[..., Any]:
        """The launch behind checks of what only the data can tell."""
        names = tuple(self.entry.signature.inputs)

        def checked(*inputs: Tensor | None) -> Any:
            check_content(self.bind(inputs), dict(zip(names, inputs, strict=True)))
            return launch(*inputs)

        return checked

    def forget(self) -> None:
        """Drop all plans, so that the next calls are planned anew."""
        with self.lock:
            self.guards = self.behind = ()
            self.plans.clear()
            self.kinds = {}

    def request_tune(self) -> None:
        """Have calls tuned that have no tuned choice yet; those that were planned are planned anew."""
        self.tune = True
        self.forget()

    def last_call(self) -> Call:
        """The Call of this thread's last run; raises TileOpsError before the first."""
        if self.local.run is None:
            raise TileOpsError(f"{self.entry.name}: no call of it has run in this thread yet")
        plan: Plan
        plan, *moved = self.local.run
        sizes = dict(zip(plan.moving, moved, strict=True))
        metas = {n: plan.forms[n].meta(sizes) if n in plan.forms else m for n, m in plan.call.inputs.items()}
        return self.checker.bind(self.params, metas, plan.call.device)

    def misaligned(self, inputs: Sequence[Any]) -> list[str]:
        """The tensors whose address is no multiple of 16."""
        named = zip(self.entry.signature.inputs, inputs, strict=False)
        return [n for n, t in named if isinstance(t, Tensor) and _is_plain(t) and t.data_ptr() % ALIGNMENT]

    def recognise(self, inputs: Inputs, plan: Plan, kinds: Mapping[Any, Plan]) -> None:
        """Put a guard for calls like this one in front, which began with ``kinds``."""
        made = guard(inputs, [plan.forms.get(n) for n in self.entry.signature.inputs]), plan.launch
        self._put_in_front(made, kinds)
        if plan.moving:
            with self.lock:
                if kinds is self.kinds:
                    self.behind = (made, *self.behind[: MAX_BEHIND - 1])

    def settle(self, plan: Plan, inputs: Inputs) -> None:
        """Put a guard for calls of the very sizes of this one in front: it came twice in a row."""
        kinds = self.kinds
        if plan.settle is None or len(plan.settled) >= MAX_SETTLED or os.environ.get("TILEOPS_DEBUG") == "1":
            return
        if plan not in kinds.values():
            return
        key = tuple(None if t is None else (*_tensor_key(t), type(t), t.requires_grad) for t in inputs)
        if key not in plan.settled:
            plan.settled[key] = guard(inputs, [None] * len(inputs)), plan.settle(self.bind(inputs)).launch
        self._put_in_front(plan.settled[key], kinds)

    def _of_known_kind(self, inputs: Inputs, kinds: Mapping[Any, Plan]) -> Any:
        """What a call of a kind gives whose guard is in front no longer, and is again then; else MISS."""
        for known in self.behind:
            matches, launch = known
            if matches(*inputs) and (result := launch(*inputs)) is not MISS:
                self._put_in_front(known, kinds)
                return result
        return MISS

    def _put_in_front(self, made: Recognised, kinds: Mapping[Any, Plan]) -> None:
        with self.lock:
            if kinds is self.kinds:
                others = [g for g in self.guards if g is not made]
                self.guards = (made, *others[: MAX_GUARDS - 1])

    def _untransformable(self, inputs: Inputs) -> str | None:
        """Why torch's transforms that are in force can't be had of a call, or None."""
        if forward_ad._current_level >= 0 and any(
            t is not None and forward_ad.unpack_dual(t).tangent is not None for t in inputs
        ):
            return "forward-mode differentiation is not supported; use torch.autograd"
        transform = _functorch()
        if transform is None:
            return None
        if autograd.needed(inputs):
            return "the derivatives of torch.func are not supported; use torch.autograd"
        if transform.key() == _VMAP and any(output.when for output in self.entry.signature.outputs.values()):
            return "torch.vmap is not supported; call it on the whole batch"
        return None

    def _check_types(self, inputs: Inputs) -> None:
        declared = self.entry.signature.inputs
        for (name, decl), t in zip(declared.items(), inputs, strict=True):
            if t is None and (decl.optional or decl.when):
                continue
            if not isinstance(t, Tensor):
                raise CheckError(
                    self.entry.name, name, f"{'None' if t is None else f'a {type(t).__name__}'}", "a tensor"
                )
            torch_ops.check_strided(self.entry, name, t)
        if torch_ops.home_of(self.entry, inputs) is None:
            raise CheckError(self.entry.name, None, "no tensor", "at least one, to tell the device")


_state = lru_cache(maxsize=MAX_STATES)(State)
_linking, _begun = threading.RLock(), set[State]()


def state_of(entry: Entry, values: tuple[Any, ...]) -> State:
    """The one State of an operator with these canonical params, in spec order."""
    state = _state(entry, values)
    if not state.linked:
        with _linking:
            if not state.linked and state not in _begun:  # an op may be a backward of its own, or of its backward
                _begun.add(state)
                try:
                    state.gradient = autograd.gradient_of(state)
                    state.linked = True
                finally:
                    _begun.discard(state)
    return state


def _is_plain(t: Tensor) -> bool:
    """A tensor whose memory holds its values, so that a kernel can be launched on it."""
    return type(t) in _PLAIN and not t.is_meta and not t.is_neg()


def _tensor_key(t: Tensor) -> tuple[Any, ...]:
    return t.shape, t.stride(), t.dtype, t.device, t.data_ptr() % ALIGNMENT == 0
