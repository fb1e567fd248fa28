r"""Mamba-2 whose state may change sign: eigenvalues in [-1, 1] in place of [0, 1].

    a_t = 2 exp(-exp(A_log) dt_t) - 1        S_t = a_t S_{t-1} + dt_t v_t k_t^T        o_t = S_t q_t

An operator's decay is never negative, but a product of signs can be folded into what is written and
what is read: with c_t = sign(a_1) ... sign(a_t), the state S'_t = c_t S_t obeys

    S'_t = |a_t| S'_{t-1} + (c_t dt_t v_t) k_t^T        o_t = c_t (S'_t q_t)

The sign stands at v and o, not at k and q, because keys are shared by all heads and decays are not.
That works for one decay a head only: signs of single entries of the state, as in Mamba, stay.

Source: "Unlocking State-Tracking in Linear RNNs Through Negative Eigenvalues" (arXiv 2411.12537),
section 4.1, which does this to Mamba.
"""

from dataclasses import replace

import torch
from torch import Tensor

from deltarule.models import CausalLM
from deltarule.models.block import Block
from deltarule.nn import Mamba2, mamba2
from deltarule.nn.documents import last_token
from deltarule.nn.gates import step_and_log_decay
from deltarule.nn.rule import Arguments, Projections

# The least |a|, as its logarithm's gradient is 1 / a.
LEAST = 1e-6


def eigenvalue(projections: Projections) -> Tensor:
    return 2 * step_and_log_decay(projections)[1].exp() - 1


def signs(projections: Projections) -> Tensor:
    """c_t, the product of the signs of all eigenvalues up to each token, [B, T, HV].

    Packed rows are refused: signs would run from one sequence into the next.
    """
    if projections.rows.cu_seqlens is not None:
        raise ValueError("cu_seqlens must be None for signed Mamba-2: give each sequence a row")
    a = eigenvalue(projections)
    return torch.where(a < 0, -1.0, 1.0).cumprod(dim=1)


def arguments(projections: Projections) -> Arguments:
    """Mamba-2's, but for the sign of what is written and the size of the decay."""
    given = mamba2.arguments(projections)
    v = given["v"] * signs(projections).unsqueeze(-1)
    log_decay = eigenvalue(projections).abs().clamp(min=LEAST).log()
    return given | {"v": v.to(given["v"].dtype), "log_decay": log_decay}


def read_out(o: Tensor, projections: Projections) -> Tensor:
    signed = (o * signs(projections).unsqueeze(-1)).to(o.dtype)
    return mamba2.read_out(signed, projections)


def final_state(state: Tensor, projections: Projections) -> Tensor:
    """S_T = c_T S'_T."""
    c = signs(projections)
    last = last_token(c, projections.rows, c.new_ones(len(state), c.shape[2]))
    return state * last[..., None, None]


class SignedMamba2(Mamba2):
    """Mamba-2 with eigenvalues in [-1, 1] and the same parameters."""

    rule = replace(
        Mamba2.rule,
        name="signed_mamba2",
        title="Mamba-2 with eigenvalues in [-1, 1]",
        recurrence="S = (2 a - 1) S + dt v k^T",
        objective="",
        source="arXiv 2411.12537, section 4.1",
        arguments=arguments,
        read_out_function=read_out,
        final_state=final_state,
    )


def with_signs(model: CausalLM) -> CausalLM:
    """The model with signed layers in place of its Mamba-2 layers, their parameters kept."""
    for index, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        signed = SignedMamba2.from_config(model.config, index)
        signed.load_state_dict(block.mixer.state_dict())
        block.mixer = signed
    return model
