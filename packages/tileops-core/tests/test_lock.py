"""The lock: stripped without loss, held to its form, renewed whole or not at all."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
MEND = "mend: python ci/lock.py"

_spec = importlib.util.spec_from_file_location("lock", ROOT / "ci/lock.py")
assert _spec
assert _spec.loader
lock = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(lock)

ADDRESSED = """\
[[package]]
name = "torch"
version = "2.13.0+cu130"
source = { registry = "https://mirror.invalid/simple" }
dependencies = [
    { name = "numpy", version = "2.2.6", source = { registry = "../wheels" }, marker = "python_full_version < '3.11'" },
]
sdist = { url = "https://mirror.invalid/a/torch-2.13.0%2Bcu130.tar.gz", hash = "sha256:00", size = 1 }
wheels = [
    { path = "torch-2.13.0+cu130-cp311-none-any.whl", hash = "sha256:01" },
]

[[package]]
name = "tileops-core"
source = { editable = "packages/tileops-core" }
"""
STRIPPED = """\
[[package]]
name = "torch"
version = "2.13.0+cu130"
source = { registry = "https://index.invalid/simple" }
dependencies = [
    { name = "numpy", version = "2.2.6", source = { registry = "https://index.invalid/simple" }, \
marker = "python_full_version < '3.11'" },
]
sdist = { filename = "torch-2.13.0+cu130.tar.gz", hash = "sha256:00", size = 1 }
wheels = [
    { filename = "torch-2.13.0+cu130-cp311-none-any.whl", hash = "sha256:01" },
]

[[package]]
name = "tileops-core"
source = { editable = "packages/tileops-core" }
"""


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """Two packages that need nothing from outside, with a fresh lock."""
    (tmp_path / "ci").mkdir()
    shutil.copy(ROOT / "ci/lock.py", tmp_path / "ci")
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "top"\nversion = "0"\nrequires-python = ">=3.10"\n'
        '[tool.uv]\npackage = false\nworkspace.members = ["packages/*"]\nsources.a = { workspace = true }\n'
    )
    for name in "ab":
        (tmp_path / "packages" / name).mkdir(parents=True)
        member(tmp_path, name)
    assert run(tmp_path) == (0, "")
    return tmp_path


def member(workspace: Path, name: str, *needs: str) -> None:
    text = f'[project]\nname = "{name}"\nversion = "1"\nrequires-python = ">=3.10"\ndependencies = {list(needs)}\n'
    (workspace / "packages" / name / "pyproject.toml").write_text(text)


def run(workspace: Path, *arguments: str) -> tuple[int, str]:
    command = [sys.executable, "ci/lock.py", *arguments]
    offline = {**os.environ, "UV_OFFLINE": "1"}
    done = subprocess.run(command, cwd=workspace, env=offline, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_strip_keeps_all_but_addresses() -> None:
    assert lock.strip(ADDRESSED) == STRIPPED


def test_strip_is_idempotent() -> None:
    committed = (ROOT / "uv.lock").read_text()
    assert lock.strip(committed) == committed
    assert lock.strip(STRIPPED) == STRIPPED


def test_fresh_lock_passes(workspace: Path) -> None:
    assert run(workspace, "--check") == (0, "")


def test_address_is_an_error(workspace: Path) -> None:
    sound = (workspace / "uv.lock").read_text()
    (workspace / "uv.lock").write_text(sound + ADDRESSED.split("\n\n")[0])
    code, said = run(workspace, "--check")
    assert code == 1
    first = len(sound.splitlines()) + 4
    assert f"error: uv.lock:{first}: 4 lines hold download addresses\n  {MEND}\n" in said


def test_stale_lock_is_one_error(workspace: Path) -> None:
    member(workspace, "b", "a")
    code, said = run(workspace, "--check")
    assert code == 1
    assert said.startswith("error: uv.lock is stale against the pyproject files (uv: ")
    assert said.endswith(f")\n  {MEND}\n")
    assert said.count("error: ") == 1


def test_unreadable_lock_is_one_error(workspace: Path) -> None:
    (workspace / "uv.lock").write_text("<<<<<<< ours\n")
    code, said = run(workspace, "--check")
    assert code == 1
    assert said.startswith("error: uv.lock can't be used: restore it from git (uv: Failed to parse")
    assert said.count("error: ") == 1


def test_missing_lock_is_one_error(workspace: Path) -> None:
    (workspace / "uv.lock").unlink()
    assert run(workspace, "--check") == (1, f"error: uv.lock is missing\n  {MEND}\n")


def test_other_constraints_are_one_error(workspace: Path) -> None:
    (workspace / "ci/constraints.txt").write_text("torch==1.0\n")
    assert run(workspace, "--check") == (1, f"error: ci/constraints.txt differs from uv.lock\n  {MEND}\n")


def test_renewal_mends(workspace: Path) -> None:
    member(workspace, "b", "a")
    assert run(workspace) == (0, "")
    assert run(workspace, "--check") == (0, "")


def test_failed_renewal_changes_nothing(workspace: Path) -> None:
    member(workspace, "b", "no requirement at all")
    before = {path: path.read_bytes() for path in workspace.rglob("*") if path.is_file()}
    code, said = run(workspace)
    assert code == 1
    assert said.startswith("error: ")
    assert {path: path.read_bytes() for path in workspace.rglob("*") if path.is_file()} == before


def test_absent_uv_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock.shutil, "which", lambda *_, **__: None)
    with pytest.raises(SystemExit, match="uv is not installed\n  mend: pip install uv"):
        lock.uv("--version")
