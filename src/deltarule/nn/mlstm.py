"""mLSTM: exponential input gates, kept in range by a running maximum that cancels.

m_t = max(log f_t + m_{t-1}, log i_t): the state that is kept is e^{-m_t} times this one

The divisor is that of the kept state plus EPS, as in the authors' programs: where e^{-m_t}
is zero in float32 (m_t above 104) a query that meets no key still reads zero.
"""

from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltarule.nn.delta_mixer import DeltaMixer
from deltarule.nn.documents import change_of_scale, running_maximum
from deltarule.nn.gates import computed, float32_parameter
from deltarule.nn.linear_attention import divided, with_one
from deltarule.nn.linears import ExactLinear
from deltarule.nn.rule import Arguments, LayerCall, Projections, Rule

# Added to the divisor of the kept state.
EPS = 1e-6
# Of xLSTM-7B.
SOFT_CAP = 15.0
FIRST_INPUT_BIAS = -10.0


def arguments(projections: Projections, cap: float | None = None) -> Arguments:
    """Decay by f_t e^{m_{t-1} - m_t} and write with e^{log i_t - m_t}: neither exceeds one."""
    log_forget, log_input = gates(projections, cap)
    before, m = maxima(projections, cap)
    log_decay = change_of_scale(log_forget, log_input, before, m)
    v = with_one(projections.v) * torch.exp(log_input - m).unsqueeze(-1)
    given = projections.qkv | {"v": v.to(projections.v.dtype), "beta": None}
    return given | {"log_decay": log_decay}


def read_out(o: Tensor, projections: Projections, cap: float | None = None) -> Tensor:
    """o_t = S_t q_t / (max(e^{-m_t}, |z_t^T q_t|) + EPS), of the kept state."""
    _, m = maxima(projections, cap)
    read = torch.cat([o[..., :-1], o[..., -1:].abs()], dim=-1)
    return divided(read, torch.exp(-m).unsqueeze(-1), EPS)


def gates(projections: Projections, cap: float | None = None) -> tuple[Tensor, Tensor]:
    """log f and log i, both [B, T, HV], of logits that a cap may bound."""
    f, i = (computed(projections.need(name)) for name in ("decay_logits", "beta_logits"))
    if cap is not None:
        f, i = (cap * torch.tanh(logits / cap) for logits in (f, i))
    return F.logsigmoid(f), i


def maxima(projections: Projections, cap: float | None) -> tuple[Tensor, ...]:
    return projections.running or running_maximum(*gates(projections, cap), projections.rows)[:2]


class MLSTM(DeltaMixer):
    """mLSTM: S = f S + i v k^T, o = S q / max(1, |z^T q|), with exponential input gates i.

    The state also keeps the running maximum (`stabilizer` [N, HV], float32): the matrix is the
    paper's times exp(-stabilizer). The norm is that of each head's mean and variance; forget biases
    start from 3 to 6 over the heads, input biases from N(0, 0.1^2).
    """

    rule = Rule(
        name="mlstm", title="mLSTM", decay="head", erase="none", state_size="HV (V + 1) K + HV",
        recurrence="S = f S + i v k^T, z = f z + i k", read_out="o = S q / max(1, |z^T q|)",
        objective="|S - f S'|^2 - 2 <S k, i v>",
        source="arXiv 2405.04517, section 2.3, eq. 19 to 27, and appendix A",
        arguments=arguments, read_out_function=read_out, normalizer=True,
    )  # fmt: skip
    default_output_gate = True
    gate_activation = "sigmoid"
    centred = True
    float32_parameters = ("decay_bias", "beta_bias")
    # What bounds the logits of both gates.
    cap: ClassVar[float | None] = None

    def adopt(self, config: Any) -> None:
        if not getattr(config, "output_norm_bias", True):
            self.o_norm.register_parameter("bias", None)

    def memories(self) -> dict[str, tuple[int, ...]]:
        return super().memories() | {"stabilizer": (self.num_v_heads,)}

    def build_gates(self) -> None:
        super().build_gates()
        heads = self.num_v_heads
        self.a_proj = ExactLinear(self.hidden_size, heads, bias=False)
        self.b_proj = ExactLinear(self.hidden_size, heads, bias=False)
        self.decay_bias = float32_parameter(torch.linspace(3, 6, heads, dtype=torch.float32))
        self.beta_bias = float32_parameter(0.1 * torch.randn(heads, dtype=torch.float32))

    def project(self, call: LayerCall) -> Projections:
        p = super().project(call)
        decay, beta = p.need("decay_logits"), p.need("beta_logits")
        p = replace(p, decay_logits=decay + self.decay_bias, beta_logits=beta + self.beta_bias)
        *running, last = running_maximum(
            *gates(p, self.cap), call.layout, call.before["stabilizer"]
        )
        call.after["stabilizer"] = last
        return replace(p, running=tuple(running))


class XLSTM7B(MLSTM):
    """The mLSTM of xLSTM-7B: the logits of both gates are bounded by 15, 15 tanh(logit / 15).

    Input biases start at -10.
    """

    rule = replace(
        MLSTM.rule, name="xlstm_7b", title="mLSTM of xLSTM-7B", page="mlstm",
        source="arXiv 2503.13427, section 3",
        arguments=partial(arguments, cap=SOFT_CAP),
        read_out_function=partial(read_out, cap=SOFT_CAP),
    )  # fmt: skip
    cap = SOFT_CAP
    expand_k = 0.5
    expand_v = 2

    def build_gates(self) -> None:
        super().build_gates()
        nn.init.constant_(self.beta_bias, FIRST_INPUT_BIAS)
