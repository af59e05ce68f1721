"""The commands: a device session without its device, or any without a sound lock, fails with the reason."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FAMILIES = ("gemm", "attention", "norm")


def nox(*arguments: str, root: Path = ROOT, **variables: str) -> tuple[int, str]:
    kept = {name: value for name, value in os.environ.items() if name != "TILEOPS_ENV"}
    command = [sys.executable, "-m", "nox", "--noxfile", str(root / "noxfile.py"), "--non-interactive", *arguments]
    done = subprocess.run(command, env={**kept, **variables}, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("backend", ["cuda", "musa"])
@pytest.mark.parametrize("kind", ["test", "bench"])
def test_absent_device_fails_with_the_reason(kind: str, backend: str) -> None:
    hidden = {"CUDA_VISIBLE_DEVICES": "", "MUSA_VISIBLE_DEVICES": ""}
    code, said = nox("-s", f"{kind}-{backend}", TILEOPS_ENV="system", **hidden)
    assert code == 1
    for family in FAMILIES:
        aborted = [line for line in said.splitlines() if f"Session {kind}-{backend}(family='{family}') aborted" in line]
        assert len(aborted) == 1
        assert f"no {backend} device: " in aborted[0]
        assert "; mend: " in aborted[0]


def test_one_family_can_be_named() -> None:
    code, said = nox("--list", "-s", "test-cuda(family='gemm')")
    assert code == 0
    assert "* test-cuda(family='gemm')" in said
    assert "* test-cuda(family='norm')" not in said


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ('    { url = "https://mirror.invalid/torch.whl", hash = "sha256:00" },\n', "hold download addresses"),
        ("<<<<<<< ours\n", "uv.lock can't be used: restore it from git"),
    ],
)
def test_unsound_lock_makes_no_environment(tmp_path: Path, fault: str, error: str) -> None:
    files = ["noxfile.py", "pyproject.toml", "uv.lock", "ci/lock.py", "ci/constraints.txt"]
    for source in [*(ROOT / name for name in files), *ROOT.glob("packages/*/pyproject.toml")]:
        target = tmp_path / source.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)
    with (tmp_path / "uv.lock").open("a") as lock:
        lock.write(fault)
    code, said = nox("-s", "test", root=tmp_path)
    assert code == 1
    assert error in said
    assert "mend: python ci/lock.py" in said
    assert not (tmp_path / ".venv").exists()
