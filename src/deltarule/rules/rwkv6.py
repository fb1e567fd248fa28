"""RWKV-6: read before the write, the current token's own value weighted by a bonus.

S_t = S_{t-1} Diag(a_t) + v_t k_t^T        o_t = (S_{t-1} + v_t (u * k_t)^T) q_t
a_t = exp(-exp(decay_logits_t))
"""

from torch import Tensor

from deltarule.rules.documents import last_token, token_before
from deltarule.rules.gates import computed
from deltarule.rules.objectives import Minimiser, stay_and_write
from deltarule.rules.rule import Carry, Mapped, Projections, Rule

# exp of it is far beyond a reset, and still finite.
LARGEST = 10.0


def arguments(projections: Projections, carry: Carry | None = None) -> Mapped:
    """Give every token the decay and write of the one before: the operator then reads S_{t-1}."""
    given = {"k": projections.k, "v": projections.v, "log_decay": log_decay(projections)}
    earlier = {name: token_before(x, projections) for name, x in given.items()}
    return {"q": projections.q, **earlier, "beta": None, "scale": 1.0}, carry


def read_out(o: Tensor, projections: Projections, carry: Carry | None = None) -> Tensor:
    """Add (q . (u * k)) v."""
    read = computed(projections.q) * projections.k * projections.need("bonus")
    return (o + read.sum(-1, keepdim=True) * projections.v).to(o.dtype)


def final_state(state: Tensor, projections: Projections) -> Tensor:
    """Decay and write once more, for each document's last token."""
    streams = projections.k, projections.v, log_decay(projections)
    k, v, logs = (last_token(x, projections).to(state.dtype) for x in streams)
    return state * logs.exp().unsqueeze(-2) + v.unsqueeze(-1) * k.unsqueeze(-2)


def log_decay(projections: Projections) -> Tensor:
    """log a = -exp(decay_logits)."""
    return -computed(projections.need("decay_logits")).clamp(max=LARGEST).exp()


RULE = Rule(
    name="rwkv6",
    title="RWKV-6",
    operator="delta_rule",
    recurrence="S = S' Diag(a) + v k^T",
    read_out="o = (S' + v (u * k)^T) q",
    decay="channel",
    erase="none",
    objective="|S - S' Diag(a)|^2 - 2 <S k, v>",
    source="arXiv 2404.05892, section 4 (001 Table 4 prints the bonus on the value channels)",
    arguments=arguments,
    read_out_function=read_out,
    final_state=final_state,
    update=Minimiser(stay_and_write),
)
