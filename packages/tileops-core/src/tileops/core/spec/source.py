"""YAML text as nodes that know their place. Only what the language needs: no anchors, no tags, YAML 1.2's scalars."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import yaml

from tileops.core.spec.diagnostics import Diagnostics, Place, did_you_mean
from tileops.core.spec.expr import Expr, ExprError, parse
from tileops.core.spec.model import Text

Node = yaml.nodes.Node
MAX_BYTES = 4 << 20
MAX_DEPTH = 20
_LINE_ENDS = re.compile("[\x85\u2028\u2029]")  # of YAML 1.1 alone: a line's number would be none that editors show

try:
    _Base: Any = yaml.CSafeLoader
except AttributeError:  # PyYAML built without libyaml
    _Base = yaml.SafeLoader


class _Loader(_Base):
    yaml_implicit_resolvers: Mapping[str, Any] = {}


for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", r"[-+]?[0-9]+(?:_[0-9]+)*", "-+0123456789"),
    ("float", r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan", "-+.0123456789"),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_pattern})$"), list(_first))

_SCALARS: dict[str, Callable[[str], Any]] = {
    "bool": lambda text: text.lower() == "true",
    "null": lambda text: None,
    "int": lambda text: int(text.replace("_", "")),
    "float": lambda text: float(text.replace(".inf", "inf").replace(".nan", "nan")),
    "str": lambda text: text,
}


class Rewritten(yaml.ScalarNode):
    """A scalar with another text than the file has at its marks: a fault in it is at its start."""


@attrs.define
class Source:
    """A spec file being read: turns nodes into values and gathers what is wrong with them."""

    path: str
    found: Diagnostics = attrs.field(factory=Diagnostics)

    def compose(self, text: str) -> Node | None:
        """The root node, or None where the text is no YAML (which is then among the findings)."""
        text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
        if len(text) > MAX_BYTES:
            self.found.error(
                Place(self.path), "S001", f"a file of {len(text)} characters; at most {MAX_BYTES} are read"
            )
            return None
        if odd := _LINE_ENDS.search(text):
            line, start = text.count("\n", 0, odd.start()) + 1, text.rfind("\n", 0, odd.start())
            what = f"not YAML: U+{ord(odd[0]):04X} ends a line for some readers and not for others"
            self.found.error(Place(self.path, line, odd.start() - start), "S001", what)
            return None
        try:
            root = yaml.compose(text, Loader=_Loader)
        except yaml.MarkedYAMLError as e:
            mark = e.problem_mark or e.context_mark
            place = Place(self.path, mark.line + 1, mark.column + 1) if mark else Place(self.path)
            self.found.error(place, "S001", f"not YAML: {e.problem or e.context}")
            return None
        except (yaml.YAMLError, UnicodeError, RecursionError) as e:
            reason = "it nests too deeply" if isinstance(e, RecursionError) else str(e).splitlines()[0]
            self.found.error(Place(self.path), "S001", f"not YAML: {reason}")
            return None
        return root if root is not None and self._is_plain(root, text) else None

    def _is_plain(self, root: Node, text: str) -> bool:
        """Whether the nodes are a tree of bounded depth and bear no tags; an anchor or tag is where its node starts."""
        layer, plain = [root], True
        for _ in range(MAX_DEPTH):
            for node in layer:
                mark = text[node.start_mark.index : node.start_mark.index + 1]
                if mark in ("&", "*", "!"):
                    what = "tags are" if mark == "!" else "anchors and aliases are"
                    self.error(node, "S003", f"{what} not part of the spec language")
                    plain = False
            layer = [part for node in layer for part in _parts(node)] if plain else []
            if not layer:
                return plain
        self.error(layer[0], "S004", f"nested more than {MAX_DEPTH} levels deep")
        return False

    def place(self, node: Node, offset: int = 0) -> Place:
        """Where a character of a scalar stands, if the file has its text as it is; else where the node starts."""
        mark, end = node.start_mark, node.end_mark
        inside = 0
        if isinstance(node, yaml.ScalarNode) and not isinstance(node, Rewritten):
            quoted = node.style in ("'", '"')
            if end.line == mark.line and end.column - mark.column == len(node.value) + 2 * quoted:
                inside = min(offset, len(node.value)) + quoted
        return Place(self.path, mark.line + 1, mark.column + 1 + inside)

    def error(self, node: Node, code: str, message: str, hint: str | None = None, offset: int = 0) -> None:
        self.found.error(self.place(node, offset), code, message, hint)

    def warning(self, node: Node, code: str, message: str, hint: str | None = None) -> None:
        self.found.warning(self.place(node), code, message, hint)

    def items(self, node: Node, what: str) -> Iterator[tuple[str, Node, Node]]:
        """(key, key node, value node) of a mapping with unique string keys."""
        if not isinstance(node, yaml.MappingNode):
            if not (isinstance(node, yaml.ScalarNode) and self.value(node) is None):
                self.error(node, "S103", f"{what} must be a mapping")
            return
        seen: dict[str, int] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                self.error(key, "S103", f"a key of {what} must be a word")
            elif key.value in seen:
                self.error(key, "S002", f"{what} has the key '{key.value}' twice", f"first in line {seen[key.value]}")
            else:
                seen[key.value] = key.start_mark.line + 1
                yield key.value, key, value

    def mapping(
        self, node: Node, what: str, allowed: Mapping[str, Any] | tuple[str, ...] | None = None
    ) -> dict[str, Node]:
        """A mapping's values by key; keys outside ``allowed`` are findings."""
        out = {}
        for key, key_node, value in self.items(node, what):
            if allowed is not None and key not in allowed:
                self.error(key_node, "S101", f"unknown key '{key}' in {what}", did_you_mean(key, allowed))
            else:
                out[key] = value
        return out

    def sequence(self, node: Node, what: str) -> list[Node]:
        if isinstance(node, yaml.SequenceNode):
            return list(node.value)
        if not (isinstance(node, yaml.ScalarNode) and self.value(node) is None):
            self.error(node, "S103", f"{what} must be a list")
        return []

    def value(self, node: Node) -> Any:
        """A scalar, or a list of values, as Python's."""
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item) for item in node.value]
        if not isinstance(node, yaml.ScalarNode):
            self.error(node, "S103", "expected a value, not a mapping")
            return None
        try:
            return _SCALARS[node.tag.removeprefix("tag:yaml.org,2002:")](node.value)
        except ValueError:  # int() refuses very long numbers
            self.error(node, "S103", "a number too long to read")
            return None

    def string(self, node: Node, what: str) -> str:
        value = self.value(node)
        if not isinstance(value, str) or not value:
            self.error(node, "S103", f"{what} must be text")
            return ""
        return value

    def flag(self, node: Node, what: str) -> bool:
        value = self.value(node)
        if not isinstance(value, bool):
            self.error(node, "S103", f"{what} must be true or false")
        return value is True

    def strings(self, node: Node, what: str) -> tuple[str, ...]:
        return tuple(self.string(item, f"an item of {what}") for item in self.sequence(node, what))

    def text(self, node: Node, what: str) -> Text | None:
        """An expression; numbers and booleans that YAML has already read are expressions too."""
        if not isinstance(node, yaml.ScalarNode):
            self.error(node, "S103", f"{what} must be an expression")
            return None
        expr = self.expr(node, node.value, what)
        return None if expr is None else Text(expr, " ".join(node.value.split("\n")).strip(), place=self.place(node))

    def expr(self, node: Node, text: str, what: str) -> Expr | None:
        try:
            return parse(text)
        except ExprError as e:
            self.fault(node, e, what)
            return None

    def fault(self, node: Node, e: ExprError, what: str) -> None:
        """Record an expression's fault at its place inside the scalar."""
        self.error(node, e.code, f"{e.message} in {what}", e.hint, offset=e.offset)


def _parts(node: Node) -> list[Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return node.value if isinstance(node, yaml.SequenceNode) else []
