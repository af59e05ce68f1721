"""What is learnt about calls: guards in front, keyed plans behind them, both bounded, neither ever wrong."""

from __future__ import annotations

import threading

import pytest
import torch

from tileops.attention import GQADenseFwdOp
from tileops.core import guards
from tileops.core.accuracy import yardstick
from tileops.core.bench.host import host_cost
from tileops.core.errors import CheckError, TileOpsError
from tileops.core.plan import MAX_GUARDS, MAX_PLANS
from tileops.gemm import GEMMFwdOp
from tileops.norm import RMSNormFwdOp


@pytest.fixture
def norm() -> RMSNormFwdOp:
    op = RMSNormFwdOp(8, eps=2**-10)
    op._state.guards = ()
    op._state.plans.clear()
    return op


def reference(x, weight=None):
    return torch.nn.functional.rms_norm(x, (8,), weight, 2**-10)


@pytest.fixture(params=["guards", "no private guards"])
def path(request, monkeypatch):
    """With torch's private guard class, and on a torch that lacks it."""
    if request.param != "guards":
        monkeypatch.setattr(guards, "tensor_guards", None)
    return request.param


def test_a_second_call_is_recognised(norm, path):
    x = torch.randn(4, 8)
    norm(x)
    (guard, _), *_ = norm._state.guards
    assert guard(torch.randn(4, 8), None)
    made = norm._state.local.run[0]
    norm(torch.randn(4, 8))
    assert norm._state.local.run[0] is made


@pytest.mark.parametrize(
    "other",
    [
        torch.randn(5, 8),
        torch.randn(8, 4).t(),
        torch.randn(4, 8, dtype=torch.float64).half(),
        torch.randn(1, 4, 8),
        torch.nn.Parameter(torch.randn(4, 8)),
        torch.randn(4, 8, requires_grad=True),
        torch.randn(4, 8, device="meta"),
        torch._neg_view(torch.randn(4, 8)),
    ],
    ids=["shape", "strides", "dtype", "rank", "type", "gradient", "device", "negated"],
)
def test_a_guard_refuses_what_differs(norm, path, other):
    norm(torch.randn(4, 8))
    (guard, *_), *_ = norm._state.guards
    assert not guard(other, None)
    assert not guard(torch.randn(4, 8), torch.randn(8)), "an input that was absent"


def test_calls_that_differ_get_their_own_results(norm, path):
    """Alternating over shapes, strides, dtypes and presence, so that each call follows one unlike it."""
    weight = torch.rand(8)
    inputs = [
        torch.randn(4, 8),
        torch.randn(8, 4).t(),
        torch.randn(4, 8).half(),
        torch.randn(2, 3, 8),
        torch.randn(0, 8),
    ]
    for _ in range(3):
        for x in inputs:
            torch.testing.assert_close(norm(x), reference(x))
            torch.testing.assert_close(norm(x, weight.to(x.dtype)), reference(x, weight.to(x.dtype)))


def test_guards_and_plans_are_bounded(norm):
    for rows in range(MAX_PLANS + 20):
        norm(torch.ones(rows, 8))
    assert len(norm._state.guards) == MAX_GUARDS
    assert len(norm._state.plans) == MAX_PLANS
    kept = [key[0][0] for key in norm._state.plans]
    assert kept[0] == (20, 8), "the least recently used went first"


def test_a_plan_made_without_gradients_serves_no_call_that_needs_one(path):
    gemm = GEMMFwdOp(trans_a=True)
    a, b = torch.randn(4, 2).half(), torch.nn.Parameter(torch.randn(3, 4).half())
    with torch.no_grad():
        for _ in range(2):
            assert not gemm(a, b).requires_grad
    assert gemm(a, b).requires_grad
    with torch.inference_mode():
        assert not gemm(a, b).requires_grad


def test_a_backward_without_gradient_raises_and_names_the_op(path):
    q = torch.nn.Parameter(torch.randn(1, 3, 2, 8).half())
    o = GQADenseFwdOp()(q, q.detach(), q.detach())
    with pytest.raises(TileOpsError, match="GQADenseFwdOp has no gradient"):
        o.sum().backward()


def test_forward_mode_differentiation_is_refused(path):
    gemm = GEMMFwdOp()
    a, b = torch.randn(2, 4).half(), torch.randn(3, 4).half()
    gemm(a, b)
    with pytest.raises(TileOpsError, match="forward-mode differentiation is not supported"):
        torch.func.jvp(lambda a: gemm(a, b), (a,), (a,))
    gemm(a, b)


