"""The older form of an entry, rewritten as the newer one.

Its own marks: no ``forall`` (dims are named in shapes, lower case), ``dtypes:`` in rows, ``shape_rules``, ``roofline.func``
(a dotted path to a function that returns flops and bytes), ``source.kernel_map``, and a key ``...`` where an abridged copy
leaves something out. All else, the nodes' places included, stays.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import yaml

from tileops.core.spec.dtypes import BITS
from tileops.core.spec.source import Node, Source

_ELIDED = "..."
_WORD = re.compile(r"[A-Za-z_]\w*")


def _pairs(node: Node | None) -> list[tuple[Node, Node]]:
    return (
        [(k, v) for k, v in node.value if isinstance(k, yaml.ScalarNode)] if isinstance(node, yaml.MappingNode) else []
    )


def _get(node: Node | None, key: str) -> Node | None:
    return next((v for k, v in _pairs(node) if k.value == key), None)


def _rows(entry: Node) -> list[Node]:
    rows = _get(entry, "workloads")
    return rows.value if isinstance(rows, yaml.SequenceNode) else []


def is_older(entry: Node) -> bool:
    """Whether an entry carries a mark of the older form."""
    signature = _get(entry, "signature")
    if _get(signature, "forall") is not None:
        return False
    return (
        any(_get(part, _ELIDED) is not None for part in (entry, signature))
        or any(_get(row, "dtypes") is not None for row in _rows(entry))
        or _get(signature, "shape_rules") is not None
        or _get(_get(entry, "roofline"), "func") is not None
        or _get(_get(entry, "source"), "kernel_map") is not None
    )


def modernise(src: Source, entry: Node) -> Node:
    """The entry in the newer form. Faults are left for the reader, which sees the same places."""
    signature = _get(entry, "signature")
    shapes = dict(_shapes(signature))
    elided = _get(signature, _ELIDED) is not None
    parts = []
    for key, value in _pairs(entry):
        match key.value:
            case "...":
                continue
            case "signature":
                parts.append((key, _signature(value, shapes, elided)))
            case "workloads" if isinstance(value, yaml.SequenceNode):
                if elided:
                    src.warning(value, "S303", "the signature is abridged, so these rows can't be made into calls")
                rows = [_row(row, signature, drop_sizes=elided) for row in value.value]
                parts.append((key, yaml.SequenceNode(value.tag, rows, value.start_mark, value.end_mark)))
            case "roofline" if (func := _get(value, "func")) is not None:
                parts.append((key, _roofline(value, func)))
            case "source":
                parts.append((key, _like(value, [(k, v) for k, v in _pairs(value) if isinstance(v, yaml.ScalarNode)])))
            case _:
                parts.append((key, value))
    return _like(entry, parts)


def _like(node: Node, pairs: list[tuple[Node, Node]]) -> Node:
    return yaml.MappingNode("tag:yaml.org,2002:map", pairs, node.start_mark, node.end_mark)


def _scalar(text: str, at: Node) -> Node:
    return yaml.ScalarNode("tag:yaml.org,2002:str", text, at.start_mark, at.end_mark)


def _shapes(signature: Node | None) -> Iterator[tuple[str, str]]:
    """(tensor, shape text) of those that give one."""
    for role in ("inputs", "outputs"):
        for name, decl in _pairs(_get(signature, role)):
            shape = _get(decl, "shape")
            if isinstance(shape, yaml.ScalarNode):
                yield name.value, shape.value


def _signature(node: Node, shapes: dict[str, str], elided: bool) -> Node:
    tensors = [name.value for role in ("inputs", "outputs") for name, _ in _pairs(_get(node, role))]
    params = {name.value for name, _ in _pairs(_get(node, "params"))}
    free = [t for t in tensors if t not in shapes]
    dims = {w for text in shapes.values() for w in _WORD.findall(text)} - params - {"if", "else", "not", "and", "or"}
    forall = [(_scalar(d, node), _scalar("Dim", node)) for d in sorted(dims)]
    forall += [(_scalar(f"shape_of_{t}", node), _scalar("Shape", node)) for t in free]
    parts = [(_scalar("forall", node), _like(node, forall))]
    for key, value in _pairs(node):
        match key.value:
            case "...":
                continue
            case "inputs" | "outputs":
                parts.append(
                    (key, _like(value, [(name, _tensor(name.value, decl, shapes)) for name, decl in _pairs(value)]))
                )
            case "shape_rules" if isinstance(value, yaml.SequenceNode):
                rules = [_rule(rule, shapes) for rule in value.value]
                where = yaml.SequenceNode(value.tag, rules, value.start_mark, value.end_mark)
                parts.append((_scalar("where", key), where))
            case _:
                parts.append((key, value))
    if elided and _get(node, "outputs") is None:
        parts.append((_scalar("outputs", node), _like(node, [])))
    return _like(node, parts)


def _tensor(name: str, decl: Node, shapes: dict[str, str]) -> Node:
    if name in shapes or not isinstance(decl, yaml.MappingNode):
        return decl
    return _like(decl, [*_pairs(decl), (_scalar("shape", decl), _scalar(f"[*shape_of_{name}]", decl))])


def _rule(node: Node, shapes: dict[str, str]) -> Node:
    """``x.shape`` and ``x.ndim`` spelled by the axes of x."""

    class Spell(ast.NodeTransformer):
        def visit_Attribute(self, attribute: ast.Attribute) -> ast.AST:
            match attribute:
                case ast.Attribute(value=ast.Name(id=tensor), attr="shape" | "ndim" as what):
                    axes = shapes.get(tensor, f"[*shape_of_{tensor}]")
                    return ast.parse(axes if what == "shape" else f"len({axes})", mode="eval").body
            return attribute

    if not isinstance(node, yaml.ScalarNode):
        return node
    try:
        return _scalar(ast.unparse(Spell().visit(ast.parse(node.value.strip(), mode="eval"))), node)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return node


def _row(row: Node, signature: Node | None, drop_sizes: bool) -> Node:
    unions = [name for name, decl in _pairs(_get(signature, "inputs")) if _is_union(_get(decl, "dtype"))]
    parts, words = [], []
    for key, value in _pairs(row):
        if key.value == "dtypes" and isinstance(value, yaml.SequenceNode):
            cases = [_like(d, [(_scalar(t.value, d), d) for t in unions]) for d in value.value]
            parts.append(
                (_scalar("dtype_cases", key), yaml.SequenceNode(value.tag, cases, value.start_mark, value.end_mark))
            )
        elif isinstance(value, yaml.ScalarNode) and key.value != "label":
            words.append(f"{key.value}{value.value}")
            if not drop_sizes:
                parts.append((key, value))
        else:
            parts.append((key, value))
    if isinstance(row, yaml.MappingNode) and _get(row, "label") is None:
        slug = re.sub(r"[^a-z0-9]+", "-", "-".join(words).lower()).strip("-")
        parts.append((_scalar("label", row), _scalar(slug or "row", row)))
    return _like(row, parts) if isinstance(row, yaml.MappingNode) else row


def _is_union(dtype: Node | None) -> bool:
    return isinstance(dtype, yaml.ScalarNode) and all(word.strip() in BITS for word in dtype.value.split("|"))


def _roofline(node: Node, func: Node) -> Node:
    """``func`` gives (flops, bytes): the same ``module:function`` stands for both."""
    rest = [(k, v) for k, v in _pairs(node) if k.value != "func"]
    if not isinstance(func, yaml.ScalarNode):
        return node
    module, _, name = func.value.rpartition(".")
    both = _scalar(f"{module}:{name}", func)
    return _like(node, [(_scalar("flops", func), both), (_scalar("bytes", func), _scalar(both.value, func)), *rest])
