"""``tileops doctor`` on hosts that lack this or that."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tileops.core.cli import doctor, main


def examined(exit_code: int = 0) -> dict[str, dict[str, Any]]:
    """Findings of all groups by what they are about."""
    result = CliRunner().invoke(main, ["doctor", "--json"])
    assert result.exit_code == exit_code, result.output
    shown = json.loads(result.stdout)
    assert shown["cpu"] == (exit_code == 0)
    return {f["what"]: f for group in shown["findings"].values() for f in group}


def tool(folder: Path, name: str, says: str) -> None:
    """A program that prints what a real one would."""
    path = folder / name
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{says}\nEND\n")
    path.chmod(0o755)


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def test_what_is_here() -> None:
    found = examined()
    assert found["Python"]["state"] == found["torch"]["state"] == found["tileops-gemm"]["state"] == "ok"
    assert "operator" in found["tileops-gemm"]["found"]


def test_every_fault_has_a_mend() -> None:
    assert all(f["mend"] or f["state"] in ("ok", "note") for f in examined().values())


@pytest.mark.parametrize("columns", [80, 120])
def test_the_page_fits_the_terminal(columns: int) -> None:
    result = CliRunner(env={"COLUMNS": str(columns)}).invoke(main, ["doctor"])
    assert result.exit_code == 0
    assert "The CPU backend can run." in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= columns


def test_without_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; from tileops.core.cli import main; main(['doctor', '--json'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (3, "")
    torch = json.loads(done.stdout)["findings"]["everything"][1]
    assert torch == {"what": "torch", "state": "missing", "found": "not installed", "mend": "pip install torch"}


def test_a_broken_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    load = importlib.import_module

    def broken(name: str) -> Any:
        if name == "torch":
            raise OSError("libcudart.so.13: cannot open shared object file")
        return load(name)

    monkeypatch.setattr(doctor.importlib, "import_module", broken)
    torch = examined(exit_code=3)["torch"]
    assert torch["state"] == "problem"
    assert torch["found"] == "can't be imported: OSError: libcudart.so.13: cannot open shared object file"


def test_an_old_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_wanted", lambda name, by: ">=99")
    torch = examined(exit_code=3)["torch"]
    assert "but >=99 is required" in torch["found"]
    assert torch["mend"] == "pip install 'torch>=99'"


def test_no_family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "families", dict)
    assert examined(exit_code=3)["families"]["state"] == "missing"


def test_a_faulty_spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "_spec.yaml").write_text("GEMMFwdOp: {}\n")
    monkeypatch.setattr(doctor, "families", lambda: {"gemm": tmp_path / "_spec.yaml"})
    gemm = examined(exit_code=3)["tileops-gemm"]
    assert "its spec has faults, the first is" in gemm["found"]
    assert gemm["mend"].startswith("tileops check ")


def test_gpus(tools: Path) -> None:
    assert examined()["GPU"]["found"] == "nvidia-smi is not on PATH"
    tool(tools, "nvidia-smi", "NVIDIA-SMI has failed")
    assert examined()["GPU"]["found"] == "nvidia-smi shows none"
    tool(tools, "nvidia-smi", "NVIDIA H200, 9.0, 580.95.05\nNVIDIA H200, 9.0, 580.95.05")
    assert examined()["GPU"]["found"] == "2 x NVIDIA H200 (sm_90), driver 580.95.05"


def test_compilers(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.version.cuda", "13.0")
    tool(tools, "nvcc", "Cuda compilation tools, release 12.8, V12.8.93")
    nvcc = examined()["nvcc"]
    assert nvcc["state"] == "problem"
    assert nvcc["found"] == f"12.8, {tools}/nvcc; torch is built for CUDA 13.0"
    assert nvcc["mend"] == "install CUDA 13's compiler, and put nvcc on PATH or set CUDA_HOME"
    tool(tools, "nvcc", "Cuda compilation tools, release 13.1, V13.1.80")
    assert examined()["nvcc"]["state"] == "ok"


def test_a_compiler_off_the_path(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tools / "musa" / "bin").mkdir(parents=True)
    tool(tools / "musa" / "bin", "mcc", "")
    monkeypatch.setenv("MUSA_HOME", str(tools / "musa"))
    assert examined()["mcc"]["found"] == f"{tools}/musa/bin/mcc"


def test_tilelang(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"tilelang": "0.1.9", "apache-tvm-ffi": "0.1.12"}
    monkeypatch.setattr(doctor.output, "version", versions.get)
    monkeypatch.setattr(doctor, "find_spec", lambda name: object() if name in ("torch", "tilelang") else None)
    wanted = {"tilelang": "<0.1.16,>=0.1.12", "apache-tvm-ffi": "==0.1.11"}
    monkeypatch.setattr(doctor, "_wanted", lambda name, by: wanted.get(name))
    found = examined()
    assert found["apache-tvm-ffi"]["mend"] == "pip install 'apache-tvm-ffi==0.1.11'"
    assert doctor._tilelang("tilelang").found == "0.1.9, but <0.1.16,>=0.1.12 is required"
    assert doctor._tilelang("tilelang_musa").state == "missing"
    versions["tilelang"] = "0.1.15"
    assert doctor._tilelang("tilelang").state == "ok"


@pytest.mark.parametrize("at", ["", "/made"])
def test_the_cache(at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEOPS_CACHE_DIR", f"{tmp_path}{at}")
    (tmp_path / "program").write_bytes(bytes(2000))
    assert examined()["cache"]["found"] == (f"{tmp_path}/made, not made yet" if at else f"{tmp_path}, 2 kB")


def test_a_cache_that_can_not_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TILEOPS_CACHE_DIR", f"{tmp_path}/file/cache")
    cache = examined()["cache"]
    assert cache["state"] == "problem"
    assert cache["mend"] == "set TILEOPS_CACHE_DIR to a folder that can be written to"


def test_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEOPS_TUNE", "1")
    monkeypatch.setenv("TILEOPS_TUNES", "1")
    found = examined()
    assert found["TILEOPS_TUNE"]["found"] == "'1': 1 tunes each new call on first use"
    assert found["TILEOPS_TUNES"]["found"] == "'1': means nothing; did you mean 'TILEOPS_TUNE'?"


@pytest.mark.parametrize(
    ("specifier", "version", "admitted"),
    [
        (">=2.9", "2.9.0+cu130", True),
        (">=2.9", "2.13", True),
        (">=2.9", "2.8.1", False),
        ("<0.1.16,>=0.1.12", "0.1.15.post1", True),
        ("<0.1.16,>=0.1.12", "0.1.16", False),
        ("==0.1.11", "0.1.11", True),
        ("==0.1.11", "0.1.12", False),
    ],
)
def test_versions(specifier: str, version: str, admitted: bool) -> None:
    assert doctor._admits(specifier, version) is admitted
