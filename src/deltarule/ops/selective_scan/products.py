"""A decay of key channels and one of value channels: chunks read by matrix products.

With A_i, B_i the products of both decays up to token i of a block, and A_ij, B_ij those over the
tokens after j up to i,

    P_ij = q_i . (A_ij * k_j)        o_i = B_i * S (A_i * q_i) + sum over j <= i of P_ij B_ij * v_j
    S <- Diag(B_C) S Diag(A_C) + sum over j of (B_Cj * v_j) (A_Cj * k_j)^T

Every A_ij has its own sum of logs: no quotient of two products, so that a reset is exact.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

# Tokens of which all pairs are there at once, [4, 4, K or V]; 8 and 16 are slower on a CPU.
BLOCK = 4


def apply(given: tuple[Tensor, ...], decays: tuple[Tensor | None, Tensor | None]) -> bool:
    """Whether these are tensors to multiply: finite ones on a CPU, where asking needs no waiting.

    A product with the zeros of a mask would take what is not finite to earlier tokens.
    """
    if given[0].device.type != "cpu":
        return False
    finite = all(bool(x.sum().isfinite()) for x in given)
    return finite and not any(bool(x.sum().isnan()) for x in decays if x is not None)


def read(
    q: Tensor, k: Tensor, v: Tensor, log_a: Tensor, log_b: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """o [M, HV, C, V] and the state after C tokens, block by block, from that before them."""
    outputs = []
    parts = (x.split(BLOCK, dim=-2) for x in (q, k, v, log_a, log_b))
    for q_, k_, v_, log_a_, log_b_ in zip(*parts, strict=True):
        start_a, start_b = log_a_.cumsum(-2).exp(), log_b_.cumsum(-2).exp()
        scores = ((_between(log_a_) * k_.unsqueeze(-3)) @ q_.unsqueeze(-1)).squeeze(-1).tril()
        inside = scores.unsqueeze(-2) @ (_between(log_b_) * v_.unsqueeze(-3))
        outputs.append(start_b * ((q_ * start_a) @ state.mT) + inside.squeeze(-2))
        written, left = write(k_, v_, log_a_, log_b_)
        state = torch.addcmul(written, left, state)
    return torch.cat(outputs, dim=-2), state


def write(k: Tensor, v: Tensor, log_a: Tensor, log_b: Tensor) -> tuple[Tensor, Tensor]:
    """What tokens make of a state of zeros [.., V, K], and what is left of any other."""
    left = log_b.sum(-2).exp().unsqueeze(-1) * log_a.sum(-2).exp().unsqueeze(-2)
    return (v * _to_end(log_b)).mT @ (k * _to_end(log_a)), left


def _between(log_decay: Tensor) -> Tensor:
    """exp of the sum over j < s <= i: [.., C, D] -> [.., C, C, D]; 1 for j >= i."""
    size = log_decay.shape[-2]
    later = torch.ones(size, size, dtype=torch.bool, device=log_decay.device).tril_(-1)
    steps = torch.where(later.unsqueeze(-1), log_decay.unsqueeze(-2), 0.0)
    return steps.cumsum_(-3).exp_()


def _to_end(log_decay: Tensor) -> Tensor:
    """exp of the sum over s > j."""
    return F.pad(log_decay[..., 1:, :].flip(-2).cumsum(-2).flip(-2), (0, 0, 0, 1)).exp_()
