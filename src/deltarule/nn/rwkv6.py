"""RWKV-6: read before the write, the current token's own value weighted by a bonus."""

import torch
from torch import Tensor, nn

from deltarule.nn.documents import last_token, token_before
from deltarule.nn.gates import computed, float32_parameter, low_rank
from deltarule.nn.layout import split
from deltarule.nn.rule import Arguments, LayerCall, Projections, Rule
from deltarule.nn.token_shift import ShiftedMixer, first_shares

MIX_RANK, DECAY_RANK = 32, 64
# What each projection reads, and how fast its share of the token before falls with the channel.
SHIFT_POWERS = {"decay": 1.0, "k": 1.0, "v": 1.0, "q": 0.5, "gate": 0.5}
# exp of it is far beyond a reset, and still finite.
LARGEST = 10.0


def arguments(projections: Projections) -> Arguments:
    """Give every token the decay and write of the one before: the operator then reads S_{t-1}."""
    given = {"k": projections.k, "v": projections.v, "log_decay": log_decay(projections)}
    earlier = {name: token_before(x, projections.rows) for name, x in given.items()}
    return {"q": projections.q, **earlier, "beta": None, "scale": 1.0}


def read_out(o: Tensor, projections: Projections) -> Tensor:
    read = computed(projections.q) * projections.k * projections.need("bonus")
    return (o + read.sum(-1, keepdim=True) * projections.v).to(o.dtype)


def final_state(state: Tensor, projections: Projections) -> Tensor:
    """Decay and write once more, for each document's last token."""
    streams = projections.k, projections.v, log_decay(projections)
    k, v, logs = (last_token(x, projections.rows).to(state.dtype) for x in streams)
    return state * logs.exp().unsqueeze(-2) + v.unsqueeze(-1) * k.unsqueeze(-2)


def log_decay(projections: Projections) -> Tensor:
    return -computed(projections.need("decay_logits")).clamp(max=LARGEST).exp()


class RWKV6(ShiftedMixer):
    """RWKV-6: S = S' Diag(a) + v k^T, read before the write: o = (S' + v (u * k)^T) q.

    Every projection reads x mixed with the token before (token shift: `shift` [N, 1, hidden_size]
    in the state), by a share that depends on both. `recurrent` holds every write, the last one too.
    Group norm with eps 64e-5 whatever norm_eps; the paper's heads have 64 channels.

    Source: arXiv 2404.05892, section 4, and the authors' starting values.
    """

    rule = Rule(
        name="rwkv6", title="RWKV-6", decay="channel", erase="none",
        recurrence="S = S' Diag(a) + v k^T", read_out="o = (S' + v (u * k)^T) q",
        objective="|S - S' Diag(a)|^2 - 2 <S k, v>",
        source="arXiv 2404.05892, section 4 "
        "(2406.06484, table 4, prints the bonus on value channels)",
        arguments=arguments, read_out_function=read_out, final_state=final_state,
    )  # fmt: skip
    float32_parameters = ("first_mix", "shift_mix", "decay_bias", "bonus")
    roles = {"mix_down": "gate", "mix_up": "gate"}

    def build_gates(self) -> None:
        super().build_gates()
        # Of the token before; the shares that depend on x start at zero.
        powers, place = SHIFT_POWERS.values(), (self.layer_index, self.num_layers)
        first, *mixes = first_shares((1.0, *powers), self.hidden_size, *place)
        mixes[list(SHIFT_POWERS).index("v")] -= 0.3 * self.depth
        self.first_mix = float32_parameter(first)
        self.shift_mix = float32_parameter(torch.stack(mixes))
        self.mix_down = nn.Linear(self.hidden_size, len(powers) * MIX_RANK, bias=False)
        nn.init.zeros_(self.mix_down.weight)
        up = torch.empty(len(powers), MIX_RANK, self.hidden_size)
        self.mix_up = nn.Parameter(up.uniform_(-0.01, 0.01))
        sizes = self.num_heads, self.head_k_dim
        channels = self.num_heads * self.head_k_dim
        self.a_proj = low_rank(self.hidden_size, DECAY_RANK, channels, activation=nn.Tanh())
        down, up = self.a_proj.parameters()
        nn.init.zeros_(down)
        nn.init.uniform_(up, -0.01, 0.01)
        # Decays from slow in the first channels to fast in the last, and a zigzag of bonuses.
        share = torch.arange(channels, dtype=torch.float32) / max(1, channels - 1)
        decay_bias = -6 + 5 * share.pow(0.7 + 1.3 * self.depth)
        bonus = self.depth * (1 - share) + 0.1 * ((torch.arange(channels) + 1) % 3 - 1)
        self.decay_bias = float32_parameter(decay_bias.view(sizes))
        self.bonus = float32_parameter(bonus.view(sizes))

    def project(self, call: LayerCall) -> Projections:
        # x_t + share (x_{t-1} - x_t), the share of each projection read from a first mix.
        change = call.token_shift()
        first = torch.addcmul(call.x, change, self.first_mix.to(call.x.dtype))
        small = split(torch.tanh(self.mix_down(first)), len(SHIFT_POWERS), MIX_RANK)
        shares = torch.einsum("btpr,prd->btpd", small, self.mix_up)
        shares = shares + self.shift_mix.to(call.x.dtype)
        mixed = call.x.unsqueeze(-2) + change.unsqueeze(-2) * shares
        x = dict(zip(SHIFT_POWERS, mixed.unbind(-2), strict=True))
        return Projections(
            q=self.by_key(self.q_proj(x["q"])), k=self.by_key(self.k_proj(x["k"])),
            v=self.by_head(self.v_proj(x["v"])),
            decay_logits=self.by_key(self.a_proj(x["decay"])) + self.decay_bias,
            output_gate=self.gate(x["gate"]), bonus=self.bonus, layout=call.layout,
        )  # fmt: skip
