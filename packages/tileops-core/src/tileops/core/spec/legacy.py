"""The older form of an entry, rewritten as the newer one.

Its own marks: no ``forall`` (dims are named in shapes, lower case), ``dtypes:`` in rows, ``shape_rules``,
``roofline.func`` (a dotted path to a function that returns flops and bytes), ``source.kernel_map``, and a key ``...``
where an abridged copy leaves something out. All else, the nodes' places included, stays.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import yaml

from tileops.core.spec.dtypes import BITS
from tileops.core.spec.expr import ExprError, Item, Name, Star, names, parse, walk
from tileops.core.spec.source import Node, Rewritten, Source

_ELIDED = "..."


def _pairs(node: Node | None) -> list[tuple[Node, Node]]:
    """A mapping's pairs; those whose key is no word have no place in either form and are the reader's to refuse."""
    return node.value if isinstance(node, yaml.MappingNode) else []


def _named(node: Node | None) -> Iterator[tuple[str, Node, Node]]:
    return ((k.value, k, v) for k, v in _pairs(node) if isinstance(k, yaml.ScalarNode))


def _get(node: Node | None, key: str) -> Node | None:
    return next((v for name, _, v in _named(node) if name == key), None)


def _items(node: Node | None) -> list[Node]:
    return node.value if isinstance(node, yaml.SequenceNode) else []


def is_older(entry: Node) -> bool:
    """Whether an entry carries a mark of the older form."""
    signature = _get(entry, "signature")
    if _get(signature, "forall") is not None:
        return False
    return (
        any(_get(part, _ELIDED) is not None for part in (entry, signature))
        or any(_get(row, "dtypes") is not None for row in _items(_get(entry, "workloads")))
        or _get(signature, "shape_rules") is not None
        or _get(_get(entry, "roofline"), "func") is not None
        or _get(_get(entry, "source"), "kernel_map") is not None
    )


def modernise(src: Source, entry: Node) -> Node:
    """The entry in the newer form. Faults are left for the reader, which sees the same places."""
    signature = _get(entry, "signature")
    elided = _get(signature, _ELIDED) is not None
    parts: list[tuple[Node, Node]] = []
    for key, value in _pairs(entry):
        match key.value:
            case "...":
                continue
            case "signature" if isinstance(value, yaml.MappingNode):
                parts.append((key, _signature(value, elided)))
            case "workloads" if isinstance(value, yaml.SequenceNode):
                if elided:
                    src.warning(value, "S303", "the signature is abridged, so these rows can't be made into calls")
                parts.append((key, _sequence(value, [_row(row, signature, elided) for row in value.value])))
            case "roofline" if isinstance(func := _get(value, "func"), yaml.ScalarNode):
                if "." not in func.value:
                    src.error(func, "S107", f"'func' of roofline must be module.function, not '{func.value}'")
                parts.append((key, _roofline(value, func)))
            case "source" if isinstance(value, yaml.MappingNode):
                parts.append((key, _mapping(value, [p for p in value.value if p[0].value != "kernel_map"])))
            case _:
                parts.append((key, value))
    return _mapping(entry, parts)


def _mapping(at: Node, pairs: list[tuple[Node, Node]]) -> Node:
    return yaml.MappingNode("tag:yaml.org,2002:map", pairs, at.start_mark, at.end_mark)


def _sequence(at: Node, items: list[Node]) -> Node:
    return yaml.SequenceNode("tag:yaml.org,2002:seq", items, at.start_mark, at.end_mark)


def _scalar(text: str, at: Node) -> Node:
    return Rewritten("tag:yaml.org,2002:str", text, at.start_mark, at.end_mark)


def _tensors(signature: Node | None) -> dict[str, str | None]:
    """The text of each tensor's shape, None where it is left out."""
    shapes = {
        name: _get(decl, "shape") for role in ("inputs", "outputs") for name, _, decl in _named(_get(signature, role))
    }
    return {name: shape.value if isinstance(shape, yaml.ScalarNode) else None for name, shape in shapes.items()}


def _indices(signature: Node, tensors: dict[str, str | None]) -> dict[str, str]:
    """What ``forall`` would say: the names in shapes, and the whole shape of a tensor that leaves its own out."""
    declared = {name for key in ("params", "let") for name, _, _ in _named(_get(signature, key))}
    found: dict[str, str] = {}
    for tensor, shape in tensors.items():
        if shape is None:
            found[f"shape_of_{tensor}"] = "Shape"
            continue
        try:
            expr = parse(shape)
        except ExprError:  # the reader says so
            continue
        types = {n.value for n in walk(expr) if isinstance(n, Item)}
        for node in walk(expr):
            if isinstance(node, Star) and isinstance(node.value, Name):
                found[node.value.id] = "Shape"
        for name in sorted(names(expr) - {t.id for t in types if isinstance(t, Name)}):
            found.setdefault(name, "Dim")
    return {name: kind for name, kind in found.items() if name not in declared}


