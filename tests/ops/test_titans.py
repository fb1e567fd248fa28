"""`titans` against arXiv 2501.00663, one head at a time."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from ops.memories import DOUBLE, HV, H, make
from oracles import titans as oracle
from tolerance import relative_rms


@pytest.mark.parametrize("impl", ["torch", "reference"])
@pytest.mark.parametrize("maps", [1, 2])
@pytest.mark.parametrize("size", [1, 8])
def test_equals_the_papers_recurrence(maps, size, impl):
    """Eq. 9, 10 and 13 to 15; with mini-batches, gradients at the memory before them."""
    case = make("titans", maps, batch=2, tokens=27, size=size, begun=False)
    x, out = case.tensors, case.run(impl)
    memory = partial(oracle.mlp, activation=partial(F.gelu, approximate="tanh"))
    for row, head in [(0, 0), (1, 3)]:
        q, k = (x[name][row, :, head * H // HV] for name in "qk")
        v, theta, eta = (x[name][row, :, head] for name in ("v", "beta", "momentum"))
        weights = {f"W{i + 1}": x[f"weights_{i + 1}"][row, head] for i in range(maps)}
        alpha = 1 - x["log_decay"][row, :, head].exp()
        o, M, S = oracle.recurrence(memory, weights, q, k, v, theta, eta, alpha, size)
        assert relative_rms(out.o[row, :, head], o) <= 1e-12
        for found, expected in ((out.final_state.weights, M), (out.final_state.momentum, S)):
            for y, wanted in zip(found, expected.values(), strict=True):
                assert relative_rms(y[row, head], wanted) <= 1e-12


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


def test_the_anchor_moves_with_full_mini_batches_only():
    case = make("titans", 1, batch=1, tokens=11, size=4, begun=False)
    state = case.run().final_state
    eight = case.part(slice(8)).run().final_state
    assert state.position.tolist() == [3]
    assert relative_rms(state.anchor[0], eight.weights[0]) <= 1e-12
    assert torch.equal(eight.anchor[0], eight.weights[0])
