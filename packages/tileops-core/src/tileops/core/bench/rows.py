"""One row measured: ours and its rivals verified on the inputs that are then timed, side by side in one run."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import subprocess
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import attrs
import torch

from tileops.core.accuracy import absolute, collect, compare, oracle, yardstick
from tileops.core.backend import gpu_backend
from tileops.core.bench import SCHEMA
from tileops.core.bench.host import gpu_cost
from tileops.core.bench.rivals import Missing, rivals_of
from tileops.core.bench.timing import calls_of_a_burst, cool, copies_for_cold_l2, record
from tileops.core.check import Call
from tileops.core.errors import TileOpsError
from tileops.core.families import families, op_class
from tileops.core.inputs import make_inputs
from tileops.core.roofline import board_of, bound, profile

HOST_BELOW_US = 20  # of device time: above, no caller waits for the host


def measure(call: Call, index: int = 0, seed: int = 0) -> dict[str, Any]:
    """The result of one row on a CUDA device; a failure of ours or of a rival is part of it."""
    backend = gpu_backend("cuda")
    assert backend is not None
    device = torch.device("cuda", index)
    board = board_of(backend.name(index))
    limit = bound(call, profile(board) if board else None)
    op: Any = op_class(call.entry)(**call.params)
    row: dict[str, Any] = {
        "case": call.id,
        "op": call.entry.name,
        "tree": sources_digest(),
        "label": (call.id or "").partition("/")[2],
        "dtypes": [call.indices[n] for n, i in call.entry.signature.indices.items() if i.kind == "DType"],
        "flops": limit.flops,
        "bytes": limit.bytes,
        "bound_us": limit.seconds and limit.seconds * 1e6,
        "bound_by": limit.by,
    }
    l2_bytes = backend.device(index).l2_bytes
    copies = copies_for_cold_l2(limit.bytes, l2_bytes)
    row["l2"] = "cold" if copies * limit.bytes > 2 * l2_bytes else "warm"
    inputs = [make_inputs(call, device, seed + i) for i in range(copies)]
    truth = oracle(call, inputs[0]), yardstick(call, inputs[0])
    extra = absolute(call, inputs[0]) if call.entry.accuracy else None

    def error(returned: Any) -> float:
        return compare(call, collect(call, returned, inputs[0]), *truth, inputs[0], extra).error

    bursts = {}
    try:
        row["error"] = error(op(*inputs[0].values()))
        row["kernel"] = str(op.explain(*inputs[0].values()).kernel)
        if row["error"] > 1:
            return row | {"status": "failed", "reason": "the result is wrong"}
        ours: list[Callable[[], Any]] = [partial(op, *i.values()) for i in inputs]
        count = calls_of_a_burst(ours[0])
        bursts["tileops"] = record(ours, count)
    except TileOpsError as e:
        return row | {"status": "failed", "reason": str(e)}
    rivals: dict[str, Any] = {}
    for name, make in rivals_of(call.entry, "cuda").items():
        if isinstance(make, str):
            rivals[name] = {"status": "missing", "reason": make}
            continue
        try:
            calls = [make(call, i) for i in inputs]
            wrong = error(calls[0]())
            if wrong > 4:  # another rounding than ours is no fault of theirs; another result is
                rivals[name] = {"status": "failed", "reason": f"its error is {wrong:.3g} of the bound", "error": wrong}
                continue
            bursts[name] = record(calls, count)
            rivals[name] = {"status": "ok", "error": wrong}
        except Missing as e:
            rivals[name] = {"status": "missing", "reason": str(e)}
        except Exception as e:
            rivals[name] = {"status": "failed", "reason": f"{type(e).__name__}: {str(e).splitlines()[0][:200]}"}
    times = cool(bursts, count)
    mine = times.pop("tileops")
    for name, took in times.items():
        rivals[name]["us"] = took.median
    seconds = mine.median * 1e-6
    row |= {
        "status": "ok",
        "us": attrs.asdict(mine),
        "tflops": limit.flops / seconds / 1e12,
        "gbps": limit.bytes / seconds / 1e9,
        "clock_mhz": _clock(),
        "rivals": rivals,
    }
    if times:
        row["fastest"] = min(times, key=lambda n: times[n].median)
        row["ratio"] = times[row["fastest"]].median / mine.median
    if mine.median < HOST_BELOW_US:
        row["host"] = gpu_cost(call, str(device))
        row["host_us"] = row["host"]["cached"]
        if "torch" in row["host"]:
            row["host_ratio"] = row["host_us"] / row["host"]["torch"]
    return row


def document(rows: list[Mapping[str, Any]], index: int = 0) -> dict[str, Any]:
    """A result document with the environment it was measured in."""
    backend = gpu_backend("cuda")
    assert backend is not None
    name = backend.name(index)
    return {
        "schema": SCHEMA,
        "board": board_of(name) or name,
        "environment": {
            "gpu": name,
            "driver": _smi("driver_version"),
            "cuda": torch.version.cuda,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "tilelang": _version("tilelang"),
            "flashinfer": _version("flashinfer-python"),
            "protocol": "cool: bursts of 12 calls or 1 ms in a CUDA graph, 40 ms pauses, alternating rounds",
        },
        "tree": sources_digest(),
        "rows": rows,
    }


@cache
def sources_digest() -> str:
    """Of the packages' sources and specs that were measured."""
    digest = hashlib.sha256()
    roots = [Path(__file__).parents[1], *(path.parent for path in families().values())]
    for root in roots:
        for source in sorted((*root.rglob("*.py"), *root.rglob("*.yaml"))):
            digest.update(source.relative_to(root).as_posix().encode() + source.read_bytes())
    return digest.hexdigest()[:16]


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _clock() -> int | None:
    found = _smi("clocks.sm")
    return int(found.split()[0]) if found and found.split()[0].isdigit() else None


def _smi(field: str) -> str | None:
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout
        return found.splitlines()[0].strip()
    except (OSError, subprocess.SubprocessError, IndexError):
        return None
