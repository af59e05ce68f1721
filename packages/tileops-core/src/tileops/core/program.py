"""Compiled programs: a cache in the process and one on disk that processes share. Core knows TileLang only here.

A program is keyed by content: the kernel sources, what is static of the call, the config, the target and the versions.
On disk it is a folder ``<key>/`` with the library and a description that carries the library's digest; it is written
beside its place and moved there whole, and read only if the digest holds.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import attrs

from tileops.core import kernel as contract
from tileops.core.errors import BackendError, CompileError
from tileops.core.kernel import Device, Form, Kernel, Static

Target = Mapping[str, str]
_DISTRIBUTIONS = ("tilelang", "tilelang_musa", "apache-tvm-ffi")


@attrs.define(eq=False)
class Program:
    """A loaded program. ``main`` takes tensors in the prim_func's order; ``ready`` names the devices it has run on."""

    key: str
    main: Callable[..., None]
    ready: set[int] = attrs.field(factory=set)
    library: Any = None


_programs: dict[str, Program] = {}
_locks: dict[str, threading.Lock] = {}
_lock = threading.Lock()
compilations = 0  # of this process; tests count them


def cache_dir() -> Path:
    """Where programs are kept: ``TILEOPS_CACHE_DIR``, else the platform's cache folder."""
    import platformdirs

    return Path(os.environ.get("TILEOPS_CACHE_DIR") or platformdirs.user_cache_dir("tileops")) / "programs"


def stored() -> Iterator[Path]:
    """The folder of each program on disk."""
    home = cache_dir()
    return (p for p in sorted(home.iterdir()) if (p / "program.json").is_file()) if home.is_dir() else iter(())


def key_of(kernel: Kernel, static: Static, config: Any, device: Device, target: Target) -> str:
    """The content key of a program."""
    cls = type(kernel)
    described = (cls.__module__, cls.__qualname__, static, config, device, sorted(target.items()))
    parts = (*map(repr, described), sources_digest(cls.__module__), _versions())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:40]


def loaded(key: str) -> Program | None:
    """A program that this process holds already."""
    return _programs.get(key)


def load(kernel: Kernel, static: Static, config: Any, device: Device, target: Target) -> Program:
    """The program from memory, from disk, or compiled; raises CompileError or BackendError."""
    key = key_of(kernel, static, config, device, target)
    found = _programs.get(key)
    if found is not None:
        return found
    with _lock:
        lock = _locks.setdefault(key, threading.Lock())
    with lock:
        if key not in _programs:
            library = _on_disk(key, lambda into: _compile(kernel, static, config, device, target, into))
            module = _tvm_ffi().load_module(str(library))
            _programs[key] = Program(key, module["main"], library=module)
    return _programs[key]


def compile_only(kernel: Kernel, static: Static, config: Any, device: Device, target: Target) -> Path:
    """The program's library on disk, compiled where it isn't there; needs no GPU."""
    key = key_of(kernel, static, config, device, target)
    return _on_disk(key, lambda into: _compile(kernel, static, config, device, target, into))


def tensors(static: Static) -> tuple[dict[str, Any], dict[str, Any]]:
    """TileLang declarations of a program's tensors by name, and its symbolic sizes by name (``"M"``, ``"B[0]"``)."""
    import tilelang.language as T

    sizes: dict[str, Any] = {}

    def size(axis: int | str) -> Any:
        if isinstance(axis, int):
            return axis
        return sizes.setdefault(axis, T.dynamic("".join(c for c in axis if c.isalnum() or c == "_")))

    def declare(form: Form) -> Any:
        shape = [size(axis) for axis in form.shape]
        strides: list[Any] = []
        for i in reversed(range(len(shape))):
            given = form.strides[i]
            packed = 1 if i == len(shape) - 1 else strides[0] * shape[i + 1]
            strides.insert(0, packed if given is None else given)
        return T.Tensor(shape, form.dtype) if form.packed else T.StridedTensor(shape, strides, form.dtype)

    return {name: declare(form) for name, form in static.tensors}, sizes


@cache
def sources_digest(module: str) -> str:
    """Of all sources beside a kernel's module and of the contract: whatever its programs may come from."""
    digest = hashlib.sha256(Path(contract.__file__).read_bytes() + Path(__file__).read_bytes())
    for source in sorted(Path(str(sys.modules[module].__file__)).parent.glob("*.py")):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()


