"""The Python class of an entry, held to it name by name: fields are params, the call takes the inputs."""

from __future__ import annotations

import importlib
import inspect
from types import ModuleType
from typing import Any

import attrs

from tileops.core.dtypes import dtype_name
from tileops.core.errors import SpecError
from tileops.core.op import Op
from tileops.core.spec.model import Param
from tileops.core.spec.values import canonical
from tileops.core.validate.subject import Subject, told


def op_class(subject: Subject) -> None:
    """Find the class in its family, and compare."""
    entry = subject.entry
    module = _family(subject) if entry.family else None
    if module is None:
        return
    cls: Any = getattr(module, entry.name, None)
    if cls is None:
        subject.due(entry.place, "S601", f"{module.__name__} has no class of this name")
        return
    if not (isinstance(cls, type) and issubclass(cls, Op)):
        subject.error(entry.place, "S601", f"{module.__name__}.{entry.name} is no subclass of tileops.core.Op")
        return
    if attrs.has(cls):
        _fields(subject, cls)
    else:
        subject.error(entry.place, "S602", f"class {cls.__module__}.{cls.__name__} is not attrs.define(frozen=True)")
    _call(subject, cls)
    for alias in entry.aliases:
        if getattr(module, alias, None) is not cls:
            subject.error(
                subject.at("aliases", alias), "S605", f"{module.__name__}.{alias} is not the class {entry.name}"
            )
    if not (cls.__doc__ or "").strip():
        subject.error(entry.place, "S606", f"class {cls.__module__}.{cls.__name__} has no docstring")


def _family(subject: Subject) -> ModuleType | None:
    name = f"tileops.{subject.entry.family}"
    place = subject.at("family")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as e:
        if e.name == name:
            subject.due(place, "S601", f"no package {name} is installed, where its class would be")
        else:
            subject.error(place, "S601", f"{name} can't be imported: {told(e)}")
    except Exception as e:  # an import runs any code
        if not (isinstance(e, SpecError) and subject.spec.file.errors):
            subject.error(place, "S601", f"{name} can't be imported: {told(e)}")
    return None


def _fields(subject: Subject, cls: Any) -> None:
    params, fields = subject.entry.signature.params, attrs.fields_dict(cls)
    if [*fields] != [*params]:
        got, wanted = ", ".join(fields) or "none", ", ".join(params) or "none"
        subject.error(
            subject.at("signature", "params"), "S602", f"the class has the fields {got}; the params are {wanted}"
        )
    for name in fields.keys() & params.keys():
        param, default = params[name], fields[name].default
        if not _same_default(param, default):
            shown = "no default" if default is attrs.NOTHING else f"the default {dtype_name(default)!r}"
            wanted = "none" if param.default is attrs.NOTHING else repr(param.default)
            subject.error(param.place, "S603", f"field '{name}' of the class has {shown}, the param {wanted}")


def _same_default(param: Param, default: Any) -> bool:
    if default is attrs.NOTHING or param.default is attrs.NOTHING:
        return default is param.default
    try:
        return bool(canonical(param.type, dtype_name(default)) == param.default)
    except ValueError:
        return False


def _call(subject: Subject, cls: Any) -> None:
    inputs, place = subject.entry.signature.inputs, subject.at("signature", "inputs")
    parameters = [*inspect.signature(cls.__call__).parameters.values()][1:]
    got = [p.name if p.kind is p.POSITIONAL_OR_KEYWORD else f"{p.kind.description} {p.name}" for p in parameters]
    if got != [*inputs]:
        wanted = ", ".join(inputs)
        subject.error(place, "S604", f"the class is called with ({', '.join(got)}); the inputs are ({wanted})")
        return
    omissible = [d.optional or d.when is not None for d in inputs.values()]
    for i, (parameter, decl) in enumerate(zip(parameters, inputs.values(), strict=True)):
        if all(omissible[i:]) and parameter.default is not None:  # Python has no default before a required argument
            subject.error(decl.place, "S604", f"input {decl.name} may be absent, so the call must default it to None")
        if not omissible[i] and parameter.default is not parameter.empty:
            subject.error(decl.place, "S604", f"input {decl.name} is always given, so the call must not default it")
