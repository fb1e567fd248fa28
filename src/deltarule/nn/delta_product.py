"""DeltaProduct: several delta-rule writes for each token, one read-out after the last."""

from dataclasses import replace

from deltarule.nn import deltanet, gated_deltanet
from deltarule.nn.rule import Rule


class DeltaProduct(deltanet.DeltaNet):
    """DeltaProduct: n_steps delta-rule writes for each token, one read-out after the last.

    k, v and beta come from projections n_steps times as wide; step j of token t is row `t*n + j`.

    Examples:
        >>> layer = DeltaProduct(32, num_heads=2, n_steps=3)
        >>> layer.k_proj.weight.shape, layer(torch.zeros(1, 5, 32))[0].shape
        (torch.Size([96, 32]), torch.Size([1, 5, 32]))
    """

    rule = Rule(
        name="delta_product", title="DeltaProduct", decay="none", erase="tied",
        recurrence="S = S (I - beta_j k_j k_j^T) + beta_j v_j k_j^T, j = 1..n",
        objective="|S k_j - v_j|^2 / 2, one gradient step for each j",
        source="arXiv 2502.10297, section 3 (slides print the steps in the wrong order)",
        arguments=deltanet.arguments,
    )  # fmt: skip
    default_beta_max = 2.0
    default_n_steps = 2


class GatedDeltaProduct(gated_deltanet.GatedDeltaNet):
    """Gated DeltaProduct: decay once a token, then n_steps delta-rule writes, one read-out."""

    rule = replace(
        DeltaProduct.rule, name="gated_delta_product", title="Gated DeltaProduct", decay="head",
        recurrence="S = a S, then S = S (I - beta_j k_j k_j^T) + beta_j v_j k_j^T, j = 1..n",
        objective="|S k_j - v_j|^2 / 2 from a S', one gradient step for each j",
        source="arXiv 2502.10297, section 3",
        arguments=gated_deltanet.arguments,
    )  # fmt: skip
    default_beta_max = 2.0
    default_n_steps = 2
