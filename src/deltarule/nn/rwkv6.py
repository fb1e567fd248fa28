"""RWKV-6: read before the write, the current token's own value weighted by a bonus.

S_t = S_{t-1} Diag(a_t) + v_t k_t^T        o_t = (S_{t-1} + v_t (u * k_t)^T) q_t
a_t = exp(-exp(decay_logits_t))
"""

import torch
from torch import Tensor, nn

from deltarule.nn.call import LayerCall
from deltarule.nn.delta_mixer import DeltaMixer
from deltarule.nn.documents import last_token, token_before
from deltarule.nn.gates import computed, float32_parameter, low_rank
from deltarule.nn.layout import split
from deltarule.nn.norm import GatedGroupNorm
from deltarule.nn.rule import Arguments, Projections, Rule
from deltarule.nn.token_shift import first_shares

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


GROUP_NORM_EPS = 64e-5
MIX_RANK, DECAY_RANK = 32, 64
# What each projection reads, and how fast its share of the token before falls with the channel.
SHIFT_POWERS = {"decay": 1.0, "k": 1.0, "v": 1.0, "q": 0.5, "gate": 0.5}


class RWKV6(DeltaMixer):
    """RWKV-6: S = S' Diag(a) + v k^T, read before the write: o = (S' + v (u * k)^T) q.

    Every projection reads x mixed with the token before (token shift: `shift` [N, 1, hidden_size]
    in the state), by a share that depends on both. `recurrent` holds every write, the last one too.

    Defaults: head_k_dim = head_v_dim = hidden_size / num_heads (64 in the paper), output gate SiLU,
    group norm with eps 64e-5 whatever norm_eps. There is no convolution, and as many value heads
    as key heads.

    Examples:
        >>> y, state = RWKV6(32, num_heads=2)(torch.zeros(1, 5, 32))
        >>> sorted(state), state["shift"].shape
        (['recurrent', 'shift'], torch.Size([1, 1, 32]))

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
    shifts = True
    default_output_gate = True
    options = DeltaMixer.options - {"num_v_heads", "conv_size", "norm_eps"}
    float32_parameters = ("first_mix", "shift_mix", "decay_bias", "bonus")
    roles = {"mix_down": "gate", "mix_up": "gate"}

    a_proj: nn.Module

    def build_gates(self) -> None:
        super().build_gates()
        sizes = self.num_heads, self.head_k_dim
        channels = self.num_heads * self.head_k_dim
        self.build_shift()
        self.a_proj = low_rank(self.hidden_size, DECAY_RANK, channels, activation=nn.Tanh())
        down, up = self.a_proj.parameters()
        nn.init.zeros_(down)
        nn.init.uniform_(up, -0.01, 0.01)
        decay_bias, bonus = self.initial_decay_and_bonus(channels)
        self.decay_bias = float32_parameter(decay_bias.view(sizes))
        self.bonus = float32_parameter(bonus.view(sizes))

    def build_shift(self) -> None:
        """Make the shares of the token before; those that depend on x start at zero."""
        powers = 1.0, *SHIFT_POWERS.values()
        first, *mixes = first_shares(powers, self.hidden_size, self.layer_index, self.num_layers)
        mixes[list(SHIFT_POWERS).index("v")] -= 0.3 * self.depth
        self.first_mix = float32_parameter(first)
        self.shift_mix = float32_parameter(torch.stack(mixes))
        projections = len(SHIFT_POWERS)
        self.mix_down = nn.Linear(self.hidden_size, projections * MIX_RANK, bias=False)
        nn.init.zeros_(self.mix_down.weight)
        up = torch.empty(projections, MIX_RANK, self.hidden_size)
        self.mix_up = nn.Parameter(up.uniform_(-0.01, 0.01))

    def initial_decay_and_bonus(self, channels: int) -> tuple[Tensor, Tensor]:
        """Decays from slow in the first channels to fast in the last, and a zigzag of bonuses."""
        share = torch.arange(channels, dtype=torch.float32) / max(1, channels - 1)
        zigzag = (torch.arange(channels) + 1) % 3 - 1
        decay_bias = -6 + 5 * share.pow(0.7 + 1.3 * self.depth)
        return decay_bias, self.depth * (1 - share) + 0.1 * zigzag

    def build_norm(self) -> nn.Module:
        return GatedGroupNorm(self.num_v_heads, self.head_v_dim, GROUP_NORM_EPS)

    def project(self, call: LayerCall) -> Projections:
        x = self.shift(call)
        heads, key_size, value_size = self.num_heads, self.head_k_dim, self.head_v_dim
        gate = None if self.g_proj is None else self.g_proj(x["gate"])
        return Projections(
            q=split(self.q_proj(x["q"]), heads, key_size),
            k=split(self.k_proj(x["k"]), heads, key_size),
            v=split(self.v_proj(x["v"]), heads, value_size),
            decay_logits=split(self.a_proj(x["decay"]), heads, key_size) + self.decay_bias,
            output_gate=None if gate is None else split(gate, heads, value_size),
            bonus=self.bonus,
            layout=call.layout,
        )

    def shift(self, call: LayerCall) -> dict[str, Tensor]:
        """x_t + share (x_{t-1} - x_t), the share of each projection read from a first mix."""
        change = call.token_shift()
        first = torch.addcmul(call.x, change, self.first_mix.to(call.x.dtype))
        small = split(torch.tanh(self.mix_down(first)), len(SHIFT_POWERS), MIX_RANK)
        shares = torch.einsum("btpr,prd->btpd", small, self.mix_up)
        shares = shares + self.shift_mix.to(call.x.dtype)
        mixed = call.x.unsqueeze(-2) + change.unsqueeze(-2) * shares
        return dict(zip(SHIFT_POWERS, mixed.unbind(-2), strict=True))
