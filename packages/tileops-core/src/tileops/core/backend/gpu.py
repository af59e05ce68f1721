"""What the GPU backends share: which kernel serves a call, and the plan that launches it."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Iterator, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Protocol

import attrs

from tileops.core import program, torch_ops
from tileops.core.accuracy import mutated
from tileops.core.backend import cpu
from tileops.core.check import Call, TensorMeta, contiguous_strides
from tileops.core.choice import Choice
from tileops.core.errors import BackendError, CaptureError, CompileError, NoKernelError
from tileops.core.kernel import ALIGNMENT, Device, Kernel, Static, static_of
from tileops.core.launch import LARGEST, Bounds, Empty, Interval, bind_plan, compile_launch
from tileops.core.roofline import board_of
from tileops.core.spec import Entry
from tileops.core.spec.dtypes import itemsize
from tileops.core.tune.bucket import Bucket, plain
from tileops.core.tune.known import known

if TYPE_CHECKING:
    from tileops.core.plan import Plan

MAX_KINDS = 1024


class Gpu(Protocol):
    """What a GPU backend provides; a module will do.

    ``available()`` is None, or why calls can't run here, ending with the mend; ``toolchain()`` the same of what kernels
    are compiled with. ``empty(index)`` gives a function of size, stride and dtype; ``fence(index)``, where there are
    several devices, whether another is current, and a context that makes this one so.
    """

    device_type: str

    def available(self) -> str | None: ...
    def toolchain(self) -> str | None: ...
    def name(self, index: int) -> str: ...
    def device(self, index: int) -> Device: ...
    def target(self, device: Device) -> program.Target: ...
    def capturing(self) -> bool: ...
    def empty(self, index: int) -> Any: ...
    def fence(self, index: int) -> tuple[Any, Any]: ...


def plan(
    gpu: Gpu, call: Call, misaligned: Sequence[str], kinds: dict[Any, Plan], last: Any, tune: bool = False
) -> Plan:
    """A plan for a checked call; raises NoKernelError, CompileError, or CaptureError inside a graph capture.

    ``kinds`` holds the plans of one op value by what is static of a call and its bucket, so that a new length that
    needs nothing new costs little. With ``tune``, or TILEOPS_TUNE=1, a bucket that has no tuned choice gets one first.
    """
    if is_empty(call):
        return cpu.plan(call, last)
    static = static_of(torch_ops.checker_of(call.entry), call)
    bounds = intervals(call, static)
    kind = static, tuple(bounds.items()), tuple(misaligned), call.device
    found = kinds.get(kind)
    if found is None:
        if len(kinds) >= MAX_KINDS:
            kinds.pop(next(iter(kinds)), None)
        found = kinds[kind] = _plan(gpu, call, static, bounds, misaligned, last, tune)
    return found


def _plan(
    gpu: Gpu, call: Call, static: Static, bounds: Bounds, misaligned: Sequence[str], last: Any, tune: bool
) -> Plan:
    index = int(call.device.partition(":")[2] or 0)
    device, board = gpu.device(index), board_at(gpu, index)
    kind = largest(call, static, bounds)
    if tune or os.environ.get("TILEOPS_TUNE") == "1":
        from tileops.core.tune.live import tune_call

        tune_call(gpu, call, misaligned, index, board)
    choice = choose(kind, device, misaligned, board)
    if gpu.capturing():
        held = program.loaded(recipe_of(choice, call, device, gpu.target(device)).key)
        if held is None or index not in held.ready:
            raise CaptureError(
                f"{call.entry.name}: this call's program has not run on {call.device} yet, and a graph capture can't "
                "load it; call it once, or op.warmup(...), before capturing"
            )
    return planned(gpu, call, kind, bounds, choice, index, gpu.empty(index), last)


def planned(
    gpu: Gpu, call: Call, kind: Call, bounds: Bounds, choice: Choice, index: int, empty: Empty, last: Any
) -> Plan:
    """The plan that runs a call by a choice, its program loaded; ``kind`` is the largest call of its bucket."""
    from tileops.core.plan import Plan

    device = gpu.device(index)
    recipe = recipe_of(choice, call, device, gpu.target(device))
    try:
        loaded = program.load(recipe)
    except CompileError as e:
        reason = gpu.toolchain()
        raise e if reason is None else BackendError(f"{call.entry.name}: {reason}") from e
    loaded.ready.add(index)
    wrong_device, fence = gpu.fence(index)
    checker = torch_ops.checker_of(call.entry)
    solution, _ = checker.variant(call.params, [m is not None for m in call.inputs.values()])
    asked = {n: f for n, f in static_of(checker, call).tensors if n in call.outputs}
    static, scratch = recipe.static, choice.kernel.workspace(kind, choice.config)

    def bind(call: Call, static: Static, bounds: Bounds) -> Plan:
        launch, moving = compile_launch(
            static,
            solution,
            list(call.inputs),
            loaded.main,
            scratch,
            bounds,
            empty,
            last,
            partial(_refused, choice, call),
            choice.copies,
            mutated(call),
            asked,
            wrong_device,
            fence,
        )
        forms = {n: f for n, f in static.tensors if n in call.inputs and n not in choice.copies}
        made = Plan(call, launch, tuple(m is not None for m in call.outputs.values()), forms, moving, choice, settle)
        bind_plan(launch, made)
        return made

    def settle(call: Call) -> Plan:
        return bind(call, _settled(static, packed(call, choice.copies)), {})

    return bind(call, static, bounds)


def _settled(static: Static, call: Call) -> Static:
    """The static part of a call all of whose sizes are fixed."""
    metas = {**call.inputs, **call.outputs}
    tensors = ((n, attrs.evolve(f, shape=m.shape)) for n, f in static.tensors if (m := metas[n]) is not None)
    return attrs.evolve(static, tensors=tuple(tensors))


def recipe_of(choice: Choice, call: Call, device: Device, target: program.Target) -> program.Recipe:
    """What the program is made from that runs a call by this choice."""
    static = static_of(torch_ops.checker_of(call.entry), packed(call, choice.copies))
    return program.Recipe(choice.kernel, static, choice.config, device, target)


def recipe(
    gpu: Gpu, call: Call, device: Device, misaligned: Sequence[str] = (), board: str | None = None
) -> program.Recipe | None:
    """The same for the choice that ``plan`` would make; None where there is nothing to launch."""
    if is_empty(call):
        return None
    return recipe_of(choose(bucketed(call), device, misaligned, board), call, device, gpu.target(device))


def is_empty(call: Call) -> bool:
    """Whether a tensor of the call has no elements: then the reference fills what there is to fill."""
    return any(0 in m.shape for m in (*call.inputs.values(), *call.outputs.values()) if m is not None)


def _refused(choice: Choice, call: Call, e: Exception) -> BackendError:
    kernel = f"{type(choice.kernel).__name__} with {choice.config}"
    reason = str(e).strip().splitlines() or [type(e).__name__]
    return BackendError(
        f"{call.entry.name}: the driver refused to launch {kernel} on {call.device}: {reason[-1]}; the call is none of "
        "those that the kernel serves, or the driver doesn't fit the GPU: `tileops doctor` examines it"
    )


def kernels(entry: Entry) -> list[Kernel]:
    """The kernels that an op names, in the order in which the family ranks them."""
    cls = torch_ops.class_of(entry)
    package = cls.__module__.rpartition(".ops.")[0]
    found = []
    for name in cls.kernels:
        module, _, kernel = name.partition(":")
        try:
            home = importlib.import_module(f"{package}.kernels.{module}")
        except ImportError as e:
            mend = 'pip install "tileops-core[cuda]" (on a MUSA image: the vendor\'s tilelang_musa)'
            raise BackendError(f"{entry.name}: kernels need TileLang, which can't be imported ({e}); {mend}") from None
        found.append(getattr(home, kernel)())
    return found


def board_at(gpu: Gpu, index: int) -> str:
    """The board of a device, by which tuned choices are kept; one without a profile goes by its own name."""
    return _board(gpu.name(index))


@cache
def _board(name: str) -> str:
    return board_of(name) or re.sub(r"\W+", "-", name.casefold()).strip("-")


def choose(call: Call, device: Device, misaligned: Sequence[str] = (), board: str | None = None) -> Choice:
    """The tuned choice for the largest call of a bucket, if its board has a legal one, else the first candidate."""
    refusals: dict[str, str] = {}
    default = next(candidates(call, device, misaligned, refusals), None)
    if default is None:
        raise NoKernelError(call.entry.name, str(call), refusals)
    return default if board is None else _tuned(default, packed(call, default.copies), device, board)


def candidates(
    call: Call, device: Device, misaligned: Sequence[str] = (), refusals: dict[str, str] | None = None
) -> Iterator[Choice]:
    """Each kernel that takes a call with each of its configs, the default first; ``refusals`` collects the others.

    Where no kernel takes the call as it is, those are asked that take it with its inputs copied to be packed.
    """
    refusals = {} if refusals is None else refusals
    unpacked = [n for n, m in call.inputs.items() if m is not None and m.strides != contiguous_strides(m.shape)]
    for copies in dict.fromkeys((tuple(misaligned), tuple(dict.fromkeys((*misaligned, *unpacked))))):
        kind, served = packed(call, copies), False
        for kernel in kernels(call.entry):
            reason = _refusal(kernel, kind, device)
            if reason is None:
                reason = f"no config of it is legal on {device.arch}"
                for config in kernel.configs(kind, device):
                    reason, served = None, True
                    yield Choice(kernel, config, refusals, copies)
            if reason is not None:
                refusals.setdefault(type(kernel).__name__, reason)
        if served:
            return


def bucket_of(kind: Call, device: Device, board: str) -> Bucket:
    """What tuned choices for a bucket are found by; ``kind`` is its largest call, packed as its kernels get it."""
    static = static_of(torch_ops.checker_of(kind.entry), kind)
    return Bucket.of(kind.entry, static, intervals(kind, static), kernels(kind.entry), device, board)


def _tuned(default: Choice, kind: Call, device: Device, board: str) -> Choice:
    """The first of the tuned choices that is legal, else the default."""
    ignored: list[str] = []
    for tuned in known(torch_ops.class_of(kind.entry), bucket_of(kind, device, board)):
        kernel = next((k for k in kernels(kind.entry) if type(k).__name__ == tuned.kernel), None)
        reason = "there is no such kernel" if kernel is None else _refusal(kernel, kind, device)
        if kernel is not None and reason is None:
            config = next((c for c in kernel.configs(kind, device) if plain(c) == tuned.config), None)
            if config is not None:
                return attrs.evolve(default, kernel=kernel, config=config, source=tuned.source, ignored=tuple(ignored))
            reason = "it has no such config"
        ignored.append(f"{tuned.kernel} with {tuned.config}, from the {tuned.source}: {reason}")
    return attrs.evolve(default, ignored=tuple(ignored))


def _refusal(kernel: Kernel, call: Call, device: Device) -> str | None:
    served = kernel.archs.get(device.backend, ())
    if device.arch not in served:
        return (
            f"runs on {', '.join(f'{b} {a}' for b, archs in kernel.archs.items() for a in archs)}, not on {device.arch}"
        )
    return kernel.refuse(call, device)


def packed(call: Call, copies: Sequence[str]) -> Call:
    """The call with these inputs packed."""
    if not copies:
        return call
    metas = {n: TensorMeta(m.shape, m.dtype) if m and n in copies else m for n, m in call.inputs.items()}
    return torch_ops.checker_of(call.entry).bind(call.params, metas, call.device, call.content, call.id)


def intervals(call: Call, static: Static) -> Bounds:
    """The bounds within which each moving size may change, for one choice of kernel and config to serve.

    An op's ``buckets`` give the upper ends of an index's intervals, of each axis of a Shape index; beyond the last they
    double. An index that it doesn't name may have any size. One that its ``pitches`` name is bounded by whether rows as
    long are aligned, too. Raises NoKernelError for a size that no program takes.
    """
    cls = torch_ops.class_of(call.entry)
    bounds: dict[str, Interval] = {}
    for axis, n in _sizes(call, static):
        if n > LARGEST:
            raise NoKernelError(call.entry.name, str(call), {"every kernel": f"{axis} = {n} is beyond 2**31 - 1"})
        if axis not in bounds:
            step = _row_step(axis, static) if axis in cls.pitches else 1
            ends = cls.buckets.get(axis.partition("[")[0])
            low, high = _interval(ends, n) if ends else (1, LARGEST)
            bounds[axis] = Interval(low, high, step, n % step == 0)
    return bounds


def _row_step(axis: str, static: Static) -> int:
    """Elements whose multiples make aligned rows, of the tensors whose rows are as long as this moving size; else 1."""
    rows = [f for _, f in static.tensors if len(f.shape) > 1 and f.shape[-1] == axis]
    return max((ALIGNMENT // itemsize(f.dtype) for f in rows), default=1)


def largest(call: Call, static: Static, bounds: Bounds) -> Call:
    """The largest call of a bucket; sizes that have no bucket stay."""
    ends = {axis: n if bounds[axis].high == LARGEST else bounds[axis].largest for axis, n in _sizes(call, static)}
    forms = dict(static.tensors)
    metas = {n: forms[n].meta(ends) if n in forms else None for n in call.inputs}
    return torch_ops.checker_of(call.entry).bind(call.params, metas, call.device, call.content, call.id)


def bucketed(call: Call) -> Call:
    """The call that stands for a call's bucket."""
    static = static_of(torch_ops.checker_of(call.entry), call)
    return largest(call, static, intervals(call, static))


def _sizes(call: Call, static: Static) -> Iterator[tuple[str, int]]:
    for name, form in static.tensors:
        meta = call.inputs.get(name) or call.outputs.get(name)
        assert meta is not None
        yield from ((axis, n) for axis, n in zip(form.shape, meta.shape, strict=True) if isinstance(axis, str))


def _interval(ends: Sequence[int], n: int) -> tuple[int, int]:
    low = 1
    for end in ends:
        if n <= end:
            return low, end
        low = end + 1
    end = ends[-1]
    while end < n:
        low, end = end + 1, 2 * end
    return low, min(end, LARGEST)
