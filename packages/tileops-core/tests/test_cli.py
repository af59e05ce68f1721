"""The ``tileops`` command: what it prints, for people and for machines, and how it ends."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import click
import pytest
import torch
from click.testing import CliRunner, Result

from tileops.core.backend import cuda
from tileops.core.cli import COMMANDS, main, output, rows
from tileops.core.errors import NoKernelError
from tileops.core.families import entries
from tileops.core.op import make_op
from tileops.core.program import cache_dir
from tileops.gemm import GEMMFwdOp

OPS = ("GEMMFwdOp", "GQADenseFwdOp", "RMSNormFwdOp")
SMALL = ("--max-flops", "1e5")


def tileops(*args: str, columns: int = 80) -> Result:
    return CliRunner(env={"COLUMNS": str(columns)}).invoke(main, args)


def document(*args: str) -> Any:
    result = tileops(*args, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def python(code: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


def without_torch(*args: str) -> "subprocess.CompletedProcess[str]":
    return python(f"import sys; sys.modules['torch'] = None; from tileops.core.cli import main; main({args})")


def test_help_imports_no_command() -> None:
    code = (
        "import sys; from tileops.core.cli import main; main(['--help'], standalone_mode=False); print([*sys.modules])"
    )
    shown = python(code).stdout
    assert all(name in shown for name in COMMANDS)
    assert not any(f"'{heavy}'" in shown for heavy in ("torch", "rich", "yaml", "tileops.core.spec"))


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_is_where_the_table_says(name: str) -> None:
    module = importlib.import_module(f"tileops.core.cli.{COMMANDS[name][0]}")
    assert isinstance(module.command, click.Command)
    assert tileops(name, "--help").exit_code == 0


def test_module_and_version() -> None:
    done = subprocess.run([sys.executable, "-m", "tileops.core.cli", "--version"], capture_output=True, text=True)
    assert done.stdout.startswith("tileops ")


def test_an_unknown_command() -> None:
    result = tileops("lsit")
    assert result.exit_code == 2
    assert "No such command 'lsit'" in result.stderr


def test_a_broken_pipe_is_quiet() -> None:
    command = [sys.executable, "-m", "tileops.core.cli", "list"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141


@pytest.mark.parametrize("args", [("list",), ("show", "GEMMFwdOp"), ("demo",)])
def test_no_family_is_installed(args: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "entries", dict)
    result = tileops(*args)
    assert result.exit_code == 3
    assert result.stderr == "Error: no operator family is installed; pip install tileops\n"


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("args", [("list",), *(("show", op) for op in OPS)])
def test_pages_fit_the_terminal(args: tuple[str, ...], columns: int) -> None:
    result = tileops(*args, columns=columns)
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= columns


def test_list() -> None:
    assert all(op in tileops("list").stdout for op in OPS)
    (gemm,) = document("list", "--family", "gemm")
    assert (gemm["name"], gemm["family"], gemm["aliases"]) == ("GEMMFwdOp", "gemm", ["GemmFwdOp"])
    assert gemm["rows"] == len(entries()["GEMMFwdOp"].workloads)


def test_list_of_an_unknown_family() -> None:
    result = tileops("list", "--family", "norms")
    assert result.exit_code == 2
    assert "did you mean 'norm'?" in result.stderr


@pytest.mark.parametrize(
    ("args", "ops"),
    [
        ((), {"GEMMFwdOp", "RMSNormFwdOp", "RMSNormBwdOp"}),
        (("--family", "norm", "--op", "RMSNormFwdOp", "--op", "GEMMFwdOp"), {"RMSNormFwdOp"}),
    ],
)
def test_programs_are_built_for_chosen_operators(
    args: tuple[str, ...], ops: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr("tileops.core.testing.programs.recipes", lambda entry, *rest: asked.append(entry.name) or {})
    assert tileops("cache", "build", "--board", "h200", *args).exit_code == 0
    assert ops <= {*asked}
    assert not args or ops == {*asked}


@pytest.mark.parametrize(("option", "meant"), [("--family", "norm"), ("--op", "RMSNormFwdOp")])
def test_programs_are_built_for_no_unknown_name(option: str, meant: str) -> None:
    result = tileops("cache", "build", "--board", "h200", option, meant + "s")
    assert result.exit_code == 2
    assert f"did you mean '{meant}'?" in " ".join(result.stderr.split())


def test_show_for_people() -> None:
    page = tileops("show", "GemmFwdOp").stdout
    assert "Mat[trans_a, M, K]" in page
    assert "K = 0 gives zeros." in page
    assert "NVIDIA H200" in page
    assert "compute" in page


def test_show_for_machines() -> None:
    shown = document("show", "GEMMFwdOp")
    row = next(r for r in shown["rows"] if r["case"] == "GEMMFwdOp/ds-v3-prefill-mlp-up-bfloat16")
    assert (row["flops"], row["bytes"], row["bound_by"]) == (240_518_168_576, 150_994_944, "compute")
    assert row["bound_us"] == pytest.approx(243.095, rel=1e-5)
    assert shown["params"][1] == {"name": "trans_b", "type": "bool", "required": False, "default": True}


def test_show_on_another_board() -> None:
    assert document("show", "RMSNormFwdOp", "--board", "a100")["board"] == "a100"
    result = tileops("show", "RMSNormFwdOp", "--board", "a10")
    assert result.exit_code == 2
    assert "did you mean 'a100'?" in result.stderr


@pytest.mark.parametrize("stuck", [False, True])
def test_a_cleared_cache_says_what_is_gone(stuck: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEOPS_CACHE_DIR", str(tmp_path))
    place = cache_dir() / ("0" * 40)
    place.mkdir(parents=True)
    (place / "program.json").touch()

    def refuse(place: Path) -> None:
        raise PermissionError(13, "Permission denied", str(place))

    if stuck:
        monkeypatch.setattr("shutil.rmtree", refuse)
    done = CliRunner().invoke(main, ["cache", "clear"])
    assert (done.exit_code, place.exists()) == (stuck, stuck)
    assert f"{int(not stuck)} programs removed" in done.stdout


def test_show_of_an_unknown_operator() -> None:
    result = tileops("show", "RMSNormOp")
    assert result.exit_code == 2
    assert "did you mean 'RMSNormFwdOp'?" in result.stderr


@pytest.mark.parametrize("op", ["GEMMFwdOp", "GQADenseFwdOp"])
def test_show_needs_no_torch(op: str) -> None:
    done = without_torch("show", op)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Workloads" in done.stdout


def test_run_needs_torch() -> None:
    done = without_torch("run", "GEMMFwdOp")
    assert (done.returncode, done.stderr) == (3, "Error: PyTorch is not installed; pip install torch\n")


@pytest.mark.parametrize("op", OPS)
def test_run_of_a_row(op: str) -> None:
    label = entries()[op].workloads[0].label
    shown = document("run", op, "--row", label, "--device", "cpu", *SMALL)
    assert (shown["device"], shown["board"]) == ("cpu", None)
    for row in shown["rows"]:
        assert row["case"].startswith(f"{op}/{label}-")
        assert row["status"] == "ok"
        assert 0 < row["error"] <= 1
        assert row["flops"] <= 1e5
        assert row["bytes"] <= 1e5
        assert row["us"]["p10"] <= row["us"]["median"] <= row["us"]["p90"]
        assert row["bound_us"] is None


def test_run_says_what_it_scaled() -> None:
    args = ("run", "GEMMFwdOp", "--row", "square-1k-float16", "--device", "cpu", "--max-flops", "2e6")
    result = tileops(*args)
    assert result.exit_code == 0
    assert "M=64 N=64 K=128" in " ".join(result.stdout.split())
    assert "at most 2 MFLOP and 125 kB" in " ".join(result.stdout.split())
    assert "1 of 1 right on cpu" in result.stdout
    (row,) = document(*args)["rows"]
    assert row["scaled"] == {"M": 64, "N": 64, "K": 128}
    assert row["inputs"] == {"a": "float16[64, 128]", "b": "float16[128, 64]"}


def test_the_seed_decides_the_values(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = []
    make = rows.make_inputs
    monkeypatch.setattr(rows, "make_inputs", lambda call, device, seed: seeds.append(seed) or make(call, device, seed))
    document("run", "GEMMFwdOp", "--row", "square-1k-float16", "--device", "cpu", "--seed", "7", *SMALL)
    assert seeds == [7]


@pytest.fixture
def wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    call = GEMMFwdOp.__call__
    monkeypatch.setattr(GEMMFwdOp, "__call__", lambda self, *inputs: call(self, *inputs) * 1.1)


@pytest.mark.usefixtures("wrong")
def test_a_wrong_result_is_caught() -> None:
    args = ("run", "GEMMFwdOp", "--row", "square-1k-float16", "--device", "cpu", *SMALL)
    result = tileops(*args)
    assert result.exit_code == 1
    assert " > 1 " in result.stdout
    assert "0 of 1 right" in result.stdout
    shown = tileops(*args, "--json")
    assert shown.exit_code == 1
    (row,) = json.loads(shown.stdout)["rows"]
    assert row["status"] == "wrong"
    assert row["error"] > 1
    assert row["message"].startswith("d: ")


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (RuntimeError("no such luck"), "failed", "RuntimeError: no such luck"),
        (NoKernelError("GEMMFwdOp", "this call", {}), "no kernel", "GEMMFwdOp: no kernel serves this call"),
    ],
)
def test_one_failure_leaves_the_others(
    error: Exception, status: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = GEMMFwdOp.__call__

    def fail(self: GEMMFwdOp, *inputs: Any) -> Any:
        if str(inputs[0].dtype) == "torch.float16":
            raise error
        return call(self, *inputs)

    monkeypatch.setattr(GEMMFwdOp, "__call__", fail)
    result = tileops("run", "GEMMFwdOp", "--row", "square-1k", "--device", "cpu", "--json", *SMALL)
    assert result.exit_code == 1
    failed, fine = json.loads(result.stdout)["rows"]
    assert (failed["status"], failed["us"]) == (status, None)
    assert failed["message"].startswith(message)
    assert fine["status"] == "ok"


def test_interrupted_runs_show_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    run = rows.Runner.run

    def interrupted(self: rows.Runner, workload: rows.Workload) -> rows.Result:
        if workload.name == "square-1k-bfloat16":
            raise KeyboardInterrupt
        return run(self, workload)

    monkeypatch.setattr(rows.Runner, "run", interrupted)
    result = tileops("run", "GEMMFwdOp", "--row", "square-1k", "--device", "cpu", *SMALL)
    assert result.exit_code == 130
    assert "square-1k-float16" in result.stdout
    assert ", 1 not run" in result.stdout


def test_an_unknown_row() -> None:
    result = tileops("run", "GEMMFwdOp", "--row", "square-2k")
    assert result.exit_code == 2
    assert "no row is called 'square-2k'; did you mean 'square-" in result.stderr


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "available", lambda: "no CUDA device is visible; get one")
    absent, unknown, malformed = (tileops("run", "GEMMFwdOp", "--device", d) for d in ("cuda", "cpud", "cpu:x"))
    assert (absent.exit_code, absent.stderr) == (3, "Error: no CUDA device is visible; get one\n")
    assert unknown.exit_code == 2
    assert "did you mean 'cpu'?" in unknown.stderr
    assert malformed.exit_code == 2
    assert str(rows.device_of(None)) == "cpu"


SPEC = """
MutatingToyFwdOp:
  family: toy
  summary: Adds to its first input.
  status: spec-only
  reference: toy_reference:add
  signature:
    forall: {N: Dim, T: "DType[float16]"}
    inputs: {x: {dtype: T, shape: "[N]", mutated: true}, y: {dtype: T, shape: "[N]"}}
    outputs: {}
  workloads: [{label: toy, N: 64}]
  roofline: {flops: N}
"""


def add(x: Any, y: Any, **_: Any) -> None:
    x += y


def test_a_mutated_input_is_held_to_what_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "_spec.yaml").write_text(SPEC)
    cls = make_op("MutatingToyFwdOp", tmp_path / "_spec.yaml")
    monkeypatch.setattr(rows, "op_class", lambda entry: cls)
    monkeypatch.setitem(sys.modules, "toy_reference", SimpleNamespace(add=add))
    (workload,) = rows.workloads([cls.entry])
    result = rows.Runner(torch.device("cpu"), 0, 1e6).run(workload)
    assert (result.status, result.message) == ("ok", None)


def test_demo_runs_every_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    few = {n: attrs.evolve(e, workloads=e.workloads[:2]) for n, e in entries().items()}
    monkeypatch.setattr(output, "entries", lambda: few)
    monkeypatch.setattr(rows, "CPU_FLOPS", 1e5)
    result = tileops("demo")
    assert result.exit_code == 0, result.output
    assert all(op in result.stdout for op in OPS)
    assert max(map(len, result.stdout.splitlines())) <= 80
    total = len(rows.workloads(few.values()))
    assert f"{total} of {total} right on cpu" in result.stdout
