"""Gated DeltaNet: decay each head, then replace what the state holds under the key."""

from deltarule.nn import deltanet
from deltarule.nn.rule import Arguments, Projections, Rule


def arguments(projections: Projections) -> Arguments:
    """DeltaNet's arguments and a decay: for each head here, for each key channel in KDA."""
    return deltanet.arguments(projections, decays=True)


class GatedDeltaNet(deltanet.DeltaNet):
    """Gated DeltaNet: S = a S (I - beta k k^T) + beta v k^T with unit keys and queries.

    a = exp(-exp(A_log) softplus(a_proj x + dt_bias)), of each head. exp(A_log) starts from
    U(0, 16), softplus(dt_bias) log-uniform in [1e-3, 1e-1].

    Examples:
        >>> layer = GatedDeltaNet(32, num_heads=2)
        >>> y, state = layer(torch.zeros(1, 5, 32))
        >>> state["recurrent"].shape, state["q_conv"].shape
        (torch.Size([1, 2, 24, 12]), torch.Size([1, 3, 24]))
    """

    rule = Rule(
        name="gated_deltanet", title="Gated DeltaNet", decay="head", erase="tied",
        recurrence="S = a S (I - beta k k^T) + beta v k^T",
        objective="|S - a S'|^2 - 2 <S k, beta (v - a S' k)>",
        source="arXiv 2412.06464, section 3 and eq. 10",
        arguments=arguments,
    )  # fmt: skip
    has_rates = True
    expand_k = 0.75
    expand_v = 2
    default_output_gate = True

    def build_gates(self) -> None:
        super().build_gates()
        self.build_head_decay(0)
