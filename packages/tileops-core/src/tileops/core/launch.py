"""The last steps of a call on a GPU, generated for one plan: does the call fit it, then outputs, scratch, the launch.

What is fixed of the plan is a constant here; sizes that change from call to call are read off the tensors.
"""

from __future__ import annotations

import linecache
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import attrs
import torch
from torch.autograd.graph import increment_version

from tileops.core.dtypes import torch_dtype
from tileops.core.kernel import ALIGNMENT, Form, Scratch, Static
from tileops.core.spec.expr import FUNCTIONS, Expr, emit, names
from tileops.core.spec.solve import FAILURES
from tileops.core.spec.steps import Require, Solution

LARGEST = 2**31 - 1  # a size travels as int32
MISS = object()  # what a launch gives for a call that is not of its kind

Empty = Callable[[Sequence[int], Sequence[int], torch.dtype], torch.Tensor]


@attrs.frozen
class Interval:
    """Sizes from low to high; of these only the multiples of ``step``, or only the others."""

    low: int
    high: int
    step: int = 1
    multiples: bool = True

    @property
    def largest(self) -> int:
        """The largest size; where there is none, the largest multiple of ``step`` below."""
        over = self.high % self.step
        return self.high - over if self.multiples else self.high - (over == 0)

    def test(self, size: str) -> str:
        """The source of a test of the variable ``size``."""
        inside = f"{self.low} <= {size} <= {self.high}"
        if self.step == 1:
            return inside
        return f"{inside} and {size} % {self.step}{' == 0' if self.multiples else ''}"


Bounds = Mapping[str, Interval]  # by an axis's name


def compile_launch(
    static: Static,
    solution: Solution,
    inputs: Sequence[str],
    main: Callable[..., None],
    scratch: Sequence[Scratch],
    bounds: Bounds,
    empty: Empty,
    last: Any,
    refused: Callable[[Exception], Exception],
    copies: Sequence[str] = (),
    mutated: Sequence[str] = (),
    asked: Mapping[str, Form] = MappingProxyType({}),
    wrong_device: Callable[[], bool] | None = None,
    fence: Callable[[], Any] | None = None,
) -> tuple[Callable[..., Any], tuple[str, ...]]:
    """``launch(*inputs)``, which gives the outputs as the caller gets them, or MISS; and the moving sizes' names.

    ``inputs`` are all of the entry's, absent ones too. ``last.run`` is set to the launch's plan, which the caller gives
    by ``bind_plan``, and the moving sizes behind it; where they are those of the call before, ``last.settle`` is told.
    ``refused`` makes the error of a launch that the driver refuses. ``copies`` are made packed and aligned first, and
    written back if they are ``mutated``; autograd is told of all that are. An output of another form than the caller
    ``asked`` for is brought into that. ``wrong_device`` says whether the tensors' device is not the current one;
    ``fence()`` is then a context that makes it so.

    All names of its own begin with an underscore, which no input's does.
    """
    forms = dict(static.tensors)
    present = [n for n in inputs if n in forms]
    outputs = [o.decl.name for o in solution.outputs if o.decl.name in forms]
    scope: dict[str, Any] = {**FUNCTIONS, "_main": main, "_empty": empty, "_zeros": _zeros(empty), "_packed": _packed}
    scope |= {f"_dtype_{n}": torch_dtype(forms[n].dtype) for n in outputs}
    scope |= {f"_dtype_{i}": torch_dtype(s.dtype) for i, s in enumerate(scratch)}
    scope |= {"_wrong_device": wrong_device, "_fence": fence, "_last": last, "_plan": None, "_run": ()}
    scope |= {"_MISS": MISS, "_FAILURES": FAILURES, "_refused": refused, "_written": increment_version}

    lines = []
    if wrong_device is not None:
        again = f"return _launch({', '.join(inputs)})"
        lines.append(f"if _wrong_device():\n        with _fence(): {again}")
    axes: dict[str, str] = {}
    for name in present:
        lines += _read_axes(name, forms[name], axes, checked=name not in copies)
    tests = [interval.test(_axis(a)) for a, interval in bounds.items() if a in axes]
    lines += [f"if not ({test}): return _MISS" for test in tests]
    rules = [_rule(s.expr, static, axes) for s in solution.steps if isinstance(s, Require) and _moves(s.expr, axes)]
    # A rule that has no value here, as shapes that don't broadcast, is the checker's to explain.
    lines += [f"try:\n        if not ({rule}): return _MISS\n    except _FAILURES: return _MISS" for rule in rules]
    if axes:
        lines.append(f"_run = {_tuple(['_plan', *map(_axis, axes)])}")
        lines.append(f"if _last.run == _run: _last.settle(_plan, ({', '.join(inputs)},))")
    back = [n for n in copies if n in mutated]
    lines += [f"_own_{n} = {n}" for n in back]
    lines += [f"{n} = _packed({n})" for n in copies]
    for name in outputs:
        shape = [a if isinstance(a, int) else _axis(a) for a in forms[name].shape]
        strides = _tuple(_strides(shape, forms[name].strides))
        lines.append(f"{name} = _empty({_tuple(shape)}, {strides}, _dtype_{name})")
    for i, s in enumerate(scratch):
        strides = _tuple(_strides(s.shape, [None] * len(s.shape)))
        lines.append(f"_scratch_{i} = {'_zeros' if s.zeroed else '_empty'}({s.shape}, {strides}, _dtype_{i})")
    given = [n if forms[n].shape else f"{n}.view(1)" for n in (*present, *outputs)]
    given += [f"_scratch_{i}" for i in range(len(scratch))]
    lines.append(f"try: _main({', '.join(given)})\n    except Exception as _e:")
    addresses = " | ".join(f"{n}.data_ptr()" for n in present if n not in copies)
    if addresses:  # which the program tests, for a tenth of what that costs here
        lines.append(f"    if ({addresses}) & {ALIGNMENT - 1}: return _MISS")
    lines += ["    raise _refused(_e) from _e", "_last.run = _run"]
    if written := [n for n in mutated if n not in copies]:
        lines.append(f"_written({_tuple(written)})")
    lines += [f"if _own_{n} is not {n}: _own_{n}.copy_({n})" for n in back]
    for name in outputs:
        if name in asked and asked[name].strides != forms[name].strides:
            shape = [a if isinstance(a, int) else _axis(a) for a in forms[name].shape]
            strides = _tuple(_strides(shape, asked[name].strides))
            lines.append(f"{name} = _empty({_tuple(shape)}, {strides}, _dtype_{name}).copy_({name})")
    lines.append(f"return {', '.join(outputs) or None}")
    source = f"def _launch({', '.join(inputs)}):\n    " + "\n    ".join(lines) + "\n"
    file = f"<launch of {static.op} {id(scope):x}>"
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    exec(compile(source, file, "exec"), scope)
    weakref.finalize(scope["_launch"], linecache.cache.pop, file, None)
    return scope["_launch"], tuple(axes)


