"""The results of a call against the truth about it."""

from __future__ import annotations

import math
from collections.abc import Callable

import attrs
import torch
from torch import Tensor

from tileops.core.accuracy import truth
from tileops.core.accuracy.measure import Case, Finding
from tileops.core.accuracy.rules import tolerance
from tileops.core.accuracy.truth import Tensors
from tileops.core.check.call import Call, TensorMeta
from tileops.core.dtypes import dtype_name


@attrs.frozen
class Verdict:
    """The findings about one call, outputs first, then mutated inputs. True where all of them are right."""

    call: str
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        return all(f.ok for f in self.findings)

    @property
    def error(self) -> float:
        """The largest measured error over its allowed bound."""
        return max((f.error for f in self.findings), default=0.0)

    def __getitem__(self, name: str) -> Finding:
        return next(f for f in self.findings if f.name == name)

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        shown = self.findings if self.ok else [f for f in self.findings if not f.ok]
        return "\n".join([f"{self.call}: {'right' if self.ok else 'wrong'}", *(f.message for f in shown)])


def verify(call: Call, inputs: Tensors, results: Tensors) -> Verdict:
    """Hold the results of a call to its entry's reference; the arguments are those of ``compare``."""
    return judge(call, inputs)(results)


def judge(call: Call, inputs: Tensors) -> Callable[[Tensors], Verdict]:
    """What holds results of a call on these inputs, which must stay as they are, to the truth: it is computed once."""
    held = truth.oracle(call, inputs), truth.yardstick(call, inputs), inputs, _terms(call, inputs)
    return lambda results: compare(call, results, *held)


def compare(
    call: Call, results: Tensors, oracle: Tensors, yardstick: Tensors, inputs: Tensors, absolute: Tensors | None = None
) -> Verdict:
    """Hold the results of a call to the truth about it.

    ``results`` maps each output, and each input that the call mutates, to its tensor after the call (``collect`` makes
    it); ``inputs`` holds the tensors as they were before. ``absolute`` is computed where a rule needs it and it isn't
    given. Raises what the reference raises, never for what is wrong with a result.
    """
    device = next((x.device for x in inputs.values() if x is not None), None)
    findings = []
    for name, meta in {**call.outputs, **{n: call.inputs[n] for n in truth.mutated(call)}}.items():
        result = results.get(name)
        finding = _without_values(name, meta, result, device)
        if finding is None:
            rule = tolerance(call, name)
            if rule.terms and absolute is None:
                absolute = truth.absolute(call, inputs)
            product = absolute[name] if rule.terms and absolute else None
            original = inputs[name] if name in call.inputs else None
            finding = Case(name, rule, result, oracle[name], yardstick[name], original, product).find()
        findings.append(finding)
    return Verdict(call.id or str(call), tuple(findings))


def _terms(call: Call, inputs: Tensors) -> Tensors | None:
    """``absolute`` of a call that a rule asks it for, else None."""
    names = (*(n for n, meta in call.outputs.items() if meta is not None), *truth.mutated(call))
    return truth.absolute(call, inputs) if any(tolerance(call, n).terms for n in names) else None


def _without_values(name: str, meta: TensorMeta | None, result: object, device: torch.device | None) -> Finding | None:
    """What can be said before any value is looked at; None where the values decide."""
    checks: list[tuple[str, object, object]]
    if meta is None:
        checks = [("presence", None, None if result is None else "a tensor")]
    elif not isinstance(result, Tensor):
        checks = [("presence", str(meta), None if result is None else type(result).__name__)]
    else:
        checks = [
            ("device", str(device or result.device), str(result.device)),
            ("dtype", meta.dtype, dtype_name(result.dtype)),
            ("shape", meta.shape, tuple(result.shape)),
        ]
    for metric, expected, actual in checks:
        if expected != actual:
            message = f"{name}: wrong {metric}: expected {_show(expected)}, got {_show(actual)}"
            return Finding(name, metric, math.inf, message, expected=expected, actual=actual)
    if meta is None or not meta.numel:
        return Finding(name, "presence", 0.0, f"{name}: {'absent' if meta is None else 'empty'}, as it must be")
    return None


def _show(value: object) -> str:
    return "none" if value is None else str(list(value)) if isinstance(value, tuple) else str(value)