def test_tensor_subclasses_and_modes_go_through_the_operator(norm):
    class Tagged(torch.Tensor):
        pass

    x = torch.randn(4, 8)
    tagged = norm(x.as_subclass(Tagged))
    assert isinstance(tagged, Tagged)
    torch.testing.assert_close(tagged.as_subclass(torch.Tensor), reference(x))


def test_threads_share_an_op(norm, path):
    failures = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for i in range(200):
            x = torch.randn((seed + i) % 23, 8, generator=generator)
            try:
                torch.testing.assert_close(norm(x), reference(x))
                assert norm.eval_roofline().bytes == 2 * x.numel() * 4
            except Exception as e:
                failures.append(e)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_autocast_changes_no_result():
    """An op computes as its spec says, and so does the yardstick that its result is held to."""
    op, a, b = GEMMFwdOp(), torch.randn(16, 512).half(), torch.randn(8, 512).half()
    plain, wanted = op(a, b), yardstick(op.bind(a, b), {"a": a, "b": b})["d"]
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(op(a, b), plain)
        assert torch.equal(yardstick(op.bind(a, b), {"a": a, "b": b})["d"], wanted)


def test_tensors_on_several_devices_are_refused_everywhere():
    """Eagerly, compiled, and by the operator itself."""
    norm, x, weight = RMSNormFwdOp(8), torch.ones(4, 8), torch.ones(8, device="meta")
    message = "RMSNormFwdOp: weight: got a tensor on meta, expected cpu, where x is"
    with pytest.raises(CheckError, match=message):
        norm(x, weight)
    with pytest.raises(Exception, match=message):
        torch.compile(lambda x, weight: norm(x, weight), backend="eager", fullgraph=True)(x, weight)
    with pytest.raises(CheckError, match=message):
        norm._state.operator(x, weight, *norm._state.values)


def test_a_refused_call_leaves_nothing_behind(norm):
    with pytest.raises(CheckError):
        norm(torch.ones(4, 7))
    assert not norm._state.plans
    assert not norm._state.guards


def test_what_a_call_costs_on_the_host():
    """The aims: a recognised call of two tensors under 4 us, a new one under 200 us; doubled for busy machines."""
    cost = host_cost(GEMMFwdOp(), (torch.ones(2, 4).half(), torch.ones(3, 4).half()))
    print(f"hit {cost.hit:.2f} us, keyed {cost.keyed:.2f} us, miss {cost.miss:.1f} us")
    assert cost.hit < 4 * 2
    assert cost.miss < 200 * 2


def test_debugging_checks_what_only_the_data_can_tell(monkeypatch):
    attention = GQADenseFwdOp(is_causal=True, softcap=7.0)
    q, kv, scale = torch.zeros(1, 2, 2, 4), torch.zeros(1, 3, 1, 4), torch.ones(1, 1)
    inputs = [t.to(torch.float8_e4m3fn) for t in (q, kv, kv)] + [None, None, scale, scale, -scale]
    attention(*inputs)
    attention._state.forget()
    monkeypatch.setenv("TILEOPS_DEBUG", "1")
    for _ in range(2):
        with pytest.raises(CheckError, match=r"GQADenseFwdOp: v_scale: got .*-1\.0.*\n.*requires: positive"):
            attention(*inputs)
    attention(*inputs[:-1], scale)
    attention._state.forget()


def test_a_recorded_call_is_recognised_whatever_its_sizes(norm, path):
    weight = torch.nn.Parameter(torch.rand(8))
    for rows in (4, 5, 4):
        x = torch.randn(rows, 8, requires_grad=True)
        norm(x, weight).sum().backward()
        expected = torch.autograd.grad(reference(x, weight).sum(), x)
        torch.testing.assert_close(x.grad, expected[0])
    guards_of_training = [g for g, _ in norm._state.guards if g(torch.randn(9, 8, requires_grad=True), weight)]
    assert len(guards_of_training) == 1
    with torch.no_grad():
        assert not guards_of_training[0](torch.randn(9, 8, requires_grad=True), weight)
    with pytest.raises(CheckError):
        norm(torch.randn(4, 7, requires_grad=True), weight)
    assert not norm(torch.randn(4, 8), weight.detach()).requires_grad
