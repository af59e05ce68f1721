"""A family for tests of the tuner, with real measuring processes whose clock and whose faults lie in the configs."""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from tileops.core.backend import cuda
from tileops.core.kernel import H200
from tileops.core.op import make_op
from tileops.core.tune import results, search, shipped
from tileops.core.tune.task import tasks

SPEC = """
TunedToyFwdOp:
  family: tuned_toy
  summary: Rows that may be many.
  status: spec-only
  reference: tuned_toy.reference:reference
  signature:
    forall: {M: Dim, N: Dim, T: "DType[float32 | float16]"}
    params: {eps: {type: float, default: 1.0e-6}, flag: {type: bool, default: false}}
    inputs:
      x: {dtype: T, shape: "[M, N]"}
      w: {dtype: "T | float32", shape: "[N]", optional: true}
    outputs: {y: {dtype: T, shape: "[M, N]"}}
    symbolic: [M]
  workloads:
  - {label: short, M: 8, N: 64, dtype_cases: [{T: float32}, {T: float16}]}
  - {label: long, M: 100, N: 64, dtype_cases: [{T: float32}]}
  - {label: longer, M: 120, N: 64, dtype_cases: [{T: float32}]}
  roofline: {flops: "M * N"}
"""
KERNELS = """
import attrs
from tileops.core.kernel import Kernel

@attrs.frozen
class Config:
    us: float = 10.0
    fault: str = ""

class Fast(Kernel):
    archs = {"cuda": ("sm90",)}
    space = (Config(), Config(8.0), Config(9.0))

    def refuse(self, call, device):
        return "N > 64" if call["N"] > 64 else None

    def configs(self, call, device):
        yield from self.space

class Slow(Fast):
    space = (Config(20.0), Config(9.9))

    def refuse(self, call, device):
        return None
"""
MEASURE = """
import os, signal, time
from pathlib import Path
from tileops.core.errors import TileOpsError
from tileops.core.tune.child import Rejected

def measure(trial, reference, rounds, slowest):
    config, kernel = trial.choice.config, type(trial.choice.kernel).__name__
    if log := os.environ.get("TOY_LOG"):
        with open(log, "a") as f:
            f.write(f"{os.getpid()} {kernel} {config.us} {trial.call.id} {rounds}\\n")
    if config.fault == "hangs":
        time.sleep(60)
    elif config.fault == "crashes":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif config.fault == "is wrong":
        raise Rejected("y: slice error 3 x its bound at [0, 0]: expected 1, got 2")
    elif config.fault == "later" and rounds > 3:
        raise Rejected("y: wrong this time")
    elif config.fault == "out of memory":
        raise TileOpsError("OutOfMemoryError: another process has it")
    other = reference.choice.config.us if reference else config.us
    if slowest and config.us > slowest * other:
        raise Rejected("far behind the best")
    time.sleep(float(os.environ.get("TOY_SECONDS", 0)))
    yield [(config.us, other)] * rounds

def build(recipes, workers):
    for recipe in recipes:
        yield recipe.key, "no such\\ninstruction" if recipe.config.fault == "does not compile" else None
"""


class Toy:
    """The family's operator ``op``, its ``kernels``, and what the tests do with them."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.op = make_op(
            "TunedToyFwdOp",
            home / "tuned_toy/_spec.yaml",
            __module__="tuned_toy.ops.toy",
            kernels=("toy:Fast", "toy:Slow"),
            buckets={"M": (16, 128)},
        )
        self.kernels = importlib.import_module("tuned_toy.kernels.toy")
        self.table = home / "tuned_toy/tuned/h200.yaml"
        self.log: Path
        self.patch: pytest.MonkeyPatch

    def call(self, M=100, N=64, dtype=torch.float32, **params):
        return self.op(**params).bind((M, N), None, T=dtype)

    def tasks(self, *calls, **settings):
        return tasks(cuda, calls or [self.call()], H200, "h200", **settings)

    def task(self, *calls, **settings):
        (task,) = self.tasks(*calls, **settings)
        return task

    def tuned(self, task, failures=None):
        """The result of a task that has no fault."""
        faults = search.run([task], [0], failures or {}, lambda progress: None)
        assert not faults, faults
        result = results.read(task.bucket)
        assert result is not None
        return result

    def fault(self, task):
        """What kept a task from being tuned."""
        (fault,) = search.run([task], [0], {}, lambda progress: None).values()
        return fault

    def space(self, *configs, kernel="Fast"):
        """Have a kernel list other configs: microseconds, and a fault if need be."""
        self.patch.setattr(getattr(self.kernels, kernel), "space", tuple(self.kernels.Config(*c) for c in configs))

    def measured(self) -> Counter[str]:
        """How often each "kernel us call rounds" was measured."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return Counter(line.partition(" ")[2] for line in lines)


@pytest.fixture(scope="session")
def toy_family(tmp_path_factory):
    """In a package of its own, which the children import too."""
    home = tmp_path_factory.mktemp("toy")
    package = home / "tuned_toy"
    (package / "kernels").mkdir(parents=True)
    for name in ("__init__.py", "kernels/__init__.py"):
        (package / name).touch()
    (package / "reference.py").write_text("def reference(x, w, **_): return x\n")
    (package / "_spec.yaml").write_text(SPEC)
    (package / "kernels/toy.py").write_text(KERNELS)
    (home / "toy_measure.py").write_text(MEASURE)
    sys.path.insert(0, str(home))
    yield Toy(home)
    sys.path.remove(str(home))


@pytest.fixture
def toy(toy_family, tmp_path, monkeypatch):
    """The family, children that pretend, an empty cache and no table."""
    toy_family.log, toy_family.patch = tmp_path / "log", monkeypatch
    monkeypatch.setenv("TILEOPS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TOY_LOG", str(tmp_path / "log"))
    monkeypatch.setattr(search, "MEASURE", "toy_measure:measure")
    monkeypatch.setattr(search, "BUILD", "toy_measure:build")
    results.forget()
    shipped.entries.cache_clear()
    yield toy_family
    results.forget()
    toy_family.table.unlink(missing_ok=True)
    shipped.entries.cache_clear()
