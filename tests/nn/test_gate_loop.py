"""GateLoop against tests/oracles/gate_loop.py: a complex state that each token turns."""

import pytest
import torch

import deltarule
from deltarule.nn import RULES
from deltarule.nn.rotation import turned
from nn.drawn import HV, B, K, T, V, draw, draw_projections, each_head, largest_error, run
from nn.layers import inputs, make
from oracles import gate_loop

SCALE = K**-0.5


def drawn():
    return draw_projections(heads=HV, decay_logits=draw(B, T, HV, K), phase=3 * draw(B, T, HV, K))


def test_by_its_oracle():
    p = drawn()
    expected = torch.zeros(B, T, HV, V, dtype=torch.float64)
    for row, head, _, v, logits, w in each_head(p.v, p.decay_logits, p.phase):
        a = gate_loop.transition(logits, w)
        q, k = p.q[row, :, head], p.k[row, :, head]
        expected[row, :, head] = gate_loop.recurrence(q * SCALE, k, v, a)[0]
    assert largest_error(run(RULES["gate_loop"], p), expected) <= 1e-12


def test_its_state_is_the_papers_in_a_turning_frame():
    p = drawn()
    arguments, carry = RULES["gate_loop"].arguments(p)
    state = deltarule.delta_rule(**arguments).final_state
    found = turned(state, carry["phase"].unsqueeze(2))
    for row, head, _, v, logits, w in each_head(p.v, p.decay_logits, p.phase):
        a = gate_loop.transition(logits, w)
        _, H = gate_loop.recurrence(p.q[row, :, head], p.k[row, :, head], v, a)
        expected = torch.cat([H.real, H.imag], dim=-1)
        assert largest_error(found[row, head], expected) <= 1e-12


def test_without_angles_it_is_gated_linear_attention():
    p = draw_projections(heads=HV, decay_logits=draw(B, T, HV, K), phase=torch.zeros(B, T, HV, K))
    arguments, _ = RULES["gate_loop"].arguments(p)
    given = {"log_decay": torch.nn.functional.logsigmoid(p.decay_logits), "beta": None}
    expected = deltarule.delta_rule(p.q, p.k, p.v, **given, scale=SCALE).o
    assert largest_error(deltarule.delta_rule(**arguments).o, expected) <= 1e-12


@pytest.mark.parametrize("turns", [1e3, 1e6])
def test_far_from_the_start_a_frame_is_as_good_as_any(turns):
    """A sequence that has turned this often reads what one at its start does."""
    layer, x = make("gate_loop"), inputs(1, 30)
    y, _ = layer(x)
    state = layer.init_state(1)
    state["phase"] += torch.tensor(turns * torch.pi)
    torch.testing.assert_close(layer(x, state)[0], y, rtol=1e-4, atol=1e-6)
