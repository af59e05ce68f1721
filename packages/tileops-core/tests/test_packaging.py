"""What the wheels and sdists hold, and that each family works alone from its wheel and core's."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FAMILIES = ("gemm", "attention", "norm")
LOOK_AT_FAMILY = """
import sys, tileops
from importlib import import_module, resources, util
from tileops.core.spec import parse_spec
family = import_module(f"tileops.{sys.argv[1]}")
entries = parse_spec(resources.files(family).joinpath("_spec.yaml").read_text()).entries
print(*tileops.__path__)
print(*filter(util.find_spec, ["tileops.gemm", "tileops.attention", "tileops.norm"]))
missing = [name for name, entry in entries.items() if entry.status == "implemented" and not hasattr(family, name)]
print("some" if entries else "no", "entries, without class:", missing)
print("tilelang" in sys.modules)
"""
READ_WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None    # as if it were not installed: importing it raises
import tileops.core.spec
print(tileops.core.spec.__file__)
print(*tileops.core.spec.load(sys.argv[1]))
"""
PACKAGES = {"tileops_core": "tileops/core", **{f"tileops_{name}": f"tileops/{name}" for name in FAMILIES}}


def uv(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "uv", *arguments, "--quiet"], cwd=ROOT, check=True)


@pytest.fixture(scope="session")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sdists of all packages and the wheels made from them; `nox -s build` brings its own."""
    if given := os.environ.get("TILEOPS_DIST"):
        return Path(given)
    folder = tmp_path_factory.mktemp("dist")
    uv("build", "--all-packages", "--out-dir", str(folder))
    return folder


def wheel(dist: Path, package: str) -> Path:
    (found,) = dist.glob(f"{package}-*.whl")
    return found


def sdist(dist: Path, package: str) -> Path:
    (found,) = dist.glob(f"{package}-*.tar.gz")
    return found


def requirements(dist: Path, package: str) -> list[str]:
    with zipfile.ZipFile(wheel(dist, package)) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return message_from_bytes(archive.read(metadata)).get_all("Requires-Dist", [])


def environment(folder: Path, *wheels: Path) -> Path:
    """The interpreter of an environment that holds these wheels and borrows the running one's torch and the like."""
    uv("venv", "--python", sys.executable, str(folder))
    python = folder / "bin/python"
    uv("pip", "install", "--offline", "--no-deps", "--python", str(python), *map(str, wheels))
    # A path in a .pth file lends packages, but not that folder's own .pth files: no editable install comes through it.
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "borrowed.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
    return python


def python_says(python: Path, program: str, *arguments: str) -> str:
    # -I: neither PYTHONPATH nor the current folder, which could bring the source tree in.
    command = [str(python), "-I", "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("package", PACKAGES)
def test_wheel_stays_in_its_part_of_the_namespace(dist: Path, package: str) -> None:
    with zipfile.ZipFile(wheel(dist, package)) as archive:
        files = [name for name in archive.namelist() if not name.endswith("/") and ".dist-info/" not in name]
    assert "tileops/__init__.py" not in files
    assert f"{PACKAGES[package]}/py.typed" in files
    assert [name for name in files if not name.startswith(f"{PACKAGES[package]}/")] == []


def test_metapackage_is_its_requirements(dist: Path) -> None:
    with zipfile.ZipFile(wheel(dist, "tileops")) as archive:
        assert [name for name in archive.namelist() if ".dist-info/" not in name] == []
    needed = [requirement for requirement in requirements(dist, "tileops") if "extra ==" not in requirement]
    version = wheel(dist, "tileops").name.split("-")[1]
    assert sorted(needed) == sorted(f"tileops-{family}=={version}" for family in FAMILIES)


@pytest.mark.parametrize("package", ["tileops", *PACKAGES])
def test_tilelang_comes_with_an_extra_only(dist: Path, package: str) -> None:
    # The MUSA image brings its own build, which a requirement would overwrite.
    required = [line for line in requirements(dist, package) if "extra ==" not in line]
    assert [line for line in required if "tilelang" in line or "[cuda]" in line] == []
    assert any("extra == 'cuda'" in line for line in requirements(dist, package))


@pytest.mark.parametrize("family", FAMILIES)
def test_spec_is_in_wheel_and_sdist(dist: Path, family: str) -> None:
    spec = (ROOT / f"specs/{family}.yaml").read_bytes()
    with zipfile.ZipFile(wheel(dist, f"tileops_{family}")) as archive:
        assert archive.read(f"tileops/{family}/_spec.yaml") == spec
    source = sdist(dist, f"tileops_{family}")
    with tarfile.open(source) as archive:
        member = archive.getmember(f"{source.name.removesuffix('.tar.gz')}/src/tileops/{family}/_spec.yaml")
        assert member.isfile()
        assert archive.extractfile(member).read() == spec


@pytest.mark.parametrize("family", FAMILIES)
def test_family_works_alone(dist: Path, tmp_path: Path, family: str) -> None:
    python = environment(tmp_path / "env", wheel(dist, "tileops_core"), wheel(dist, f"tileops_{family}"))
    said = python_says(python, LOOK_AT_FAMILY, family)
    (site,) = (tmp_path / "env").glob("lib/python*/site-packages")
    assert said.splitlines() == [str(site / "tileops"), f"tileops.{family}", "some entries, without class: []", "False"]


def test_specs_are_read_without_torch(dist: Path, tmp_path: Path) -> None:
    python = environment(tmp_path / "env", wheel(dist, "tileops_core"))
    said = python_says(python, READ_WITHOUT_TORCH, str(ROOT / "specs/gemm.yaml"))
    where, names = said.splitlines()
    assert Path(where).is_relative_to(tmp_path)
    assert "GEMMFwdOp" in names.split()
