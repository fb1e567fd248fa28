"""What `ttt` and `titans` share: the dual form is the primal one, however the tokens come."""

import weakref
from importlib import import_module

import pytest
import torch

from deltarule.ops import mini_batches
from deltarule.ops.memory import inputs
from deltarule.ops.memory.torch import memory
from ops import contract
from ops.memories import CALLS, DOUBLE, HV, KINDS, arguments, make, run
from tolerance import relative_rms

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
    of = contract.memory(operator, maps, size)
    x = of.draw(3, 37, lengths)
    x |= {} if position is None else {"position": torch.full((7,), position)}
    *found, place = of.run(**x, impl="torch")
    *expected, exact_place = of.run(**x, impl="reference")
    assert torch.equal(place, exact_place)
    assert all(relative_rms(*pair) <= REORDERED for pair in zip(found, expected, strict=True))


@every_kind
@pytest.mark.parametrize("recompute", [True, False])
def test_a_backward_pass_keeps_few_memories(operator, maps, recompute, monkeypatch):
    """Of 100 mini-batches 10, as those between them run once more."""
    tensors, seen = make(operator, maps, 1, 400, 1, size=4), []
    leaves = {n: x.requires_grad_() for n, x in tensors.items() if n != "position"}

    def noted(*given, mini_batch=memory.mini_batch):
        z, after = mini_batch(*given)
        seen.append(weakref.ref(after.weights[0]))
        return z, after

    monkeypatch.setattr(memory, "mini_batch", noted)
    monkeypatch.setattr(memory, "KEPT", 0 if recompute else 2**30)
    o, *_ = run(operator, tensors | leaves, 4)
    alive = sum(ref() is not None for ref in seen)
    assert len(seen) >= 100
    assert alive <= 11 if recompute else alive >= 100
    o.sum().backward()


@every_kind
def test_recomputed_gradients_equal_kept_ones(operator, maps, monkeypatch):
    of, found = contract.memory(operator, maps), []
    x = of.draw(3, 37)
    for kept in (0, 2**30):
        monkeypatch.setattr(memory, "KEPT", kept)
        found.append(contract.gradients(of, x, impl="torch")[1])
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_gelu_slope():
    x = torch.linspace(-5, 5, 101, dtype=DOUBLE, requires_grad=True)
    y = torch.nn.functional.gelu(x, approximate="tanh")
    (expected,) = torch.autograd.grad(y.sum(), x)
    assert (memory.gelu_slope(x) - expected).abs().max() <= 1e-14


@every_kind
def test_auto_takes_the_kernels_where_they_run(operator, maps, monkeypatch):
    monkeypatch.setattr(inputs, "why_not_fused", lambda *_: None)
    monkeypatch.setattr(inputs, "capability", lambda _: 9)
    # The functions of these names hide their modules.
    table = import_module(f"deltarule.ops.memory.{operator}").IMPLEMENTATIONS
    kernels = table["triton"]._replace(run=lambda _: "kernels")
    monkeypatch.setitem(table, "triton", kernels)
    given = arguments(operator, make(operator, maps))
    assert CALLS[operator](**given, impl="triton") == CALLS[operator](**given) == "kernels"
    with pytest.raises(ValueError, match="mini-batches up to 16, got K = 4, V = 4 and 17"):
        run(operator, make(operator, maps, size=17), 17, impl="triton")


def test_gates_left_out_are_neutral():
    x, constant = make("titans", 2), -torch.rand(HV, dtype=DOUBLE)
    zeros, each = torch.zeros_like(x["beta"]), constant.expand(x["beta"].shape)
    for one, other in (
        ({"momentum": None, "log_decay": None}, {"momentum": zeros, "log_decay": zeros}),
        ({"log_decay": constant}, {"log_decay": each}),
    ):
        assert torch.equal(run("titans", x | one)[0], run("titans", x | other)[0])
