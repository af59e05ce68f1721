"""The programs that an operator's cases run on a GPU, known without running them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

from tileops.core.backend import gpu
from tileops.core.backend.gpu import Gpu
from tileops.core.check import Call
from tileops.core.errors import NoKernelError
from tileops.core.families import op_class
from tileops.core.kernel import Device
from tileops.core.program import Recipe, build, cache_dir
from tileops.core.spec import Entry
from tileops.core.testing.cases import edge_cases, workload_cases
from tileops.core.testing.integration import torch_cases


def recipes(entry: Entry, backend: Gpu, device: Device, board: str | None = None) -> dict[str, Recipe]:
    """By key what the programs are made from that an entry's rows, edges and checks with torch need on a device.

    With the choices that are tuned for a ``board``, if it is named.
    """
    op_class(entry)
    found = {}
    for call, misaligned in _calls(entry, backend.device_type):
        with suppress(NoKernelError):  # its test says so
            recipe = gpu.recipe(backend, call, device, misaligned, board)
            if recipe is not None:
                found[recipe.key] = recipe
    return found


def compile_all(recipes: Iterable[Recipe]) -> None:
    """Compile what isn't on disk; raises AssertionError with what fails.

    One process at a time: pytest-xdist's workers, who all come here at once, would start a pool for each of them.
    """
    import filelock

    home = cache_dir()
    home.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(home / "tests.lock"):
        failures = [failure for _, failure in build(recipes) if failure]
    if failures:
        raise AssertionError("\n".join(failures))


def _calls(entry: Entry, device: str) -> Iterator[tuple[Call, Sequence[str]]]:
    for case in (*workload_cases(entry, device=device), *edge_cases(entry, device)):
        yield case.call, [n for n, layout in case.layouts.items() if layout == "misaligned"]
    for check in torch_cases(entry, device):
        yield from ((call, ()) for call in check.calls)
