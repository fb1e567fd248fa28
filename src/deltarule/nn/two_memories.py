"""Layers that attend to a few slots: ABC and gated slot attention."""

from abc import abstractmethod
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from deltarule import ops
from deltarule.nn.checks import COMMON
from deltarule.nn.documents import running_log_sum
from deltarule.nn.gates import computed
from deltarule.nn.layout import silence_padding, split
from deltarule.nn.mixer import Mixer
from deltarule.nn.rule import Arguments, LayerCall, System

# Keeps most decays near one, whatever the logit.
TEMPERATURE = 8
# log 0, finite so that differences and gradients of it are.
LOG_ZERO = -1e30


class SlotMixer(Mixer):
    """A layer over `two_memories`, whose slots are made by `slots`."""

    options = COMMON | {"num_slots"}
    roles = {"s_proj": "gate"}

    def stream_sizes(self) -> dict[str, int]:
        return super().stream_sizes() | {"s": self.num_heads * self.num_slots}

    def memories(self) -> dict[str, tuple[int, ...]]:
        return {
            "recurrent": (self.num_heads, self.head_v_dim, self.num_slots),
            "keys": (self.num_heads, self.num_slots, self.head_k_dim),
        }

    @abstractmethod
    def slots(self, logits: Tensor, call: LayerCall) -> Arguments:
        """Compute the slots and their decays from [B, T, H, M], and keep what they carry."""

    def arguments(self, call: LayerCall) -> Arguments:
        streams = dict(zip("qkv", self.streams(call), strict=True))
        logits = split(self.stream("s", call), self.num_heads, self.num_slots)
        return streams | self.slots(logits, call)

    def read(self, call: LayerCall) -> Tensor:
        out = ops.two_memories(
            **silence_padding(self.arguments(call), call.layout.real, ("slots", "log_decay")),
            key_memory=call.before["keys"],
            value_memory=call.before["recurrent"],
            **call.layout.spans,
        )
        call.after["keys"], call.after["recurrent"] = out.key_memory, out.value_memory
        return out.o


class ABC(SlotMixer):
    """Attention with bounded-memory control: every slot holds a mean of keys, weighed by exp(s).

    The state also keeps the logarithm of the weights' sum, `log_sum` [N, H, M]. The release rotates
    q and k (RoPE) and clamps s to [-32, 32]; neither is in the paper, nor here.

    Examples:
        >>> y, state = ABC(32, num_heads=2, num_slots=4)(torch.zeros(1, 5, 32))
        >>> state["log_sum"][0, 0].exp().round()
        tensor([5., 5., 5., 5.], grad_fn=<RoundBackward0>)
    """

    rule = System(
        name="abc", title="Attention with Bounded-memory Control", operator="two_memories",
        decay="channel", erase="none", state_size="H M (K + V + 1)",
        recurrence="S^k = (S^k z' + k phi^T) / z, S^v = (S^v z' + v phi^T) / z, z = z' + phi",
        read_out="o = S^v softmax((S^k)^T q)",
        source="arXiv 2110.02488, eq. 6 and section 3.2 (ABC-MLP with exponential phi)",
    )  # fmt: skip
    first_values = {"log_sum": LOG_ZERO}
    expand_k = 0.5
    expand_v = 2
    default_output_gate = True

    def memories(self) -> dict[str, tuple[int, ...]]:
        return super().memories() | {"log_sum": (self.num_heads, self.num_slots)}

    def slots(self, logits: Tensor, call: LayerCall) -> Arguments:
        weighed, before = (computed(x).flatten(-2) for x in (logits, call.before["log_sum"]))
        earlier, log_sum, last = running_log_sum(
            torch.zeros_like(weighed), weighed, call.layout, before, LOG_ZERO
        )
        # exp(s) / z and the decay: in logarithms nothing overflows, however large a logit is.
        slots, log_decay = (weighed - log_sum).exp(), earlier - log_sum
        slots, log_decay, call.after["log_sum"] = (
            split(x, self.num_heads, self.num_slots) for x in (slots, log_decay, last)
        )
        return {"slots": slots, "log_decay": log_decay}


class GatedSlotAttention(SlotMixer):
    """Gated slot attention: a slot forgets the share a of what it holds and takes in 1 - a.

    SiLU on q, k, v and the output, and one norm of all heads.
    """

    rule = replace(
        ABC.rule, name="gsa", title="Gated Slot Attention", state_size="H M (K + V)",
        recurrence="S^k = S^k Diag(a) + k (1 - a)^T, S^v = S^v Diag(a) + v (1 - a)^T",
        source="arXiv 2409.07146, eq. 8 and section 4",
    )  # fmt: skip
    norm_of_all = True

    def streams(self, call: LayerCall) -> list[Tensor]:
        """Inputs of the operator, after SiLU (a convolution applies its own)."""
        return list(self.activated(*super().streams(call)))

    def slots(self, logits: Tensor, call: LayerCall) -> Arguments:
        log_decay = F.logsigmoid(computed(logits)) / TEMPERATURE
        # As in the release, q is not scaled.
        return {"slots": -torch.expm1(log_decay), "log_decay": log_decay, "scale": 1.0}

    def read(self, call: LayerCall) -> Tensor:
        return F.silu(super().read(call))
