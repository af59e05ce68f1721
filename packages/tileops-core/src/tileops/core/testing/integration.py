"""How an operator fits into Python and torch: as a value, in threads, compiled, on shapes alone; what it refuses."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import chain, count
from typing import Any

import attrs
import torch
from torch import Tensor

from tileops.core import accuracy, workloads
from tileops.core.check import Call
from tileops.core.dtypes import torch_dtype
from tileops.core.errors import CheckError, TileOpsError
from tileops.core.families import op_class
from tileops.core.inputs import make_inputs
from tileops.core.op import Op
from tileops.core.spec import Entry
from tileops.core.spec.expr import compile_expr
from tileops.core.testing.cases import Tier, edge_cases
from tileops.core.testing.points import Point, Space, base_point, bind, legal, pairwise, space_of
from tileops.core.testing.run import CaseFailure, same_bits
from tileops.core.torch_ops import meta_of, operator_of


@attrs.frozen
class TorchCase:
    """A check of ``CHECKS`` on one call, or on several that differ in sizes."""

    id: str
    check: str
    calls: tuple[Call, ...]
    tier: Tier = "full"
    generated: bool = True

    def __str__(self) -> str:
        params = ", ".join(f"{name}={value}" for name, value in self.calls[0].params.items())
        return f"{', '.join(map(str, self.calls))} {params}"


def torch_cases(entry: Entry, device: str = "cpu") -> list[TorchCase]:
    """The checks of an entry: on small calls in which every optional tensor is there and isn't, on its rows' shapes."""
    elsewhere = ("graph", "stream") if device == "cpu" else ("meta",)
    return [case for case in _torch_cases(entry) if case.check not in elsewhere]


@lru_cache
def _torch_cases(entry: Entry) -> tuple[TorchCase, ...]:
    return tuple(_made(entry))


def _made(entry: Entry) -> Iterator[TorchCase]:
    space = space_of(entry)
    base = base_point(space)
    points = pairwise(space, base)
    few = [*_few(space, points), *(c.call for c in edge_cases(entry) if c.id.startswith(f"{entry.name}/mixed0"))]
    others = [call for point in points if (call := bind(space, point)) and call.params != few[0].params]
    grown = list(_grown(space, base))
    alike = [case.call for case in edge_cases(entry) if case.call.params == few[0].params]
    yield TorchCase(f"{entry.name}/value", "value", (few[0], *others), tier="smoke")
    yield TorchCase(f"{entry.name}/threads", "threads", tuple(dict.fromkeys([*alike, *chain(*grown)])))
    for i, call in enumerate(few):
        yield TorchCase(f"{entry.name}/refusals{i}", "refusals", (call,), tier="full" if i else "smoke")
        yield TorchCase(f"{entry.name}/opcheck{i}", "opcheck", (call,))
        yield TorchCase(f"{entry.name}/graph{i}", "graph", (call,), tier="full" if i else "smoke")
        yield TorchCase(f"{entry.name}/stream{i}", "stream", (call,))
        if entry.fullgraph:
            yield TorchCase(f"{entry.name}/aot_eager{i}", "aot_eager", (call,))
    if entry.fullgraph:
        yield TorchCase(f"{entry.name}/inductor", "inductor", (few[-1],))
        for i, calls in enumerate(grown):
            yield TorchCase(f"{entry.name}/dynamic{i}", "dynamic", calls)
    if not entry.grad and any(m and torch_dtype(m.dtype).is_floating_point for m in few[0].outputs.values()):
        yield TorchCase(f"{entry.name}/gradient", "gradient", (few[0],), tier="smoke")
        if entry.fullgraph:
            yield TorchCase(f"{entry.name}/gradient-compiled", "gradient-compiled", (few[0],))
    for i, call in enumerate(workloads.calls(entry)):
        label = str(call.id).partition("/")[2]
        yield TorchCase(f"{entry.name}/meta-{label}", "meta", (call,), tier="full" if i else "smoke")


def _few(space: Space, points: Sequence[Point]) -> Iterator[Call]:
    """The first calls in which a tensor is there, or isn't, that was not so before."""
    seen: set[tuple[str, bool]] = set()
    for point in points:
        call = bind(space, point)
        assert call is not None
        facts = {(name, meta is not None) for name, meta in (*call.inputs.items(), *call.outputs.items())}
        if facts - seen:
            seen |= facts
            yield call


def _grown(space: Space, base: Point) -> Iterator[tuple[Call, ...]]:
    """Calls that differ in what changes from call to call: all of it or, where a rule is against that, one size.

    No size is another's too: torch takes equal ones for the same until they differ, and compiles again.
    """
    first = bind(space, base)
    assert first is not None
    symbolic = space.entry.signature.symbolic
    free = [s.index for s in symbolic if s.when is None or compile_expr(s.when.expr)(first.env)]
    used = {n for meta in first.inputs.values() if meta is not None for n in meta.shape}
    for names in filter(None, (free, *([name] for name in free))):
        sizes = (n for n in count(4, 2) if n not in used)
        steps = [legal(space, {name: _like(base[name], sizes) for name in names}, [base]) for _ in range(3)]
        grown = tuple(call for step in steps if step and (call := bind(space, step)))
        if len(grown) == len(steps):
            yield grown
            if names is free:
                return


