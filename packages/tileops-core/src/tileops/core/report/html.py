"""HTML and SVG as nested calls: whatever isn't made here is escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import TypeAlias


class Html(str):
    """Markup made by ``tag``."""


Child: TypeAlias = "str | Iterable[Child] | None"


def tag(name: str, *children: Child, **attributes: object) -> Html:
    """An element. ``class_`` is the attribute ``class``, ``data_v`` is ``data-v``; attributes of None are left out."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{given}>{join(children)}</{name}>")


def join(children: Child) -> Html:
    """Children one after the other; None is nothing."""
    if children is None:
        return Html("")
    if isinstance(children, str):
        return children if isinstance(children, Html) else Html(html.escape(children))
    return Html("".join(map(join, children)))
