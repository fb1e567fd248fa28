"""Linear attention as a layer, with any feature map."""

from deltarule.nn.mixer import RecurrentMixer
from deltarule.rules import linear_attention


class LinearAttention(RecurrentMixer):
    """Linear attention: S += v phi(k)^T, o = S phi(q), then a norm of each head.

    The papers' ablations are a choice of two words: feature_map (identity, elu, relu, silu, dpfp,
    taylor, hedgehog, random_fourier, performer, cosformer) and qk_norm (none, l1, l2). With
    normalizer=True the read-out is divided by z^T phi(q), z the sum of phi(k), in place of the
    norm. cosFormer counts tokens (`length` [N] in the state).

    Defaults: head_k_dim = head_v_dim = hidden_size / num_heads, no convolution, no output gate,
    no feature map, no norm of q and k, no normaliser.

    Example:
        >>> import torch
        >>> y, state = LinearAttention(32, num_heads=2)(torch.zeros(1, 5, 32))
        >>> y.shape, state["recurrent"].shape
        (torch.Size([1, 5, 32]), torch.Size([1, 2, 16, 16]))
        >>> layer = LinearAttention(32, num_heads=2, feature_map="elu", normalizer=True)
        >>> layer(torch.zeros(1, 5, 32))[1]["recurrent"].shape  # one value channel more: z
        torch.Size([1, 2, 17, 16])

    Source: arXiv 2006.16236; the norm in place of the normaliser as in arXiv 2210.10340.
    """

    rule = linear_attention.RULE
    maps_features = True
