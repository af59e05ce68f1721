"""What serves a call."""

from __future__ import annotations

from typing import Any

import attrs

from tileops.core.kernel import Kernel


@attrs.frozen
class Choice:
    """The kernel that serves a call, its config, who refused and why, and the inputs that are copied for it.

    ``source`` says who chose the config; ``ignored`` has the tuned choices that are no longer legal, each with why.
    """

    kernel: Kernel
    config: Any
    refusals: dict[str, str]
    copies: tuple[str, ...]
    source: str = "default"
    ignored: tuple[str, ...] = ()
