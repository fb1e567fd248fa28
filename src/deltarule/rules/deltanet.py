"""DeltaNet: replace what the state holds under the key.

S_t = S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T        |k_t| = |q_t| = 1
beta_t = beta_max sigmoid(beta_logits_t)
"""

from deltarule.rules.feature_maps import normalised
from deltarule.rules.gates import write_strength
from deltarule.rules.objectives import GradientSteps, square_error
from deltarule.rules.rule import Carry, Mapped, Projections, Rule


def arguments(projections: Projections, carry: Carry | None = None) -> Mapped:
    """With unit keys every eigenvalue of the transition is in [1 - beta_max, 1]."""
    beta = write_strength(projections)
    return normalised(projections, otherwise="l2") | {"beta": beta}, carry


RULE = Rule(
    name="deltanet",
    title="DeltaNet",
    operator="delta_rule",
    recurrence="S = S (I - beta k k^T) + beta v k^T",
    read_out="o = S q",
    decay="none",
    erase="tied",
    objective="|S k - v|^2 / 2, one gradient step of size beta",
    source="arXiv 2406.06484, section 2.2 (its eq. 10 prints I - tril for I + tril)",
    arguments=arguments,
    update=GradientSteps(square_error),
)
