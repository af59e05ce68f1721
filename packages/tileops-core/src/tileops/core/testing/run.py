"""One case through the front door: the right values, and nothing written but the outputs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor

from tileops.core import accuracy
from tileops.core.check import Call, TensorMeta
from tileops.core.errors import TileOpsError
from tileops.core.families import find_entry, op_class
from tileops.core.inputs import make_inputs
from tileops.core.op import Op
from tileops.core.spec.diagnostics import did_you_mean
from tileops.core.testing.cases import Case, edge_cases, workload_cases
from tileops.core.testing.layouts import VALUES, Placement, expanded_once, free_inputs, placement

if TYPE_CHECKING:
    from tileops.core.testing.integration import TorchCase

GUARD = 512  # bytes; a multiple of every alignment that a kernel may ask for
SMALL = 2**20  # bytes; torch's allocator for GPUs takes what is smaller from shared segments
POISON = 0xFF  # NaN in every floating type, -1 in every signed integer

Tensors = dict[str, Tensor | None]


class CaseFailure(AssertionError):
    """All that is wrong about an operator in one case, with a line that shows it again."""

    def __init__(self, case: Case | TorchCase, device: str, problems: Sequence[str]):
        again = f"from tileops.core.testing import reproduce; reproduce('{case.id}', '{device}')"
        shown = [f"- {p}".replace("\n", "\n  ") for p in problems]
        shown += [f"call: {case}", *([f'again: python -c "{again}"'] if case.generated else [])]
        super().__init__("\n".join([f"{case.id} on {device}", *shown]))


@attrs.frozen
class Held:
    """An input inside a buffer of poison, and the buffer as it was before the call."""

    tensor: Tensor
    buffer: Tensor
    before: Tensor

    def within(self, buffer: Tensor) -> Tensor:
        """The tensor's elements in a copy of the buffer, each once."""
        t = self.tensor
        return expanded_once(buffer.view(t.dtype).as_strided(t.shape, t.stride(), t.storage_offset()))


def run_case(case: Case, device: str = "cpu", op: type[Op] | None = None, seed: int = 0) -> None:
    """Hold an operator to one case; raises CaseFailure, an AssertionError.

    Values are as near to the oracle's as the yardstick says, and a second call gives the same bits. Shapes, dtypes,
    strides and device are the call's. Inputs stay as they were but where the entry says otherwise, and so does the
    memory around them. Outputs have memory of their own and keep none of what was there. ``op`` is the operator's
    class where no installed family has it.
    """
    problems: list[str] = []
    try:
        with _one_thread():
            for problem in _problems(case, device, op or op_class(case.call.entry), seed):
                problems.append(problem)
    except Exception as e:
        raise CaseFailure(case, device, [*problems, f"{type(e).__name__}: {e}"]) from e
    if problems:
        raise CaseFailure(case, device, problems)


def _problems(case: Case, device: str, cls: type[Op], seed: int) -> Iterator[str]:
    call = case.call
    held = {n: _hold(case, n, x) for n, x in _inputs(case, device, seed).items() if x is not None}
    tensors: Tensors = {n: held[n].tensor if n in held else None for n in call.inputs}
    op: Any = cls(**call.params)

    with _poisoned_memory(call, device) as spoilt:
        returned = op(*tensors.values())
    if spoilt():
        yield "memory beside an output is written"
    results = accuracy.collect(call, returned, tensors)
    kept = {n: x.clone() if isinstance(x, Tensor) else x for n, x in results.items()}
    for name, h in held.items():
        yield from _changes(name, h, name in accuracy.mutated(call))
    yield from _form(call, returned)
    for name in call.outputs:
        yield from _place(call, name, results, held)
    yield from _binding(call, op, tensors)

    for h in held.values():
        h.buffer.copy_(h.before)
    verdict = accuracy.verify(call, tensors, kept)
    yield from (finding.message for finding in verdict.findings if not finding.ok)
    again = accuracy.collect(call, op(*tensors.values()), tensors)
    yield from (f"{n}: a second call gives other bits" for n, x in again.items() if not same_bits(x, kept[n]))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Cases are small on a cpu; threads would spend the time waiting for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def assert_right(op: Any, *inputs: Tensor | None) -> Any:
    """What an op returns for these very tensors, found as near to the oracle as it must be; else AssertionError."""
    call = op.bind(*inputs)
    before = {n: None if x is None else x.clone() for n, x in zip_longest(call.inputs, inputs)}
    returned = op(*inputs)
    results = accuracy.collect(call, returned, dict(zip_longest(call.inputs, inputs)))
    verdict = accuracy.verify(call, before, results)
    assert verdict, str(verdict)
    return returned


def reproduce(case_id: str, device: str = "cpu") -> None:
    """Run the case of an installed operator that has this id."""
    from tileops.core.testing.integration import run_torch_case, torch_cases

    entry = find_entry(case_id.partition("/")[0])
    cases = {c.id: c for c in (*workload_cases(entry, device=device), *edge_cases(entry, device))}
    checks = {c.id: c for c in torch_cases(entry, device)}
    if case_id in cases:
        run_case(cases[case_id], device)
    elif case_id in checks:
        run_torch_case(checks[case_id], device)
    else:
        hint = did_you_mean(case_id, [*cases, *checks]) or f"{entry.name} has {len(cases) + len(checks)}"
        raise TileOpsError(f"no case is called '{case_id}'; {hint}")


