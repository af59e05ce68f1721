"""The contract of an operator: a frozen value; its fields are its entry's params, its call the entry's inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import update_wrapper
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any, ClassVar

import attrs
import torch
from torch import Tensor
from torch.autograd import forward_ad

from tileops.core import autograd, torch_ops
from tileops.core.backend import default_device
from tileops.core.check import Call, TensorMeta
from tileops.core.dtypes import dtype_name, torch_dtype
from tileops.core.errors import CheckError, TileOpsError
from tileops.core.families import load_spec, spec_path
from tileops.core.inputs import make_inputs
from tileops.core.launch import MISS
from tileops.core.plan import State, state_of
from tileops.core.roofline import Work, work
from tileops.core.spec import Entry
from tileops.core.workloads import bare_meta, labelled

if TYPE_CHECKING:
    from tileops.core.explain import Explanation

Result = Any  # a tensor, a tuple of those that are present, or None where the op only mutates


class Op:
    """Base of all operators. A subclass is ``attrs.define(frozen=True)``: its fields are the params, in spec order.

    The entry is found by the class's name in the ``_spec.yaml`` of its package, or in the file that ``spec`` names.
    Equal params make equal ops, and equal ops share what is learnt about their calls. Thread-safe.

    ``kernels`` names the kernels as ``"module:Class"`` in the family's ``kernels`` package, the preferred first; they
    are imported when a GPU first plans a call. ``buckets`` gives, for an index whose sizes change from call to call,
    the upper ends of the intervals within which one choice of kernel and config serves; beyond the last they double.
    ``pitches`` names such sizes that are the length of a tensor's rows: whether those are multiples of 16 bytes
    decides, too.
    """

    __slots__ = ("__weakref__", "_state")
    spec: ClassVar[Path | None] = None
    kernels: ClassVar[tuple[str, ...]] = ()
    buckets: ClassVar[Mapping[str, tuple[int, ...]]] = {}
    pitches: ClassVar[tuple[str, ...]] = ()
    entry: ClassVar[Entry]
    _state: State

    @classmethod
    def __attrs_init_subclass__(cls) -> None:
        path = cls.spec or spec_path(cls.__module__)
        known = load_spec(path) if path else {}
        if cls.__name__ not in known:
            raise TileOpsError(f"{cls.__module__}.{cls.__name__} has no entry in {path or 'any _spec.yaml around it'}")
        cls.entry = known[cls.__name__]
        if cls.run is Op.run:
            run = _compile_run(list(cls.entry.signature.inputs))
            type.__setattr__(cls, "run", run)
            type.__setattr__(cls, "__call__", _inlined(cls.__call__, run))
        torch_ops.define(cls.entry, cls)

    def __attrs_post_init__(self) -> None:
        params = self.entry.signature.params
        given = {n: getattr(self, n) for n in params}
        canonical = torch_ops.checker_of(self.entry).params({n: dtype_name(v) for n, v in given.items()})
        for name, value in canonical.items():
            value = torch_dtype(value) if params[name].type.base == "dtype" and value is not None else value
            object.__setattr__(self, name, value)
        object.__setattr__(self, "_state", state_of(self.entry, tuple(canonical.values())))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(getattr(self, n) for n in self.entry.signature.params)

    def run(self, *inputs: Tensor | None) -> Result:
        """Check and run one call; ``inputs`` are in spec order, absent ones None.

        Returns the output, or a tuple of the outputs that are present, or None where there are none. Raises CheckError
        for a call outside the signature, NoKernelError or BackendError where the device can't serve it.
        """
        raise NotImplementedError  # each class has one of its own arity

    def bind(self, *inputs: Any, **dtypes: Any) -> Call:
        """The checked Call of inputs in spec order, without running it.

        An input is a tensor, a TensorMeta, a bare shape or None. A bare shape takes its dtype from ``dtypes``, by the
        name of its dtype index or its own: ``op.bind((4096, 7168), (4096, 7168), T=torch.bfloat16)``.
        """
        names = list(self.entry.signature.inputs)
        if len(inputs) > len(names):
            raise CheckError(
                self.entry.name, None, f"{len(inputs)} inputs", f"at most {len(names)}: {', '.join(names)}"
            )
        known = [n for n, i in self.entry.signature.indices.items() if i.kind == "DType"] + names
        if unknown := [n for n in dtypes if n not in known]:
            raise CheckError(self.entry.name, None, f"a dtype for '{unknown[0]}'", f"one for {', '.join(known)}")
        case = {n: dtype_name(d) for n, d in dtypes.items()}
        metas: dict[str, TensorMeta | None] = {}
        home = torch_ops.home_of(self.entry, [t if isinstance(t, Tensor) else None for t in inputs])
        for name, given in zip(names, inputs, strict=False):
            if isinstance(given, Tensor):
                torch_ops.check_strided(self.entry, name, given)
                metas[name] = torch_ops.meta_of(given)
            elif given is None or isinstance(given, TensorMeta):
                metas[name] = given
            else:
                metas[name] = bare_meta(self.entry, name, given, case, self._state.params, metas)
        return self._state.checker.bind(self._state.params, metas, str(home or "meta"))

    def explain(self, *inputs: Any, **dtypes: Any) -> Explanation:
        """Which kernel and config serve a call, who refused it and why, what is copied, and its bound."""
        from tileops.core.explain import explain

        return explain(self.bind(*inputs, **dtypes), self._state.misaligned(inputs))

    def warmup(self, *calls: Call | str, device: torch.device | str | None = None) -> None:
        """Compile, load and run once what these calls need, so that they can be captured or served at once.

        A call is a Call, or the label of a row, all of whose dtype cases are meant; a row has its own params. Memory
        for the tensors is taken meanwhile: on ``device``, else where the Call's tensors were, else on the GPU.
        """
        for wanted in calls:
            for call in [wanted] if isinstance(wanted, Call) else labelled(self.entry, wanted):
                op: Any = type(self)(**call.params)
                at = device or (default_device() if call.device == "meta" else call.device)
                op(*make_inputs(call, at).values())

    def request_tune(self) -> None:
        """Have the calls that follow, of this op and of all equal ones, tuned where they have no tuned choice yet.

        The first call of each bucket then blocks for as long as its candidates take to compile and to be measured. On
        a CPU nothing happens.
        """
        self._state.request_tune()

    def roofline(self, call: Call) -> Work:
        """Work of a call: floating point operations and bytes, from the spec alone."""
        return work(call)

    def eval_roofline(self) -> Work:
        """Work of this thread's last call of this op (of any equal value); raises TileOpsError before the first."""
        return work(self._state.last_call())


