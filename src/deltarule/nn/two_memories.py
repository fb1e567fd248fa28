"""Layers that attend to a few slots: ABC and gated slot attention."""

from abc import abstractmethod
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltarule import ops
from deltarule.nn.arguments import above_zero, default, default_head_dim, positive
from deltarule.nn.call import Call
from deltarule.nn.frame import FramedMixer, silence_padding
from deltarule.nn.gates import computed
from deltarule.nn.heads import split
from deltarule.nn.layout import Layout
from deltarule.nn.norm import GatedRMSNorm, RMSNorm
from deltarule.nn.rule import Arguments, System
from deltarule.nn.state import State
from deltarule.ops.context import Context
from deltarule.ops.context.rows import one_of_each


def abc_arguments(logits: Tensor, log_sum_before: Tensor, log_sum: Tensor) -> Arguments:
    """The slots exp(s) / z and the decays of `two_memories`, from log z before and after a token.

    In logarithms nothing overflows, however large a logit is.
    """
    return {"slots": (logits - log_sum).exp(), "log_decay": log_sum_before - log_sum}


ABC_SYSTEM = System(
    name="abc",
    title="Attention with Bounded-memory Control",
    operator="two_memories",
    recurrence="S^k = (S^k z' + k phi^T) / z, S^v = (S^v z' + v phi^T) / z, z = z' + phi",
    read_out="o = S^v softmax((S^k)^T q)",
    decay="channel",
    erase="none",
    objective="",
    source="arXiv 2110.02488, eq. 6 and section 3.2 (ABC-MLP with exponential phi)",
    state_size="H M (K + V + 1)",
    forms="recurrent, chunked, GPU kernel",
)


# Keeps most decays near one, whatever the logit.
TEMPERATURE = 8


def gsa_arguments(slot_logits: Tensor) -> Arguments:
    """The slots and their decay, of `two_memories`; q is not scaled, as in the release."""
    log_decay = F.logsigmoid(computed(slot_logits)) / TEMPERATURE
    return {"slots": -torch.expm1(log_decay), "log_decay": log_decay, "scale": 1.0}


GSA_SYSTEM = System(
    name="gsa",
    title="Gated Slot Attention",
    operator="two_memories",
    recurrence="S^k = S^k Diag(a) + k (1 - a)^T, S^v = S^v Diag(a) + v (1 - a)^T",
    read_out="o = S^v softmax((S^k)^T q)",
    decay="channel",
    erase="none",
    objective="",
    source="arXiv 2409.07146, eq. 8 and section 4",
    state_size="H M (K + V)",
    forms="recurrent, chunked, GPU kernel",
)


# log 0, finite so that differences and gradients of it are.
LOG_ZERO = -1e30