@cache
def _versions() -> str:
    found = []
    for name in _DISTRIBUTIONS:
        with suppress(metadata.PackageNotFoundError):
            found.append(f"{name}={metadata.version(name)}")
    return " ".join(found)


def _tvm_ffi() -> Any:
    """tvm_ffi with the loaders that TileLang's runtime registers."""
    _tilelang()
    import tvm_ffi

    return tvm_ffi


def _tilelang() -> Any:
    try:
        import tilelang
    except ImportError as e:
        mend = 'pip install "tileops-core[cuda]" (on a MUSA image: the vendor\'s tilelang_musa)'
        raise BackendError(f"kernels need TileLang, which can't be imported ({e}); {mend}") from None
    return tilelang


def _compile(kernel: Kernel, static: Static, config: Any, device: Device, target: Target, into: Path) -> None:
    global compilations
    tilelang = _tilelang()
    passes = {getattr(tilelang.PassConfigKey, name): value for name, value in kernel.pass_configs.items()}
    with _quiet(tilelang):
        function = kernel.program(static, config, device)
        try:
            compiled = tilelang.compile(function, target=dict(target), execution_backend="tvm_ffi", pass_configs=passes)
            compiled.adapter.get_exportable_executable().export_library(str(into / "program.so"))
        except Exception as e:
            raise CompileError(_failure(kernel, static, config, function, e)) from e
    compilations += 1
    library = (into / "program.so").read_bytes()
    described = {
        "digest": hashlib.sha256(library).hexdigest(),
        "kernel": type(kernel).__qualname__,
        "config": repr(config),
        "static": repr(static),
        "target": dict(target),
        "versions": _versions(),
    }
    (into / "program.json").write_text(json.dumps(described, indent=1))


def _failure(kernel: Kernel, static: Static, config: Any, function: Any, e: Exception) -> str:
    with tempfile.NamedTemporaryFile("w", prefix="tileops-", suffix=".txt", delete=False) as source:
        source.write(f"{static}\n{config}\n\n{function}\n\n{e}\n")
    lines = str(e).strip().splitlines() or [type(e).__name__]
    message = next((line for line in lines if "error" in line.lower()), lines[-1])
    name = type(kernel).__qualname__
    return f"{static.op}: {name} with {config} did not compile: {message}\n  source and full message: {source.name}"


@contextmanager
def _quiet(tilelang: Any) -> Any:
    """No progress lines, and no second cache of TileLang's own."""
    import logging

    logger = logging.getLogger("tilelang")
    level = logger.level
    enabled = tilelang.is_cache_enabled()
    logger.setLevel(logging.WARNING)
    tilelang.disable_cache()
    try:
        yield
    finally:
        logger.setLevel(level)
        if enabled:
            tilelang.enable_cache()


def _on_disk(key: str, make: Callable[[Path], None]) -> Path:
    """The library of a key, made by one process while others wait. A damaged entry is made again."""
    import filelock  # here, since it is slow to import and needed only where a program is made

    home = cache_dir()
    place = home / key
    if _intact(place):
        return place / "program.so"
    try:
        home.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(home / f"{key}.lock"):
            if not _intact(place):
                with tempfile.TemporaryDirectory(dir=home, prefix=".new-") as fresh:
                    made = Path(fresh) / key
                    made.mkdir()
                    make(made)
                    if place.exists():
                        shutil.rmtree(place)
                    made.rename(place)
    except OSError as e:
        return _in_private(key, make, e)
    return place / "program.so"


def _in_private(key: str, make: Callable[[Path], None], reason: OSError) -> Path:
    """Where the cache can't be written, a folder that goes with the process."""
    import atexit
    import warnings

    warnings.warn(f"programs are kept for this process only: {reason}; set TILEOPS_CACHE_DIR", stacklevel=2)
    folder = Path(tempfile.mkdtemp(prefix="tileops-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    make(folder)
    return folder / "program.so"


def _intact(place: Path) -> bool:
    try:
        described = json.loads((place / "program.json").read_text())
        return bool(hashlib.sha256((place / "program.so").read_bytes()).hexdigest() == described["digest"])
    except (OSError, ValueError, KeyError, TypeError):
        return False