def _inlined(declared: Any, run: FunctionType) -> Any:
    """A ``__call__`` that only passes its inputs on to ``run``, with that for its body: a frame less."""
    inputs = ", ".join(run.__code__.co_varnames[1 : run.__code__.co_argcount])
    scope: dict[str, Any] = {}
    exec(f"def call(self, {inputs}): return self.run({inputs})", scope)
    code, passing_on = declared.__code__, scope["call"].__code__
    if any(getattr(code, part) != getattr(passing_on, part) for part in ("co_code", "co_names", "co_varnames")):
        return declared
    return update_wrapper(FunctionType(run.__code__, run.__globals__, argdefs=declared.__defaults__), declared)


def _compile_run(names: Sequence[str]) -> FunctionType:
    """``Op.run`` with its inputs spelled out, which saves packing and unpacking them three times a call.

    All names of its own begin with an underscore, which no input's does.
    """
    inputs = ", ".join(names)
    source = f"""
def run(self, {inputs}):
    _state = self._state
    if _is_tracing():
        return _traced(_state, ({inputs},))
    if not _dispatch_modes() and _forward_ad._current_level < 0:
        for _matches, _launch in _state.guards:
            if _matches({inputs}):
                _result = _launch({inputs})
                if _result is not _MISS:
                    return _result
    return _state.slow(({inputs},))
"""
    scope: dict[str, Any] = {
        "_is_tracing": torch.compiler.is_dynamo_compiling,
        "_dispatch_modes": torch._C._len_torch_dispatch_stack,
        "_forward_ad": forward_ad,
        "_traced": autograd.traced,
        "_MISS": MISS,
    }
    exec(source, scope)
    scope["run"].__doc__ = Op.run.__doc__
    run: FunctionType = scope["run"]
    return run


def make_op(entry_name: str, spec: Path, **namespace: Any) -> type[Op]:
    """An operator class made from a spec file alone, for specs that come without a class of their own."""
    entry: Entry = load_spec(spec)[entry_name]
    fields: Mapping[str, Any] = {
        n: attrs.field(default=p.default) if p.default is not attrs.NOTHING else attrs.field()
        for n, p in entry.signature.params.items()
    }

    names = list(entry.signature.inputs)

    def call(self: Op, *inputs: Tensor | None) -> Result:
        if len(inputs) > len(names):
            raise CheckError(entry.name, None, f"{len(inputs)} inputs", f"at most {len(names)}: {', '.join(names)}")
        return self.run(*inputs, *[None] * (len(names) - len(inputs)))

    body = {
        "__call__": call,
        "__slots__": (),
        "spec": spec,
        "__module__": __name__,
        "__doc__": entry.summary,
        **namespace,
    }
    base = type(f"_{entry_name}", (Op,), body)
    cls: type[Op] = attrs.make_class(entry_name, dict(fields), bases=(base,), frozen=True, slots=True)
    cls.__module__ = base.__module__
    return cls
