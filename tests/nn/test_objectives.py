"""Each row's update is what its objective says: the minimiser, or gradient steps, to 1e-10.

minimiser        S_t = argmin_S loss(S, S_{t-1}, token), for a loss that is quadratic in S
gradient step    S_t = A_t - rate * d loss / dS at A_t, the state after its decay

The losses know nothing of the recurrences: they follow from them. They read a write x: its key k
[K], value v [V] and strength beta, the decay of each key channel [K] before it, and of a free erase
what the old state is read with, a [K], and what that is taken away under, b [K].
"""

from types import SimpleNamespace

import pytest
import torch

from deltarule.nn import RULES
from deltarule.ops.delta_rule import definition
from nn.layers import OPERATORS, draw_projections
from nn.test_rules import gates, key_heads


def minimiser(loss):
    """One Newton step from the old state, exact because the loss is quadratic; one write."""

    def update(before, writes):
        (x,) = writes
        start, of = before.flatten(), lambda state: loss(state.view_as(before), before, x)
        gradient, hessian = torch.func.grad(of)(start), torch.func.hessian(of)(start)
        return (start - torch.linalg.solve(hessian, gradient)).view_as(before)

    return update


def gradient_steps(loss):
    """One for each write, from the state after its decay."""

    def update(before, writes):
        state = before * writes[0].decay
        for x in writes:
            rate = 1.0 if x.beta is None else x.beta
            state = state - rate * torch.func.grad(loss)(state, state, x)
        return state

    return update


def moved(state, start):
    return (state - start).square().sum()


def similarity(state, before, x):
    """-<S k, v>."""
    return -(state @ x.k) @ x.v


def square_error(state, before, x):
    """|S k - v|^2 / 2."""
    return (state @ x.k - x.v).square().sum() / 2


def stay_and_write(state, before, x):
    """|S - S' Diag(a)|^2 - 2 <S k, v>, v being what the operator writes."""
    return moved(state, before * x.decay) + 2 * similarity(state, before, x)


def stay_and_correct(state, before, x):
    """|S - S' Diag(a)|^2 - 2 <S k, beta (v - S' Diag(a) k)>."""
    decayed = before * x.decay
    return moved(state, decayed) - 2 * (state @ x.k) @ (x.beta * (x.v - decayed @ x.k))


def proximal_regression(state, before, x):
    """|S - S'|^2 + b |S k - v|^2, with b = e / (1 - e |k|^2) from the step e that is applied."""
    strength = x.beta / (1 - x.beta * x.k @ x.k)
    return moved(state, before) + 2 * strength * square_error(state, before, x)


def stay_and_replace(state, before, x):
    """|S - S' Diag(a)|^2 - 2 <S b, S' a'> - 2 <S k, v> with a', b the free erase."""
    return stay_and_write(state, before, x) - 2 * (state @ x.b) @ (before @ x.a)


# By the rule's name, what its row says in words.
UPDATES = {
    rule: update
    for update, rules in (
        (gradient_steps(similarity), "linear_attention"),
        (minimiser(proximal_regression), "longhorn"),
        (gradient_steps(square_error),
         "deltanet delta_product gated_delta_product multi_head_deltanet multi_kv_deltanet "
         "multi_value_deltanet multi_key_deltanet multi_query_deltanet block_deltanet"),
        (minimiser(stay_and_write),
         "mamba2 gla rwkv6 hgrn2 mlstm xlstm_7b retnet lightning gated_rfa gated_retnet gate_loop"),
        (minimiser(stay_and_correct), "gated_deltanet kda"),
        (minimiser(stay_and_replace), "gated_deltanet2 comba comba_released rwkv7"),
    )
    for rule in rules.split()
}  # fmt: skip
WITH_OBJECTIVE = [name for name, rule in RULES.items() if rule.objective]


def writes_of(arguments, head, value_heads):
    """What the operator is given for one head of the first row: the writes of each token."""
    n = arguments.get("n_steps", 1)
    key_head = head * arguments["k"].shape[2] // value_heads
    k, v = arguments["k"][0, :, key_head], arguments["v"][0, :, head]
    k = definition.unit_norm(k) if arguments.get("normalize_qk") else k
    beta, a, b, log_decay = (arguments.get(name) for name in ("beta", "a", "b", "log_decay"))
    decay = torch.ones(len(k) // n, k.shape[1], dtype=k.dtype)
    if log_decay is not None:
        own = log_decay[head] if log_decay.ndim == 1 else log_decay[0, :, head]
        decay = decay * own.exp().reshape(1 if own.ndim == 0 else len(decay), -1)
    for t in range(len(decay)):
        given = {name: None if x is None else x[0, t, head] for name, x in (("a", a), ("b", b))}
        strengths = [None if beta is None else beta[0, i, head] for i in range(len(k))]
        yield [
            SimpleNamespace(k=k[i], v=v[i], beta=strengths[i], decay=decay[t], **given)
            for i in range(t * n, t * n + n)
        ]


@pytest.mark.parametrize("name", WITH_OBJECTIVE)
def test_update_solves_the_objective(name):
    rule, n = RULES[name], 3 if "product" in name else 1
    p = draw_projections(n, heads=key_heads(rule), **gates(rule, n))
    arguments = rule.arguments(p)
    final = OPERATORS[rule.operator](**arguments).final_state
    for head in range(arguments["v"].shape[2]):
        state = torch.zeros(final.shape[2:], dtype=torch.float64)
        for writes in writes_of(arguments, head, arguments["v"].shape[2]):
            state = UPDATES[name](state, writes)
        assert (state - final[0, head]).abs().max() <= 1e-10 * final[0, head].abs().max()


def test_every_row_with_an_objective_has_it_in_code():
    assert set(UPDATES) == set(WITH_OBJECTIVE)
