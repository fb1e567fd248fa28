"""DeltaProduct: several delta-rule writes for each token, one read-out after the last.

S_{t,j} = S_{t,j-1} (I - beta_{t,j} k_{t,j} k_{t,j}^T) + beta_{t,j} v_{t,j} k_{t,j}^T
S_{t,0} = S_{t-1,n}        o_t = S_{t,n} q_t        j = 1..n
"""

from deltarule.rules import deltanet
from deltarule.rules.objectives import GradientSteps, square_error
from deltarule.rules.rule import Carry, Mapped, Projections, Rule


def arguments(projections: Projections, carry: Carry | None = None) -> Mapped:
    """DeltaNet's arguments, n rows of them for each token."""
    given, carry = deltanet.arguments(projections, carry)
    return given | {"n_steps": projections.n_steps}, carry


RULE = Rule(
    name="delta_product",
    title="DeltaProduct",
    operator="delta_rule",
    recurrence="S = S (I - beta_j k_j k_j^T) + beta_j v_j k_j^T, j = 1..n",
    read_out="o = S q",
    decay="none",
    erase="tied",
    objective="|S k_j - v_j|^2 / 2, one gradient step for each j",
    source="arXiv 2502.10297, section 3 (slides print the steps in the wrong order)",
    arguments=arguments,
    update=GradientSteps(square_error),
)
