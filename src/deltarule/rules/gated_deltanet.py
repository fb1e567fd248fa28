"""Gated DeltaNet: decay each head, then replace what the state holds under the key.

S_t = a_t S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T        |k_t| = |q_t| = 1
a_t = exp(-exp(A_log) softplus(decay_logits_t + dt_bias))
beta_t = beta_max sigmoid(beta_logits_t)
"""

from deltarule.rules import deltanet
from deltarule.rules.gates import discretised_log_decay
from deltarule.rules.objectives import Minimiser, stay_and_correct
from deltarule.rules.rule import Carry, Mapped, Projections, Rule


def arguments(projections: Projections, carry: Carry | None = None) -> Mapped:
    """DeltaNet's arguments and a decay: for each head here, for each key channel in KDA."""
    given, carry = deltanet.arguments(projections, carry)
    return given | {"log_decay": discretised_log_decay(projections)}, carry


RULE = Rule(
    name="gated_deltanet",
    title="Gated DeltaNet",
    operator="delta_rule",
    recurrence="S = a S (I - beta k k^T) + beta v k^T",
    read_out="o = S q",
    decay="head",
    erase="tied",
    objective="|S - a S'|^2 - 2 <S k, beta (v - a S' k)>",
    source="arXiv 2412.06464, eq. 10",
    arguments=arguments,
    update=Minimiser(stay_and_correct),
)
