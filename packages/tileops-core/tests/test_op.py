"""An operator is a frozen value that meets its spec entry through one front door."""

from __future__ import annotations

import copy
import pickle
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from attrs import define
from attrs.exceptions import FrozenInstanceError
from torch import Tensor

from tileops.core import TensorMeta
from tileops.core.errors import BackendError, CheckError, SpecError, TileOpsError
from tileops.core.op import Op, make_op

SPEC = """
{name}:
  family: test
  summary: Scales a vector, and sums it when asked.
  status: spec-only
  reference: scale_reference:reference
  signature:
    forall: {{N: Dim, T: "DType[float32 | float16]"}}
    params:
      factor: {{type: float, default: 2.0}}
      mode: {{type: "'plain' | 'negated'", default: plain}}
      out_dtype: {{type: "float32 | float16 | None", default: null}}
      axes: {{type: "list[int]", default: [0]}}
      with_sum: {{type: bool, default: false}}
    inputs:
      x: {{dtype: T, shape: "[N]"}}
      bias: {{dtype: T, shape: "[N]", optional: true}}
    outputs:
      y: {{dtype: "coalesce(out_dtype, T)", shape: "[N]"}}
      total: {{dtype: float32, shape: "[]", when: with_sum}}
    where:
    - rule: "N < 100"
      hint: a short vector
"""


def reference(x, bias, *, factor, mode, out_dtype, axes, with_sum, T):
    y = x * factor * (-1 if mode == "negated" else 1)
    y = (y if bias is None else y + bias).to(out_dtype or T)
    return y, y.float().sum() if with_sum else None


sys.modules["scale_reference"] = SimpleNamespace(reference=reference)  # test modules have no importable name


@pytest.fixture(scope="module")
def scale(tmp_path_factory) -> type[Op]:
    path = tmp_path_factory.mktemp("spec") / "scale.yaml"
    path.write_text(SPEC.format(name="ScaleFwdOp"))
    return make_op("ScaleFwdOp", path)


def test_fields_are_the_params_in_canonical_form(scale):
    op = scale(factor=3, axes=[1, 2], out_dtype=torch.float16)
    assert (op.factor, op.axes, op.out_dtype) == (3.0, (1, 2), torch.float16)
    assert isinstance(op.factor, float)
    assert scale(out_dtype="float16") == scale(out_dtype=torch.float16)


def test_ops_are_values(scale):
    op = scale(factor=3)
    assert op == scale(factor=3.0)
    assert hash(op) == hash(scale(factor=3.0))
    assert op != scale(factor=4)
    assert op._state is scale(factor=3.0)._state, "equal ops share what is learnt"
    with pytest.raises(FrozenInstanceError):
        op.factor = 5


@pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy], ids=["copy", "deepcopy"])
def test_ops_can_be_copied(scale, clone):
    op = scale(mode="negated")
    assert clone(op) == op
    assert torch.equal(clone(op)(torch.ones(3)), op(torch.ones(3)))


def test_ops_can_be_pickled():
    from tileops.norm import RMSNormFwdOp

    op = RMSNormFwdOp((4, 2), eps=1e-6)
    assert pickle.loads(pickle.dumps(op)) == op


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"factor": "3"}, "factor: got '3', expected float"),
        ({"factor": True}, "factor: got True, expected float"),
        ({"factor": float("nan")}, "factor: got nan, expected a number"),
        ({"mode": "Plain"}, "mode: got 'Plain', expected 'plain' | 'negated'"),
        ({"out_dtype": torch.bfloat16}, "out_dtype: got 'bfloat16', expected float32 | float16 | None"),
        ({"axes": [1.5]}, "axes: got [1.5], expected list[int]"),
        ({"with_sum": 1}, "with_sum: got 1, expected bool"),
    ],
)
def test_a_wrong_param_is_refused_at_construction(scale, params, message):
    with pytest.raises(CheckError) as caught:
        scale(**params)
    assert message in str(caught.value)
    assert caught.value.op == "ScaleFwdOp"
    assert isinstance(caught.value, ValueError)


