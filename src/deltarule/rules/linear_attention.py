"""Linear attention: a sum of outer products, nothing forgotten.

S_t = S_{t-1} + v_t k_t^T        o_t = S_t q_t
"""

from deltarule.rules.rule import Carry, Mapped, Projections, Rule


def arguments(projections: Projections, carry: Carry | None = None) -> Mapped:
    """No decay, no erase."""
    return projections.qkv | {"beta": None}, carry


RULE = Rule(
    name="linear_attention",
    title="Linear attention",
    operator="delta_rule",
    recurrence="S = S + v k^T",
    read_out="o = S q",
    decay="none",
    erase="none",
    objective="-<S k, v>",
    source="arXiv 2006.16236, eq. 16 to 20, without feature map and normaliser",
    arguments=arguments,
)
