"""A host with a GPU: cold and spoilt caches, captures, threads, processes, several devices, what the host lacks."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from threading import Barrier

import attrs
import pytest
import torch
from torch import Tensor

from tileops.core import program
from tileops.core.backend import cuda
from tileops.core.errors import CaptureError, CheckError, NoKernelError
from tileops.norm import RMSNormFwdOp

pytestmark = pytest.mark.cuda

N = 640
_numbers = count(1)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache on disk, and none in memory."""
    monkeypatch.setenv("TILEOPS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(program, "_programs", {})
    return tmp_path / "programs"


def fresh(n: int = N) -> RMSNormFwdOp:
    """An op that has no plans yet; its eps makes its program one of its own."""
    return RMSNormFwdOp(n, eps=next(_numbers) * 1e-6)


def normal(*shape: int, device: str = "cuda") -> Tensor:
    return torch.randn(shape, device=device, generator=torch.Generator(device).manual_seed(0)).bfloat16()


def close(op: RMSNormFwdOp, x: Tensor, y: Tensor) -> bool:
    expected = torch.nn.functional.rms_norm(x.double(), op.normalized_shape, eps=op.eps)
    return torch.allclose(y.double(), expected, rtol=2**-8, atol=1e-6)


def test_the_device_is_what_programs_are_built_for_elsewhere() -> None:
    """So that a folder made by ``tileops cache build --board h200`` serves here."""
    from tileops.core.kernel import H200

    assert cuda.device(0) == H200


def test_a_first_call_inside_a_capture_says_so_and_leaves_it_usable() -> None:
    op, x = fresh(), normal(3, N)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        z = x + 1
        with pytest.raises(CaptureError, match=r"has not run on cuda:0 yet.*op.warmup"):
            op(x)
    graph.replay()
    assert torch.equal(z, x + 1)
    assert close(op, x, op(x))


def test_a_warm_op_can_be_captured_at_once() -> None:
    op, x = fresh(), normal(3, N)
    op.warmup(op.bind((5, N), T=torch.bfloat16))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = op(x)
    x.copy_(normal(4, N)[1:])
    graph.replay()
    assert close(op, x, y)


@pytest.mark.nightly
def test_a_call_is_tuned_on_request_and_stays_right() -> None:
    op, x = fresh(), normal(3, N)
    assert close(op, x, op(x))
    op.request_tune()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        z = x + 1
        with pytest.raises(CaptureError, match="is to be tuned"):
            op(x)
    graph.replay()
    assert torch.equal(z, x + 1)
    assert close(op, x, op(x))
    assert op.explain(x).source == "result cache"


def replace(place: Path, content: bytes) -> None:
    """By a new file: the old one is mapped into this process."""
    (place / "new").write_bytes(content)
    (place / "new").replace(place / "program.so")


SPOILT: dict[str, Callable[[Path], object]] = {
    "changed": lambda place: replace(place, bytes(1000)),
    "truncated": lambda place: replace(place, (place / "program.so").read_bytes()[:-100]),
    "half-gone": lambda place: (place / "program.so").unlink(),
    "not-described": lambda place: (place / "program.json").write_text("{"),
}


@pytest.mark.parametrize("how", SPOILT)
def test_a_spoilt_program_is_made_again(home: Path, how: str) -> None:
    op, x = fresh(), normal(3, N)
    y = op(x)
    (place,) = program.stored()
    compiled = program.compilations
    SPOILT[how](place)
    for _ in range(2):  # the second time it is whole
        program._programs.clear()
        op._state.forget()
        assert torch.equal(op(x), y)
        assert program.compilations == compiled + 1


def test_a_cache_that_can_not_be_written_costs_a_warning(home: Path) -> None:
    home.write_text("a file where the folder should be")
    op, x = fresh(), normal(3, N)
    with pytest.warns(UserWarning, match=r"programs are kept for this process only: .*set TILEOPS_CACHE_DIR"):
        assert close(op, x, op(x))
    assert close(op, x, op(x))


def test_eight_threads_with_one_cold_program() -> None:
    op, x = fresh(), normal(3, N)
    compiled, start = program.compilations, Barrier(8)

    def call(_: int) -> Tensor:
        start.wait()
        return op(x)

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(call, range(8)))
    assert close(op, x, results[0])
    assert all(torch.equal(y, results[0]) for y in results)
    assert program.compilations == compiled + 1


CALL = """
import json, sys, torch
from tileops.core import program
from tileops.core.errors import TileOpsError
from tileops.norm import RMSNormFwdOp
def call(n):
    x = torch.arange(3 * n, device="cuda").view(3, n) % 13 - 6
    try:
        return RMSNormFwdOp(n)(x.bfloat16()).double().sum().item()
    except TileOpsError as e:
        return f"{type(e).__name__}: {e}"
"""


