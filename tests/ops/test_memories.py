"""What `ttt` and `titans` share: the dual form is the primal one, however the tokens come."""

import weakref
from importlib import import_module

import pytest
import torch

from deltarule.ops import mini_batches
from deltarule.ops.memory import inputs
from deltarule.ops.memory.torch import memory
from ops.memories import DOUBLE, HV, KINDS, assert_same, make

every_kind = pytest.mark.parametrize(("operator", "maps"), KINDS)
LENGTHS = (3, 0, 21, 1, 0, 1)
# The dual form reorders the sums.
REORDERED = 1e-10


# Mini-batches, packed sequences if any, and where all of these are in their mini-batches; of seven
# alike, some may all need one mini-batch more.
SIZES = [(1, None, None), (5, None, None), (16, None, None), (1, LENGTHS, None), (5, LENGTHS, None)]
SIZES += [(5, (length,) * 7, at) for length, at in ((2, 4), (6, 4), (1, 0), (5, 0), (6, 0))]


@every_kind
@pytest.mark.parametrize(("size", "lengths", "position"), SIZES)
@pytest.mark.parametrize("read", [True, False])
def test_dual_form_equals_primal_form(operator, maps, size, lengths, position, read, monkeypatch):
    if not read:
        monkeypatch.setattr(mini_batches, "readable", lambda _: False)
    case = make(operator, maps, size=size, lengths=lengths)
    if position is not None:
        case = case.changed(position=torch.full((7,), position))
    assert_same(case.run("torch"), case.run("reference"), REORDERED)


@every_kind
@pytest.mark.parametrize("recompute", [True, False])
def test_a_backward_pass_keeps_few_memories(operator, maps, recompute, monkeypatch):
    """Of 100 mini-batches 10, as those between them run once more."""
    case, seen = make(operator, maps, batch=1, tokens=400, size=4, begun=False), []
    leaves = {n: x.clone().requires_grad_() for n, x in case.tensors.items() if n != "position"}

    monkeypatch.setattr(memory, "mini_batch", noting(memory.mini_batch, seen))
    monkeypatch.setattr(memory, "KEPT", 0 if recompute else 2**30)
    out = case.changed(**leaves).run()
    alive = sum(ref() is not None for ref in seen)
    assert len(seen) >= 100
    assert alive <= 11 if recompute else alive >= 100
    out.o.sum().backward()


def noting(mini_batch, seen):
    """The stage, which leaves a weak reference to every memory it makes."""

    def noted(*given):
        z, after = mini_batch(*given)
        seen.append(weakref.ref(after.weights[0]))
        return z, after

    return noted


@every_kind
def test_recomputed_gradients_equal_kept_ones(operator, maps, monkeypatch):
    case = make(operator, maps)
    monkeypatch.setattr(memory, "KEPT", 0)
    found = case.gradients("torch")
    monkeypatch.setattr(memory, "KEPT", 2**30)
    for name, gradient in case.gradients("torch").items():
        assert torch.equal(gradient, found[name]), name


def test_gelu_slope():
    x = torch.linspace(-5, 5, 101, dtype=DOUBLE, requires_grad=True)
    y = torch.nn.functional.gelu(x, approximate="tanh")
    (expected,) = torch.autograd.grad(y.sum(), x)
    assert (memory.gelu_slope(x) - expected).abs().max() <= 1e-14


@every_kind
def test_auto_takes_the_kernels_where_they_run(operator, maps, monkeypatch):
    monkeypatch.setattr(inputs, "why_not_fused", lambda _: None)
    monkeypatch.setattr(inputs, "capability", lambda _: 9)
    # The functions of these names hide their modules.
    table = import_module(f"deltarule.ops.memory.{operator}").IMPLEMENTATIONS
    kernels = table["triton"]._replace(run=lambda _: "kernels")
    monkeypatch.setitem(table, "triton", kernels)
    case = make(operator, maps)
    assert case.run("triton") == "kernels"
    assert case.run() == "kernels"
    with pytest.raises(ValueError, match="mini-batches up to 16, got K = 4, V = 4 and 17"):
        make(operator, maps, size=17).run("triton")


def test_gates_left_out_are_neutral():
    case = make("titans", 2)
    x = case.tensors
    zeros = torch.zeros_like(x["beta"])
    plain = case.changed(momentum=None, log_decay=None).run()
    spelled = case.changed(momentum=zeros, log_decay=zeros).run()
    assert torch.equal(plain.o, spelled.o)
    constant = -torch.rand(HV, dtype=DOUBLE)
    each = case.changed(log_decay=constant.expand(x["beta"].shape)).run()
    assert torch.equal(case.changed(log_decay=constant).run().o, each.o)
