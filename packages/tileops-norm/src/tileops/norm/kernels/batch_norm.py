"""BatchNorm: a set is a channel of the whole batch. InstanceNorm by running statistics is the same."""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from tileops.core.check import Call
from tileops.core.kernel import Device, Form, Kernel, Static
from tileops.norm.kernels.group_norm import forms_of, strided_channels
from tileops.norm.kernels.rows import ARCHS, MAX_CLUSTER, PASSES, WARP, lanes_for
from tileops.norm.kernels.set_norm import Config, excluded, program
from tileops.norm.kernels.sets import FARTHEST, SECTOR, sets_of

LARGE = 1 << 15  # vectors of a channel, which are worth two blocks a multiprocessor
SMALL, NARROW = 64, 8  # vectors of a channel, so few that bundles have 8 bytes: less code and more blocks
ENOUGH = 0.9  # of the multiprocessors


def batch_configs(
    forms: Mapping[str, Form], dtype: str, device: Device, tensors: int = 1, given: bool = False
) -> Iterator[Config]:
    """The configs for the channels of a batch, the default first: enough blocks for the device, none without work.

    A channel's size changes from call to call, and so may the order of its sums from config to config. With ``given``
    statistics there are none. ``tensors`` are read at once.
    """
    s = sets_of(forms, None)
    assert not isinstance(s, str)
    vectors = s.vectors({})
    bundled = NARROW if s.stats > 1 and vectors <= SMALL else SECTOR
    s = sets_of(forms, None, bundled)
    assert not isinstance(s, str)
    widest, most = (512, 4 // tensors) if s.stats == 1 else (256, 2 // tensors)
    blocks = (4 if given else 2 if vectors >= LARGE else 1) * ENOUGH * device.sm_count
    enough = next((c for c in (1, 2, 4) if s.count * c >= blocks or vectors <= c * 256), MAX_CLUSTER)
    threads = max(lanes_for(-(-vectors // enough), widest), WARP) if vectors > WARP else WARP
    chunks = next(c for c in (1, 2, 4) if c >= min(most, -(-vectors // (enough * threads))))
    seen = set()
    for cluster, block, chunk, resident in itertools.product(
        (enough, 1, 2, 4, MAX_CLUSTER), (threads, 128, 256, 512), (chunks, 1, 2, 4), (1, 2, 4)
    ):
        config = Config(block, chunk, cluster, block, resident, bundled)
        if config not in seen and excluded(config, s, dtype, tensors) is None:
            seen.add(config)
            yield config


def refuse_batch(call: Call, names: tuple[str, ...]) -> str | None:
    """Why the channels of a batch can't be walked, or None."""
    s = strided_channels(call) or sets_of(forms_of(call, names), None)
    if isinstance(s, str):
        return s
    return None if s.vectors({}) < FARTHEST else "a channel has 2**31 - 2**17 vectors or more"


class BatchNorm(Kernel):
    """A block, or a cluster of up to 8, walks its channel twice, for the statistics and for the elements, or only once.

    What was read is mostly in the cache still when it is read again, but for the largest tensors. Only one thread
    writes a channel's running statistics, so that they are the same each time.
    """

    archs = ARCHS
    pass_configs = PASSES

    def refuse(self, call: Call, device: Device) -> str | None:
        if call.params.get("use_input_stats"):
            return "the statistics are those of each instance"
        return refuse_batch(call, ("x", "y"))

    def configs(self, call: Call, device: Device) -> Iterator[Config]:
        return batch_configs(forms_of(call), call["T"], device, given=not call.params.get("training"))

    def program(self, static: Static, config: Config, device: Device) -> Any:
        s = sets_of({name: form for name, form in static.tensors if name in ("x", "y")}, None, config.bundled)
        assert not isinstance(s, str)
        return program(static, config, s, held=False, given=not dict(static.values).get("training"), moments=False)
