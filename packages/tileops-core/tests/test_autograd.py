"""Gradients come from the entry's ``grad``: an operator of its own, called with what the forward saved."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tileops.core.errors import TileOpsError
from tileops.core.op import make_op

SPEC = """
RootFwdOp:
  family: test
  summary: y = weight * sqrt(x) + z, and the root when asked.
  status: spec-only
  reference: root_reference:forward
  signature:
    forall: {N: Dim, T: "DType[float64]"}
    params: {power: {type: float, default: 0.5}, return_root: {type: bool, default: false}}
    inputs:
      x: {dtype: T, shape: "[N]"}
      weight: {dtype: T, shape: "[N]", optional: true}
      z: {dtype: T, shape: "[N]", optional: true}
    outputs:
      y: {dtype: T, shape: "[N]"}
      root: {dtype: T, shape: "[N]", when: return_root}
  grad:
    op: RootBwdOp
    params: {power: power}
    inputs: {dy: grad(y), weight: weight, root: saved(root)}
    gives: {x: dx, weight: dweight, z: "grad(y)"}
RootBwdOp:
  family: test
  summary: The gradient of RootFwdOp.
  status: spec-only
  reference: root_reference:backward
  signature:
    forall: {N: Dim, T: "DType[float64]"}
    params: {power: {type: float}}
    inputs:
      dy: {dtype: T, shape: "[N]"}
      weight: {dtype: T, shape: "[N]", optional: true}
      root: {dtype: T, shape: "[N]"}
    outputs:
      dx: {dtype: T, shape: "[N]"}
      dweight: {dtype: T, shape: "[N]", when: present(weight)}
"""


def forward(x, weight, z, *, power, return_root, T):
    root = x**power
    y = root if weight is None else weight * root
    return (y.clone() if z is None else y + z), root if return_root else None


def backward(dy, weight, root, *, power, T):
    scaled = dy if weight is None else dy * weight
    return scaled * power * root ** ((power - 1) / power), None if weight is None else dy * root


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    sys.modules["root_reference"] = SimpleNamespace(forward=forward, backward=backward)
    path = tmp_path_factory.mktemp("spec") / "root.yaml"
    path.write_text(SPEC)
    make_op("RootBwdOp", path)
    return make_op("RootFwdOp", path)


def inputs():
    torch.manual_seed(0)
    return [(torch.rand(5, dtype=torch.float64) + 0.5).requires_grad_() for _ in range(3)]


def test_gradients_are_right(root):
    assert torch.autograd.gradcheck(root(), inputs())
    assert torch.autograd.gradcheck(lambda x: root(power=2.0)(x), inputs()[:1])
    x, weight, _ = inputs()
    assert torch.autograd.gradcheck(lambda x, w: root()(x, w), (x, weight))


def test_what_backward_needs_is_asked_for_and_not_shown(root):
    x, weight, z = inputs()
    y = root()(x, weight, z)
    assert isinstance(y, torch.Tensor)
    y, shown = root(return_root=True)(x, weight, z)
    assert not shown.requires_grad, "no gradient is declared for it"
    y.sum().backward()
    assert x.grad is not None


def test_only_what_requires_a_gradient_gets_one(root):
    x, weight, z = inputs()
    root()(x.detach(), weight, z.detach()).sum().backward()
    assert x.grad is None
    assert torch.allclose(weight.grad, x.detach().sqrt())


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_a_training_step_compiles_whole(root, backend):
    torch._dynamo.reset()
    op = root()
    step = torch.compile(lambda x, w, z: op(x * 2, w, z).sum(), fullgraph=True, backend=backend)
    plain, compiled = inputs(), inputs()
    op(plain[0] * 2, plain[1], plain[2]).sum().backward()
    step(*compiled).backward()
    for a, b in zip(plain, compiled, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_a_checkpoint_gives_the_same_gradients(root):
    """It unpacks what was saved once, and no more."""
    plain, again = inputs(), inputs()
    root()(*plain).sum().backward()
    checkpoint(root(), *again, use_reentrant=False).sum().backward()
    for a, b in zip(plain, again, strict=True):
        assert torch.equal(a.grad, b.grad)


def test_a_recorded_call_is_the_last_one_too(root):
    op, (x, weight, z) = root(power=0.25), inputs()
    with pytest.raises(TileOpsError, match="no call of it has run"):
        op.eval_roofline()
    op(x.detach(), weight.detach(), z.detach())
    long = torch.ones(100, dtype=torch.float64, requires_grad=True)
    for _ in range(3):
        op(long)
        assert op._state.last_call() == op.bind(long)


def test_what_is_tuned_forward_is_tuned_backward(root):
    op, (x, *_) = root(power=0.75), inputs()
    op(x).sum().backward()
    op.request_tune()
    op(x).sum().backward()
    gradient = op._state.gradient
    assert gradient.forward.tune
    assert all(backward.state.tune for backward in gradient.backward)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev, lambda f: lambda x: torch.func.vjp(f, x)])
def test_the_derivatives_of_torch_func_are_refused(root, transform):
    with pytest.raises(TileOpsError, match=r"RootFwdOp: the derivatives of torch.func are not supported; use torch.au"):
        transform(lambda x: root()(x).sum())(torch.ones(3, dtype=torch.float64))


def test_a_batch_of_calls_by_vmap_is_refused_where_torch_makes_none(root):
    with pytest.raises(TileOpsError, match=r"RootFwdOp: torch.vmap is not supported; call it on the whole batch"):
        torch.vmap(root())(torch.ones(4, 3, dtype=torch.float64))


def test_a_second_derivative_is_refused(root):
    x, *_ = inputs()
    (grad,) = torch.autograd.grad(root()(x).square().sum(), x, create_graph=True)
    with pytest.raises(TileOpsError, match="RootBwdOp has no gradient"):
        grad.sum().backward()


def test_an_unknown_backward_is_named(tmp_path):
    path = tmp_path / "lone.yaml"
    path.write_text(
        SPEC.split("RootBwdOp:\n  family")[0].replace("RootFwdOp", "LoneFwdOp").replace("RootBwdOp", "NoneBwdOp")
    )
    with pytest.raises(TileOpsError, match="no operator is called 'NoneBwdOp'"):
        make_op("LoneFwdOp", path)()


MUTATING = """
ClearFwdOp:
  family: test
  summary: Sets a vector to zero.
  status: spec-only
  reference: clear_reference:clear
  signature:
    forall: {N: Dim}
    inputs: {x: {dtype: float32, shape: "[N]", mutated: true}}
    outputs: {}
