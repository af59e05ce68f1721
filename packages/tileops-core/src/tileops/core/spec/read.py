"""YAML nodes -> Entry. Every fault becomes a finding and reading goes on, so that all of a file's come at once."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, cast

import attrs
import yaml

from tileops.core.spec.diagnostics import did_you_mean
from tileops.core.spec.dtypes import BITS
from tileops.core.spec.expr import Const, ExprError, Func, Name, rewrite, walk
from tileops.core.spec.kinds import Kind, Scope
from tileops.core.spec.model import Baselines, Entry, FuncRef, GradCall, Predicate, Roofline, Row, Signature, Text
from tileops.core.spec.read_signature import SignatureReader
from tileops.core.spec.source import Node, Source
from tileops.core.spec.values import canonical

ENTRY_KEYS = (
    "family", "summary", "status", "aliases", "ref_api", "reference", "model", "signature", "semantics", "workloads",
    "accuracy", "baselines", "roofline", "grad", "composition", "compile", "source",
)  # fmt: skip
_OP_NAME = re.compile(r"[A-Z][A-Za-z0-9]*(Fwd|Bwd)Op")
_FUNC_REF = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_SLUG = re.compile(r"[a-z0-9]+([-.][a-z0-9]+)*")


def read_entry(
    src: Source, name: str, key: Node, node: Node, form: Literal["newer", "older"] = "newer"
) -> Entry | None:
    """One entry; None where it has no signature to speak of."""
    if not _OP_NAME.fullmatch(name):
        src.error(key, "S106", f"'{name}' is no op's name", "write {Name}FwdOp or {Name}BwdOp")
    parts = src.mapping(node, name, ENTRY_KEYS)
    status = _choice(src, parts, "status", ("implemented", "spec-only"), "spec-only")
    complain = src.error if status == "implemented" else src.warning
    must = ["family", "summary", "status", "reference", "workloads", "roofline"]
    for missing in [k for k in [*must, *(["baselines"] if status == "implemented" else [])] if k not in parts]:
        complain(key, "S102", f"{name} lacks '{missing}'")
    if "signature" not in parts:
        src.error(key, "S102", f"{name} lacks 'signature'")
        return None
    reader = SignatureReader(src, parts["signature"])
    signature = reader.read()
    rest = _EntryReader(src, name, parts, signature, Scope(reader.kinds, reader.tensors), reader)
    fullgraph, reason = rest.compile()
    return Entry(
        name=name,
        family=rest.string("family"),
        summary=rest.string("summary"),
        status=cast(Any, status),
        signature=signature,
        workloads=rest.workloads(),
        aliases=rest.strings("aliases"),
        ref_api=rest.string("ref_api") or None,
        reference=rest.func_ref("reference"),
        model=rest.func_ref("model"),
        semantics=rest.semantics(),
        accuracy=rest.accuracy(),
        baselines=rest.baselines(),
        roofline=rest.roofline(),
        grad=rest.grad(),
        composition=rest.strings("composition"),
        fullgraph=fullgraph,
        fullgraph_reason=reason,
        source=rest.source_paths(),
        form=form,
        place=src.place(key),
    )


def _choice(
    src: Source, parts: Mapping[str, Node], key: str, allowed: tuple[str, ...], default: str | None
) -> str | None:
    if key not in parts:
        return default
    value = src.value(parts[key])
    if value not in allowed:
        src.error(parts[key], "S107", f"'{key}' must be {' or '.join(allowed)}", did_you_mean(str(value), allowed))
        return default
    return cast(str, value)


class _EntryReader:
    def __init__(
        self,
        src: Source,
        name: str,
        parts: dict[str, Node],
        signature: Signature,
        scope: Scope,
        reader: SignatureReader,
    ) -> None:
        self.src, self.name, self.parts, self.signature, self.scope, self.reader = (
            src,
            name,
            parts,
            signature,
            scope,
            reader,
        )

    def string(self, key: str) -> str:
        return self.src.string(self.parts[key], f"'{key}' of {self.name}") if key in self.parts else ""

    def strings(self, key: str) -> tuple[str, ...]:
        return self.src.strings(self.parts[key], f"'{key}' of {self.name}") if key in self.parts else ()

    def func_ref(self, key: str) -> FuncRef | None:
        if key not in self.parts:
            return None
        text = self.string(key)
        if not _FUNC_REF.fullmatch(text):
            self.src.error(self.parts[key], "S107", f"'{key}' of {self.name} must be module:function, not '{text}'")
            return None
        return FuncRef(text, place=self.src.place(self.parts[key]))

    def text(self, node: Node, what: str, kind: Kind | None = None, scope: Scope | None = None) -> Text | None:
        text = self.src.text(node, what)
        try:
            if text is not None and kind is not None:
                (scope or self.scope).need(text.expr, kind, "it")
        except ExprError as e:
            self.src.fault(node, e, what)
            return None
        return text

    def semantics(self) -> dict[str, str]:
        out = {}
        if "semantics" in self.parts:
            for id, key, node in self.src.items(self.parts["semantics"], f"semantics of {self.name}"):
                if not _SLUG.fullmatch(id):
                    self.src.error(key, "S106", f"'{id}' is no id: lower-case words joined by '-'")
                out[id] = self.src.string(node, f"semantics '{id}'")
        return out

    # -- workloads --

    def workloads(self) -> tuple[Row, ...]:
        rows: list[Row] = []
        labels: dict[str, int] = {}
        for node in self.src.sequence(self.parts["workloads"], "workloads") if "workloads" in self.parts else ():
            row = self._row(node)
            if row.label in labels:
                self.src.error(node, "S302", f"label '{row.label}' is used twice", f"first in line {labels[row.label]}")
            labels[row.label] = row.place.line
            rows.append(row)
        return tuple(rows)

    def _row(self, node: Node) -> Row:
        sig = self.signature
        sizes = {n: i for n, i in sig.indices.items() if i.kind != "DType"}
        parts = self.src.mapping(
            node, f"a row of {self.name}", (*sizes, *sig.params, "some", "dtype_cases", "values", "label")
        )
        label = self.src.string(parts["label"], "a row's label") if "label" in parts else ""
        if "label" not in parts:
            self.src.error(node, "S102", f"a row of {self.name} lacks 'label'")
        elif label and not _SLUG.fullmatch(label):
            self.src.error(parts["label"], "S106", f"'{label}' is no label: lower-case words joined by '-'")
        values: dict[str, Any] = {}
        for name, part in parts.items():
            if name in sizes:
                values[name] = self._size(name, sizes[name].kind, part)
            elif name in sig.params:
                try:
                    values[name] = canonical(sig.params[name].type, self.src.value(part))
                except ValueError as e:
                    self.src.error(part, "S301", f"param '{name}' must be {e} in row '{label}'")
        for name, param in sig.params.items():
            if name not in parts and param.default is not attrs.NOTHING:
                values.setdefault(name, param.default)
        some = self.src.strings(parts["some"], "'some'") if "some" in parts else ()
        optional = [n for n, t in sig.inputs.items() if t.optional]
        for name in some:
            if name not in optional:
                self.src.error(
                    parts["some"], "S301", f"'some' names '{name}', no optional input", did_you_mean(name, optional)
                )
        content: dict[str, Predicate] = {}
        if "values" in parts:
            for name, key, part in self.src.items(parts["values"], "a row's values"):
                if name not in sig.inputs:
                    self.src.error(key, "S301", f"'values' names '{name}', no input", did_you_mean(name, sig.inputs))
                elif (made := self.reader.values(part, f"'values' of {name}")) is not None:
                    content[name] = made
        return Row(label, values, some, self._dtype_cases(parts, label), content, place=self.src.place(node))

    def _size(self, name: str, kind: str, node: Node) -> Any:
        value = self.src.value(node)
        sizes = value if kind == "Shape" and isinstance(value, list) else [value]
        if not all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 2**62 for n in sizes):
            wanted = "a list of sizes" if kind == "Shape" else "a size"
            self.src.error(node, "S301", f"'{name}' must be {wanted}, not {value!r}")
            return () if kind == "Shape" else 0
        return tuple(sizes) if kind == "Shape" else value

    def _dtype_cases(self, parts: Mapping[str, Node], label: str) -> tuple[dict[str, str], ...]:
        choices = {n: i.choices for n, i in self.signature.indices.items() if i.kind == "DType"}
        known = (*choices, *(n for n in self.signature.inputs if n not in choices))
        cases = []
        for node in self.src.sequence(parts["dtype_cases"], "dtype_cases") if "dtype_cases" in parts else ():
            case = {}
            for name, part in self.src.mapping(node, "a dtype case", known).items():
                dtype = self.src.value(part)
                allowed = choices.get(name, tuple(BITS))
                if dtype not in allowed:
                    shown = " or ".join(allowed) if name in choices else "a dtype"
                    self.src.error(
                        part, "S301", f"'{name}' must be {shown}, not {dtype!r}", did_you_mean(str(dtype), allowed)
                    )
                else:
                    case[name] = dtype
            cases.append(case)
        return tuple(cases)

    # -- the rest --

    def accuracy(self) -> Mapping[str, Any] | None:
        if "accuracy" not in self.parts:
            return None
        return {k: self.src.value(n) for k, _, n in self.src.items(self.parts["accuracy"], f"accuracy of {self.name}")}

    def baselines(self) -> dict[str, Baselines]:
        out = {}
        if "baselines" in self.parts:
            for backend, _, node in self.src.items(self.parts["baselines"], "baselines"):
                lists = self.src.mapping(node, f"baselines of {backend}", ("required", "optional"))
                out[backend] = Baselines(**{k: self.src.strings(n, f"'{k}' baselines") for k, n in lists.items()})
        return out

    def roofline(self) -> Roofline | None:
        if "roofline" not in self.parts:
            return None
        node = self.parts["roofline"]
        parts = self.src.mapping(node, f"roofline of {self.name}", ("flops", "bytes", "unit", "dtype"))
        needs = ("flops", "unit", "dtype") if self.string("status") == "implemented" else ("flops",)
        for missing in [k for k in needs if k not in parts]:
            self.src.error(node, "S102", f"roofline of {self.name} lacks '{missing}'")
        flops = self._work(parts["flops"], "flops") if "flops" in parts else None
        if flops is None:
            return None
        dtype = self.src.string(parts["dtype"], "'dtype' of roofline") if "dtype" in parts else None
        dtypes = [n for n, i in self.signature.indices.items() if i.kind == "DType"]
        if dtype and dtype not in dtypes and dtype not in BITS:
            self.src.error(parts["dtype"], "S104", f"'{dtype}' is no dtype", did_you_mean(dtype, [*dtypes, *BITS]))
        unit = _choice(self.src, parts, "unit", ("tensor_core", "cuda_core"), None)
        nbytes = self._work(parts["bytes"], "bytes") if "bytes" in parts else None
        return Roofline(flops, nbytes, cast(Any, unit), dtype, place=self.src.place(node))

    def _work(self, node: Node, key: str) -> Text | FuncRef | None:
        if isinstance(node, yaml.ScalarNode) and _FUNC_REF.fullmatch(node.value):
            return FuncRef(node.value, place=self.src.place(node))
        content: dict[str, Kind] = {n: "any" for n, t in self.signature.inputs.items() if t.requires or t.values}
        return self.text(
            node, f"'{key}' of roofline", "number", Scope({**content, **self.scope.names}, self.scope.tensors)
        )

    def grad(self) -> tuple[GradCall, ...]:
        if "grad" not in self.parts:
            return ()
        node = self.parts["grad"]
        is_list = isinstance(node, yaml.MappingNode) and any(k.value == "calls" for k, _ in node.value)
        nodes = [node]
        if is_list:
            nodes = self.src.sequence(self.src.mapping(node, "grad", ("calls",))["calls"], "'calls' of grad")
        return tuple(call for n in nodes if (call := self._grad_call(n)) is not None)

    def _grad_call(self, node: Node) -> GradCall | None:
        parts = self.src.mapping(node, f"grad of {self.name}", ("op", "when", "params", "inputs", "gives"))
        missing = [k for k in ("op", "inputs", "gives") if k not in parts]
        for key in missing:
            self.src.error(node, "S102", f"grad of {self.name} lacks '{key}'")
        if missing:
            return None
        tables: dict[str, dict[str, Text]] = {}
        for key in ("params", "inputs", "gives"):
            nodes = self.src.mapping(parts[key], f"'{key}' of grad") if key in parts else {}
            tables[key] = {n: t for n, p in nodes.items() if (t := self._grad_text(p, key, n)) is not None}
        for name in tables["gives"]:
            if name not in self.signature.inputs:
                hint = did_you_mean(name, self.signature.inputs)
                self.src.error(parts["gives"], "S104", f"'gives' of grad names '{name}', no input", hint)
        when = self.text(parts["when"], "'when' of grad", "bool") if "when" in parts else None
        op = self.src.string(parts["op"], "'op' of grad")
        return GradCall(op, tables["inputs"], tables["gives"], tables["params"], when, place=self.src.place(node))

    def _grad_text(self, node: Node, key: str, name: str) -> Text | None:
        """``grad(y)`` and ``saved(rstd)`` name outputs; the rest of the scope is the forward's, and ``gives`` may sum."""
        what = f"'{name}' in '{key}' of grad"
        text = self.src.text(node, what)
        if text is None or key == "gives":
            return text
        tensors: dict[str, Kind] = dict.fromkeys(self.signature.inputs, "any")
        try:
            for wrapped in _wrapped(text, ("grad", "saved")):
                if wrapped not in self.signature.outputs:
                    raise ExprError(
                        f"'{wrapped}' is no output", 0, did_you_mean(wrapped, self.signature.outputs), "S104"
                    )
            plain = rewrite(
                text.expr, lambda n: Const(0) if isinstance(n, Func) and n.name in ("grad", "saved") else None
            )
            Scope({**tensors, **self.scope.names}, self.scope.tensors).infer(plain)
        except ExprError as e:
            self.src.fault(node, e, what)
            return None
        return text

    def compile(self) -> tuple[bool, str | None]:
        if "compile" not in self.parts:
            return True, None
        node = self.parts["compile"]
        parts = self.src.mapping(node, f"compile of {self.name}", ("fullgraph", "reason"))
        fullgraph = "fullgraph" not in parts or self.src.flag(parts["fullgraph"], "'fullgraph'")
        reason = self.src.string(parts["reason"], "'reason' of compile") if "reason" in parts else None
        if not fullgraph and not reason:
            self.src.error(node, "S102", "'fullgraph: false' needs a 'reason'")
        return fullgraph, reason

    def source_paths(self) -> dict[str, str]:
        if "source" not in self.parts:
            return {}
        return {k: self.src.string(n, f"source '{k}'") for k, _, n in self.src.items(self.parts["source"], "source")}


def _wrapped(text: Text, functions: tuple[str, ...]) -> list[str]:

    return [
        n.args[0].id
        for n in walk(text.expr)
        if isinstance(n, Func) and n.name in functions and len(n.args) == 1 and isinstance(n.args[0], Name)
    ]