def bind_plan(launch: Callable[..., Any], plan: Any) -> None:
    """Give a launch the plan that it belongs to."""
    launch.__globals__.update(_plan=plan, _run=(plan,))


def guard_sizes(form: Form, shape: Sequence[int], strides: Sequence[int]) -> tuple[list[Any], list[Any]]:
    """Sizes and strides for a guard, None where a call of the same kind may have others."""
    sizes: list[Any] = [n if isinstance(axis, int) else None for n, axis in zip(shape, form.shape, strict=True)]
    steps: list[Any] = list(strides)
    moving = False  # whether a size to the right changes
    expected = 1
    for i in reversed(range(len(shape))):
        if form.strides[i] is None and strides[i] != expected:
            return list(shape), list(strides)  # an axis of size 1 whose stride says nothing: these very sizes only
        if form.strides[i] is None and moving:
            steps[i] = None
        moving = (moving and form.strides[i] is None) or sizes[i] is None
        expected = strides[i] * shape[i]
    return sizes, steps


def _axis(name: str) -> str:
    return "_n_" + re.sub(r"\W", "_", name)


def _read_axes(tensor: str, form: Form, axes: dict[str, str], checked: bool) -> list[str]:
    """Read a tensor's moving sizes; compare those that another tensor gave, and strides that follow from them."""
    moving = [(i, a) for i, a in enumerate(form.shape) if isinstance(a, str)]
    if not moving:
        return []
    lines = [f"_s_{tensor} = {tensor}.shape"]
    for i, axis in moving:
        if axis in axes:
            lines.append(f"if _s_{tensor}[{i}] != {_axis(axis)}: return _MISS")
        else:
            axes[axis] = f"_s_{tensor}[{i}]"
            lines.append(f"{_axis(axis)} = _s_{tensor}[{i}]")
    if checked and any(i > 0 for i, _ in moving):
        if form.packed:
            lines.append(f"if not {tensor}.is_contiguous(): return _MISS")
        else:
            for i, stride in enumerate(form.strides[:-1]):
                if stride is None:
                    wanted = f"_s_{tensor}[{i + 1}] * {tensor}.stride({i + 1})"
                    lines.append(f"if {tensor}.stride({i}) != {wanted} and _s_{tensor}[{i}] != 1: return _MISS")
    return lines


def _moves(expr: Expr, axes: Mapping[str, str]) -> bool:
    return bool(names(expr) & {a.partition("[")[0] for a in axes})


def _rule(expr: Expr, static: Static, axes: Mapping[str, str]) -> str:
    """A rule over moving sizes, everything else in it a constant."""
    fixed = dict(static.values)

    def spell(name: str) -> str:
        if name in fixed:
            return repr(fixed[name])
        parts = [a for a in axes if a.partition("[")[0] == name]
        return _axis(name) if parts == [name] else _tuple([_axis(a) for a in parts])

    return emit(expr, spell)


def _tuple(items: Sequence[Any]) -> str:
    return f"({''.join(f'{i}, ' for i in items)})"


def _strides(shape: Sequence[Any], given: Sequence[int | None]) -> list[Any]:
    """The strides of a new tensor, as numbers as far as the sizes are, else as products; None is packed."""
    strides: list[Any] = []
    step: Any = 1
    for n, stride in zip(reversed(shape), reversed(given), strict=True):
        step = step if stride is None else stride
        strides.insert(0, step)
        step = step * n if isinstance(step, int) and isinstance(n, int) else f"{n}" if step == 1 else f"{n} * {step}"
    return strides


def _packed(t: torch.Tensor) -> torch.Tensor:
    """The tensor as it is where it is packed and aligned, else a copy that is."""
    if t.is_contiguous() and t.data_ptr() % ALIGNMENT == 0:
        return t
    return t.clone(memory_format=torch.contiguous_format)


def _zeros(empty: Empty) -> Empty:
    return lambda size, stride, dtype: empty(size, stride, dtype).zero_()
