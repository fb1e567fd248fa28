"""RWKV-4: a decayed mean of values, weighted by e^k, in which the current token has a bonus.

Both sums are kept times e^{-m_t}, with m_t = max(m_{t-1} - w, k_t), which cancels in o_t. The scan
is given each write one token late, and so reads the sums before it.
"""

import torch
from torch import Tensor

from deltarule.nn.documents import change_of_scale, last_token, running_maximum, token_before
from deltarule.nn.gates import computed, float32_parameter
from deltarule.nn.rule import LayerCall, System
from deltarule.nn.scan_mixer import VectorMixer
from deltarule.nn.token_shift import first_shares, shifted

# The maximum of no token: e^-m of it is nothing to any other, and sums of it are finite.
NOTHING = -1e30
# What each projection reads, and how fast its share of the token before falls with the channel.
SHIFT_POWERS = {"k": 1.0, "v": 1.0, "g": 0.5}


class RWKV4(VectorMixer):
    """RWKV-4: o = (a' + e^{u + k} v) / (b' + e^{u + k}) of a = e^{-w} a' + e^k v and of b, v = 1.

    Every projection reads x mixed with the token before (token shift: `shift` [N, 1, hidden_size]
    in the state), by a share that is learned. w = exp(A_log) and the bonus u are learned for each
    channel. The state's `recurrent` [N, H, 2 V, 1] is (a, b) times e^{-stabilizer} [N, H, V].
    """

    rule = System(
        name="rwkv4", title="RWKV-4", operator="selective_scan", decay="constant", erase="none",
        state_size="3 HV V",
        recurrence="a = e^{-w} a' + e^k v, b = e^{-w} b' + e^k",
        read_out="o = (a' + e^{u + k} v) / (b' + e^{u + k})",
        source="arXiv 2305.13048, section 3, eq. 16, and appendix D; the authors' starting values",
    )  # fmt: skip
    options = VectorMixer.options - {"conv_size", "conv_bias"}
    convolved = ()
    default_output_gate = True
    gate_activation = "sigmoid"
    shifts = True
    first_values = {"stabilizer": NOTHING}
    float32_parameters = ("shift_mix", "A_log", "bonus")

    def stream_sizes(self) -> dict[str, int]:
        return dict.fromkeys("kv", self.num_heads * self.head_v_dim)

    def build_gates(self) -> None:
        sizes = self.num_heads, self.head_v_dim
        channels = self.num_heads * self.head_v_dim
        place = self.hidden_size, self.layer_index, self.num_layers
        mixes = first_shares(SHIFT_POWERS.values(), *place)
        mixes[list(SHIFT_POWERS).index("v")] -= 0.3 * self.depth
        self.shift_mix = float32_parameter(mixes)
        share = torch.arange(channels, dtype=torch.float32) / max(1, channels - 1)
        self.A_log = float32_parameter((-5 + 8 * share.pow(0.7 + 1.3 * self.depth)).view(sizes))
        zigzag = (torch.arange(channels, dtype=torch.float32) + 1) % 3 - 1
        self.bonus = float32_parameter((zigzag / 2 + torch.tensor(0.3).log()).view(sizes))

    def memories(self) -> dict[str, tuple[int, ...]]:
        sizes = self.num_heads, self.head_v_dim
        return {"recurrent": (sizes[0], 2 * sizes[1], 1), "stabilizer": sizes}

    def mix(self, call: LayerCall) -> Tensor:
        mixed = shifted(call, SHIFT_POWERS, self.shift_mix)
        k, v = self.k_proj(mixed["k"]), self.v_proj(mixed["v"])
        k, v, layout = computed(self.by_head(k)), computed(self.by_head(v)), call.layout
        log_decay, logits = (-self.A_log.exp()).expand(k.shape).flatten(-2), k.flatten(-2)
        start = call.before["stabilizer"].flatten(-2)
        before, m, last = running_maximum(log_decay, logits, layout, start, NOTHING)
        rescaled = change_of_scale(log_decay, logits, before, m).view_as(k)
        before, m = (x.expand(logits.shape).reshape(k.shape) for x in (before, m))
        weight = torch.exp(k - m)
        # Together: other processes are asked once, in whatever order a backward comes by.
        both = torch.cat([weight * v, weight, rescaled, rescaled], dim=-1)
        earlier, decays = token_before(both, layout).chunk(2, dim=-1)
        read = self.run(earlier, decays, call)
        written, decay = last_token(both, layout).chunk(2, dim=-1)
        kept = decay.exp() * call.after["recurrent"].squeeze(-1)
        call.after["recurrent"] = (kept + written).unsqueeze(-1)
        call.after["stabilizer"] = self.by_head(last)
        top = torch.maximum(before, self.bonus + k).detach()
        old, new = torch.exp(before - top), torch.exp(self.bonus + k - top)
        values, weights = read.chunk(2, dim=-1)
        o = (old * values + new * v) / (old * weights + new)
        gate = None if self.g_proj is None else self.by_head(self.g_proj(mixed["g"]))
        return self.o_proj(self.normed(o.to(call.x.dtype), gate))
