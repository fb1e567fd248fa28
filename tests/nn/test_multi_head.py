"""The five multi-head DeltaNets against the blog's update, and which are DeltaNet in sum."""

import pytest
import torch

from deltarule.nn import RULES
from deltarule.nn.rule import Projections
from nn.drawn import B, K, T, V, draw, largest_error, run

N = 3
# Heads of q, k, v and beta in the blog's table; a write strength belongs to a state.
HEADS = {
    "multi_head_deltanet": (N, N, N, N),
    "multi_kv_deltanet": (1, N, N, N),
    "multi_value_deltanet": (1, 1, N, N),
    "multi_key_deltanet": (1, N, 1, N),
    "multi_query_deltanet": (N, 1, 1, 1),
}


def drawn(name):
    q, k, v, beta = HEADS[name]
    return Projections(
        q=draw(B, T, q, K), k=draw(B, T, k, K), v=draw(B, T, v, V), beta_logits=draw(B, T, beta)
    )


def unit(x):
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def by_hand(p):
    """y_i = q_i W_i, W_i = (I - eta_i k_i^T k_i) W_i + eta_i k_i^T v_i with row vectors."""
    q, k, v = (x.expand(B, T, N, -1) for x in (unit(p.q), unit(p.k), p.v))
    eta = torch.sigmoid(p.beta_logits).expand(B, T, N)
    W, y = torch.zeros(B, N, K, V, dtype=torch.float64), []
    for t in range(T):
        key = k[:, t].unsqueeze(-1)
        W = W + eta[:, t, :, None, None] * key * (v[:, t].unsqueeze(-2) - key.mT @ W)
        y.append((q[:, t].unsqueeze(-2) @ W).squeeze(-2))
    return torch.stack(y, dim=1) / K**0.5


@pytest.mark.parametrize("name", HEADS)
def test_per_head_outputs(name):
    p = drawn(name)
    o = run(RULES[name], p)
    assert o.shape == (B, T, N, V)
    assert largest_error(o, by_hand(p)) <= 1e-12


def test_multi_head_is_deltanet():
    p = drawn("multi_head_deltanet")
    assert torch.equal(run(RULES["multi_head_deltanet"], p), run(RULES["deltanet"], p))


def summed(name, p):
    return run(RULES[name], p).sum(2, keepdim=True)


@pytest.mark.parametrize("name", HEADS)
def test_which_collapse_under_the_blogs_summed_read_out(name):
    """With one eta for all heads, many values or queries are one DeltaNet of their sum.

    Many keys are not: each changes its own state, and no single key does what they do together.
    """
    p = drawn(name)
    shared = p.beta_logits[..., :1]
    p = Projections(q=p.q, k=p.k, v=p.v, beta_logits=shared.expand(B, T, HEADS[name][3]))
    # Unit queries first: their sum is not a unit, and the rule must leave it as it is.
    q, k, v = (x.sum(2, keepdim=True) for x in (unit(p.q), p.k, p.v))
    one = Projections(q=q, k=unit(k), v=v, beta_logits=shared, qk_norm="none")
    error = largest_error(summed(name, p), run(RULES["deltanet"], one))
    if name in ("multi_value_deltanet", "multi_query_deltanet"):
        assert error <= 1e-12
    else:
        assert error > 0.1


def test_multi_kv_is_delta_product_where_keys_are_orthogonal():
    """With slots of orthogonal keys, states of their own hold what one state holds in sum."""
    p = drawn("multi_kv_deltanet")
    # Slot i lives on channel i for ever.
    keys = torch.eye(K, dtype=torch.float64)[:N].expand(B, T, N, K) * (1 + draw(B, T, N, 1).abs())
    p = Projections(q=p.q, k=keys, v=p.v, beta_logits=p.beta_logits)
    steps = {"k": keys.reshape(B, T * N, 1, K), "v": p.v.reshape(B, T * N, 1, V)}
    product = Projections(q=p.q, beta_logits=p.beta_logits.reshape(B, T * N, 1), n_steps=N, **steps)
    one_state = run(RULES["delta_product"], product)
    assert largest_error(summed("multi_kv_deltanet", p), one_state) <= 1e-12
    mixed = {"k": draw(B, T, N, K)}
    apart = summed("multi_kv_deltanet", Projections(
        q=p.q, v=p.v, beta_logits=p.beta_logits, **mixed
    ))  # fmt: skip
    together = run(RULES["delta_product"], Projections(
        q=p.q, k=mixed["k"].reshape(B, T * N, 1, K), v=steps["v"],
        beta_logits=product.beta_logits, n_steps=N,
    ))  # fmt: skip
    assert largest_error(apart, together) > 0.1
