"""``tileops doctor``: what is here and what is missing, each missing thing with its mend. Works without torch."""

from __future__ import annotations

import importlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import attrs
import click
from platformdirs import user_cache_dir
from rich.markup import escape

from tileops.core.cli import ENVIRONMENT, output
from tileops.core.errors import TileOpsError
from tileops.core.families import families, load_spec
from tileops.core.spec.diagnostics import did_you_mean
from tileops.core.toolchain import MCC, NVCC, find_compiler, where

Needed = Literal["everything", "any GPU", "NVIDIA GPUs", "Moore Threads GPUs"]
State = Literal["ok", "missing", "problem", "note"]

VARIABLES = {
    "TILEOPS_CACHE_DIR": "where compiled programs and tuned choices are kept",
    "TILEOPS_DEBUG": "1 checks on the device what only the data can tell",
    "TILEOPS_ENV": "system makes nox use the environment as it is",
    "TILEOPS_FALLBACK": "reference runs the reference where a GPU has no kernel",
    "TILEOPS_TUNE": "1 tunes each new call on first use",
}
_STYLES = {"ok": "green", "missing": "yellow", "problem": "red", "note": "dim"}


@attrs.frozen
class Finding:
    """One line of the table. ``mend`` is there where something is wrong."""

    what: str
    state: State
    found: str
    mend: str | None = None


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def command(as_json: bool) -> None:
    """Say what is here, what is missing, and the mend.

    Exits with 0 if the CPU backend can run; what only GPUs need doesn't count.
    """
    found = examine()
    runs = {needed: not any(f.mend for f in group) for needed, group in found.items()}
    if as_json:
        groups = {needed: [attrs.asdict(f) for f in group] for needed, group in found.items()}
        output.print_json({"cpu": runs["everything"], "findings": groups})
    else:
        _print(found, runs)
    sys.exit(0 if runs["everything"] else ENVIRONMENT)


def examine() -> dict[Needed, list[Finding]]:
    """All findings, by what needs that which they are about."""
    torch_found, torch = _torch()
    return {
        "everything": [_python(), torch_found, *_families(), *_variables()],
        "any GPU": [_cache()],
        "NVIDIA GPUs": [_gpu(), _device(torch, "cuda"), _nvcc(torch), _tilelang("tilelang"), _tvm_ffi()],
        "Moore Threads GPUs": [_torch_musa(torch), _mcc(), _tilelang("tilelang_musa")],
    }


def _print(found: dict[Needed, list[Finding]], runs: dict[Needed, bool]) -> None:
    console = output.console()
    for needed, group in found.items():
        table = output.table("", "=", "", title=f"For {needed}")
        table.show_header = False
        for f in group:
            mend = f"\n[yellow]mend: {escape(f.mend)}[/]" if f.mend else ""
            table.add_row(escape(f.what), f"[{_STYLES[f.state]}]{f.state}[/]", escape(f.found) + mend)
        console.print(table, "")
    kinds: tuple[Needed, ...] = ("NVIDIA GPUs", "Moore Threads GPUs")
    ready = [n for n in kinds if runs["everything"] and runs["any GPU"] and runs[n]]
    console.print("The CPU backend can run." if runs["everything"] else "[red]The CPU backend can't run.[/]")
    console.print(f"Ready for {' and '.join(ready)}." if ready else "Not ready for GPUs.")


# For everything.


def _python() -> Finding:
    return Finding("Python", "ok", f"{platform.python_version()}, {sys.executable}")


def _torch() -> tuple[Finding, Any]:
    """What is known of torch, and torch itself where it can be imported."""
    if find_spec("torch") is None:
        return Finding("torch", "missing", "not installed", "pip install torch"), None
    try:
        torch = importlib.import_module("torch")
    except Exception as e:  # a broken build fails in any way
        why = f"can't be imported: {type(e).__name__}: {e}"
        return Finding("torch", "problem", why, "pip install --force-reinstall torch"), None
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    wanted = next((w for family in families() if (w := _wanted("torch", f"tileops-{family}"))), None)
    finding = _versioned("torch", str(torch.__version__), wanted, f"pip install 'torch{wanted}'")
    return attrs.evolve(finding, found=f"{finding.found}, {built}"), torch


def _families() -> Iterator[Finding]:
    found = families()
    if not found:
        yield Finding("families", "missing", "none is installed", "pip install tileops, or one of tileops-gemm, ...")
    for family, path in found.items():
        name = f"tileops-{family}"
        try:
            count = len(load_spec(path))
        except TileOpsError as e:
            yield Finding(
                name, "problem", f"its spec has faults, the first is {str(e).splitlines()[0]}", f"tileops check {path}"
            )
        else:
            at = output.version(name) or f"from {path.parent}"
            yield Finding(name, "ok", f"{at}, {count} operator{'s' if count > 1 else ''}")


def _cache() -> Finding:
    folder = Path(os.environ.get("TILEOPS_CACHE_DIR") or user_cache_dir("tileops"))
    nearest = next(p for p in (folder, *folder.parents) if p.exists())
    try:
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as e:
        mend = "set TILEOPS_CACHE_DIR to a folder that can be written to"
        return Finding("cache", "problem", f"{folder} can't be written to: {e.strerror}", mend)
    size = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()) if folder.exists() else 0
    return Finding("cache", "ok", f"{folder}, {output.amount(size)}B" if folder.exists() else f"{folder}, not made yet")


