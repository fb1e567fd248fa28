"""Gated DeltaProduct: decay once a token, then several delta-rule writes, one read-out.

S_{t,0} = a_t S_{t-1,n}        o_t = S_{t,n} q_t
S_{t,j} = S_{t,j-1} (I - beta_{t,j} k_{t,j} k_{t,j}^T) + beta_{t,j} v_{t,j} k_{t,j}^T
"""

from deltarule.rules import delta_product
from deltarule.rules.gates import discretised_log_decay
from deltarule.rules.objectives import GradientSteps, square_error
from deltarule.rules.rule import Carry, Mapped, Projections, Rule


def arguments(projections: Projections, carry: Carry | None = None) -> Mapped:
    """DeltaProduct's arguments and Gated DeltaNet's decay."""
    given, carry = delta_product.arguments(projections, carry)
    return given | {"log_decay": discretised_log_decay(projections)}, carry


RULE = Rule(
    name="gated_delta_product",
    title="Gated DeltaProduct",
    operator="delta_rule",
    recurrence="S = a S, then S = S (I - beta_j k_j k_j^T) + beta_j v_j k_j^T, j = 1..n",
    read_out="o = S q",
    decay="head",
    erase="tied",
    objective="|S k_j - v_j|^2 / 2 from a S', one gradient step for each j",
    source="arXiv 2502.10297, section 3",
    arguments=arguments,
    update=GradientSteps(square_error),
)