def test_a_call_returns_the_outputs_that_are_present(scale):
    x = torch.arange(3.0)
    assert torch.equal(scale()(x, None), 2 * x)
    y, total = scale(with_sum=True)(x, torch.ones(3))
    assert torch.equal(y, 2 * x + 1)
    assert total == 9


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((None, None), "x: got None, expected a tensor"),
        ((3.0, None), "x: got a float, expected a tensor"),
        ((torch.ones(3), None, None), "got 3 inputs, expected at most 2: x, bias"),
        ((torch.ones(3, 1), None), "x: got rank 2, shape (3, 1), expected [N]"),
        ((torch.ones(3), torch.ones(4)), "bias: got shape (4,), expected [N] with N = 3 (from x)"),
        ((torch.ones(3, dtype=torch.int32), None), "x: got int32, expected float32 or float16"),
        ((torch.ones(3, dtype=torch.complex64), None), "x: got complex64, expected float32 or float16"),
        ((torch.ones(3), torch.ones(3).half()), "bias: got float16, expected float32"),
        ((torch.ones(3), torch.ones(3, device="meta")), "bias: got a tensor on meta, expected cpu, where x is"),
        ((torch.ones(3).to_sparse(), None), "x: got a tensor of layout torch.sparse_coo, expected a strided tensor"),
        ((torch.ones(100), None), "got N = 100, expected a short vector\n  rule: N < 100"),
    ],
)
def test_a_call_outside_the_signature_is_refused_with_what_was_expected(scale, inputs, message):
    op = scale()
    with pytest.raises(CheckError) as caught:
        op(*inputs)
    assert str(caught.value).startswith(f"ScaleFwdOp: {message}")
    assert torch.equal(op(torch.ones(3), None), torch.full((3,), 2.0)), "the next call works"


def test_bind_makes_a_call_of_tensors_metas_or_shapes(scale):
    op = scale(with_sum=True)
    call = op.bind(torch.ones(3), torch.ones(3))
    assert call["N"] == 3
    assert call.outputs == {"y": TensorMeta((3,), "float32"), "total": TensorMeta((), "float32")}
    assert op.bind((3,), (3,), T=torch.float32).inputs == call.inputs
    assert op.bind(TensorMeta((3,), "float32"), TensorMeta((3,), "float32")) == op.bind((3,), (3,), T="float32")
    assert op.bind((3,), T="float16").inputs["bias"] is None
    with pytest.raises(CheckError, match="x: got a shape without dtype, expected T="):
        op.bind((3,))
    with pytest.raises(CheckError, match="got 3 inputs, expected at most 2: x, bias"):
        op.bind((3,), (3,), (3,), T="float16")


@pytest.mark.parametrize(
    ("inputs", "dtypes", "message"),
    [
        (((-1,),), {"T": "float16"}, r"x: got \(-1,\), expected a tensor, or a shape: a tuple of sizes"),
        (((1.5,),), {"T": "float16"}, r"x: got \(1.5,\), expected a tensor, or a shape"),
        (("ab",), {"T": "float16"}, "x: got 'ab', expected a tensor, or a shape"),
        (((3,),), {"T": "float16", "U": "float32"}, "got a dtype for 'U', expected one for T, x, bias"),
        ((torch.ones(3), torch.ones(3, device="meta")), {}, "bias: got a tensor on meta, expected cpu, where x is"),
        ((torch.ones(3).to_sparse(),), {}, "x: got a tensor of layout torch.sparse_coo, expected a strided tensor"),
    ],
)
def test_bind_refuses_what_no_call_can_be(scale, inputs, dtypes, message):
    with pytest.raises(CheckError, match=message):
        scale().bind(*inputs, **dtypes)


def test_warmup_runs_a_call_where_its_tensors_are(scale):
    op = scale(with_sum=True)
    for call in (op.bind(torch.ones(3), torch.ones(1).expand(3)), op.bind((4,), T="float16")):
        op.warmup(call)
        assert op._state.local.run[0].call["N"] == call["N"]


