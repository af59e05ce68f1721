"""The tuned choices that are known for a bucket, the first to be trusted first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import attrs

from tileops.core.tune import results, shipped
from tileops.core.tune.bucket import Bucket

if TYPE_CHECKING:
    from tileops.core.op import Op


@attrs.frozen
class Tuned:
    """A kernel by its class's name and a config's values, and where they come from."""

    kernel: str
    config: Mapping[str, Any]
    source: str


def known(cls: type[Op], bucket: Bucket) -> Iterator[Tuned]:
    """The results of this machine, then what the family ships for the board."""
    if found := results.choice(bucket):
        yield Tuned(found.kernel, found.config, "result cache")
    if entry := shipped.entry(cls, bucket.board, bucket.text):
        yield Tuned(entry.kernel, entry.config, f"shipped table {bucket.board}")
