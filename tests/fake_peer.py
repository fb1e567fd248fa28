"""A package with the habits of all peers: bfloat16 gates, decays, states [K, V], packed rows."""

import torch

from deltarule.ops.delta_rule import definition

CALLS = []


def key_first(*, q, k, v, beta, g=None, initial_state=None, output_final_state=False, steps=1):
    """As FLA: beta in bfloat16, the logarithm of the decay under another name, states [K, V]."""
    assert output_final_state
    CALLS.append({"beta": beta.dtype, "state": None if initial_state is None else initial_state})
    state = None if initial_state is None else initial_state.mT
    o, state = definition.delta_rule(
        q, k, v, beta=beta, log_decay=g, n_steps=steps, initial_state=state
    )
    return o, state.mT


def packed(*, q, k, v, beta, g, cu_seqlens, longest, output_final_state=False):
    """As FlashInfer: no batch axis, the decay itself, states [V, K]."""
    assert output_final_state
    assert cu_seqlens.dtype == torch.int64
    assert longest == int(cu_seqlens.diff().max())
    rows = (x.unsqueeze(0) for x in (q, k, v))
    o, state = definition.delta_rule(
        *rows, beta=beta[None], log_decay=g[None].log(), cu_seqlens=cu_seqlens
    )
    return o[0], state


def stepping(*, x, dt, A, B, C, chunk_size):
    """As Mamba-2: steps multiply a rate, and what is written; no scale."""
    x, log_decay = x * dt.unsqueeze(-1), dt * A
    o, state = definition.delta_rule(C, B, x, beta=None, log_decay=log_decay, scale=1.0)
    return o, state


def refuses(**arguments):
    raise RuntimeError("not on this machine\nsecond line")


class NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("the backward pass is wrong on this version")


def forward_only(**arguments):
    o, state = key_first(**arguments)
    return NoBackward.apply(o), state