@pytest.mark.parametrize("name", ["state", "matches", "launch", "result", "run", "plan", "forward_ad"])
def test_an_input_may_have_any_name(tmp_path, name):
    path = tmp_path / "named.yaml"
    text = SPEC.format(name=f"{name.title().replace('_', '')}NamedFwdOp")
    path.write_text(re.sub(r"\bbias\b", name, text))
    sys.modules["named_reference"] = SimpleNamespace(reference=lambda x, **others: (x * 2, None))
    path.write_text(re.sub(r"reference: .*", "reference: named_reference:reference", path.read_text()))
    op = make_op(f"{name.title().replace('_', '')}NamedFwdOp", path)()
    for _ in range(2):
        assert torch.equal(op(torch.ones(3), torch.ones(3)), torch.full((3,), 2.0))


def test_a_float_like_dtype_param_reaches_the_reference(scale):
    assert scale(out_dtype=torch.float16)(torch.ones(2), None).dtype == torch.float16


def test_eval_roofline_is_of_this_threads_last_call():
    from tileops.gemm import GEMMFwdOp

    gemm = GEMMFwdOp(trans_a=True, trans_b=False)
    with pytest.raises(TileOpsError, match="no call of it has run"):
        gemm.eval_roofline()
    gemm(torch.ones(3, 2, dtype=torch.float16), torch.ones(3, 5, dtype=torch.float16))
    assert gemm.eval_roofline() == gemm.roofline(gemm.bind((3, 2), (3, 5), T="float16"))
    assert gemm.eval_roofline().flops == 2 * 2 * 5 * 3


def test_a_class_needs_an_entry_of_its_name(tmp_path):
    path = tmp_path / "scale.yaml"
    path.write_text(SPEC.format(name="OtherFwdOp"))
    with pytest.raises(TileOpsError, match=r"NoEntryFwdOp has no entry in .*scale\.yaml"):

        @define(frozen=True)
        class NoEntryFwdOp(Op):
            spec = path


def test_a_class_with_a_malformed_spec_shows_every_fault(tmp_path):
    path = tmp_path / "broken.yaml"
    path.write_text(SPEC.format(name="BrokenFwdOp").replace("[N]", "[L]"))
    with pytest.raises(SpecError) as caught:
        make_op("BrokenFwdOp", path)
    assert [d.code for d in caught.value.diagnostics] == ["S104"] * 3


def test_an_op_without_reference_says_so_when_called(tmp_path):
    path = tmp_path / "bare.yaml"
    lines = SPEC.format(name="BareFwdOp").splitlines()
    path.write_text("\n".join(line for line in lines if "reference:" not in line))
    with pytest.raises(BackendError, match="BareFwdOp: the cpu backend runs references, and its spec entry has none"):
        make_op("BareFwdOp", path)()(torch.ones(3), None)


def test_two_entries_of_one_name_are_refused(scale, tmp_path: Path):
    path = tmp_path / "scale.yaml"
    path.write_text(SPEC.format(name="ScaleFwdOp").replace("default: 2.0", "default: 4.0"))
    with pytest.raises(TileOpsError, match="ScaleFwdOp is defined already"):
        make_op("ScaleFwdOp", path)


def test_errors_survive_pickling(scale):
    with pytest.raises(CheckError) as caught:
        scale()(torch.ones(100), None)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.rule) == (str(caught.value), "N < 100")


def test_the_families_import_quickly():
    """Under a seventh of what torch itself takes: no TileLang, no CLI, no reading of more than the spec."""
    code = (
        "import time\n"
        "start = time.process_time()\n"
        "import torch\n"
        "torchs = time.process_time() - start\n"
        "import tileops.gemm\n"
        "took = time.process_time() - start - torchs\n"
        "import sys\n"
        "assert not {'tilelang', 'click', 'rich', 'pytest'} & sys.modules.keys()\n"
        "print(took / torchs)"
    )
    shares: list[float] = []
    while len(shares) < 6 and min(shares, default=1) >= 1 / 7:  # a busy machine makes single runs look slow
        shares.append(float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout))
    print(f"import tileops.gemm: {min(shares):.3f} of torch's")
    assert min(shares) < 1 / 7


def test_a_tensor_annotation_is_what_the_call_takes():
    from tileops.gemm import GEMMFwdOp, GemmFwdOp

    assert GemmFwdOp is GEMMFwdOp
    assert GEMMFwdOp.__call__.__annotations__ == {"a": "Tensor", "b": "Tensor", "return": "Tensor"}
    assert Tensor is torch.Tensor
