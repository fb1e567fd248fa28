"""Each row's update is what its objective says: the minimiser, or gradient steps, to 1e-10."""

import pytest
import torch

from deltarule.nn import RULES
from deltarule.ops.delta_rule import definition
from nn.drawn import OPERATORS, draw_projections
from nn.objectives import UPDATES, GradientSteps, Minimiser, Token
from nn.test_rules import gates, key_heads

WITH_OBJECTIVE = [name for name, rule in RULES.items() if rule.objective]


def tokens(arguments, head, value_heads):
    """What the operator is given for one head of the first row, a `Token` at a time."""
    n = arguments.get("n_steps", 1)
    key_head = head * arguments["k"].shape[2] // value_heads
    k, v = arguments["k"][0, :, key_head], arguments["v"][0, :, head]
    if arguments.get("normalize_qk"):
        k = definition.unit_norm(k)
    steps = len(k) // n
    decay = torch.ones(steps, k.shape[1], dtype=k.dtype)
    if (log_decay := arguments.get("log_decay")) is not None:
        log_decay = log_decay[head].expand(steps) if log_decay.ndim == 1 else log_decay[0, :, head]
        decay = decay * log_decay.exp().reshape(steps, -1)
    for t in range(steps):
        rows = slice(t * n, t * n + n)
        beta, a, b = (arguments.get(name) for name in ("beta", "a", "b"))
        yield Token(
            k[rows],
            v[rows],
            decay[t],
            beta=None if beta is None else beta[0, rows, head],
            a=None if a is None else a[0, t, head],
            b=None if b is None else b[0, t, head],
        )


def drawn_arguments(rule):
    n = 3 if "product" in rule.name else 1
    given = gates(rule, n)
    p = draw_projections(n, heads=key_heads(rule), **given)
    return rule.arguments(p)


@pytest.mark.parametrize("name", WITH_OBJECTIVE)
def test_update_solves_the_objective(name):
    rule = RULES[name]
    arguments = drawn_arguments(rule)
    value_heads = arguments["v"].shape[2]
    final = OPERATORS[rule.operator](**arguments).final_state
    for head in range(value_heads):
        state = torch.zeros(final.shape[2:], dtype=torch.float64)
        for token in tokens(arguments, head, value_heads):
            state = UPDATES[name](state, token)
        assert (state - final[0, head]).abs().max() <= 1e-10 * final[0, head].abs().max()


@pytest.mark.parametrize("name", WITH_OBJECTIVE)
def test_minimum_is_a_minimum(name):
    """No small change of a minimiser lowers its loss: the sign in the print of Longhorn's fails."""
    rule = RULES[name]
    if isinstance(UPDATES[name], GradientSteps):
        return
    assert isinstance(UPDATES[name], Minimiser)
    arguments = drawn_arguments(rule)
    *_, token = tokens(arguments, 0, arguments["v"].shape[2])
    before = torch.randn(token.v.shape[1], token.k.shape[1], dtype=torch.float64)
    after = UPDATES[name](before, token)
    least = UPDATES[name].loss(after, before, token)
    for _ in range(20):
        moved = after + 0.1 * torch.randn_like(after)
        assert UPDATES[name].loss(moved, before, token) > least


def test_every_row_with_an_objective_has_it_in_code():
    assert set(UPDATES) == set(WITH_OBJECTIVE)
