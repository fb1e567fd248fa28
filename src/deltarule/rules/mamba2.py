"""Mamba-2: a decay and a step size for each head from one gate, and a value that skips the state.

S_t = exp(-exp(A_log) dt_t) S_{t-1} + dt_t v_t k_t^T        o_t = S_t q_t + D v_t
dt_t = softplus(decay_logits_t + dt_bias)
"""

from torch import Tensor

from deltarule.rules.gates import step_and_log_decay
from deltarule.rules.objectives import Minimiser, stay_and_write
from deltarule.rules.rule import Carry, Mapped, Projections, Rule


def arguments(projections: Projections, carry: Carry | None = None) -> Mapped:
    """The read-out is not scaled: beside D v_t its size matters."""
    dt, log_decay = step_and_log_decay(projections)
    v = projections.v * dt.unsqueeze(-1)
    given = projections.qkv | {"v": v.to(projections.v.dtype), "beta": None}
    return given | {"log_decay": log_decay, "scale": 1.0}, carry


def read_out(o: Tensor, projections: Projections, carry: Carry | None = None) -> Tensor:
    """o_t = S_t q_t + D v_t."""
    return (o + projections.need("D").unsqueeze(-1) * projections.v).to(o.dtype)


RULE = Rule(
    name="mamba2",
    title="Mamba-2",
    operator="delta_rule",
    recurrence="S = a S + dt v k^T",
    read_out="o = S q + D v",
    decay="head",
    erase="none",
    objective="|S - a S'|^2 - 2 <S k, dt v>",
    source="arXiv 2405.21060, section 3 and listing 1",
    arguments=arguments,
    read_out_function=read_out,
    update=Minimiser(stay_and_write),
)