def elsewhere(code: str, **environment: str) -> subprocess.Popen[str]:
    """A process of its own, with this one's cache on disk."""
    command = [sys.executable, "-c", CALL + code]
    return subprocess.Popen(command, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True)


def test_a_program_of_another_host_is_made_again() -> None:
    """A whole and verified entry, which no loader takes."""
    code = "print(json.dumps([call(640), program.compilations]))"
    made = json.loads(elsewhere(code).communicate(timeout=300)[0])
    (place,) = program.stored()
    content = b"\x7fELF of another host"
    (place / "program.so").write_bytes(content)
    described = json.loads((place / "program.json").read_text())
    described["digest"] = hashlib.sha256(content).hexdigest()
    (place / "program.json").write_text(json.dumps(described))
    assert json.loads(elsewhere(code).communicate(timeout=300)[0]) == made == [made[0], 1]


def test_two_processes_with_one_cold_program() -> None:
    both = [elsewhere("print(json.dumps([call(640), program.compilations]))") for _ in range(2)]
    (first, compiled), (second, others) = (json.loads(p.communicate(timeout=300)[0]) for p in both)
    assert first == second != 0
    assert compiled + others == 1


def test_without_a_compiler_what_is_on_disk_runs() -> None:
    here = json.loads(elsewhere("print(json.dumps(call(640)))").communicate(timeout=300)[0])
    process = elsewhere("print(json.dumps([call(640), call(641), call(640)]))", CUDA_HOME="/nowhere")
    first, cold, again = json.loads(process.communicate(timeout=300)[0])
    assert first == again == here
    assert cold.startswith("BackendError: RMSNormFwdOp: nvcc, which compiles kernels, is not in CUDA_HOME, /nowhere; ")


def test_without_tilelang() -> None:
    process = elsewhere("sys.modules['tilelang'] = None; print(json.dumps(call(640)))")
    assert 'pip install "tileops-core[cuda]"' in json.loads(process.communicate(timeout=300)[0])


def test_a_gpu_that_no_kernel_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    old = attrs.evolve(cuda.device(0), arch="sm75")
    with monkeypatch.context() as m:
        m.setattr(cuda, "device", lambda index: old)
        op, x = fresh(), normal(3, N)
        with pytest.raises(NoKernelError, match="RMSNormRows: runs on cuda sm90, not on sm75"):
            op(x)
    assert close(op, x, op(x))


def test_tensors_on_two_devices() -> None:
    op, x, weight = fresh(), normal(3, N), normal(N, device="cpu")
    with pytest.raises(CheckError, match=r"weight: got a tensor on cpu, expected cuda:0, where x is"):
        op(x, weight)
    assert op(x, weight.cuda()).shape == x.shape


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_device_that_is_not_the_current_one() -> None:
    op, x, weight = fresh(), normal(3, N), normal(N)
    y = op(x, weight)
    assert torch.cuda.current_device() == 0
    for _ in range(2):
        there = op(x.to("cuda:1"), weight.to("cuda:1"))
        assert there.device == torch.device("cuda:1")
        assert torch.equal(there.to("cuda:0"), y)
        assert torch.equal(op(x, weight), y)
    with torch.cuda.device(1):
        assert torch.equal(op(x, weight), y)
    with pytest.raises(CheckError, match=r"weight: got a tensor on cuda:1, expected cuda:0"):
        op(x, weight.to("cuda:1"))


def test_a_tensor_whose_memory_holds_the_negated_values() -> None:
    op, x = fresh(), normal(3, N)
    op(x)
    negated = torch._neg_view(x)
    assert torch.equal(op(negated), op(-x))


def test_a_program_refuses_an_address_that_would_cost_the_device() -> None:
    """Accesses of 16 bytes at it are an error after which nothing runs in the process any more."""
    op, x = fresh(), normal(4, N)
    y = op(x)
    (program_,) = program._programs.values()
    odd = x.flatten()[1 : 1 + 3 * N].view(3, N)
    for tensors in ((odd, y[:3]), (x[:3], y.flatten()[1 : 1 + 3 * N].view(3, N))):
        with pytest.raises(RuntimeError, match="an address is no multiple of 16"):
            program_.main(*tensors)
    for _ in range(3):
        assert close(op, odd, op(odd))
        assert torch.equal(op(x), y)


def test_a_hundred_thousand_lengths_take_no_memory() -> None:
    op, x = fresh(64), normal(100_000, 64)
    lengths = range(1, len(x) + 1)
    for n in lengths[:20_000]:
        op(x[:n])
    before, programs = resident(), len(program._programs)
    for n in lengths[20_000:]:
        op(x[:n])
    assert resident() - before < 2**22
    assert len(program._programs) == programs == 1


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
