"""Programs on disk: shared by processes, verified before use, made again where damaged."""

from __future__ import annotations

import hashlib
import importlib
import json
import multiprocessing
import os
import stat
import time
from pathlib import Path

import attrs
import pytest

from tileops.core import program
from tileops.core.errors import BackendError, CompileError
from tileops.core.kernel import H200, Form, Kernel, Static

KEY = "0123abcd"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("TILEOPS_CACHE_DIR", str(tmp_path))
    return tmp_path / "programs"


def write(into: Path, content: bytes = b"library") -> None:
    (into / "program.so").write_bytes(content)
    (into / "program.json").write_text(json.dumps({"digest": hashlib.sha256(content).hexdigest()}))


class Maker:
    def __init__(self) -> None:
        self.made = 0

    def __call__(self, into: Path) -> None:
        self.made += 1
        write(into)


def test_a_program_is_made_once(home):
    make = Maker()
    for _ in range(3):
        assert program._on_disk(KEY, make).read_bytes() == b"library"
    assert make.made == 1
    assert [p.name for p in home.iterdir() if p.is_dir()] == [KEY], "nothing half-written is left"


DAMAGE = {
    "a changed library": lambda place: (place / "program.so").write_bytes(b"librarX"),
    "a truncated library": lambda place: (place / "program.so").write_bytes(b""),
    "no library": lambda place: (place / "program.so").unlink(),
    "no description": lambda place: (place / "program.json").unlink(),
    "a truncated description": lambda place: (place / "program.json").write_text('{"dig'),
    "a foreign description": lambda place: (place / "program.json").write_text("[1, 2]"),
    "a description without digest": lambda place: (place / "program.json").write_text("{}"),
    "a binary description": lambda place: (place / "program.json").write_bytes(b"\xff\xfe\x00"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_entry_is_made_again(home, damage):
    make = Maker()
    damage(program._on_disk(KEY, make).parent)
    assert program._on_disk(KEY, make).read_bytes() == b"library"
    assert make.made == 2
    assert program._on_disk(KEY, make).exists()
    assert make.made == 2


def test_a_failed_compilation_leaves_nothing(home):
    def fail(into: Path) -> None:
        (into / "program.so").write_bytes(b"half")
        raise CompileError("no")

    with pytest.raises(CompileError):
        program._on_disk(KEY, fail)
    assert not [p for p in home.iterdir() if p.is_dir()]
    assert program._on_disk(KEY, Maker()).exists()


@pytest.mark.parametrize("obstacle", ["a file in its place", "read-only"])
def test_a_cache_that_cannot_be_written_serves_the_process(home, obstacle, monkeypatch, tmp_path):
    if obstacle == "read-only":
        if os.geteuid() == 0:
            monkeypatch.setattr(Path, "mkdir", lambda *a, **k: (_ for _ in ()).throw(PermissionError(13, "denied")))
        tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    else:
        home.write_text("")
    with pytest.warns(UserWarning, match="kept for this process only.*TILEOPS_CACHE_DIR"):
        library = program._on_disk(KEY, Maker())
    assert library.read_bytes() == b"library"
    tmp_path.chmod(stat.S_IRWXU)


def _race(log: str) -> None:
    def make(into: Path) -> None:
        with Path(log).open("a") as f:
            f.write("made\n")
        time.sleep(0.2)
        write(into)

    assert program._on_disk(KEY, make).read_bytes() == b"library"


def test_two_processes_compile_once(tmp_path):
    log = tmp_path / "log"
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_race, args=(str(log),)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert log.read_text() == "made\n"


class Some(Kernel):
    pass


@attrs.frozen
class Config:
    tile: int = 64


STATIC = Static("SomeFwdOp", (("N", 64),), (("x", Form("float16", ("M", 64), (None, None))),))
TARGET = {"kind": "cuda", "arch": "sm_90a"}


@pytest.mark.parametrize(
    "other",
    [
        (Some(), attrs.evolve(STATIC, values=(("N", 65),)), Config(), H200, TARGET),
        (Some(), STATIC, Config(128), H200, TARGET),
        (Some(), STATIC, Config(), attrs.evolve(H200, sm_count=100), TARGET),
        (Some(), STATIC, Config(), H200, {**TARGET, "arch": "sm_80"}),
    ],
    ids=["static", "config", "device", "target"],
)
def test_all_that_a_program_depends_on_is_in_its_key(other):
    key = program.Recipe(Some(), STATIC, Config(), H200, TARGET).key
    assert key == program.Recipe(Some(), STATIC, Config(), H200, dict(TARGET)).key
    assert key != program.Recipe(*other).key


def test_a_key_changes_with_the_modules_beside_the_kernels_that_it_imports(tmp_path, monkeypatch):
    """So that an edit of one kernel leaves the programs of the others."""
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = tmp_path / "some_kernels"
    folder.mkdir()
    texts = {
        "__init__": "",
        "a": "import json\nfrom some_kernels.shared import SIZE",
        "b": "from . import other",
        "shared": "from .deeper import SIZE",
        "deeper": "SIZE = 1",
        "other": "",
    }
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text)
    uses = {"a": {"a", "shared", "deeper"}, "b": {"b", "__init__", "other"}}
    for name in texts:
        importlib.import_module(f"some_kernels.{name}")

    def digests():
        program.sources_digest.cache_clear()
        return {name: program.sources_digest(f"some_kernels.{name}") for name in uses}

    for edited in texts:
        before = digests()
        (folder / f"{edited}.py").write_text(texts[edited] + "\n# edited\n")
        assert {name for name, digest in digests().items() if digest != before[name]} == {
            name for name in uses if edited in uses[name]
        }


def _slow(recipe) -> None:
    Path(os.environ["STARTED"]).write_text(str(os.getpid()))
    time.sleep(60)


def test_a_killed_build_leaves_no_worker(tmp_path, monkeypatch):
    monkeypatch.setenv("STARTED", str(tmp_path / "started"))
    process = multiprocessing.get_context("spawn").Process(target=_build_slowly)
    process.start()
    until(lambda: (tmp_path / "started").exists() and (tmp_path / "started").read_text())
    worker = int((tmp_path / "started").read_text())
    process.kill()
    until(lambda: not Path(f"/proc/{worker}").exists())


def _build_slowly() -> None:
    program._failure_of = _slow
    list(program.build([program.Recipe(Some(), STATIC, Config(), H200, TARGET)], 1))


def until(condition) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_missing_tilelang_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tilelang", None)
    with pytest.raises(BackendError, match=r'kernels need TileLang.*pip install "tileops-core\[cuda\]"'):
        program.load(program.Recipe(Some(), STATIC, Config(), H200, TARGET))