"""


@pytest.mark.parametrize("compiled", [False, True])
def test_an_op_that_only_mutates_refuses_what_needs_a_gradient(tmp_path, compiled):
    def reference(x):
        x.zero_()

    sys.modules["clear_reference"] = SimpleNamespace(clear=reference)
    path = tmp_path / "clear.yaml"
    path.write_text(MUTATING)
    clear = make_op("ClearFwdOp", path)()
    run = torch.compile(lambda x: clear(x), fullgraph=True, backend="aot_eager") if compiled else clear
    x = torch.ones(3)
    assert run(x) is None
    assert not x.any()
    with pytest.raises(Exception, match="ClearFwdOp has no gradient"):
        run(torch.ones(3).requires_grad_() * 2)


TWO_OUTPUTS = """
ShiftFwdOp:
  family: test
  summary: s = a + b, and y = s times the length of a row.
  status: spec-only
  reference: shift_reference:forward
  signature:
    forall: {B: Shape, N: Dim}
    inputs: {a: {dtype: float64, shape: "[*B, N]"}, b: {dtype: float64, shape: "[*B, N]"}}
    outputs: {y: {dtype: float64, shape: "[*B, N]"}, s: {dtype: float64, shape: "[*B, N]"}}
  grad:
    op: ShiftBwdOp
    params: {shape: "[N]"}
    inputs: {dy: grad(y)}
    gives: {a: "dx + grad(s)", b: "dx + grad(s)"}
ShiftBwdOp:
  family: test
  summary: dx = dy times the length of a row.
  status: spec-only
  reference: shift_reference:backward
  signature:
    forall: {B: Shape}
    params: {shape: {type: "list[int]"}}
    inputs: {dy: {dtype: float64, shape: "[*B, *shape]"}}
    outputs: {dx: {dtype: float64, shape: "[*B, *shape]"}}
"""


@pytest.fixture(scope="module")
def shift(tmp_path_factory):
    def forward(a, b):
        return (a + b) * a.shape[-1], a + b

    sys.modules["shift_reference"] = SimpleNamespace(forward=forward, backward=lambda dy, shape: dy * shape[0])
    path = tmp_path_factory.mktemp("spec") / "shift.yaml"
    path.write_text(TWO_OUTPUTS)
    make_op("ShiftBwdOp", path)
    return make_op("ShiftFwdOp", path)()


def two(n):
    return [torch.full((2, n), float(i), dtype=torch.float64, requires_grad=True) for i in range(2)]


@pytest.mark.parametrize("n", [3, 4])
def test_a_gradient_that_arrives_is_added_to_the_backwards(shift, n):
    """The backward op's params come from the sizes of a call."""
    assert torch.autograd.gradcheck(shift, two(n))
    for use, expected in ((lambda y, s: y, n), (lambda y, s: s, 1), (lambda y, s: y + s, n + 1)):
        a, b = two(n)
        use(*shift(a, b)).sum().backward()
        assert a.grad.unique().tolist() == b.grad.unique().tolist() == [expected]
        a.grad.zero_()
        assert b.grad.unique().tolist() == [expected], "each input has a gradient of its own"


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_backward_of_sizes_compiles_whole(shift, backend, dynamic):
    torch._dynamo.reset()
    step = torch.compile(
        lambda a, b: sum(t.sum() for t in shift(a, b)), fullgraph=True, backend=backend, dynamic=dynamic
    )
    for n in (3, 4):
        a, b = two(n)
        step(a, b).backward()
        assert a.grad.unique().tolist() == b.grad.unique().tolist() == [n + 1]


def test_a_size_that_the_backward_is_not_given_is_named(tmp_path):
    path = tmp_path / "lost.yaml"
    path.write_text(TWO_OUTPUTS.replace("ShiftFwdOp", "LostFwdOp").replace('shape: "[N]"}', 'shape: "[prod(B)]"}'))
    with pytest.raises(TileOpsError, match="LostFwdOp: 'grad' uses 'B', which no tensor given to ShiftBwdOp has"):
        make_op("LostFwdOp", path)()
