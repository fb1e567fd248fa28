"""Gated Linear Attention: one decay for each key channel."""

import torch.nn.functional as F

from deltarule.nn.delta_mixer import DeltaMixer
from deltarule.nn.gates import computed, low_rank
from deltarule.nn.rule import Arguments, Projections, Rule

DECAY_RANK = 16
# Keeps most decays near one, whatever the logit.
TEMPERATURE = 16


def arguments(projections: Projections) -> Arguments:
    """log_decay = logsigmoid(decay_logits) / 16, of a key channel; in Gated RetNet, of a head."""
    log_decay = F.logsigmoid(computed(projections.need("decay_logits"))) / TEMPERATURE
    return projections.qkv | {"beta": None, "log_decay": log_decay}


class GatedLinearAttention(DeltaMixer):
    """Gated Linear Attention: S = S Diag(a) + v k^T, a = sigmoid(W2 W1 x + b)^(1/16).

    The decay is projected through 16 channels.
    """

    rule = Rule(
        name="gla", title="Gated Linear Attention", decay="channel", erase="none",
        recurrence="S = S Diag(a) + v k^T",
        objective="|S - S' Diag(a)|^2 - 2 <S k, v>",
        source="arXiv 2312.06635, eq. 3 and section 4.4",
        arguments=arguments,
    )  # fmt: skip
    expand_k = 0.5
    expand_v = 2
    default_output_gate = True

    def build_gates(self) -> None:
        super().build_gates()
        channels = self.num_v_heads * self.head_k_dim
        self.a_proj = low_rank(self.hidden_size, DECAY_RANK, channels, bias=True)
