"""GroupNorm and InstanceNorm: a set is a group of channels of an instance, or one of them."""

from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from tileops.core.check import Call
from tileops.core.kernel import Device, Form, Kernel, Scratch, Static
from tileops.norm.kernels.operands import LESS_BUSY
from tileops.norm.kernels.rows import ARCHS, MAX_CLUSTER, PASSES, WARP, lanes_for, refuse_served, strided
from tileops.norm.kernels.set_norm import Config, excluded, program
from tileops.norm.kernels.sets import FARTHEST, Sets, sets_of

# Vectors of a block's share of a set, and the most threads that take it; vectors with statistics of their own need
# registers for these, so that fewer threads have to do.
LADDER = ((64, WARP), (256, 128), (2048, 256), (4096, 512), (8192, 1024))
BUNDLES = ((64, WARP), (256, 128), (2048, 256))
SHARE = 2048  # vectors of a block, beyond which a cluster shares the set: sets are few, multiprocessors many


def held_configs(s: Sets, dtype: str) -> Iterator[Config]:
    """The configs for sets that fit in registers, the default first. All of them sum a set in one order."""
    assert s.held is not None
    ladder = LADDER if s.stats == 1 else BUNDLES
    cluster = next((c for c in (1, 2, 4) if s.held <= c * SHARE), MAX_CLUSTER)
    share = -(-s.held // cluster)
    most = next((threads for limit, threads in ladder if share <= limit), None)
    if most is None:
        return
    lanes = max(lanes_for(share, most), WARP)
    deal = Config(lanes, -(-share // lanes), cluster)
    found = [
        attrs.evolve(deal, threads=threads, resident=resident)
        for threads in ((128, 256) if lanes == WARP else (lanes,))
        for resident in (1, 2, 3, 4, 8)
    ]
    found.sort(key=lambda config: (abs(config.threads * config.resident - LESS_BUSY), -config.resident))
    yield from (config for config in found if excluded(config, s, dtype) is None)


def walk_configs(s: Sets, dtype: str) -> Iterator[Config]:
    """The same for sets that are read twice."""
    lanes, chunks = (512, 4) if s.stats == 1 else (256, 2)
    for resident in (2, 1, 3, 4):
        config = Config(lanes, chunks, MAX_CLUSTER, lanes, resident)
        if excluded(config, s, dtype) is None:
            yield config


class GroupNormHeld(Kernel):
    """Sets in registers, one read and one write of each element: wins wherever a set fits.

    A set is shared by a warp (no barrier at all), by a block or, beyond 2048 vectors, by a cluster of up to 8 blocks.
    """

    archs = ARCHS
    pass_configs = PASSES

    def refuse(self, call: Call, device: Device) -> str | None:
        s = strided_channels(call) or sets_in(call)
        if isinstance(s, str):
            return s
        if next(held_configs(s, call["T"]), None) is None:
            return f"a set of {s.held} vectors fits in no cluster's registers"
        return None

    def configs(self, call: Call, device: Device) -> Iterator[Config]:
        s = sets_in(call)
        assert not isinstance(s, str)
        return held_configs(s, call["T"])

    def workspace(self, call: Call, config: Config) -> list[Scratch]:
        return scratch(call)

    def program(self, static: Static, config: Config, device: Device) -> Any:
        return instance_program(static, config, held=True)


class GroupNormWalk(Kernel):
    """A cluster walks its set twice, for the statistics and for the elements: the last resort, for sets of any size."""

    archs = ARCHS
    pass_configs = PASSES

    def refuse(self, call: Call, device: Device) -> str | None:
        s = strided_channels(call) or sets_in(call)
        if isinstance(s, str):
            return s
        if s.held is None or s.held >= FARTHEST:
            return "a set has 2**31 - 2**17 vectors or more"
        return refuse_served(GroupNormHeld(), call, device)

    def configs(self, call: Call, device: Device) -> Iterator[Config]:
        s = sets_in(call)
        assert not isinstance(s, str)
        return walk_configs(s, call["T"])

    def workspace(self, call: Call, config: Config) -> list[Scratch]:
        return scratch(call)

    def program(self, static: Static, config: Config, device: Device) -> Any:
        return instance_program(static, config, held=False)


def instance_program(static: Static, config: Config, held: bool) -> Any:
    names = dict(static.values)
    forms = {name: form for name, form in static.tensors if name in ("x", "y")}
    s = sets_of(forms, names.get("num_groups", forms["x"].shape[1]))
    assert not isinstance(s, str)
    return program(static, config, s, held=held, given=False, moments=static.tensor("running_mean") is not None)


def sets_in(call: Call) -> Sets | str:
    """The sets of a call, or why it has none that can be walked."""
    if not call.params.get("use_input_stats", True):
        return "the statistics are given"
    return sets_of(forms_of(call), call.params.get("num_groups", call["C"]))


def strided_channels(call: Call) -> str | None:
    """Which tensor of ``[C]`` has gaps, if one has."""
    names = (n for n, m in call.inputs.items() if m is not None and len(m.shape) == 1 and strided(m, 1))
    return next((f"{name} is not contiguous" for name in names), None)


def forms_of(call: Call, names: tuple[str, ...] = ("x", "y")) -> Mapping[str, Form]:
    """The forms of tensors, all of their sizes fixed."""
    metas = {**call.inputs, **call.outputs}
    return {n: Form(m.dtype, m.shape, m.strides) for n in names if (m := metas[n]) is not None}


def scratch(call: Call) -> list[Scratch]:
    """Mean and variance of each channel of each instance, where running statistics are made of them."""
    if call.inputs.get("running_mean") is None:
        return []
    return [Scratch((2 * call["B"] * call["C"],), "float32")]