def _like(size: Any, sizes: Iterator[int]) -> Any:
    return tuple(next(sizes) for _ in size) if isinstance(size, tuple) else next(sizes)


def run_torch_case(case: TorchCase, device: str = "cpu", op: type[Op] | None = None) -> None:
    """Run a check; raises CaseFailure. ``op`` is the operator's class where no installed family has it."""
    call = case.calls[0]
    try:
        instance = (op or op_class(call.entry))(**call.params)
        problems = list(CHECKS[case.check](instance, case.calls, device))
    except Exception as e:
        raise CaseFailure(case, device, [f"{type(e).__name__}: {e}"]) from e
    if problems:
        raise CaseFailure(case, device, problems)


def _arguments(call: Call, device: str) -> tuple[Tensor | None, ...]:
    """The same tensors each time, for an op may write to them."""
    return tuple(make_inputs(call, device).values())


def _results(op: Any, call: Call, device: str) -> accuracy.Tensors:
    """Outputs, and inputs that the call writes to, by name."""
    inputs = _arguments(call, device)
    return accuracy.collect(call, op(*inputs), dict(zip(call.inputs, inputs, strict=True)))


def _unlike(got: accuracy.Tensors, expected: accuracy.Tensors) -> Iterator[str]:
    yield from (
        f"{n}: the bits differ from those of a plain call" for n, x in got.items() if not same_bits(x, expected[n])
    )


def _value(op: Any, calls: Sequence[Call], device: str) -> Iterator[str]:
    """Equal params make equal ops, of which copies and what a pickle gives back are some."""
    first, *others = calls
    for how, other in {
        "one more with its params": type(op)(**first.params),
        "a copy": copy.copy(op),
        "a deep copy": copy.deepcopy(op),
        "a pickle": pickle.loads(pickle.dumps(op)),
    }.items():
        if other != op or hash(other) != hash(op) or repr(other) != repr(op):
            yield f"{how} is {other!r}, which isn't {op!r}"
        elif list(_unlike(_results(other, first, device), _results(op, first, device))):
            yield f"{how} gives other bits"
    for call in others:
        if type(op)(**call.params) == op:
            yield f"{op!r} equals the op with {dict(call.params)}"
    for name in first.params:
        try:
            setattr(op, name, getattr(op, name))
        except AttributeError:
            continue
        yield f"{name} can be set"


def _threads(op: Any, calls: Sequence[Call], device: str) -> Iterator[str]:
    """Eight threads that make the same calls, each in an order of its own."""
    alone = [_results(op, call, device) for call in calls]

    def work(thread: int) -> list[str]:
        order = [(i * (2 * thread + 1) + thread) % len(calls) for i in range(2 * len(calls))]
        return [p for i in order for p in _unlike(_results(op, calls[i], device), alone[i])]

    with ThreadPoolExecutor(8) as pool:
        found = [p for problems in pool.map(work, range(8)) for p in problems]
    yield from dict.fromkeys(f"{p}, in threads" for p in found)


def _refusals(op: Any, calls: Sequence[Call], device: str) -> Iterator[str]:
    """Whatever the signature says, no input may be one of these; the error names it."""
    for call in calls:
        inputs = dict(zip(call.inputs, _arguments(call, device), strict=True))
        there = {name: x for name, x in inputs.items() if x is not None}
        for name, x in there.items():
            wrong = {"a list": [1.0], "complex": x.to(torch.complex64), "sparse": x.float().to_sparse()}
            if len(there) > 1:
                wrong["elsewhere"] = x.to("meta")
            if not call.entry.signature.inputs[name].optional:
                wrong["absent"] = None
            for what, bad in wrong.items():
                try:
                    op(*{**inputs, name: bad}.values())
                except CheckError as e:
                    if what != "elsewhere" and e.argument != name:
                        yield f"{name} {what}: the error names {e.argument}: {e}"
                else:
                    yield f"{name} {what}: no CheckError is raised"


def _opcheck(op: Any, calls: Sequence[Call], device: str) -> Iterable[str]:
    for call in calls:
        utilities = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
        if any(m and m.dtype.startswith("float8") for m in call.inputs.values()):
            utilities.remove("test_schema")  # it compares with arithmetic that torch lacks for them
        torch.library.opcheck(
            operator_of(call.entry), (*_arguments(call, device), *op._state.values), test_utils=utilities
        )
    return ()


def _compiled(backend: str) -> Callable[[Any, Sequence[Call], str], Iterable[str]]:
    def check(op: Any, calls: Sequence[Call], device: str) -> Iterator[str]:
        torch._dynamo.reset()
        compiled = torch.compile(lambda *inputs: op(*inputs), fullgraph=True, backend=backend)
        for call in calls:
            yield from _unlike(_results(compiled, call, device), _results(op, call, device))

    return check


