"""From a checked call to a launch: what is static of it, which kernel serves it, and the code that runs it.

No GPU: the kernels here only record what they were given, on CPU tensors.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch

from tileops.core import program, torch_ops
from tileops.core.backend import gpu
from tileops.core.errors import CaptureError, NoKernelError
from tileops.core.kernel import ALIGNMENT, H200, Form, Kernel, Scratch, static_of
from tileops.core.launch import LARGEST, MISS, Interval
from tileops.core.op import make_op
from tileops.core.plan import MAX_GUARDS
from tileops.core.program import Program

SPEC = """
AttendFwdOp:
  family: test
  summary: Something with two moving sizes, one of them shared.
  status: spec-only
  reference: attend_reference:reference
  signature:
    forall: {B: Dim, S: Dim, H: Dim, D: Dim, L: Shape, T: "DType[float32 | float16]"}
    params: {scale: {type: float, default: 1.0}, with_sum: {type: bool, default: false}}
    inputs:
      q: {dtype: T, shape: "[B, S, H, D]"}
      k: {dtype: T, shape: "[B, S, D]"}
      w: {dtype: T, shape: "[*L, D]", optional: true}
    outputs:
      o: {dtype: T, shape: "[B, S, H, D]"}
      total: {dtype: float32, shape: "[B, H, S]", when: with_sum}
    where:
    - {rule: "S % 2 == 0 or B == 1", hint: an even S}
    symbolic: [B, S, L]

SumFwdOp:
  family: test
  summary: Rows of a moving length.
  status: spec-only
  reference: attend_reference:reference
  signature:
    forall: {M: Dim, K: Dim, T: "DType[float32 | float16]"}
    inputs: {x: {dtype: T, shape: "[K, M]"}, y: {dtype: T, shape: "[K, 8]"}}
    outputs: {z: {dtype: T, shape: "[M, 8]"}}
    symbolic: [M, K]

ScalarFwdOp:
  family: test
  summary: A tensor without axes in, and one out.
  status: spec-only
  reference: attend_reference:reference
  signature:
    forall: {M: Dim}
    inputs: {x: {dtype: float32, shape: "[M]"}, scale: {dtype: float32, shape: "[]"}}
    outputs: {z: {dtype: float32, shape: "[]"}}
    symbolic: [M]

StirFwdOp:
  family: test
  summary: A tensor that is written to, and one laid out as it is.
  status: spec-only
  reference: attend_reference:reference
  signature:
    forall: {M: Dim, N: Dim}
    inputs: {x: {dtype: float32, shape: "[M, N]", mutated: true}}
    outputs: {y: {dtype: float32, shape: "[M, N]", layout: like(x)}}
    symbolic: [M]

JoinFwdOp:
  family: test
  summary: Two tensors that broadcast.
  status: spec-only
  reference: attend_reference:reference
  signature:
    forall: {A: Shape, B: Shape}
    inputs: {x: {dtype: float32, shape: "[*A, 4]"}, y: {dtype: float32, shape: "[*B, 4]"}}
    outputs: {z: {dtype: float32, shape: "[*A, 4]"}}
    where: ["broadcast(A, B) == A"]
    symbolic: [A, B]

LinesFwdOp:
  family: test
  summary: Rows in any number of axes.
  status: spec-only
  reference: attend_reference:reference
  signature:
    forall: {B: Shape}
    inputs: {x: {dtype: float32, shape: "[*B, 4]"}}
    outputs: {y: {dtype: float32, shape: "[*B, 4]"}}
    symbolic: [B]
