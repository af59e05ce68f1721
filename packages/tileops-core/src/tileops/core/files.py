"""Files that are written whole, or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from tileops.core.errors import TileOpsError


def write_whole(path: Path, text: str) -> None:
    """Write a file beside its place and move it there; raises TileOpsError where it can't be written."""
    with _beside(path) as fresh:
        fresh.write_text(text, encoding="utf-8", errors="replace")
        fresh.replace(path)


def check_writable(path: Path) -> None:
    """Raise TileOpsError where a file can't be written, before the work is done that is to be in it."""
    with _beside(path) as fresh:
        fresh.touch()
        fresh.unlink()


@contextlib.contextmanager
def _beside(path: Path) -> Iterator[Path]:
    fresh = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield fresh
    except OSError as e:
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)
        raise TileOpsError(f"{path} can't be written: {e.strerror or e}") from None
