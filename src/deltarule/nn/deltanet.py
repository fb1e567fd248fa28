"""DeltaNet as a layer."""

from deltarule.nn.mixer import RecurrentMixer
from deltarule.rules import deltanet


class DeltaNet(RecurrentMixer):
    """DeltaNet: S = S (I - beta k k^T) + beta v k^T with unit keys and queries.

    Defaults: head_k_dim = head_v_dim = hidden_size / num_heads, convolution of 4, SiLU on q, k and
    v (also without a convolution), unit q and k, beta in [0, 1], no output gate. The paper's
    ablation is a choice of two words: feature_map replaces the SiLU of q and k, qk_norm their norm.
    With qk_norm="none" long keys make beta |k|^2 exceed 2, and the state grow.

    Example:
        >>> import torch
        >>> layer = DeltaNet(32, num_heads=2, beta_max=2.0)
        >>> y, state = layer(torch.zeros(1, 5, 32))
        >>> y, state = layer(torch.zeros(1, 1, 32), state)  # the sixth token

    Source: arXiv 2406.06484, section 3.4.
    """

    rule = deltanet.RULE
    maps_features = True
    default_conv_size = 4
    activates_projections = True