class SlotMixer(FramedMixer):
    """A layer over `two_memories`.

    Args:
        hidden_size: Channels of x.
        num_heads: Heads H.
        head_k_dim: Channels K of a query or key. None: the layer's default.
        head_v_dim: Channels V of a value. None: hidden_size / num_heads.
        num_slots: Slots M of each head. None: head_k_dim.
        conv_size: Taps of the short convolutions of q, k and v; 0 removes them. None: 0.
        output_gate: Whether to gate the output by a SiLU. None: the layer's default.
        norm_eps: Added to the mean square in the norm of the output.

    Raises:
        ValueError: A size is out of range.
    """

    expand_k: ClassVar[float] = 1.0
    default_output_gate: ClassVar[bool] = False

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int,
        head_k_dim: int | None = None,
        head_v_dim: int | None = None,
        num_slots: int | None = None,
        conv_size: int | None = None,
        output_gate: bool | None = None,
        norm_eps: float = 1e-5,
    ) -> None:
        """Build the projections, that of the slots among them."""
        super().__init__(hidden_size, num_heads=num_heads)
        self.hidden_size = positive("hidden_size", hidden_size)
        self.num_heads = positive("num_heads", num_heads)
        sizes = hidden_size, "num_heads", num_heads
        if head_k_dim is None:
            head_k_dim = default_head_dim("head_k_dim", self.expand_k, *sizes)
            head_v_dim = default(head_v_dim, default_head_dim("head_v_dim", 1, *sizes))
        self.head_k_dim = positive("head_k_dim", head_k_dim)
        head_v_dim = default(head_v_dim, int(head_k_dim / self.expand_k))
        self.head_v_dim = positive("head_v_dim", head_v_dim)
        self.num_slots = positive("num_slots", default(num_slots, self.head_k_dim))
        keys, values = num_heads * self.head_k_dim, num_heads * self.head_v_dim
        self.q_proj = nn.Linear(hidden_size, keys, bias=False)
        self.k_proj = nn.Linear(hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(hidden_size, values, bias=False)
        self.s_proj = nn.Linear(hidden_size, num_heads * self.num_slots, bias=False)
        channels = {"q": keys, "k": keys, "v": values}
        self.build_convolutions(default(conv_size, 0), channels)
        gated = default(output_gate, self.default_output_gate)
        self.g_proj = nn.Linear(hidden_size, values, bias=False) if gated else None
        self.build_norm(above_zero("norm_eps", norm_eps))
        self.o_proj = nn.Linear(values, hidden_size, bias=False)

    def memories(self) -> dict[str, tuple[int, ...]]:
        """`recurrent` is that of the values, `keys` that of the keys."""
        return {
            "recurrent": (self.num_heads, self.head_v_dim, self.num_slots),
            "keys": (self.num_heads, self.num_slots, self.head_k_dim),
        }

    @abstractmethod
    def build_norm(self, eps: float) -> None:
        """Make o_norm."""

    @abstractmethod
    def slots(self, logits: Tensor, call: Call) -> Arguments:
        """Compute the slots and their decays from [B, T, H, M], and keep what they carry."""

    @abstractmethod
    def finish(self, o: Tensor, gate: Tensor | None) -> Tensor:
        """Normalise and gate o [B, T, H, V]; return [B, T, H * V]."""

    def mix(self, call: Call) -> Tensor:
        """Project, attend to the slots, normalise, project back."""
        out = ops.two_memories(
            **silence_padding(self.arguments(call), call.layout.real, ("slots", "log_decay")),
            key_memory=call.before["keys"], value_memory=call.before["recurrent"],
            **call.layout.spans,
        )  # fmt: skip
        call.after["keys"], call.after["recurrent"] = out.key_memory, out.value_memory
        gate = None
        if self.g_proj is not None:
            gate = split(self.g_proj(call.x), self.num_heads, self.head_v_dim)
        y: Tensor = self.o_proj(self.finish(out.o, gate))
        return y

    def arguments(self, call: Call) -> Arguments:
        """Project to all that `two_memories` takes but the memories."""
        sizes = {"q": self.head_k_dim, "k": self.head_k_dim, "v": self.head_v_dim}
        heads = self.num_heads
        streams = {name: split(self.stream(name, call), heads, n) for name, n in sizes.items()}
        return streams | self.slots(split(self.s_proj(call.x), heads, self.num_slots), call)

    def stream(self, name: str, call: Call) -> Tensor:
        """Project x to q, k or v, and convolve it."""
        return self.convolve(name, getattr(self, f"{name}_proj")(call.x), call)


class GatedSlotAttention(SlotMixer):
    """Gated slot attention: a slot forgets the share a of what it holds and takes in 1 - a.

    Defaults: head_k_dim = head_v_dim = hidden_size / num_heads and as many slots, SiLU on q, k, v
    and the output, one norm of all heads, no convolution, no output gate.

    Example:
        >>> import torch
        >>> y, state = GatedSlotAttention(32, num_heads=2, num_slots=8)(torch.zeros(1, 5, 32))
        >>> state["keys"].shape, state["recurrent"].shape
        (torch.Size([1, 2, 8, 16]), torch.Size([1, 2, 16, 8]))

    Source: arXiv 2409.07146, section 4.
    """

    rule = GSA_SYSTEM

    def build_norm(self, eps: float) -> None:
        """One norm for all heads."""
        self.o_norm = RMSNorm(self.num_heads * self.head_v_dim, eps)

    def stream(self, name: str, call: Call) -> Tensor:
        """With SiLU, which a convolution brings along."""
        y = super().stream(name, call)
        return y if self.conv_size else F.silu(y)

    def slots(self, logits: Tensor, call: Call) -> Arguments:
        """By the rule."""
        return gsa_arguments(logits)

    def finish(self, o: Tensor, gate: Tensor | None) -> Tensor:
        """norm(SiLU(o)), gated if there is a gate."""
        y: Tensor = self.o_norm(F.silu(o).flatten(-2))
        return y if gate is None else y * F.silu(gate.flatten(-2))


class ABC(SlotMixer):
    """Attention with bounded-memory control: every slot holds a mean of keys, weighed by exp(s).

    The state also keeps the logarithm of the weights' sum, `log_sum` [N, H, M].

    Defaults: head_k_dim = hidden_size / (2 num_heads) and as many slots, head_v_dim = 2 head_k_dim,
    norm of each head and output gate SiLU, no convolution. The release rotates q and k (RoPE) and
    clamps s to [-32, 32]; neither is in the paper, nor here.

    Example:
        >>> import torch
        >>> y, state = ABC(32, num_heads=2, num_slots=4)(torch.zeros(1, 5, 32))
        >>> state["log_sum"][0, 0].exp().round()
        tensor([5., 5., 5., 5.], grad_fn=<RoundBackward0>)

    Source: arXiv 2110.02488, section 3.2.
    """

    rule = ABC_SYSTEM
    expand_k = 0.5
    default_output_gate = True

    def build_norm(self, eps: float) -> None:
        """Make a norm of each head."""
        self.o_norm = GatedRMSNorm(self.head_v_dim, eps)

    def init_state(self, batch_size: int) -> State:
        """Return zeros, and log 0 for the sum of no weights."""
        state = super().init_state(batch_size)
        sizes = (batch_size, self.num_heads, self.num_slots)
        return State(state, log_sum=state["recurrent"].new_full(sizes, LOG_ZERO))

    def exact(self) -> tuple[str, ...]:
        """Both memories, and the sum that divides them."""
        return (*super().exact(), "log_sum")

    def slots(self, logits: Tensor, call: Call) -> Arguments:
        """By the rule, from the running sum of exp(s)."""
        layout, shape = call.layout, logits.shape[2:]
        weighed = computed(logits).flatten(2)
        before = computed(call.before["log_sum"]).flatten(1).unsqueeze(1)
        if layout.context is not None:
            before = log_sum_before(layout.context, weighed, before)
        sums = running_log_sum(layout.with_history(weighed, before), layout)
        call.after["log_sum"] = layout.next_history(sums, 1).squeeze(1).unflatten(1, shape)
        earlier = layout.without_history(sums[:, :-1], 1)
        log_sum = layout.without_history(sums[:, 1:], 1)
        arguments = abc_arguments(weighed, earlier, log_sum)
        return {name: x.unflatten(2, shape) for name, x in arguments.items()}

    def finish(self, o: Tensor, gate: Tensor | None) -> Tensor:
        """Norm of each head, gated."""
        y: Tensor = self.o_norm(o, gate).flatten(-2)
        return y


def log_sum_before(context: Context, x: Tensor, given: Tensor) -> Tensor:
    """[N, 1, D] log(sum exp x) before each sequence here, given where it begins here."""
    sums = one_of_each(context, x[:, context.tail :].logsumexp(1))
    first = given[: len(x)]
    if context.goes_on:
        # The first of them has all there is: before it nothing was weighed.
        first = sums[:, context.before].logsumexp(1, keepdim=True)
    # Every process must reach the exchange of gradients, whether or not it looks back.
    return torch.cat([first + 0 * sums.sum(), given[len(x) :]])


def running_log_sum(x: Tensor, layout: Layout) -> Tensor:
    """log(exp x_0 + ... + exp x_t) along each sequence of `Layout.with_history`, of reach 1.

    In log2(T) steps: after the i-th a place holds the sum of the 2^i before it.
    """
    place = torch.arange(x.shape[1], device=x.device)
    if layout.cu_seqlens is not None:
        offsets = layout.cu_seqlens + torch.arange(len(layout.cu_seqlens), device=x.device)
        place = place - offsets[torch.searchsorted(offsets[1:], place, right=True)]
    shift = 1
    while shift < x.shape[1]:
        earlier = F.pad(x[:, :-shift], (0, 0, shift, 0), value=LOG_ZERO)
        x = torch.where((place >= shift).unsqueeze(-1), torch.logaddexp(x, earlier), x)
        shift *= 2
    return x
