"""Linear attention: a sum of outer products, nothing forgotten, with any feature map.

S_t = S_{t-1} + v_t k_t^T        o_t = S_t q_t
z_t = z_{t-1} + k_t              o_t = S_t q_t / (z_t^T q_t) with the normaliser
"""

from torch import Tensor

from deltarule.rules.feature_maps import normalised
from deltarule.rules.normalizer import divided, with_one
from deltarule.rules.objectives import GradientSteps, similarity
from deltarule.rules.rule import Carry, Mapped, Projections, Rule


def arguments(projections: Projections, carry: Carry | None = None) -> Mapped:
    """No decay, no erase; q and k have been through the layer's feature map."""
    given = normalised(projections, otherwise="none") | {"beta": None}
    if projections.normalizer:
        given |= {"v": with_one(projections.v), "scale": 1.0}
    return given, carry


def read_out(o: Tensor, projections: Projections, carry: Carry | None = None) -> Tensor:
    """o_t = S_t q_t, divided by z_t^T q_t if the layer has the normaliser."""
    return divided(o) if projections.normalizer else o


RULE = Rule(
    name="linear_attention",
    title="Linear attention",
    operator="delta_rule",
    recurrence="S = S + v k^T",
    read_out="o = S q",
    decay="none",
    erase="none",
    objective="-<S k, v>, one gradient step of size 1",
    source="arXiv 2006.16236, eq. 16 to 20",
    arguments=arguments,
    read_out_function=read_out,
    update=GradientSteps(similarity),
)
