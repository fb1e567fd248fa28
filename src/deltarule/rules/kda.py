"""Kimi Delta Attention: Gated DeltaNet with one decay for each key channel.

S_t = S_{t-1} Diag(a_t) (I - beta_t k_t k_t^T) + beta_t v_t k_t^T        |k_t| = |q_t| = 1
a_t = exp(-exp(A_log) softplus(decay_logits_t + dt_bias))
"""

from deltarule.rules.gated_deltanet import arguments
from deltarule.rules.objectives import Minimiser, stay_and_correct
from deltarule.rules.rule import Rule

RULE = Rule(
    name="kda",
    title="Kimi Delta Attention",
    operator="delta_rule",
    recurrence="S = S Diag(a) (I - beta k k^T) + beta v k^T",
    read_out="o = S q",
    decay="channel",
    erase="tied",
    objective="|S - S' Diag(a)|^2 - 2 <S k, beta (v - S' Diag(a) k)>",
    source="arXiv 2510.26692, section 3",
    arguments=arguments,
    update=Minimiser(stay_and_correct),
)
