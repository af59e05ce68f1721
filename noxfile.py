"""The commands of the project; `nox -l` lists them. What follows `--` goes on to the command.

They share the workspace environment `.venv`, made from `uv.lock` and renewed when the lock or a pyproject file changed.
With `TILEOPS_ENV=system` they take the environment that nox itself runs in, as it is.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path

import nox

nox.needs_version = ">=2024.10"
nox.options.default_venv_backend = "none"
nox.options.sessions = ["check", "test"]

ROOT = Path(__file__).parent
FAMILIES = ("gemm", "attention", "norm")
MEMBERS = sorted(f"packages/{path.parent.name}" for path in ROOT.glob("packages/*/pyproject.toml"))
EDITABLE = ("--quiet", "--no-deps", *(f"--editable={member}" for member in MEMBERS))
EXPORT = ("export", "--quiet", "--frozen", "--no-emit-workspace", "--package=tileops", "--package=tileops-workspace")
CHECKS = (
    ("ci/lock.py", "--check"),
    ("-m", "ruff", "check"),
    ("-m", "ruff", "format", "--check"),
    ("-m", "mypy"),
    ("-c", "from importlinter.cli import lint_imports_command as main; main(['--no-logo'])"),
    ("-m", "tileops.core.cli", "check", "specs"),
)
MENDS = {
    "cuda": "run it on a host with an NVIDIA GPU and its driver (`nvidia-smi` shows both)",
    "musa": "run it in the vendor's image on a Moore Threads GPU (ci/Dockerfile.musa)",
}
SYSTEM = os.environ.get("TILEOPS_ENV") == "system"
# A host that has the packages on no path: they run from the tree, without metadata.
BARE = SYSTEM and not any(found.name == "tileops-core" for found in distributions())


@nox.session
def check(session: nox.Session) -> None:
    """Lint, types, import contracts, the lock and the specs."""
    python = environment(session)
    for command in CHECKS:
        run(session, python, *command)


@nox.session
def test(session: nox.Session) -> None:
    """Every test that needs no GPU."""
    test_cpu(session, environment(session))


@nox.session(name="test-kernels")
def test_kernels(session: nox.Session) -> None:
    """What the kernels refuse and whether they compile: needs TileLang and nvcc, no GPU."""
    python = environment(session, "cuda")
    if not SYSTEM:
        run(session, python, "-c", "import tilelang")
    tests = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("packages/*/tests/test_kernels_*.py"))
    pytest(session, python, "-m", "not cuda and not musa", *tests)


@nox.session(name="test-torch29")
def test_torch29(session: nox.Session) -> None:
    """The same on the oldest torch that is supported, in an environment of its own."""
    test_cpu(session, environment(session, at=".nox/torch29", torch="2.9.1"))


@nox.session(name="test-python")
@nox.parametrize("version", ("3.10", "3.11", "3.12", "3.13"))
def test_python(session: nox.Session, version: str) -> None:
    """The same on each supported Python, in environments of their own."""
    command = [uv(session), "python", "find", "--no-project", "--no-python-downloads", version]
    found = subprocess.run(command, capture_output=True, text=True)
    if found.returncode:
        session.error(f"no Python {version} here; mend: put one on PATH, or run `uv python install {version}`")
    test_cpu(session, environment(session, at=f".nox/python-{version}", base=found.stdout.strip()))


@nox.session(name="test-cuda")
@nox.parametrize("family", FAMILIES)
def test_cuda(session: nox.Session, family: str) -> None:
    """The tests that need an NVIDIA GPU."""
    test_device(session, "cuda", family)


@nox.session(name="test-musa")
@nox.parametrize("family", FAMILIES)
def test_musa(session: nox.Session, family: str) -> None:
    """The tests that need a Moore Threads GPU."""
    test_device(session, "musa", family)


@nox.session(name="bench-cuda")
@nox.parametrize("family", FAMILIES)
def bench_cuda(session: nox.Session, family: str) -> None:
    """Every row of the family against its rivals, on an NVIDIA GPU."""
    bench_device(session, "cuda", family)


@nox.session(name="bench-musa")
@nox.parametrize("family", FAMILIES)
def bench_musa(session: nox.Session, family: str) -> None:
    """Every row of the family against its rivals, on a Moore Threads GPU."""
    bench_device(session, "musa", family)


@nox.session
def demo(session: nox.Session) -> None:
    """A first look that needs no GPU."""
    run(session, environment(session), "-m", "tileops.core.cli", "demo", *session.posargs)


@nox.session
def build(session: nox.Session) -> None:
    """All wheels and sdists into dist/, their content checked."""
    python, dist = environment(session), ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    session.run(uv(session), "build", "--quiet", "--all-packages", "--out-dir", str(dist))
    os.environ["TILEOPS_DIST"] = str(dist)
    pytest(session, python, "packages/tileops-core/tests/test_packaging.py")


def test_cpu(session: nox.Session, python: str) -> None:
    workers = ("-n", "auto") if not SYSTEM or find_spec("xdist") else ()
    pytest(session, python, "-m", "not cuda and not musa", *workers)


def test_device(session: nox.Session, backend: str, family: str) -> None:
    python = device_environment(session, backend)
    if backend == "cuda":
        run(session, python, "-m", "tileops.core.cli", "cache", "build", "--family", family)  # on all cores
    pytest(session, python, "-m", backend, f"packages/tileops-{family}/tests")


def bench_device(session: nox.Session, backend: str, family: str) -> None:
    python = device_environment(session, backend, "bench")
    kept = session.posargs or ("--json", f".nox/bench/{backend}-{family}.json")
    run(session, python, "-m", "tileops.core.cli", "bench", "--backend", backend, "--family", family, *kept)


def pytest(session: nox.Session, python: str, *arguments: str) -> None:
    run(session, python, "-m", "pytest", *arguments, *session.posargs)


def run(session: nox.Session, python: str, *arguments: str) -> None:
    sources = [str(ROOT / member / "src") for member in MEMBERS] if BARE else []
    path = os.pathsep.join([*sources, *filter(None, [os.environ.get("PYTHONPATH")])])
    session.run(python, *arguments, env={"PYTHONPATH": path or None})


def uv(session: nox.Session) -> str:
    # Beside the interpreter first: there pip puts it, on PATH or not.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return shutil.which("uv", path=path) or session.error("uv is not installed; mend: pip install uv")


def environment(
    session: nox.Session, *groups: str, at: str = ".venv", base: str = sys.executable, torch: str = "locked"
) -> str:
    """The interpreter of the environment ``at``, which is made or renewed where it isn't what the lock says.

    A group that was once asked for stays: who runs the GPU's sessions keeps TileLang through a ``check``.
    """
    if SYSTEM:
        return sys.executable
    home = ROOT / at
    python, stamp, requirements = home / "bin/python", home / "tileops.stamp", home / "requirements.txt"
    held = stamp.read_text().split() if stamp.exists() and python.exists() else []
    wanted = [digest(torch), *sorted({*groups, *held[1:]})]
    if held == wanted:
        return str(python)

    tool = uv(session)
    session.run(sys.executable, "ci/lock.py", "--check", silent=True)
    if not python.exists():
        session.run(tool, "venv", "--quiet", "--clear", "--python", base, at)
    stamp.unlink(missing_ok=True)
    export = (*EXPORT, *(f"--group={group}" for group in wanted[1:]), "--output-file", str(requirements))
    if torch == "locked":
        session.run(tool, *export)
        session.run(tool, "pip", "sync", "--python", str(python), "--require-hashes", str(requirements))
    else:
        # Its inductor needs setuptools, which it names for newer Pythons only.
        session.run(tool, *export, "--prune=torch", "--no-hashes")
        install(session, str(python), "--exact", "--requirements", str(requirements), f"torch=={torch}", "setuptools")
    install(session, str(python), *EDITABLE)
    stamp.write_text(" ".join(wanted))
    return str(python)


def device_environment(session: nox.Session, backend: str, *groups: str) -> str:
    if reason := driver_fault(backend):
        session.error(f"no {backend} device: {reason}; mend: {MENDS[backend]}")
    python = environment(session, "cuda", *groups) if backend == "cuda" else image_environment(session)
    if reason := torch_fault(backend, python):
        session.error(f"no {backend} device: {reason}; mend: {MENDS[backend]}")
    return python


def image_environment(session: nox.Session) -> str:
    """The vendor's image that nox runs in: what it lacks is added, what it holds stays as it is."""
    if not SYSTEM:
        held = ROOT / ".nox/image.txt"
        held.parent.mkdir(exist_ok=True)
        # Without the system's own packages, whose versions may be ones that no Python tool reads.
        readable = re.compile(r"[\d.]+((a|b|rc|\.post|\.dev)\d+)*(\+[\w.]+)?").fullmatch
        pins = (f"{found.name}=={found.version}\n" for found in distributions() if readable(found.version))
        held.write_text("".join(pins))
        core = "packages/tileops-core/pyproject.toml"
        install(session, sys.executable, "--constraints", str(held), "--requirements", core, "--group", "dev")
        install(session, sys.executable, *EDITABLE)
    return sys.executable


def install(session: nox.Session, python: str, *what: str) -> None:
    session.run(uv(session), "pip", "install", "--python", python, *what)


@cache
def driver_fault(backend: str) -> str:
    """Why no device can be here, asked before anything is installed."""
    if backend == "musa":
        return "" if find_spec("torch_musa") else "torch_musa is not installed"
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "the NVIDIA driver is not installed"
    count = ctypes.c_int()
    found = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value
    return "" if found else "the NVIDIA driver shows no GPU"


@cache
def torch_fault(backend: str, python: str) -> str:
    command = [python, "-c", f"import torch; torch.zeros(1, device='{backend}')"]
    probe = subprocess.run(command, capture_output=True, text=True)
    return probe.stderr.strip().splitlines()[-1] if probe.returncode else ""


def digest(torch: str) -> str:
    """Of all that decides what an environment holds."""
    files = ["uv.lock", "pyproject.toml", *(f"{member}/pyproject.toml" for member in MEMBERS)]
    return hashlib.sha256(b"".join([torch.encode(), *((ROOT / name).read_bytes() for name in files)])).hexdigest()
