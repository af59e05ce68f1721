"""What a measuring process is asked."""

from __future__ import annotations

import attrs

from tileops.core.check import Call
from tileops.core.choice import Choice


@attrs.frozen
class Trial:
    """A choice to be run on a call, at an index among a backend's devices."""

    call: Call
    choice: Choice
    backend: str
    index: int

    @property
    def name(self) -> str:
        return f"{type(self.choice.kernel).__name__} with {self.choice.config}"
