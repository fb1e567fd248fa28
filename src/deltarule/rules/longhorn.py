"""Longhorn, one step size for each head: the exact minimiser of a proximal least-squares step.

S_t = S_{t-1} (I - e_t k_t k_t^T) + e_t v_t k_t^T        e_t = b_t / (1 + b_t |k_t|^2)
b_t = beta_max sigmoid(beta_logits_t)
"""

from deltarule.rules.gates import computed, write_strength
from deltarule.rules.objectives import Minimiser, proximal_regression
from deltarule.rules.rule import Carry, Mapped, Projections, Rule


def arguments(projections: Projections, carry: Carry | None = None) -> Mapped:
    """Keys keep their length: the step size makes up for it, and 1 - e |k|^2 is in (0, 1]."""
    strength = write_strength(projections)
    value_heads_per_key_head = projections.v.shape[2] // projections.k.shape[2]
    key_square = computed(projections.k).square().sum(-1)
    key_square = key_square.repeat_interleave(value_heads_per_key_head, dim=2)
    beta = strength / (1 + strength * key_square)
    return projections.qkv | {"beta": beta}, carry


RULE = Rule(
    name="longhorn",
    title="Longhorn (per head)",
    operator="delta_rule",
    recurrence="S = S (I - e k k^T) + e v k^T",
    read_out="o = S q",
    decay="none",
    erase="tied",
    objective="|S - S'|^2 + b |S k - v|^2, exactly",
    source="arXiv 2407.14207, theorem 3.1, one b for each head instead of one for each channel",
    arguments=arguments,
    update=Minimiser(proximal_regression),
)
