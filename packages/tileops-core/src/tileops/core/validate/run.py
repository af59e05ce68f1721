"""The reference on tensors without data: it gives what the signature says and does the work that is counted."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tileops.core.check import Call, TensorMeta
from tileops.core.dtypes import dtype_name, torch_dtype
from tileops.core.reference import arguments
from tileops.core.roofline import work
from tileops.core.spec import Place
from tileops.core.validate.subject import Subject, Tally, metadata, told

Reference = Callable[..., Any]


def outputs(subject: Subject, reference: Reference, place: Place, calls: Sequence[Call]) -> None:
    """Run every call and compare what comes back; where a reference reads content that isn't there, say so."""
    wrong, unread = Tally(subject), Tally(subject)
    reads = metadata(subject.entry)
    for call in calls:
        for content in (False, True) if reads else (False,):
            try:
                returned = _run(reference, call, content)
                break
            except Exception as e:  # a reference fails in its own ways
                failure = e
        else:
            if reads and isinstance(failure, RuntimeError):
                message = f"the reference can't run on tensors without data: {told(failure)}"
                unread.add(call, place, "S506", message, f"it may read {', '.join(reads)}")
            else:
                wrong.add(call, place, "S504", f"the reference fails: {told(failure)}", kind=type(failure).__name__)
            continue
        for name, got, declared in _differences(call, returned):
            message = f"the reference gives {got}{f' for {name}' if name else ''}, the signature {declared}"
            wrong.add(call, place, "S505", message, kind=name)
    wrong.tell()
    unread.tell("warning")


def recount(subject: Subject, reference: Reference, calls: Iterable[Call], place: Place) -> None:
    """Compare the flops of calls with those of the reference's contractions, as torch counts them."""
    tally, counted = Tally(subject), 0
    for call in calls:
        with contextlib.suppress(Exception), FlopCounterMode(display=False) as counter:  # a failure is told already
            said = work(call).flops
            _run(reference, call, content=False)
            counted += 1
            if said != (seen := counter.get_total_flops()):
                tally.add(call, place, "S405", f"roofline flops are {said:,}, those of the reference {seen:,}")
    tally.tell()
    if not counted:
        subject.warning(place, "S406", "flops could not be compared with those of the reference")


def _run(reference: Reference, call: Call, content: bool) -> Any:
    def tensor(name: str, meta: TensorMeta | None) -> Tensor | None:
        if meta is None:
            return None
        dtype = torch_dtype(meta.dtype)
        if content and call.content and name in call.content:
            return torch.tensor(call.content[name], dtype=dtype).reshape(meta.shape)
        return torch.empty_strided(meta.shape, meta.strides, dtype=dtype, device="meta")

    with torch.no_grad():
        return reference(**{n: tensor(n, m) for n, m in call.inputs.items()}, **arguments(call))


def _differences(call: Call, returned: Any) -> Iterator[tuple[str, str, str]]:
    """(output, what came, what is declared) where they differ; no output's name where their number does."""
    declared = call.outputs
    values = returned if isinstance(returned, (tuple, list)) else (returned,) if declared else ()
    if len(values) != len(declared):
        names = ", ".join(declared) or "none"
        yield "", f"{len(values)} outputs", f"{len(declared)} ({names}), None where one is absent"
        return
    for (name, meta), value in zip(declared.items(), values, strict=True):
        got, wanted = _shown(value), "nothing" if meta is None else str(meta)
        if got != wanted:
            yield name, got, wanted
        elif meta is not None and _steps(value.shape, value.stride()) != _steps(meta.shape, meta.strides):
            yield name, f"strides {value.stride()}", str(meta.strides)


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return str(TensorMeta(tuple(value.shape), dtype_name(value.dtype)))
    return "nothing" if value is None else f"a {type(value).__name__}"


def _steps(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """The strides that matter: an axis of one element has none."""
    return [] if 0 in shape else [s for n, s in zip(shape, strides, strict=True) if n > 1]
