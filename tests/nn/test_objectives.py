"""Each row's update is what its objective says: the minimiser, or gradient steps, to 1e-10.

minimiser        S_t = argmin_S loss(S, S_{t-1}, token), for a loss that is quadratic in S
gradient step    S_t = A_t - rate * d loss / dS at A_t, the state after its decay

The losses know nothing of the recurrences: they follow from them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from deltarule.nn import RULES
from deltarule.ops.delta_rule import definition
from nn.layers import OPERATORS, draw_projections
from nn.test_rules import gates, key_heads


class Token(NamedTuple):
    """What the operator is given for one token of one value head.

    Args:
        k: Keys [n, K], one for each write.
        v: Values [n, V].
        decay: exp(log_decay) of each key channel, [K]; ones without a decay.
        beta: Write strengths [n]; None without an erase.
        a: Free erase [K]: what the old state is read with. None in `delta_rule`.
        b: Free erase [K]: what that is taken away under. None in `delta_rule`.
    """

    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor | None = None
    a: Tensor | None = None
    b: Tensor | None = None


Loss = Callable[[Tensor, Tensor, Token], Tensor]
Update = Callable[[Tensor, Token], Tensor]


@dataclass(frozen=True)
class Minimiser:
    """S = argmin loss: one Newton step from the old state, exact because the loss is quadratic."""

    loss: Loss

    def __call__(self, before: Tensor, token: Token) -> Tensor:
        """Return the minimiser [V, K] from the state before [V, K]."""

        def loss(state: Tensor) -> Tensor:
            return self.loss(state.view_as(before), before, token)

        start = before.flatten()
        gradient, hessian = torch.func.grad(loss)(start), torch.func.hessian(loss)(start)
        return (start - torch.linalg.solve(hessian, gradient)).view_as(before)


@dataclass(frozen=True)
class GradientSteps:
    """S <- S - rate * d loss / dS, once for each write, from the state after its decay."""

    loss: Loss

    def __call__(self, before: Tensor, token: Token) -> Tensor:
        """Return the state [V, K] after all writes of a token."""
        state = before * token.decay
        for j in range(len(token.k)):
            beta = None if token.beta is None else token.beta[j : j + 1]
            write = token._replace(k=token.k[j : j + 1], v=token.v[j : j + 1], beta=beta)
            rate = 1.0 if beta is None else beta
            state = state - rate * torch.func.grad(self.loss)(state, state, write)
        return state


def similarity(state: Tensor, before: Tensor, token: Token) -> Tensor:
    """-<S k, v>."""
    return -(state @ token.k[0] * token.v[0]).sum()


def square_error(state: Tensor, before: Tensor, token: Token) -> Tensor:
    """|S k - v|^2 / 2."""
    return (state @ token.k[0] - token.v[0]).square().sum() / 2


def stay_and_write(state: Tensor, before: Tensor, token: Token) -> Tensor:
    """|S - S' Diag(a)|^2 - 2 <S k, v>, v being what the operator writes."""
    return _move(state, before * token.decay) + 2 * similarity(state, before, token)


def stay_and_correct(state: Tensor, before: Tensor, token: Token) -> Tensor:
    """|S - S' Diag(a)|^2 - 2 <S k, beta (v - S' Diag(a) k)>."""
    assert token.beta is not None
    decayed, key = before * token.decay, token.k[0]
    corrected = token.beta[0] * (token.v[0] - decayed @ key)
    return _move(state, decayed) - 2 * (state @ key * corrected).sum()


def proximal_regression(state: Tensor, before: Tensor, token: Token) -> Tensor:
    """|S - S'|^2 + b |S k - v|^2, with b = e / (1 - e |k|^2) from the step e that is applied."""
    assert token.beta is not None
    key = token.k[0]
    strength = token.beta[0] / (1 - token.beta[0] * key.square().sum())
    return _move(state, before) + 2 * strength * square_error(state, before, token)


def stay_and_replace(state: Tensor, before: Tensor, token: Token) -> Tensor:
    """|S - S' Diag(a)|^2 - 2 <S b, S' a'> - 2 <S k, v> with a', b the free erase."""
    assert token.a is not None
    assert token.b is not None
    erased = (state @ token.b * (before @ token.a)).sum()
    return stay_and_write(state, before, token) - 2 * erased


def _move(state: Tensor, start: Tensor) -> Tensor:
    return (state - start).square().sum()


_writes = (
    *("mamba2", "gla", "rwkv6", "hgrn2", "mlstm", "xlstm_7b"),
    *("retnet", "lightning", "gated_rfa", "gated_retnet", "gate_loop"),
)
_corrects = ("gated_deltanet", "kda")
_replaces = ("gated_deltanet2", "comba", "comba_released", "rwkv7")
_squares = (
    *("deltanet", "delta_product", "gated_delta_product", "multi_head_deltanet"),
    *("multi_kv_deltanet", "multi_value_deltanet", "multi_key_deltanet"),
    *("multi_query_deltanet", "block_deltanet"),
)
# By the rule's name, what its row says in words.
UPDATES: dict[str, Update] = {
    "linear_attention": GradientSteps(similarity),
    "longhorn": Minimiser(proximal_regression),
    **dict.fromkeys(_squares, GradientSteps(square_error)),
    **dict.fromkeys(_writes, Minimiser(stay_and_write)),
    **dict.fromkeys(_corrects, Minimiser(stay_and_correct)),
    **dict.fromkeys(_replaces, Minimiser(stay_and_replace)),
}


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


def test_every_row_with_an_objective_has_it_in_code():
    assert set(UPDATES) == set(WITH_OBJECTIVE)
