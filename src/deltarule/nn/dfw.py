"""Decaying fast weights: a gate for each value channel from the left, one for each key channel.

S_t = Diag(b_t) S_{t-1} Diag(a_t) + v_t k_t^T        o_t = S_t q_t
a_t = sigmoid(decay_logits_t)        b_t = sigmoid(value_decay_logits_t)
"""

import torch.nn.functional as F
from torch import Tensor, nn

from deltarule.nn.arguments import above_zero, default, default_head_dim, positive
from deltarule.nn.call import Call
from deltarule.nn.gates import computed
from deltarule.nn.heads import split
from deltarule.nn.norm import GatedRMSNorm
from deltarule.nn.rule import Arguments, System
from deltarule.nn.scan import ScanMixer


def arguments(
    q: Tensor, k: Tensor, v: Tensor, *, decay_logits: Tensor, value_decay_logits: Tensor
) -> Arguments:
    """Arguments of `selective_scan`."""
    decays = {
        "log_decay": F.logsigmoid(computed(decay_logits)),
        "value_log_decay": F.logsigmoid(computed(value_decay_logits)),
    }
    return {"q": q, "k": k, "v": v, **decays}


SYSTEM = System(
    name="dfw",
    title="Decaying fast weights",
    operator="selective_scan",
    recurrence="S = Diag(b) S Diag(a) + v k^T",
    read_out="o = S q",
    decay="element",
    erase="none",
    objective="|S - Diag(b) S' Diag(a)|^2 - 2 <S k, v>",
    source="arXiv 2210.04243, section 4; table 4 of arXiv 2406.06484",
    state_size="HV V K",
    forms="recurrent, chunked, GPU kernel",
)


# sigmoid(4) = 0.98: most of the state outlives a token at first.
DECAY_BIAS = 4.0


class DecayingFastWeights(ScanMixer):
    """Decaying fast weights: S = Diag(b) S Diag(a) + v k^T, o = S q, then a norm of each head.

    Args:
        hidden_size: Channels of x.
        num_heads: Heads H.
        head_k_dim: Channels K of a query or key. None: hidden_size / num_heads.
        head_v_dim: Channels V of a value. None: head_k_dim.
        conv_size: Taps of the short convolutions of q, k and v; 0 removes them. None: 0.
        output_gate: Whether to gate the output by a SiLU. None: False.
        norm_eps: Added to the mean square in the norm of the output.

    The biases of both gates start at 4 and the norm is this library's; the paper fine-tunes
    pre-trained attention and adds neither.

    Raises:
        ValueError: A size is out of range.

    Example:
        >>> import torch
        >>> y, state = DecayingFastWeights(32, num_heads=2)(torch.zeros(1, 5, 32))
        >>> state["recurrent"].shape
        torch.Size([1, 2, 16, 16])

    Source: arXiv 2210.04243, section 4.
    """

    rule = SYSTEM

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int,
        head_k_dim: int | None = None,
        head_v_dim: int | None = None,
        conv_size: int | None = None,
        output_gate: bool | None = None,
        norm_eps: float = 1e-5,
    ) -> None:
        """Build the projections, both gates and the norm."""
        super().__init__(hidden_size, num_heads=num_heads)
        self.hidden_size = positive("hidden_size", hidden_size)
        self.num_heads = positive("num_heads", num_heads)
        if head_k_dim is None:
            head_k_dim = default_head_dim("head_k_dim", 1, hidden_size, "num_heads", num_heads)
        self.head_k_dim = positive("head_k_dim", head_k_dim)
        self.head_v_dim = positive("head_v_dim", default(head_v_dim, head_k_dim))
        keys, values = num_heads * self.head_k_dim, num_heads * self.head_v_dim
        self.q_proj = nn.Linear(hidden_size, keys, bias=False)
        self.k_proj = nn.Linear(hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(hidden_size, values, bias=False)
        self.a_proj = nn.Linear(hidden_size, keys)
        self.b_proj = nn.Linear(hidden_size, values)
        for gate in (self.a_proj, self.b_proj):
            nn.init.constant_(gate.bias, DECAY_BIAS)
        channels = {"q": keys, "k": keys, "v": values}
        self.build_convolutions(default(conv_size, 0), channels)
        self.o_norm = GatedRMSNorm(self.head_v_dim, above_zero("norm_eps", norm_eps))
        gated = default(output_gate, False)
        self.g_proj = nn.Linear(hidden_size, values, bias=False) if gated else None
        self.o_proj = nn.Linear(values, hidden_size, bias=False)

    def arguments(self, call: Call) -> Arguments:
        """By the rule."""
        x, heads = call.x, self.num_heads
        q, k, v = (
            split(self.convolve(name, getattr(self, f"{name}_proj")(x), call), heads, size)
            for name, size in (
                ("q", self.head_k_dim), ("k", self.head_k_dim), ("v", self.head_v_dim)
            )
        )  # fmt: skip
        return arguments(
            q, k, v,
            decay_logits=split(self.a_proj(x), heads, self.head_k_dim),
            value_decay_logits=split(self.b_proj(x), heads, self.head_v_dim),
        )  # fmt: skip

    def mix(self, call: Call) -> Tensor:
        """Project, scan, normalise each head."""
        o = self.scan(self.arguments(call), call)
        gate = None
        if self.g_proj is not None:
            gate = split(self.g_proj(call.x), self.num_heads, self.head_v_dim)
        y: Tensor = self.o_proj(self.o_norm(o, gate).flatten(-2))
        return y
