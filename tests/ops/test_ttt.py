"""`ttt` against the authors' recurrence, one head at a time."""

import pytest
import torch

from ops.memories import HV, H, make
from oracles import ttt as oracle
from tolerance import relative_rms


def weights_of(maps):
    """As the oracle has them: rows times W, and a bias apart."""
    pairs = {f"W{i + 1}": w[:, :-1].mT for i, w in enumerate(maps)}
    return pairs | {f"b{i + 1}": w[:, -1] for i, w in enumerate(maps)}


@pytest.mark.parametrize("impl", ["torch", "reference"])
@pytest.mark.parametrize("maps", [1, 2])
def test_equals_the_authors_recurrence(maps, impl):
    case = make("ttt", maps, batch=2, tokens=40, size=8, begun=False)
    x, out = case.tensors, case.run(impl)
    network = oracle.linear if maps == 1 else oracle.mlp
    for row, head in [(0, 0), (1, 3)]:
        q, k = (x[name][row, :, head * H // HV] for name in "qk")
        expected, after = oracle.recurrence(
            network, weights_of([x[f"weights_{i + 1}"][row, head] for i in range(maps)]), q, k,
            x["v"][row, :, head], x["beta"][row, :, head], x["step_scale"], x["norm_weight"][head],
            x["norm_bias"][head],
        )  # fmt: skip
        assert relative_rms(out.o[row, :, head], expected) <= 1e-12
        found = weights_of([w[row, head] for w in out.final_state.weights])
        assert all(relative_rms(found[name], after[name]) <= 1e-12 for name in after)
    # Its mini-batches are whole.
    assert out.final_state.position.tolist() == [0, 0]
    assert all((summed == 0).all() for summed in out.final_state.gradients)


def test_an_open_mini_batch_waits_in_the_state():
    case = make("ttt", 1, batch=1, tokens=3, size=8, begun=False)
    state = case.run().final_state
    assert torch.equal(state.weights[0], case.tensors["weights_1"])
    assert state.position.tolist() == [3]
    assert (state.gradients[0] != 0).all()
