"""The operator families that are installed: packages ``tileops.<family>`` that carry a spec."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import tileops
from tileops.core.errors import TileOpsError
from tileops.core.spec import Entry, load
from tileops.core.spec.diagnostics import did_you_mean

if TYPE_CHECKING:
    from tileops.core.op import Op

SPEC_NAME = "_spec.yaml"


def spec_path(module: str) -> Path | None:
    """The spec of the innermost package around a module, without importing anything."""
    while module:
        found = importlib.util.find_spec(module)
        for folder in (found.submodule_search_locations if found else None) or ():
            if (Path(folder) / SPEC_NAME).is_file():
                return Path(folder) / SPEC_NAME
        module = module.rpartition(".")[0]
    return None


@cache
def load_spec(path: Path) -> Mapping[str, Entry]:
    """The entries of a spec file, read once a process; raises SpecError."""
    return load(path)


def families() -> dict[str, Path]:
    """Family name -> its spec file, for every installed family."""
    found = {}
    for module in pkgutil.iter_modules(tileops.__path__, "tileops."):
        path = spec_path(module.name) if module.ispkg else None
        if path is not None:
            found[module.name.removeprefix("tileops.")] = path
    return found


def entries() -> dict[str, Entry]:
    """Every operator of the installed families by name."""
    return {name: entry for path in families().values() for name, entry in load_spec(path).items()}


def find_entry(name: str) -> Entry:
    """An operator's entry by its name or an alias; raises TileOpsError with the closest known name."""
    known = entries()
    for entry in known.values():
        if name == entry.name or name in entry.aliases:
            return entry
    hint = did_you_mean(name, known) or f"known are {', '.join(known) or 'none: no family is installed'}"
    raise TileOpsError(f"no operator is called '{name}'; {hint}")


def family_module(entry: Entry) -> ModuleType:
    """The package of an entry's family."""
    return importlib.import_module(f"tileops.{entry.family}")


def op_class(entry: Entry) -> type[Op]:
    """The Python class of an entry."""
    cls: type[Op] = getattr(family_module(entry), entry.name)
    return cls
