"""The online-learning view as code: each token's update as the solution of a small problem.

minimiser        S_t = argmin_S loss(S, S_{t-1}, token), for a loss that is quadratic in S
gradient step    S_t = A_t - rate * d loss / dS at A_t, the state after its decay

Nothing here knows the recurrences: they follow from the losses, which the tests check.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


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