def _inputs(case: Case, device: str, seed: int) -> Tensors:
    """Contiguous tensors that hold the case's values."""
    metas = {n: m and TensorMeta(m.shape, m.dtype) for n, m in case.call.inputs.items()}
    tensors = make_inputs(attrs.evolve(case.call, inputs=metas), device, seed)
    for name in free_inputs(case.call):
        x = tensors[name]
        if x is not None and case.values in VALUES and case.where in (None, name):
            tensors[name] = VALUES[case.values](x)
    return tensors


def _hold(case: Case, name: str, values: Tensor) -> Held:
    meta = case.call.inputs[name]
    assert meta is not None
    place = placement(case.layouts[name], meta.shape) if name in case.layouts else Placement(meta.strides)
    last = (
        sum((n - 1) * stride for n, stride in zip(values.shape, place.strides, strict=True)) if values.numel() else -1
    )
    size = GUARD + (place.offset + last + 1) * values.element_size() + GUARD
    buffer = torch.full((-(-size // GUARD) * GUARD,), POISON, dtype=torch.uint8, device=values.device)
    lead = GUARD // values.element_size() + place.offset
    tensor = buffer.view(values.dtype).as_strided(values.shape, place.strides, lead)
    own = expanded_once(tensor)
    own.copy_(values[tuple(slice(n) for n in own.shape)])
    return Held(tensor, buffer, buffer.clone())


@contextmanager
def _poisoned_memory(call: Call, device: str) -> Iterator[Callable[[], bool]]:
    """Poison free memory where outputs may be allocated; gives a function that tells whether it is written beside them.

    Blocks of an output's size are made, and every other one is freed: it is what an allocator will give next, between
    two that are watched. Beside a large output the watched ones are small. ``torch.empty`` is filled too, which torch
    does while it is to be deterministic. How much of this a call meets is up to the allocators.
    """
    sizes: list[int] = []
    for size in [meta.nbytes for meta in call.outputs.values() if meta is not None and meta.numel]:
        count, beside = (8, size) if size <= SMALL else (1, GUARD)
        sizes += [n for _ in range(count) for n in (beside, size, beside)]
    blocks = [torch.full((n,), POISON, dtype=torch.uint8, device=device) for n in sizes]
    guards = [block for i, block in enumerate(blocks) if i % 3 != 1]
    del blocks
    mode = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="(?s).*deterministic")
            yield lambda: any(bool((guard != POISON).any()) for guard in guards)
    finally:
        torch.set_deterministic_debug_mode(mode)


def _changes(name: str, held: Held, mutated: bool) -> Iterator[str]:
    """What a call wrote into an input's buffer and shouldn't have."""
    after = held.buffer.clone()
    now, before = held.within(after), held.within(held.before)
    if not mutated and not same_bits(now, before):
        at = (_bytes(now) != _bytes(before)).any(-1).nonzero()[0].tolist()
        yield f"{name}: the input is changed, first at {at}: {before[tuple(at)].item()} is {now[tuple(at)].item()} now"
    now.copy_(before)
    outside = (after != held.before).nonzero().flatten()
    if outside.numel():
        first = int(outside[0]) // now.element_size() - held.tensor.storage_offset()
        yield f"{name}: {outside.numel()} bytes around the input are written, first {first} elements from its start"


def _form(call: Call, returned: Any) -> Iterator[str]:
    count = sum(meta is not None for meta in call.outputs.values())
    wanted = tuple if count > 1 else Tensor if count else type(None)
    if not isinstance(returned, wanted):
        yield f"returns a {type(returned).__name__}, expected a {wanted.__name__}: it has {count} outputs"


def _place(call: Call, name: str, results: Mapping[str, Any], held: Mapping[str, Held]) -> Iterator[str]:
    """What is wrong about an output's memory."""
    result, meta = results[name], call.outputs[name]
    if not isinstance(result, Tensor) or meta is None or not result.numel():
        return
    if tuple(result.shape) == meta.shape:
        steps = zip(meta.shape, result.stride(), meta.strides, strict=True)
        if any(n > 1 and got != expected for n, got, expected in steps):
            yield f"{name}: strides are {result.stride()}, expected {meta.strides}"
    home = result.untyped_storage().data_ptr()
    others = {n: h.buffer for n, h in held.items()}
    others |= {n: x for n in call.outputs if n != name and isinstance(x := results[n], Tensor)}
    for other, tensor in others.items():
        if tensor.untyped_storage().data_ptr() == home:
            yield f"{name}: the output shares its memory with {other}"


def _binding(call: Call, instance: Op, tensors: Tensors) -> Iterator[str]:
    bound = instance.bind(*tensors.values())
    for part in ("params", "indices", "inputs", "outputs"):
        got, expected = dict(getattr(bound, part)), dict(getattr(call, part))
        if got != expected:
            yield f"bind: {part} are {got}, in the case {expected}"


def _bytes(x: Tensor) -> Tensor:
    """The bits of a tensor, one axis more."""
    return x.contiguous().unsqueeze(-1).view(torch.uint8)


def same_bits(x: Any, y: Any) -> bool:
    """Whether two tensors are equal to the bit, or both absent."""
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        return x is y
    return x.shape == y.shape and x.dtype == y.dtype and bool(torch.equal(_bytes(x), _bytes(y)))
