"""DeltaProduct as a layer, plain and gated."""

from deltarule.nn.deltanet import DeltaNet
from deltarule.nn.gated_deltanet import GatedDeltaNet
from deltarule.rules import delta_product, gated_delta_product


class DeltaProduct(DeltaNet):
    """DeltaProduct: n_steps delta-rule writes for each token, one read-out after the last.

    k, v and beta come from projections n_steps times as wide; step j of token t is row t*n + j.

    Defaults: as DeltaNet, with n_steps = 2 and beta in [0, 2].

    Example:
        >>> import torch
        >>> layer = DeltaProduct(32, num_heads=2, n_steps=3)
        >>> layer.k_proj.weight.shape, layer(torch.zeros(1, 5, 32))[0].shape
        (torch.Size([96, 32]), torch.Size([1, 5, 32]))

    Source: arXiv 2502.10297, section 3.
    """

    rule = delta_product.RULE
    default_beta_max = 2.0
    default_n_steps = 2


class GatedDeltaProduct(GatedDeltaNet):
    """Gated DeltaProduct: decay once a token, then n_steps delta-rule writes, one read-out.

    Defaults: as GatedDeltaNet, with n_steps = 2 and beta in [0, 2].

    Example:
        >>> import torch
        >>> GatedDeltaProduct(32, num_heads=2)(torch.zeros(1, 5, 32))[0].shape
        torch.Size([1, 5, 32])

    Source: arXiv 2502.10297, section 3.
    """

    rule = gated_delta_product.RULE
    default_beta_max = 2.0
    default_n_steps = 2
