"""The five multi-head DeltaNets, H heads of n slots, against the blog's update and its table."""

import pytest
import torch

from deltarule.nn import RULES
from deltarule.nn.rule import Projections
from nn.layers import B, K, T, V, draw, inputs, largest_error, make, run
from oracles import multi_head_delta as oracle
from oracles.lifted import unit

H, N = 2, 3
# Queries, keys, values, write strengths and states of one head, in the blog's table.
TABLE = {
    "multi_head_deltanet": (N, N, N, N, N),
    "multi_kv_deltanet": (1, N, N, N, N),
    "multi_value_deltanet": (1, 1, N, 1, N),
    "multi_key_deltanet": (1, N, 1, N, N),
    "multi_query_deltanet": (N, 1, 1, 1, 1),
    # Not in the blog: blocks of one key, arXiv 2406.06484, section 5.3.
    "block_deltanet": (N, N, 1, N, N),
}


def drawn(name):
    q, k, v, beta, _ = (H * n for n in TABLE[name])
    return Projections(
        q=draw(B, T, q, K),
        k=draw(B, T, k, K),
        v=draw(B, T, v, V),
        beta_logits=draw(B, T, beta),
        slots=N,
    )


def by_hand(p):
    """Each head of each row by the blog's loop, its slots summed."""
    parts = [unit(p.q), unit(p.k), p.v, torch.sigmoid(p.beta_logits)]
    o = torch.zeros(B, T, H, V, dtype=torch.float64)
    for row in range(B):
        for head in range(H):
            given = (x[row].unflatten(1, (H, -1))[:, head] for x in parts)
            o[row, :, head] = oracle.recurrence(*given)[0].sum(1)
    return o / K**0.5


@pytest.mark.parametrize("name", TABLE)
def test_heads_of_slots(name):
    p = drawn(name)
    o = run(RULES[name], p)
    assert o.shape == (B, T, H, V)
    assert largest_error(o, by_hand(p)) <= 1e-12


@pytest.mark.parametrize("name", TABLE)
def test_layers_have_what_the_table_counts(name):
    layer = make(name)
    _, state = layer(inputs(1, 3))
    q, k, v, beta, states = TABLE[name]
    weights = (layer.q_proj, layer.k_proj, layer.v_proj, layer.b_proj)
    sizes = [w.weight.shape[0] for w in weights]
    assert sizes == [2 * q * 4, 2 * k * 4, 2 * v * 4, 2 * beta]
    assert state["recurrent"].shape == (1, 2 * states, 4, 4)
    assert layer.o_proj.weight.shape[1] == 2 * 4
