"""YAML nodes -> Entry. Every fault becomes a finding and reading goes on, so that all of a file's come at once."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, cast

import attrs
import yaml

from tileops.core.spec.diagnostics import did_you_mean
from tileops.core.spec.dtypes import BITS
from tileops.core.spec.expr import Binary, Expr, ExprError, Func, Name, names, walk
from tileops.core.spec.kinds import Kind, Scope
from tileops.core.spec.model import Baselines, Entry, FuncRef, GradCall, Predicate, Roofline, Row, Signature, Text
from tileops.core.spec.read_signature import SignatureReader
from tileops.core.spec.source import Node, Source
from tileops.core.spec.values import canonical

ENTRY_KEYS = (
    "family", "summary", "status", "aliases", "ref_api", "reference", "model", "absolute", "signature", "semantics",
    "workloads", "accuracy", "baselines", "roofline", "grad", "composition", "compile", "source",
)  # fmt: skip
ROW_KEYS = ("some", "dtype_cases", "values", "dim_order", "label")
ACCURACY_RULES = ("slices", "statistic", "codes", "exact")
_BOUNDS: dict[str, tuple[Kind, float]] = {"contraction": ("int", 0), "factor": ("number", 0), "floor": ("number", 1)}
_OP_NAME = re.compile(r"[A-Z][A-Za-z0-9]*(Fwd|Bwd)Op")
_FAMILY = re.compile(r"[a-z][a-z0-9_]*")
_FUNC_REF = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_SLUG = re.compile(r"[a-z0-9]+([-.][a-z0-9]+)*")


def read_entry(
    src: Source, name: str, key: Node, node: Node, form: Literal["newer", "older"] = "newer"
) -> Entry | None:
    """One entry; None where it has no signature to speak of."""
    if not _OP_NAME.fullmatch(name):
        src.error(key, "S106", f"'{name}' is no op's name", "write {Name}FwdOp or {Name}BwdOp")
    parts = src.mapping(node, name, ENTRY_KEYS)
    status = _choice(src, parts, "status", ("implemented", "spec-only")) or "spec-only"
    complain = src.error if status == "implemented" else src.warning
    must = ["family", "summary", "status", "reference", "workloads", "roofline"]
    for missing in [k for k in [*must, *(["baselines"] if status == "implemented" else [])] if k not in parts]:
        complain(key, "S102", f"{name} lacks '{missing}'")
    if "signature" not in parts:
        src.error(key, "S102", f"{name} lacks 'signature'")
        return None
    reader = SignatureReader(src, parts["signature"])
    signature = reader.read()
    scope = Scope(reader.kinds, tuple(reader.tensors), reader.choices)
    rest = _EntryReader(src, name, status == "implemented", parts, signature, scope, reader)
    fullgraph, reason = rest.compile()
    return Entry(
        name=name,
        family=rest.family(),
        summary=rest.string("summary"),
        status=cast(Any, status),
        signature=signature,
        workloads=rest.workloads(),
        aliases=rest.aliases(),
        ref_api=rest.string("ref_api") or None,
        reference=rest.func_ref("reference"),
        model=rest.func_ref("model"),
        absolute=rest.func_ref("absolute"),
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


def _choice(src: Source, parts: Mapping[str, Node], key: str, allowed: tuple[str, ...]) -> str | None:
    if key not in parts:
        return None
    value = src.value(parts[key])
    if value not in allowed:
        src.error(parts[key], "S107", f"'{key}' must be {' or '.join(allowed)}", did_you_mean(str(value), allowed))
        return None
    return cast(str, value)


@attrs.frozen
class _EntryReader:
    """Reads all but the signature; ``scope`` has the names of the signature, which expressions may use."""

    src: Source
    name: str
    implemented: bool
    parts: dict[str, Node]
    signature: Signature
    scope: Scope
    reader: SignatureReader

    def string(self, key: str) -> str:
        return self.src.string(self.parts[key], f"'{key}' of {self.name}") if key in self.parts else ""

    def strings(self, key: str) -> tuple[str, ...]:
        return self.src.strings(self.parts[key], f"'{key}' of {self.name}") if key in self.parts else ()

    def family(self) -> str:
        family = self.string("family")
        if family and not _FAMILY.fullmatch(family):
            self.src.error(self.parts["family"], "S106", f"'{family}' is no family: lower-case letters, digits and '_'")
        return family

    def aliases(self) -> tuple[str, ...]:
        aliases = self.strings("aliases")
        for alias, node in zip(aliases, self.parts["aliases"].value if aliases else (), strict=True):
            if alias and not _OP_NAME.fullmatch(alias):
                self.src.error(node, "S106", f"'{alias}' is no op's name", "write {Name}FwdOp or {Name}BwdOp")
        return aliases

    def func_ref(self, key: str) -> FuncRef | None:
        if key not in self.parts:
            return None
        text = self.string(key)
        if text and not _FUNC_REF.fullmatch(text):
            self.src.error(self.parts[key], "S107", f"'{key}' of {self.name} must be module:function, not '{text}'")
        return FuncRef(text, place=self.src.place(self.parts[key]))

    def text(self, node: Node, what: str, kind: Kind | None, scope: Scope | None = None) -> Text | None:
        text = self.src.text(node, what)
        try:
            if text is not None and kind is None:
                self.scope.infer(text.expr)
            elif text is not None and kind is not None:
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

    def workloads(self) -> tuple[Row, ...]:
        rows: list[Row] = []
        labels: dict[str, int] = {}
        for node in self.src.sequence(self.parts["workloads"], "workloads") if "workloads" in self.parts else ():
            row = self._row(node)
            line = labels.setdefault(row.label, row.place.line)
            if row.label and row.place.line != line:
                self.src.error(node, "S302", f"label '{row.label}' is used twice", f"first in line {line}")
            rows.append(row)
        return tuple(rows)

    def _row(self, node: Node) -> Row:
        sig = self.signature
        sizes = {n: i for n, i in sig.indices.items() if i.kind != "DType"}
        parts = self.src.mapping(node, f"a row of {self.name}", (*sizes, *sig.params, *self.reader.faulty, *ROW_KEYS))
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
                elif (made := self.reader.values(part, f"'values' of {name}", name)) is not None:
                    content[name] = made
        order = {}
        if "dim_order" in parts:
            orders = self.src.mapping(parts["dim_order"], f"dim_order of row '{label}'", sig.inputs)
            order = {name: self._order(part) for name, part in orders.items()}
        return Row(label, values, some, self._dtype_cases(parts, label), content, order, place=self.src.place(node))

    def _order(self, node: Node) -> tuple[int, ...]:
        value = self.src.value(node)
        if not isinstance(value, list) or sorted(map(repr, value)) != sorted(map(repr, range(len(value)))):
            self.src.error(node, "S301", f"a dim_order must have each axis once, outermost first, not {value!r}")
            return ()
        return tuple(value)

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
        known = dict.fromkeys(self.reader.faulty, tuple(BITS)) | choices
        known |= {n: own for n, t in self.signature.inputs.items() if (own := _union(t.dtype.expr, choices))}
        cases = []
        for node in self.src.sequence(parts["dtype_cases"], "dtype_cases") if "dtype_cases" in parts else ():
            case = {}
            for name, part in self.src.mapping(node, f"a dtype case of row '{label}'", known).items():
                dtype, allowed = self.src.value(part), known[name]
                if dtype not in allowed:
                    message = f"'{name}' must be {' or '.join(allowed)}, not {dtype!r}"
                    self.src.error(part, "S301", message, did_you_mean(str(dtype), allowed))
                else:
                    case[name] = dtype
            cases.append(case)
        return tuple(cases)

    def accuracy(self) -> Mapping[str, Mapping[str, Any]] | None:
        """The overrides of ``tileops.core.accuracy`` by output or mutated input; numbers are expressions."""
        if "accuracy" not in self.parts:
            return None
        out = {}
        sig = self.signature
        results = (*sig.outputs, *(n for n, t in sig.inputs.items() if t.mutated))
        keys = ("rule", *_BOUNDS, "reason")
        for name, node in self.src.mapping(self.parts["accuracy"], f"accuracy of {self.name}", results).items():
            what = f"accuracy of {name}"
            parts = self.src.mapping(node, what, keys)
            if "rule" in parts:
                _choice(self.src, parts, "rule", ACCURACY_RULES)
            if "reason" not in parts and (unfounded := [k for k in ("factor", "floor") if k in parts]):
                self.src.error(node, "S102", f"{what} needs a 'reason' for its {' and '.join(unfounded)}")
            out[name] = {
                k: self._bound(n, k, what) if k in _BOUNDS else self.src.string(n, f"'{k}' in {what}")
                for k, n in parts.items()
            }
        return out

    def _bound(self, node: Node, key: str, what: str) -> Text | None:
        kind, least = _BOUNDS[key]
        text = self.text(node, f"'{key}' in {what}", kind, self._with_content())
        if text is not None and isinstance(value := self.src.value(node), (int, float)) and value < least:
            self.src.error(node, "S107", f"'{key}' in {what} must be at least {least}")
        return text

    def _with_content(self) -> Scope:
        """The scope and the content of metadata inputs."""
        content: dict[str, Kind] = {n: "any" for n, t in self.signature.inputs.items() if t.requires or t.values}
        return attrs.evolve(self.scope, names={**content, **self.scope.names})

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
        for missing in [k for k in (("flops", "unit", "dtype") if self.implemented else ("flops",)) if k not in parts]:
            self.src.error(node, "S102", f"roofline of {self.name} lacks '{missing}'")
        flops = self._work(parts["flops"], "flops") if "flops" in parts else None
        nbytes = self._work(parts["bytes"], "bytes") if "bytes" in parts else None
        unit = _choice(self.src, parts, "unit", ("tensor_core", "cuda_core"))
        dtype = self.src.string(parts["dtype"], "'dtype' of roofline") if "dtype" in parts else None
        dtypes = [n for n, i in self.signature.indices.items() if i.kind == "DType"]
        if dtype and dtype not in dtypes and dtype not in BITS:
            self.src.error(parts["dtype"], "S104", f"'{dtype}' is no dtype", did_you_mean(dtype, [*dtypes, *BITS]))
        return Roofline(flops, nbytes, cast(Any, unit), dtype, place=self.src.place(node)) if flops else None

    def _work(self, node: Node, key: str) -> Text | FuncRef | None:
        if isinstance(node, yaml.ScalarNode) and _FUNC_REF.fullmatch(node.value):
            return FuncRef(node.value, place=self.src.place(node))
        return self.text(node, f"'{key}' of roofline", "number", self._with_content())

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
        for name, key_node, _ in self.src.items(parts["gives"], "'gives' of grad"):
            if name not in self.signature.inputs:
                hint = did_you_mean(name, self.signature.inputs)
                self.src.error(key_node, "S104", f"'gives' of grad names '{name}', no input", hint)
        when = self.text(parts["when"], "'when' of grad", "bool") if "when" in parts else None
        op = self.src.string(parts["op"], "'op' of grad")
        return GradCall(op, tables["inputs"], tables["gives"], tables["params"], when, place=self.src.place(node))

    def _grad_text(self, node: Node, key: str, name: str) -> Text | None:
        """A param's expression; an input as ``x``, ``grad(y)`` or ``saved(y)``; or a sum of outputs and ``grad(y)``."""
        what = f"'{name}' in '{key}' of grad"
        if key == "params":
            return self.text(node, what, None)
        text = self.src.text(node, what)
        try:
            if text is not None:
                self._grad_term(text.expr, sums=key == "gives")
        except ExprError as e:
            self.src.fault(node, e, what)
            return None
        return text

    def _grad_term(self, expr: Expr, sums: bool) -> None:
        outputs, inputs = self.signature.outputs, self.signature.inputs
        match expr:
            case Binary(op="+", left=left, right=right) if sums:
                self._grad_term(left, sums)
                self._grad_term(right, sums)
            case Func(name="grad" | "saved" as how, args=(Name(id=id),)) if how == "grad" or not sums:
                if not sums and id not in outputs:
                    raise ExprError(f"'{id}' is no output", expr.at, did_you_mean(id, outputs), "S104")
            case Name(id=id):
                if not sums and id not in inputs:
                    raise ExprError(f"'{id}' is no input", expr.at, did_you_mean(id, inputs), "S104")
            case _:
                wanted = "outputs of the op and grad(y), summed" if sums else "an input, grad(y) or saved(y)"
                raise ExprError(f"not {wanted}", expr.at)

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


def _union(dtype: Expr, indices: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """What an input's own union of dtypes may become; empty where its dtype is no union."""
    if not any(isinstance(n, Binary) and n.op == "|" for n in walk(dtype)):
        return ()
    if any(isinstance(n, Func) and n.name == "same_as" for n in walk(dtype)):
        return tuple(BITS)
    found = {n.id for n in walk(dtype) if isinstance(n, Name) and n.id in BITS}
    return tuple(d for d in BITS if d in found.union(*(indices.get(n, ()) for n in names(dtype))))
