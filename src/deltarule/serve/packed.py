"""What both engines hand over: one packed row of tokens, and gates as logits."""

import os
from typing import Any

from torch import Tensor

from deltarule.ops import BetaLogits, DecayLogits


def asked_for(switch: str) -> bool:
    """Whether an engine's own list of plugins names this one: being installed is no request."""
    names = os.environ.get(switch, "").split(",")
    return "deltarule" in [name.strip() for name in names]


def split_heads(mixed_qkv: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[N, channels of q, k and v] into views [N, 1, heads, channels], for these states."""
    heads, value_size, key_size = state.shape[1:]
    keys = (mixed_qkv.shape[1] - heads * value_size) // 2
    q, k, v = mixed_qkv.unsqueeze(1).split([keys, keys, heads * value_size], dim=-1)
    return (
        q.unflatten(-1, (-1, key_size)),
        k.unflatten(-1, (-1, key_size)),
        v.unflatten(-1, (heads, value_size)),
    )


def logits(
    a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, v: Tensor, key_size: int | None = None,
    lower_bound: float | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The gates of v's tokens [B, T, HV, V]; with a key size the decay is one of its channels."""
    rows = v.shape[:3]
    decay = rows if key_size is None else (*rows, key_size)
    bias = dt_bias if key_size is None else dt_bias.view(-1, key_size)
    return {
        "beta": BetaLogits(b.reshape(rows)),
        "log_decay": DecayLogits(a.reshape(decay), A_log.view(-1), bias, lower_bound),
    }