def _signature(node: Node, elided: bool) -> Node:
    tensors = _tensors(node)
    forall = [(_scalar(name, node), _scalar(kind, node)) for name, kind in _indices(node, tensors).items()]
    parts = [(_scalar("forall", node), _mapping(node, forall))]
    for key, value in _pairs(node):
        match key.value:
            case "...":
                continue
            case "inputs" | "outputs" if isinstance(value, yaml.MappingNode):
                parts.append((key, _mapping(value, [(name, _tensor(name, decl)) for name, decl in value.value])))
            case "shape_rules":
                rules = [_rule(rule, tensors) for rule in _items(value)]
                where = _sequence(value, rules) if isinstance(value, yaml.SequenceNode) else value
                parts.append((_scalar("where", key), where))
            case _:
                parts.append((key, value))
    if elided and _get(node, "outputs") is None:
        parts.append((_scalar("outputs", node), _mapping(node, [])))
    return _mapping(node, parts)


def _tensor(name: Node, decl: Node) -> Node:
    if not isinstance(decl, yaml.MappingNode) or _get(decl, "shape") is not None:
        return decl
    return _mapping(decl, [*decl.value, (_scalar("shape", decl), _scalar(f"[*shape_of_{name.value}]", decl))])


def _rule(node: Node, tensors: dict[str, str | None]) -> Node:
    """``x.shape`` and ``x.ndim`` spelled by the axes of x."""

    class Spell(ast.NodeTransformer):
        def visit_Attribute(self, attribute: ast.Attribute) -> ast.AST:
            match attribute:
                case ast.Attribute(value=ast.Name(id=tensor), attr="shape" | "ndim" as what) if tensor in tensors:
                    axes = tensors[tensor] or f"[*shape_of_{tensor}]"
                    return ast.parse(axes if what == "shape" else f"len({axes})", mode="eval").body
            return attribute

    if not isinstance(node, yaml.ScalarNode) or "." not in node.value:
        return node
    try:
        rule = Spell().visit(ast.parse(node.value.strip(), mode="eval"))
        spelt = not any(isinstance(part, ast.Attribute) for part in ast.walk(rule))
        return _scalar(ast.unparse(rule), node) if spelt else node
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return node


def _row(row: Node, signature: Node | None, elided: bool) -> Node:
    """A row with ``dtypes`` as cases of the inputs that leave a choice, and labelled by its values if need be."""
    if not isinstance(row, yaml.MappingNode):
        return row
    unions = {name: _union(_get(decl, "dtype")) for name, _, decl in _named(_get(signature, "inputs"))}
    parts: list[tuple[Node, Node]] = []
    words = []
    for key, value in row.value:
        if key.value == "dtypes" and isinstance(value, yaml.SequenceNode):
            cases = [
                _mapping(d, [(_scalar(t, d), d) for t, union in unions.items() if d.value in union])
                for d in value.value
            ]
            parts.append((_scalar("dtype_cases", key), _sequence(value, cases)))
        elif isinstance(value, yaml.ScalarNode) and key.value != "label":
            words.append(f"{key.value}{value.value}")
            parts += [] if elided else [(key, value)]
        else:
            parts.append((key, value))
    if _get(row, "label") is None:
        slug = re.sub(r"[^a-z0-9]+", "-", "-".join(words).lower()).strip("-")
        parts.append((_scalar("label", row), _scalar(slug or "row", row)))
    return _mapping(row, parts)


def _union(dtype: Node | None) -> list[str]:
    """The dtypes among which an input leaves a choice of its own."""
    choices = [word.strip() for word in dtype.value.split("|")] if isinstance(dtype, yaml.ScalarNode) else []
    return choices if len(choices) > 1 and all(c in BITS for c in choices) else []


def _roofline(node: Node, func: Node) -> Node:
    """``func`` gives (flops, bytes): the same ``module:function`` stands for both."""
    module, _, name = func.value.rpartition(".")
    both = f"{module}:{name}" if module else "0"
    rest = [(k, v) for k, v in node.value if k.value != "func"]
    return _mapping(
        node, [(_scalar("flops", func), _scalar(both, func)), (_scalar("bytes", func), _scalar(both, func)), *rest]
    )