def _dynamic(op: Any, calls: Sequence[Call], device: str) -> Iterator[str]:
    """Sizes that change compile once if they are declared dynamic, once more if torch has to notice."""
    for dynamic, allowed in ((True, 1), (None, 2)):
        graphs: list[Any] = []

        def backend(graph: Any, inputs: Any, graphs: list[Any] = graphs) -> Any:
            graphs.append(graph)
            return graph.forward

        torch._dynamo.reset()
        compiled = torch.compile(lambda *inputs: op(*inputs), fullgraph=True, backend=backend, dynamic=dynamic)
        for call in calls:
            yield from _unlike(_results(compiled, call, device), _results(op, call, device))
        if len(graphs) > allowed:
            yield f"{len(calls)} calls with dynamic={dynamic} compile {len(graphs)} times, expected {allowed}"


def _meta(op: Any, calls: Sequence[Call], device: str) -> Iterator[str]:
    for call in calls:
        inputs = [
            m and torch.empty_strided(m.shape, m.strides, dtype=torch_dtype(m.dtype), device="meta")
            for m in call.inputs.values()
        ]
        results = accuracy.collect(call, op(*inputs), dict(zip(call.inputs, inputs, strict=True)))
        for name, meta in call.outputs.items():
            x = results[name]
            if (x is None) != (meta is None) or (x is not None and (not x.is_meta or meta_of(x) != meta)):
                yield f"{name}: on meta tensors it is {x is not None and (x.device, meta_of(x))}, expected {meta}"


def _gradient(op: Any, calls: Sequence[Call], device: str) -> Iterator[str]:
    for call in calls:
        inputs = [
            x.requires_grad_() if x is not None and x.is_floating_point() else x for x in _arguments(call, device)
        ]
        results = accuracy.collect(call, op(*inputs), dict(zip(call.inputs, inputs, strict=True)))
        result = next(results[n] for n, m in call.outputs.items() if m and torch_dtype(m.dtype).is_floating_point)
        assert result is not None
        try:
            result.float().sum().backward()
        except TileOpsError as e:
            if "no gradient" not in str(e):
                yield f"a backward says '{e}', expected that {call.entry.name} has no gradient"
        else:
            yield "a backward gives gradients without an error, though the entry declares none"


def _gradient_compiled(op: Any, calls: Sequence[Call], device: str) -> Iterator[str]:
    torch._dynamo.reset()
    compiled = torch.compile(lambda *inputs: op(*inputs), fullgraph=True, backend="aot_eager")
    yield from _gradient(compiled, calls, device)


def _graph(op: Any, calls: Sequence[Call], device: str) -> Iterator[str]:
    """A captured call, replayed with other inputs, into outputs that were filled with something else."""
    for call in calls:
        inputs = make_inputs(call, device)
        op(*inputs.values())
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = accuracy.collect(call, op(*inputs.values()), inputs)
        for seed in (1, 2):
            others = make_inputs(call, device, seed)
            for x in results.values():
                if x is not None:
                    x.as_strided((x.numel(),), (1,)).view(torch.uint8).fill_(0x7F)  # dense, in any order of axes
            for x, other in zip(inputs.values(), others.values(), strict=True):
                if x is not None and other is not None:
                    _memory(x).copy_(_memory(other))
            graph.replay()
            torch.cuda.synchronize()
            expected = accuracy.collect(call, op(*others.values()), others)
            yield from (f"{p}, in a replay" for p in _unlike(results, expected))


def _memory(x: Tensor) -> Tensor:
    """A tensor without the axes along which all of its elements are one."""
    for axis in range(x.dim()):
        if x.stride(axis) == 0:
            x = x.narrow(axis, 0, min(x.shape[axis], 1))
    return x


def _stream(op: Any, calls: Sequence[Call], device: str) -> Iterator[str]:
    """A call on a side stream runs behind what was put there before it, and no call waits for the device."""
    for call in calls:
        expected = _results(op, call, device)
        for cycles in (10**8, 10**10):  # a host that is busy may take longer to call than the device to sleep
            given = make_inputs(call, device)
            late = {n: x if x is None else torch.zeros_like(x) for n, x in given.items()}
            stream = torch.cuda.Stream()
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                torch.cuda._sleep(cycles)
                for x, value in zip(late.values(), given.values(), strict=True):
                    if x is not None and value is not None:
                        x.copy_(value)
                results = accuracy.collect(call, op(*late.values()), late)
                if not stream.query():
                    break
        else:
            yield "the call waited for the device"
        stream.synchronize()
        yield from (f"{p}, on a side stream" for p in _unlike(results, expected))


CHECKS: Mapping[str, Callable[[Any, Sequence[Call], str], Iterable[str]]] = {
    "value": _value,
    "threads": _threads,
    "refusals": _refusals,
    "opcheck": _opcheck,
    "aot_eager": _compiled("aot_eager"),
    "inductor": _compiled("inductor"),
    "dynamic": _dynamic,
    "meta": _meta,
    "graph": _graph,
    "stream": _stream,
    "gradient": _gradient,
    "gradient-compiled": _gradient_compiled,
}
