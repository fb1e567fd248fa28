"""GateLoop: linear attention whose key channels decay and turn, both as the token says.

With Phi_t = w_1 + .. + w_t, k~ = e^{-i Phi} k = (k cos Phi, -k sin Phi) and q~ likewise,

S_t = S_{t-1} Diag(a_t, a_t) + v_t k~_t^T        o_t = S_t q~_t

rotates by positions that the tokens choose, and its decay is real.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltarule.nn.delta_mixer import DeltaMixer
from deltarule.nn.documents import last_token, per_token
from deltarule.nn.gates import computed, float32_parameter, initial_dt_bias
from deltarule.nn.rotation import in_float64, within_a_turn
from deltarule.nn.rule import Arguments, LayerCall, Projections, Rule
from deltarule.ops.context.exchange import starting_state


def arguments(projections: Projections) -> Arguments:
    (phase,) = projections.running or (phases(projections),)
    cos, sin = phase.cos(), phase.sin()
    # e^{-i Phi} x: real parts before imaginary ones.
    both = (torch.cat([x * cos, -x * sin], dim=-1) for x in (projections.q, projections.k))
    q, k = (x.to(projections.q.dtype) for x in both)
    log_decay = F.logsigmoid(computed(projections.need("decay_logits")))
    given = {"q": q, "k": k, "v": projections.v, "beta": None}
    decays = torch.cat([log_decay] * 2, dim=-1)
    return given | {"log_decay": decays, "scale": log_decay.shape[-1] ** -0.5}


def phases(projections: Projections, start: Tensor | None = None) -> Tensor:
    """[B, T, HV, K] Phi_t of each document, which had turned by start [N, HV, K]; None: by zero."""
    turns, layout = computed(projections.need("phase")), projections.rows
    if start is None:
        start = turns.new_zeros(layout.sequences, *turns.shape[2:])
    total, start = in_float64(turns).cumsum(1), in_float64(start)
    if layout.cu_seqlens is not None:
        before = F.pad(total, (0, 0, 0, 0, 1, 0))
        start = start - before[0, layout.cu_seqlens[:-1]]
    return within_a_turn(total + per_token(start, layout), turns.dtype)


class GateLoop(DeltaMixer):
    """GateLoop: H = H * (a e^{i w})^T + v k^T, o = Re(H q): a and w both depend on the token.

    a = sigmoid(a_proj x + decay_bias) and w = w_proj x, for each key channel. The state's
    `recurrent` [N, H, V, 2 K] is e^{-i Phi} H, its real parts before its imaginary ones, and
    `phase` [N, H, K] is Phi, the sum of all w. Decays start from 1 - 0.1 to 1 - 0.001. The paper
    has one channel a head.
    """

    rule = Rule(
        name="gate_loop", title="GateLoop", decay="channel", erase="none",
        state_size="2 HV V K + HV K",
        recurrence="H = H * (a e^{i w})^T + v k^T", read_out="o = Re(H q)",
        objective="|H - H' * (a e^{i w})^T|^2 - 2 Re <H k, v>",
        source="arXiv 2311.01927, section 3",
        arguments=arguments,
    )  # fmt: skip
    options = DeltaMixer.options - {"num_v_heads"}
    default_output_gate = True
    float32_parameters = ("decay_bias",)
    roles = {"w_proj": "gate"}

    def build_gates(self) -> None:
        super().build_gates()
        channels = self.num_heads * self.head_k_dim
        self.a_proj = nn.Linear(self.hidden_size, channels, bias=False)
        self.w_proj = nn.Linear(self.hidden_size, channels, bias=False)
        bias = -initial_dt_bias(self.num_heads, self.head_k_dim)
        self.decay_bias = float32_parameter(bias)

    def memories(self) -> dict[str, tuple[int, ...]]:
        heads, key_size = self.num_heads, self.head_k_dim
        return {"recurrent": (heads, self.head_v_dim, 2 * key_size), "phase": (heads, key_size)}

    def project(self, call: LayerCall) -> Projections:
        p = super().project(call)
        turns = computed(self.by_key(self.w_proj(call.x)))
        start = call.before["phase"]
        if (context := call.layout.context) is not None:
            # How far others have turned, of the document that begins elsewhere.
            tail = turns[:, context.tail :].sum(1).unsqueeze(-2)
            kept = torch.full_like(tail, float(context.goes_on and context.tail == 0))
            before = starting_state(context, tail, kept).squeeze(-2)
            start = torch.cat([start[: len(before)] + before, start[len(before) :]])
        p = replace(p, decay_logits=p.need("decay_logits") + self.decay_bias, phase=turns)
        phase = phases(p, start)
        call.after["phase"] = last_token(phase, call.layout, otherwise=start)
        return replace(p, running=(phase,))
