"""Compiled programs: a cache in the process and one on disk that processes share. Core knows TileLang only here.

A program is keyed by content: the kernel sources, what is static of the call, the config, the target and the versions.
On disk it is a folder ``<key>/`` with the library and a description that carries the library's digest; it is written
beside its place and moved there whole, and read only if the digest holds.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import multiprocessing
import os
import platform
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from functools import cache, cached_property, partial, reduce
from importlib import metadata
from pathlib import Path
from typing import Any

import attrs

from tileops.core import kernel as contract
from tileops.core.errors import BackendError, CompileError
from tileops.core.kernel import ALIGNMENT, Device, Form, Kernel, Static

Target = Mapping[str, str]


@attrs.frozen(eq=False)
class Recipe:
    """What a program is made from. Its ``key`` stands for all of it, the sources and versions too."""

    kernel: Kernel
    static: Static
    config: Any
    device: Device
    target: Target

    @cached_property
    def key(self) -> str:
        cls = type(self.kernel)
        described = (
            cls.__module__,
            cls.__qualname__,
            self.static,
            self.config,
            self.device,
            sorted(self.target.items()),
        )
        parts = (*map(repr, described), sources_digest(cls.__module__), _versions())
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:40]


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


def loaded(key: str) -> Program | None:
    """A program that this process holds already."""
    return _programs.get(key)


def load(recipe: Recipe) -> Program:
    """The program from memory, from disk, or compiled; raises CompileError or BackendError."""
    key = recipe.key
    found = _programs.get(key)
    if found is not None:
        return found
    with _lock:
        lock = _locks.setdefault(key, threading.Lock())
    with lock:
        if key not in _programs:
            module = _module(recipe)
            _programs[key] = Program(key, module["main"], library=module)
    return _programs[key]


def _module(recipe: Recipe) -> Any:
    """The loaded library; one that this host can't load, as after a change of its system, is made again."""
    load_module = _tvm_ffi().load_module
    library = compile_only(recipe)
    try:
        return load_module(str(library))
    except Exception:
        shutil.rmtree(library.parent)
        return load_module(str(compile_only(recipe)))


def compile_only(recipe: Recipe) -> Path:
    """The program's library on disk, compiled where it isn't there; needs no GPU."""
    return _on_disk(recipe.key, partial(_compile, recipe))


def build(recipes: Iterable[Recipe], workers: int | None = None) -> Iterator[tuple[Recipe, str | None]]:
    """Compile to disk what isn't there, in worker processes: each recipe as it is done, with its failure.

    What is finished when the caller stops stays; needs no GPU.
    """
    todo = []
    for recipe in {r.key: r for r in recipes}.values():
        if _intact(cache_dir() / recipe.key):
            yield recipe, None
        else:
            todo.append(recipe)
    if not todo:
        return
    workers = min(len(todo), workers or os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _end_with_parent) as pool:
        done = {pool.submit(_failure_of, recipe): recipe for recipe in todo}
        try:
            for future in as_completed(done):
                yield done[future], future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _end_with_parent() -> None:
    """A worker whose parent was killed would wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _failure_of(recipe: Recipe) -> str | None:
    try:
        compile_only(recipe)
    except Exception as e:
        return str(e)
    return None


def tensors(static: Static) -> tuple[dict[str, Any], dict[str, Any]]:
    """TileLang declarations of a program's tensors by name, and its symbolic sizes by name (``"M"``, ``"B[0]"``)."""
    import tilelang.language as T

    sizes: dict[str, Any] = {}

    def size(axis: int | str) -> Any:
        if isinstance(axis, int):
            return axis
        return sizes.setdefault(axis, T.dynamic("".join(c for c in axis if c.isalnum() or c == "_")))

    def declare(form: Form) -> Any:
        if not form.shape:
            return T.Tensor([1], form.dtype)  # as a launch gives it: TileLang 0.1.12 knows no tensor without axes
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
    """Of the contract and of a kernel's module with the modules beside it that it imports."""
    folder = Path(str(sys.modules[module].__file__)).parent
    sources: dict[str, Path] = {}
    todo = [module]
    while todo:
        name = todo.pop()
        file = getattr(sys.modules.get(name), "__file__", None)
        if file and name not in sources and Path(file).parent == folder:
            sources[name] = Path(file)
            todo += _imported(name, sources[name])
    digest = hashlib.sha256(Path(contract.__file__).read_bytes() + Path(__file__).read_bytes())
    for name in sorted(sources):
        digest.update(name.encode() + sources[name].read_bytes())
    return digest.hexdigest()


def _imported(module: str, source: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(source.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            beside = "." * node.level + (node.module or "")
            origin = importlib.util.resolve_name(beside, sys.modules[module].__package__ or "")
            yield from (origin, *(f"{origin}.{alias.name}" for alias in node.names))


@cache
def _versions() -> str:
    found = [platform.machine()]
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


def _compile(recipe: Recipe, into: Path) -> None:
    global compilations
    tilelang = _tilelang()
    kernel, static, config, target = recipe.kernel, recipe.static, recipe.config, recipe.target
    passes = {getattr(tilelang.PassConfigKey, name): value for name, value in kernel.pass_configs.items()}
    with _quiet(tilelang):
        function = _aligned(kernel.program(static, config, recipe.device))
        try:
            compiled = tilelang.compile(function, target=dict(target), execution_backend="tvm_ffi", pass_configs=passes)
            compiled.adapter.get_exportable_executable().export_library(str(into / "program.so"))
        except Exception as e:
            raise CompileError(_failure(recipe, function, e)) from e
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


def _aligned(function: Any) -> Any:
    """The function with a test of its tensors' addresses before it launches.

    Kernels access 16 bytes at once. At an address that is no multiple of 16 that would be an error of the device, after
    which nothing runs in this process any more.
    """
    tirx = _tilelang().tvm.tirx
    addresses = [tirx.reinterpret("uint64", function.buffer_map[p].data) for p in function.params]
    odd = tirx.bitwise_and(reduce(tirx.bitwise_or, addresses), tirx.const(ALIGNMENT - 1, "uint64"))
    error = tirx.StringImm("RuntimeError"), [tirx.StringImm(f"an address is no multiple of {ALIGNMENT}")]
    # Failing in a branch: as a condition of all that follows, TileLang would reason about it for minutes.
    refusal = tirx.AssertStmt(tirx.const(False, "bool"), *error)
    test = tirx.IfThenElse(tirx.NE(odd, tirx.const(0, "uint64")), refusal, None)
    root, block = function.body, function.body.block
    body = tirx.SeqStmt([test, block.body])
    parts = block.iter_vars, block.reads, block.writes, block.name_hint, body, block.init, block.alloc_buffers
    tested = type(block)(*parts, block.match_buffers, block.annotations)
    return function.with_body(type(root)(root.iter_values, root.predicate, tested))


def _failure(recipe: Recipe, function: Any, e: Exception) -> str:
    static, config = recipe.static, recipe.config
    with tempfile.NamedTemporaryFile("w", prefix="tileops-", suffix=".txt", delete=False) as source:
        source.write(f"{static}\n{config}\n\n{function}\n\n{e}\n")
    lines = str(e).strip().splitlines() or [type(e).__name__]
    message = next((line for line in lines if "error" in line.lower()), lines[-1])
    name = type(recipe.kernel).__qualname__
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
