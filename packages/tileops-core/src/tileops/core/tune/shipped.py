"""Shipped tables: tuned choices that are released with a family, one file ``tuned/<board>.yaml`` beside its spec."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import yaml

from tileops.core.errors import TileOpsError
from tileops.core.families import spec_path
from tileops.core.files import write_whole
from tileops.core.tune.bucket import text_of
from tileops.core.tune.results import Result

if TYPE_CHECKING:
    from tileops.core.op import Op

NOISE = 0.02  # gains below this aren't worth an entry that people have to review
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@attrs.frozen
class Shipped:
    """One bucket's choice. ``us`` holds by case the microseconds of the default (None if it is out) and the choice."""

    op: str
    call: Mapping[str, Any]
    kernel: str
    config: Mapping[str, Any]
    us: Mapping[str, list[float | None]]


def path(cls: type[Op], board: str) -> Path | None:
    """Where the table of an operator's family for a board is, or would be."""
    return _path(cls.spec, cls.__module__, board)


@cache
def _path(spec: Path | None, module: str, board: str) -> Path | None:
    spec = spec or spec_path(module)
    return spec and spec.parent / "tuned" / f"{board}.yaml"


@cache
def entries(table: Path) -> Mapping[str, Shipped]:
    """A table's entries by ``text_of`` their bucket, read once a process; raises TileOpsError for a malformed one."""
    if not table.is_file():
        return {}
    try:
        read = [Shipped(**entry) for entry in yaml.load(table.read_text(), _Loader)["choices"]]
    except (OSError, yaml.YAMLError, TypeError, KeyError) as e:
        raise TileOpsError(f"{table}: no table of tuned choices: {e}; restore it from git") from None
    return {text_of(e.op, e.call): e for e in read}


def entry(cls: type[Op], board: str, text: str) -> Shipped | None:
    """The entry of a bucket, if its family's table for the board has one."""
    table = path(cls, board)
    return entries(table).get(text) if table else None


def entry_of(result: Result, cases: Sequence[str], every: bool = False) -> Shipped | None:
    """A result as an entry; None where its choice gains no more than noise over the default, unless ``every``."""
    chosen = result.chosen
    assert chosen is not None
    if not every and chosen.score(cases) * (1 + NOISE) >= result.candidates[0].score(cases):
        return None
    us = {case: [t and round(t, 2) for t in result.times(case)] for case in cases}
    return Shipped(result.op, result.call, chosen.kernel, chosen.config, us)


def write(table: Path, provenance: Mapping[str, Any], tuned: Mapping[str, Shipped | None]) -> None:
    """Put the entries of some buckets, by ``text_of`` each, into a table; None takes an entry out, others stay."""
    entries.cache_clear()
    merged = {**entries(table), **tuned}
    lines = ["# Written by `tileops tune --ship`; `us` is [default, choice] by case. Reviewed like code.\n"]
    lines += [f"{name}: {_flow(value)}\n" for name, value in provenance.items()]
    lines.append("choices:\n" if any(merged.values()) else "choices: []\n")
    lines += [_lines(merged[text]) for text in _sorted(merged)]
    write_whole(table, "".join(lines))
    entries.cache_clear()


def _sorted(merged: Mapping[str, Shipped | None]) -> Iterable[str]:
    """By op, then as numbers go."""

    def rank(text: str) -> Any:
        entry = merged[text]
        assert entry is not None
        return entry.op, [(n, *_comparable(v)) for n, v in entry.call.items()]

    return sorted((text for text, entry in merged.items() if entry is not None), key=rank)


def _comparable(value: Any) -> tuple[int, Any]:
    if isinstance(value, list):
        return 2, [_comparable(v) for v in value]
    return (0, value) if isinstance(value, int | float) else (1, str(value))


def _lines(entry: Shipped | None) -> str:
    first, *others = (f"{name}: {_flow(value)}\n" for name, value in attrs.asdict(entry).items())  # type: ignore[arg-type]
    return f"- {first}" + "".join(f"  {line}" for line in others)


def _flow(value: Any) -> str:
    """YAML on one line."""
    return yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**6).removesuffix("...\n").strip()