"""


@attrs.frozen
class Config:
    tile: int


class Wide(Kernel):
    """Serves packed tensors of many tokens."""

    archs = {"cuda": ("sm90",)}

    def refuse(self, call, device):
        if call["S"] < 64:
            return f"serves S >= 64, not {call['S']}"
        strides = call.inputs["q"].strides
        return None if strides[-1] == 1 else f"q has stride {strides[-1]} along D"

    def configs(self, call, device) -> Iterator[Config]:
        yield Config(128 if call["S"] >= 128 else 64)

    def workspace(self, call, config):
        return [Scratch((call["S"], 4), "float32"), Scratch((3,), "int32", zeroed=True)]


class Narrow(Wide):
    """Serves short sequences."""

    archs = {"cuda": ("sm80", "sm90"), "musa": ("mp31",)}

    def refuse(self, call, device):
        return None if call["S"] <= 8 else f"serves S <= 8, not {call['S']}"

    def workspace(self, call, config):
        return []


class Old(Wide):
    archs = {"cuda": ("sm80",)}


class Rows(Kernel):
    """Serves aligned rows."""

    archs = {"cuda": ("sm90",)}

    def refuse(self, call, device):
        return "odd rows" if call.inputs["x"].strides[0] * 2 % 16 else None

    def configs(self, call, device):
        yield Config(1)


class Whatever(Rows):
    def refuse(self, call, device):
        return None


class Scratched(Whatever):
    def workspace(self, call, config):
        return [Scratch((7,), "float32")]


class Recorder:
    """A GPU of CPU tensors: ``launched`` holds the arguments of each launch."""

    device_type = "cuda"
    index = 0
    is_capturing = False

    def __init__(self) -> None:
        self.launched: list[tuple[torch.Tensor, ...]] = []

    def name(self, index):
        return "a recorder"

    def device(self, index):
        return H200

    def target(self, device):
        return {"kind": "cuda", "arch": "sm_90a"}

    def capturing(self):
        return self.is_capturing

    def empty(self, index):
        return lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype).fill_(-1)

    def fence(self, index):
        return None, None

    def main(self, *tensors):
        if any(t.data_ptr() % ALIGNMENT for t in tensors):
            raise RuntimeError("an address is no multiple of 16")
        self.launched.append(tensors)


@pytest.fixture(scope="module")
def op_class(tmp_path_factory):
    kernels = "attend_family.kernels"
    sys.modules["attend_reference"] = SimpleNamespace(reference=lambda q, k, w, **_: (q.clone(), None))
    sys.modules["attend_family"] = SimpleNamespace()
    sys.modules[kernels] = SimpleNamespace()
    sys.modules[f"{kernels}.attend"] = SimpleNamespace(
        Wide=Wide, Narrow=Narrow, Old=Old, Rows=Rows, Whatever=Whatever, Scratched=Scratched
    )
    path = tmp_path_factory.mktemp("spec") / "attend.yaml"
    path.write_text(SPEC)
    return make_op(
        "AttendFwdOp",
        path,
        __module__="attend_family.ops.attend",
        kernels=("attend:Old", "attend:Wide", "attend:Narrow"),
        buckets={"S": (8, 16, 64, 128)},
    )


@pytest.fixture(scope="module")
def rows_op(op_class):
    return make_op(
        "SumFwdOp",
        op_class.spec,
        __module__="attend_family.ops.attend",
        kernels=("attend:Rows", "attend:Whatever"),
        buckets={"M": (4, 64, 128)},
        pitches=("M",),
    )


@pytest.fixture
def recorder(monkeypatch):
    recorder = Recorder()
    programs: dict[str, Program] = {}

    def load(recipe):
        return programs.setdefault(recipe.key, Program(recipe.key, recorder.main))

    monkeypatch.setattr(program, "load", load)
    monkeypatch.setattr(program, "loaded", programs.get)
    monkeypatch.setattr(program, "sources_digest", lambda module: module)
    recorder.programs = programs
    return recorder


def tensors(B=2, S=64, H=3, D=4, dtype=torch.float32):
    return torch.randn(B, S, H, D, dtype=dtype), torch.randn(B, S, D, dtype=dtype), None


def plan_of(recorder, op, inputs, misaligned=()):
    call = op.bind(*inputs)
    last: Any = SimpleNamespace(run=None, settle=lambda *_: None)
    return gpu.plan(recorder, call, misaligned, {}, last), last


def test_what_moves_is_named_and_what_is_fixed_is_a_number(op_class):
    call = op_class(with_sum=True).bind(*tensors())
    static = static_of(torch_ops.checker_of(op_class.entry), call)
    assert dict(static.values) == {"scale": 1.0, "with_sum": True, "H": 3, "D": 4, "T": "float32"}
    assert static.tensor("q") == Form("float32", ("B", "S", 3, 4), (None,) * 4)
    assert static.tensor("total") == Form("float32", ("B", 3, "S"), (None,) * 3)
    assert static.tensor("w") is None
    with pytest.raises(KeyError):
        static["S"]
    other = op_class(with_sum=True).bind(*tensors(B=7, S=130))
    assert static_of(torch_ops.checker_of(op_class.entry), other) == static


def test_a_shape_index_moves_by_rank(op_class):
    q, k, _ = tensors()
    static = static_of(torch_ops.checker_of(op_class.entry), op_class().bind(q, k, torch.randn(5, 6, 4)))
    assert static.tensor("w").shape == ("L[0]", "L[1]", 4)


def test_a_tensor_without_axes_travels_as_one_of_one_element(op_class, recorder):
    op = make_op("ScalarFwdOp", op_class.spec, __module__="attend_family.ops.attend", kernels=("attend:Whatever",))()
    x, scale = torch.randn(3), torch.tensor(2.0)
    plan, _ = plan_of(recorder, op, (x, scale))
    z = plan.launch(x, scale)
    assert z.shape == ()
    assert [tuple(t.shape) for t in recorder.launched[0]] == [(3,), (1,), (1,)]
    assert [t.data_ptr() for t in recorder.launched[0][1:]] == [scale.data_ptr(), z.data_ptr()]


@pytest.mark.parametrize(
    "place",
    [
        lambda x: x,
        lambda x: x.t().contiguous().t(),
        lambda x: torch.stack([x, x], -1)[..., 0],
        lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
    ],
    ids=["packed", "transposed", "every-other", "misaligned"],
)
def test_a_copy_of_what_is_written_to_is_written_back(op_class, recorder, place):
    """And an output is laid out as the input was, not as its copy."""

    class Stir(Whatever):
        def refuse(self, call, device):
            return None if call.inputs["x"].strides == (call["N"], 1) else "x is not packed"

    def main(x, y):
        assert x.is_contiguous()
        y.copy_(x + 1)
        x.mul_(2)

    sys.modules["attend_family.kernels.attend"].Stir = Stir
    recorder.main = main
    op = make_op("StirFwdOp", op_class.spec, __module__="attend_family.ops.attend", kernels=("attend:Stir",))()
    for M in (5, 9):
        values = torch.randn(M, 4)
        x = place(values.clone())
        plan, _ = plan_of(recorder, op, (x,), op._state.misaligned((x,)))
        y = plan.launch(x)
        assert torch.equal(x, 2 * values)
        assert torch.equal(y, values + 1)
        assert y.stride() == torch.empty_like(x).stride()


@pytest.mark.parametrize(
    ("k", "strides"),
    [
        (torch.randn(2, 64, 4), (None, None, None)),
        (torch.randn(2, 64, 8)[..., :4], (None, 8, None)),
        (torch.randn(2, 100, 4)[:, :64], (400, None, None)),
        (torch.randn(2, 64, 8)[..., ::2], (None, None, 2)),
        (torch.randn(64, 2, 4).transpose(0, 1), (4, 8, None)),
        (torch.randn(4).expand(2, 64, 4), (None, 0, None)),
    ],
    ids=["packed", "row pitch", "batch pitch", "stride", "transposed", "expanded"],
)
def test_a_stride_is_packed_or_a_number(op_class, k, strides):
    call = op_class().bind(torch.randn(2, 64, 3, 4), k)
    assert static_of(torch_ops.checker_of(op_class.entry), call).tensor("k").strides == strides


@pytest.mark.parametrize(
    ("S", "interval", "end"),
    [(2, (1, 8), 8), (8, (1, 8), 8), (10, (9, 16), 16), (128, (65, 128), 128), (600, (513, 1024), 1024)],
)
def test_a_call_stands_for_its_bucket(op_class, S, interval, end):
    call = op_class().bind(*tensors(S=S))
    kind = gpu.bucketed(call)
    assert kind["S"] == end
    assert gpu.intervals(call, static_of(torch_ops.checker_of(op_class.entry), call)) == {
        "S": Interval(*interval),
        "B": Interval(1, gpu.LARGEST),
    }
    assert kind["B"] == 2


def test_the_first_kernel_that_does_not_refuse_serves(op_class):
    choice = gpu.choose(gpu.bucketed(op_class().bind(*tensors(S=100))), H200)
    assert (type(choice.kernel), choice.config) == (Wide, Config(128))
    choice = gpu.choose(gpu.bucketed(op_class().bind(*tensors(S=6))), H200)
    assert type(choice.kernel) is Narrow
    assert choice.refusals["Wide"] == "serves S >= 64, not 8"


def test_no_kernel_names_every_reason(op_class):
    with pytest.raises(NoKernelError) as caught:
        gpu.choose(op_class().bind(*tensors(S=10)), H200)
    assert caught.value.refusals == {
        "Old": "runs on cuda sm80, not on sm90",
        "Wide": "serves S >= 64, not 10",
        "Narrow": "serves S <= 8, not 10",
    }
    for kernel, reason in caught.value.refusals.items():
        assert f"{kernel}: {reason}" in str(caught.value)


def test_a_launch_allocates_and_passes_in_order(op_class, recorder):
    op = op_class(with_sum=True)
    q, k, w = tensors()
    plan, last = plan_of(recorder, op, (q, k, w))
    o, total = plan.launch(q, k, w)
    ((*given, scratch, counters),) = recorder.launched
    assert [t.data_ptr() for t in given] == [t.data_ptr() for t in (q, k, o, total)]
    assert (o.shape, o.dtype, total.shape, total.dtype) == ((2, 64, 3, 4), torch.float32, (2, 3, 64), torch.float32)
    assert o.is_contiguous()
    assert total.is_contiguous()
    assert (scratch.shape, scratch.dtype) == ((64, 4), torch.float32)
    assert counters.tolist() == [0, 0, 0]
    assert last.run == (plan, 2, 64)
    assert plan.outputs == (True, True)


def test_one_plan_serves_its_bucket_and_nothing_else(op_class, recorder):
    q, k, w = tensors(S=100)
    plan, last = plan_of(recorder, op_class(), (q, k, w))
    for B, S in ((2, 128), (5, 66), (1, 65), (300, 66)):
        o = plan.launch(*tensors(B=B, S=S))
        assert o.shape == (B, S, 3, 4)
        assert last.run == (plan, B, S)
    misses = {
        "a longer S": tensors(S=130),
        "a shorter S": tensors(S=64),
        "an empty batch": tensors(B=0, S=100),
        "sizes that differ": (tensors(S=100)[0], tensors(S=102)[1], None),
        "a rule that fails": tensors(B=2, S=67),
        "strides that differ": (tensors(S=100)[0], torch.randn(2, 200, 4)[:, ::2], None),
        "an odd address": (torch.randn(1 + 2 * 100 * 12)[1:].view(2, 100, 3, 4), k, None),
    }
    before = len(recorder.launched)
    for reason, inputs in misses.items():
        assert plan.launch(*inputs) is MISS, reason
    assert len(recorder.launched) == before


@pytest.mark.parametrize(
    ("M", "kernel", "end", "same", "other"),
    [
        (72, Rows, 128, (80, 128), (73, 66, 64)),
        (73, Whatever, 127, (65, 127, 100), (72, 128, 64)),
        (3, Whatever, 4, (1, 2, 4), (5, 8)),
    ],
)
def test_rows_of_a_moving_length_are_aligned_or_not(rows_op, recorder, M, kernel, end, same, other):
    def inputs(M, K=5):
        return torch.ones(K, M, dtype=torch.float16), torch.ones(K, 8, dtype=torch.float16)

    plan, _ = plan_of(recorder, rows_op(), inputs(M))
    assert type(plan.choice.kernel) is kernel
    assert gpu.bucketed(rows_op().bind(*inputs(M)))["M"] == end
    for n in same:
        assert plan.launch(*inputs(n, K=7)).shape == (n, 8)
    for n in other:
        assert plan.launch(*inputs(n)) is MISS


def test_a_size_that_no_program_takes_is_refused(rows_op):
    long = torch.ones(1, 1, dtype=torch.float16).expand(2**31 + 8, 72)
    with pytest.raises(NoKernelError, match=r"SumFwdOp: no kernel serves(.|\n)*every kernel: K = 2147483656 is beyond"):
        gpu.bucketed(rows_op().bind(long, torch.ones(1, 1, dtype=torch.float16).expand(2**31 + 8, 8)))


def test_shapes_that_do_not_fit_together_are_no_call_of_a_kind(op_class, recorder):
    """The rule has no value then: the checker says what is wrong."""
    op = make_op("JoinFwdOp", op_class.spec, __module__="attend_family.ops.attend", kernels=("attend:Whatever",))()
    plan, _ = plan_of(recorder, op, (torch.ones(2, 3, 4), torch.ones(2, 3, 4)))
    assert plan.launch(torch.ones(5, 3, 4), torch.ones(1, 3, 4)).shape == (5, 3, 4)
    assert plan.launch(torch.ones(5, 3, 4), torch.ones(2, 3, 4)) is MISS


def test_autograd_is_told_of_what_a_kernel_writes(op_class, recorder):
    op = make_op("StirFwdOp", op_class.spec, __module__="attend_family.ops.attend", kernels=("attend:Whatever",))()
    x = torch.ones(5, 4, requires_grad=True)
    kept = x * 1
    squares = (kept * kept).sum()
    plan, _ = plan_of(recorder, op, (kept.detach(),))
    plan.launch(kept.detach())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.backward()


@pytest.mark.parametrize(
    "name", ["main", "empty", "last", "plan", "run", "launch", "n_M", "s_x", "scratch_0", "packed"]
)
def test_a_tensor_may_have_any_name(tmp_path, recorder, name):
    path = tmp_path / "named.yaml"
    op_name = f"Launch{name.title().replace('_', '')}FwdOp"
    path.write_text(
        f"{op_name}:\n  family: test\n  summary: A copy.\n  status: spec-only\n  signature:\n    forall: {{M: Dim}}\n"
        f"    inputs: {{{name}: {{dtype: float32, shape: '[M]'}}, x: {{dtype: float32, shape: '[M, M]'}}}}\n"
        "    outputs: {y: {dtype: float32, shape: '[M]'}}\n    symbolic: [M]\n"
    )
    op = make_op(op_name, path, __module__="attend_family.ops.attend", kernels=("attend:Scratched",))()
    plan, last = plan_of(recorder, op, (torch.ones(3), torch.ones(3, 3)))
    assert plan.launch(torch.ones(5), torch.ones(5, 5)).shape == (5,)
    assert last.run == (plan, 5)
    assert [tuple(t.shape) for t in recorder.launched[0]] == [(5,), (5, 5), (5,), (7,)]


def test_each_axis_of_a_shape_has_its_buckets(op_class, recorder):
    lines = make_op(
        "LinesFwdOp",
        op_class.spec,
        __module__="attend_family.ops.attend",
        kernels=("attend:Whatever",),
        buckets={"B": (4, 64, LARGEST)},
    )
    plan, _ = plan_of(recorder, lines(), (torch.ones(3, 50, 4),))
    for B in ((1, 5), (4, 64)):
        assert plan.launch(torch.ones(*B, 4)).shape == (*B, 4)
    for B in ((5, 50), (3, 4), (3, 65)):
        assert plan.launch(torch.ones(*B, 4)) is MISS
    for B, largest in (((3, 50), (4, 64)), ((1000, 3), (1000, 4)), ((5, 6, 1), (64, 64, 4))):
        assert gpu.bucketed(lines().bind(torch.ones(*B, 4))).inputs["x"].shape == (*largest, 4)


def test_lengths_share_programs(op_class, recorder):
    op = op_class()
    for S in range(66, 300, 2):
        plan_of(recorder, op, tensors(S=S))
    assert len(recorder.programs) == 1, "one config serves all of these"
    for S in range(66, 128, 2):
        plan_of(recorder, op, (tensors(S=S)[0], torch.randn(2, S, 8)[..., :4], None))
    assert len(recorder.programs) == 2, "a pitch is fixed, whatever the length"


def test_what_no_kernel_takes_is_copied(op_class, recorder):
    _, k, w = tensors()
    strided = torch.randn(2, 64, 3, 8)[..., ::2]
    plan, _ = plan_of(recorder, op_class(), (strided, k, w))
    assert plan.choice.copies == ("q",)
    assert plan.choice.refusals["Wide"] == "q has stride 2 along D"
    plan.launch(strided, k, w)
    copied, *_ = recorder.launched[-1]
    assert copied.is_contiguous()
    assert torch.equal(copied, strided)


def test_a_misaligned_input_is_copied(op_class, recorder):
    q, k, w = tensors()
    odd = torch.randn(1 + q.numel())[1:].view(q.shape)
    plan, _ = plan_of(recorder, op_class(), (odd, k, w), misaligned=("q",))
    plan.launch(odd, k, w)
    copied, *_ = recorder.launched[-1]
    assert copied.data_ptr() % 16 == 0
    assert torch.equal(copied, odd)


def test_what_is_not_copied_must_be_aligned(op_class, recorder):
    _, k, w = tensors()
    strided = torch.randn(2, 64, 3, 8)[..., ::2]
    plan, _ = plan_of(recorder, op_class(), (strided, k, w))
    assert plan.choice.copies == ("q",)
    odd = torch.randn(1 + k.numel())[1:].view(k.shape)
    assert plan.launch(strided, odd, w) is MISS


def test_an_empty_call_runs_the_reference(op_class, recorder):
    q, k, w = tensors(B=0)
    plan, _ = plan_of(recorder, op_class(), (q, k, w))
    assert plan.launch(q, k, w).shape == q.shape
    assert not recorder.launched


def test_a_capture_needs_a_program_that_has_run(op_class, recorder):
    recorder.is_capturing = True
    with pytest.raises(CaptureError, match="AttendFwdOp: this call's program has not run on cpu yet"):
        plan_of(recorder, op_class(), tensors())
    recorder.is_capturing = False
    plan_of(recorder, op_class(), tensors())
    recorder.is_capturing = True
    plan, _ = plan_of(recorder, op_class(), tensors(S=128 // 2, B=3))
    assert plan.launch(*tensors(B=3)) is not MISS


def test_the_roofline_is_of_the_sizes_that_ran(op_class, recorder, monkeypatch):
    """Through the front door, on a device that records."""
    from tileops.core import backend

    monkeypatch.setattr(backend, "plan", lambda *args: gpu.plan(recorder, *args))
    op = op_class(scale=2.0)
    for B, S in ((2, 128), (5, 66), (5, 70)):
        op(*tensors(B=B, S=S))
        call = op._state.last_call()
        assert (call["B"], call["S"]) == (B, S)
        assert call == op.bind(*tensors(B=B, S=S)) or call.device == "cpu"
    assert len(op._state.plans) == 1, "the guard recognised the others"


def test_sizes_that_come_twice_in_a_row_get_a_launch_of_their_own(op_class, recorder, monkeypatch):
    from tileops.core import backend

    monkeypatch.setattr(backend, "plan", lambda *args: gpu.plan(recorder, *args))
    op = op_class(scale=3.0)
    state = op._state
    sizes = [(2, 128), (5, 66), (5, 70), (2, 128)]
    for B, S in sizes:
        op(*tensors(B=B, S=S))
    assert len(state.guards) == 1, "sizes that change are read off the tensors"
    for B, S in (*sizes, *sizes):
        for _ in range(3):
            inputs = tensors(B=B, S=S)
            assert op(*inputs).shape == inputs[0].shape
            assert recorder.launched[-1][0] is inputs[0]
            call = state.last_call()
            assert (call["B"], call["S"]) == (B, S)
    ((_, settled), *_), (plan,) = state.guards, state.plans.values()
    assert len(plan.settled) == 3
    assert len(state.guards) == 1 + 3
    assert ".shape" not in source_of(settled)
    strided = torch.randn(2, 128, 3, 8)[..., :4]
    assert op(strided, *tensors(S=128)[1:]).shape == strided.shape
    assert recorder.launched[-1][0] is strided, "not taken for the packed one of its sizes"


def test_a_kind_whose_guard_is_in_front_no_longer_is_known_still(op_class, recorder, monkeypatch):
    """As in serving: each length comes once for every layer, and has a guard of its very sizes from the second on."""
    from tileops.core import backend

    made = []
    monkeypatch.setattr(backend, "plan", lambda *args: made.append(args) or gpu.plan(recorder, *args))
    op = op_class(scale=4.0)
    state = op._state
    for S in range(66, 66 + 2 * MAX_GUARDS, 2):
        for _ in range(3):
            op(*tensors(S=S))
    assert not any(".shape" in source_of(launch) for _, launch in state.guards), "all are of their very sizes"
    inputs = tensors(B=3, S=120)
    assert op(*inputs).shape == inputs[0].shape
    assert recorder.launched[-1][0] is inputs[0]
    assert ".shape" in source_of(state.guards[0][1])
    assert len(made) == 1, "nothing was planned but the first call"


def test_guards_of_kinds_are_bounded(op_class, recorder, monkeypatch):
    from tileops.core import backend, plan

    monkeypatch.setattr(backend, "plan", lambda *args: gpu.plan(recorder, *args))
    monkeypatch.setattr(plan, "MAX_BEHIND", 2)
    op = op_class(scale=5.0)
    q, k, w = tensors()
    strided = q.transpose(1, 2).contiguous().transpose(1, 2)
    wide = torch.randn(*q.shape[:3], 2 * q.shape[3])[..., : q.shape[3]]
    for heads in (q, strided, wide):
        op(heads, k, w)
    assert len(op._state.behind) == 2
    op._state.forget()
    assert not op._state.behind


def source_of(launch) -> str:
    return "".join(linecache.getlines(launch.__code__.co_filename))