def _variables() -> Iterator[Finding]:
    for name, value in sorted(os.environ.items()):
        if name in VARIABLES:
            yield Finding(name, "note", f"'{value}': {VARIABLES[name]}")
        elif name.startswith("TILEOPS_"):
            hint = did_you_mean(name, VARIABLES) or f"known are {', '.join(VARIABLES)}"
            yield Finding(name, "note", f"'{value}': means nothing; {hint}")


# For GPUs.


def _gpu() -> Finding:
    """What the driver shows; torch may see fewer."""
    mend = "a host with an NVIDIA GPU and its driver"
    if shutil.which("nvidia-smi") is None:
        return Finding("GPU", "missing", "nvidia-smi is not on PATH", mend)
    query = _run("nvidia-smi", "--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader") or ""
    gpus = [line.split(", ") for line in query.splitlines() if line.count(", ") == 2]
    if not gpus:
        return Finding("GPU", "missing", "nvidia-smi shows none", mend)
    kinds = {f"{name} (sm_{cap.replace('.', '')})": None for name, cap, _ in gpus}
    return Finding("GPU", "ok", f"{len(gpus)} x {', '.join(kinds)}, driver {gpus[0][2]}")


def _device(torch: Any, kind: str) -> Finding:
    """What the backend says of its device."""
    what = f"{kind} device"
    if torch is None:
        return Finding(what, "missing", "nobody to ask without torch", "pip install torch")
    reason: str | None = importlib.import_module(f"tileops.core.backend.{kind}").available()
    if reason is None:
        return Finding(what, "ok", f"{torch.get_device_module(kind).device_count()} visible to torch")
    found, _, mend = reason.partition("; ")
    return Finding(what, "missing", found, mend)


def _nvcc(torch: Any) -> Finding:
    path = find_compiler(*NVCC)
    wanted = torch.version.cuda if torch is not None else None
    major = (wanted or "13").partition(".")[0]
    mend = f"install CUDA {major}'s compiler, and put nvcc on PATH or set CUDA_HOME"
    if path is None:
        return Finding("nvcc", "missing", where(*NVCC[1:]), mend)
    release = re.search(r"release ([\d.]+)", _run(path, "--version") or "")
    if release is None:
        return Finding("nvcc", "problem", f"{path} doesn't tell its version", mend)
    found = f"{release[1]}, {path}"
    if wanted and release[1].partition(".")[0] != major:
        return Finding("nvcc", "problem", f"{found}; torch is built for CUDA {wanted}", mend)
    return Finding("nvcc", "ok", found)


def _mcc() -> Finding:
    path = find_compiler(*MCC)
    if path is None:
        return Finding("mcc", "missing", where(*MCC[1:]), "the vendor's image has it")
    return Finding("mcc", "ok", path)


def _tilelang(distribution: str) -> Finding:
    """TileLang's build for one kind of GPU; looked for, not imported, which would take seconds."""
    musa = distribution == "tilelang_musa"
    mend = "the vendor's image has it" if musa else 'pip install "tileops-core[cuda]"'
    found = output.version(distribution)
    if found is None:
        return Finding("TileLang", "missing", f"{distribution} is not installed", mend)
    if find_spec("tilelang") is None and find_spec(distribution) is None:
        return Finding("TileLang", "problem", f"{distribution} {found} has no module to import", mend)
    return _versioned("TileLang", f"{found}", None if musa else _wanted("tilelang", "tileops-core"), mend)


def _tvm_ffi() -> Finding:
    found, wanted = output.version("apache-tvm-ffi"), _wanted("apache-tvm-ffi", "tileops-core")
    mend = f"pip install 'apache-tvm-ffi{wanted or ''}'"
    if found is None:
        return Finding("apache-tvm-ffi", "missing", "not installed", mend)
    return _versioned("apache-tvm-ffi", found, wanted, mend)


def _torch_musa(torch: Any) -> Finding:
    if find_spec("torch_musa") is None:
        return Finding("torch_musa", "missing", "not installed", "the vendor's image has it")
    version = output.version("torch_musa") or "of unknown version"
    device = _device(torch, "musa")
    return attrs.evolve(device, what="torch_musa", found=f"{version}, {device.found}")


# How these find out.


def _versioned(what: str, found: str, wanted: str | None, mend: str) -> Finding:
    if wanted and not _admits(wanted, found):
        return Finding(what, "problem", f"{found}, but {wanted} is required", mend)
    return Finding(what, "ok", found)


def _wanted(name: str, by: str) -> str | None:
    """The versions of a package that one of ours requires; None where it has no metadata (a source tree)."""
    try:
        lines = metadata.requires(by) or []
    except metadata.PackageNotFoundError:
        return None
    matches = (re.fullmatch(rf"{re.escape(name)}([<>=!][^;]*?)?\s*(;.*)?", line) for line in lines)
    return next((m[1] for m in matches if m and m[1]), None)


_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    ">=": lambda a, b: a >= b,
    "<=": lambda a, b: a <= b,
    "==": lambda a, b: a == b,
    "<": lambda a, b: a < b,
    ">": lambda a, b: a > b,
}


def _admits(specifier: str, version: str) -> bool:
    """Whether a version's release number satisfies a specifier such as ``>=2.11,<2.14``."""
    clauses = re.findall(r"(>=|<=|==|<|>)\s*([\d.]+)", specifier)
    return all(_COMPARE[how](_release(version), _release(bound)) for how, bound in clauses)


def _release(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(n) for n in match[0].split(".")] if match else []
    while numbers and numbers[-1] == 0:  # 2.9 is 2.9.0
        numbers.pop()
    return tuple(numbers)


def _run(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
