"""Lightning Attention: constant decays that grow weaker with depth."""

import torch
from torch import Tensor

from deltarule.nn.delta_mixer import DeltaMixer
from deltarule.nn.rule import Arguments, Projections, Rule

# What the last layer forgets, as a share of the first layer's slope.
LEAST_SHARE = 1e-5


def slopes(head: Tensor) -> Tensor:
    below = 1 << (len(head).bit_length() - 1)
    # Every other exponent of twice as many heads lies half a step before those of `below` heads.
    step = torch.where(head < below, head + 1, head - below + 0.5)
    return torch.exp2(-8 / below * step)


def arguments(projections: Projections) -> Arguments:
    """Head 0 forgets fastest, and the last layer hardly at all."""
    dtype = torch.promote_types(projections.v.dtype, torch.float32)
    head = torch.arange(projections.v.shape[2], dtype=dtype, device=projections.v.device)
    log_decay = -slopes(head) * (1 - projections.depth + LEAST_SHARE)
    return projections.qkv | {"beta": None, "log_decay": log_decay}


class Lightning(DeltaMixer):
    """Lightning Attention: S = g_h S + v k^T, the deeper the layer the slower the decay.

    log g_h = -2^(-8 (h + 1) / HV) (1 - layer_index / (num_layers - 1) + 1e-5), so give both; a
    layer alone is the first of one. Where HV is no power of two the slopes are those of the
    power below, then every other one of the power above. SiLU on q, k and v, a norm of each head
    (of all in MiniMax-01: output_norm="all").

    Examples:
        >>> layer = Lightning(32, num_heads=2, layer_index=3, num_layers=12)
        >>> layer(torch.zeros(1, 5, 32))[0].shape
        torch.Size([1, 5, 32])

    Source: arXiv 2401.04658; slopes, activation and gate of MiniMax-01, arXiv 2501.08313.
    """

    rule = Rule(
        name="lightning", title="Lightning Attention", decay="constant", erase="none",
        recurrence="S = g_h S + v k^T",
        objective="|S - g S'|^2 - 2 <S k, v>",
        source="arXiv 2401.04658, section 3; slopes as released with it and with MiniMax-01",
        arguments=arguments,
    )  # fmt: skip
    reads_depth = True
    default_output_gate = True
    gate_activation = "sigmoid"
    activates_projections = True

    @classmethod
    def takes(cls, option: str) -> bool:
        """Its norm may go over all heads together, as in MiniMax-01."""
        return option == "output_norm" or super().takes(option)
