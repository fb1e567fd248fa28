"""DeltaNet: replace what the state holds under the key."""

from deltarule.nn.delta_mixer import DeltaMixer
from deltarule.nn.feature_maps import normed_qkv
from deltarule.nn.gates import gates_of
from deltarule.nn.rule import Arguments, Projections, Rule


def arguments(projections: Projections, decays: bool = False) -> Arguments:
    """With unit keys every eigenvalue of the transition is in [1 - beta_max, 1].

    DeltaProduct has n rows of keys, values and write strengths for each token.
    """
    gates = gates_of(projections, decays)
    return normed_qkv(projections, otherwise="l2") | gates | {"n_steps": projections.n_steps}


class DeltaNet(DeltaMixer):
    """DeltaNet: S = S (I - beta k k^T) + beta v k^T with unit keys and queries.

    SiLU on q, k and v (also without a convolution), unit q and k. Two options are the
    paper's ablations: feature_map replaces the SiLU of q and k, qk_norm their norm. With
    qk_norm="none" long keys make beta |k|^2 exceed 2, and the state grows.

    Examples:
        >>> layer = DeltaNet(32, num_heads=2, beta_max=2.0)
        >>> y, state = layer(torch.zeros(1, 5, 32))
        >>> y, state = layer(torch.zeros(1, 1, 32), state)  # the sixth token
    """

    rule = Rule(
        name="deltanet", title="DeltaNet", decay="none", erase="tied",
        recurrence="S = S (I - beta k k^T) + beta v k^T",
        objective="|S k - v|^2 / 2, one gradient step of size beta",
        source="arXiv 2406.06484, sections 2.2 (its eq. 10 prints I - tril for I + tril) and 3.4",
        arguments=arguments,
    )  # fmt: skip
    maps_features = True
    default_conv_size = 4
    activates_projections = True
