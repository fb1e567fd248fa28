"""Gated random feature attention: one gate decays the sums, and what it frees is written."""

import torch
import torch.nn.functional as F
from torch import Tensor

from deltarule.nn.delta_mixer import DeltaMixer
from deltarule.nn.feature_maps import normed_qkv
from deltarule.nn.gates import computed
from deltarule.nn.linear_attention import divided, with_one
from deltarule.nn.rule import Arguments, Projections, Rule

# Random features may cancel, and a divisor near zero would make one token outweigh all others.
SMALLEST = 0.01


def arguments(projections: Projections) -> Arguments:
    """1 - g = sigmoid(-decay_logits), which never rounds to zero."""
    logits = computed(projections.need("decay_logits"))
    v = with_one(projections.v) * torch.sigmoid(-logits).unsqueeze(-1)
    given = normed_qkv(projections, otherwise="none") | {"v": v.to(projections.v.dtype)}
    return given | {"beta": None, "log_decay": F.logsigmoid(logits), "scale": 1.0}


def read_out(o: Tensor, projections: Projections) -> Tensor:
    """o_t = S_t q_t / (z_t^T q_t), the divisor at least 0.01."""
    return divided(o, SMALLEST)


class GatedRFA(DeltaMixer):
    """Gated RFA: S = g S + (1 - g) v phi(k)^T, divided by the same sum of phi(k).

    The features (2 head_k_dim of them, of unit queries and keys) learn the width of their kernel.
    There is no norm: the read-out is a weighted sum of values already.
    """

    rule = Rule(
        name="gated_rfa", title="Gated RFA", decay="head", erase="none", state_size="HV (V + 1) 2K",
        recurrence="S = g S + (1 - g) v k^T, z = g z + (1 - g) k", read_out="o = S q / (z^T q)",
        objective="|S - g S'|^2 - 2 <S k, (1 - g) v>",
        source="arXiv 2103.02143, section 3.2",
        arguments=arguments, read_out_function=read_out, normalizer=True,
    )  # fmt: skip
    maps_features = True
    default_feature_map = "random_fourier"
    gates_heads = True
