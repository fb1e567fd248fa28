"""The one frame of every recurrent layer.

    project -> short convolution -> rule -> operator -> read-out, norm, output gate -> project

A layer on top of it says which rule it follows, which gates feed the rule, and its defaults.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltarule import ops
from deltarule.nn.arguments import (
    above_zero,
    check_beta_max,
    check_depth,
    check_input,
    check_multiple,
    check_n_steps,
    check_state,
    default,
    default_head_dim,
    positive,
)
from deltarule.nn.heads import per_step, split
from deltarule.nn.interface import Mixer, MixerConfig
from deltarule.nn.layout import Layout, blank_padding, make_layout
from deltarule.nn.norm import Activation, GatedRMSNorm
from deltarule.nn.short_conv import ShortConv
from deltarule.nn.state import State
from deltarule.rules import Projections, Rule
from deltarule.shapes import Hidden, Mask, Offsets, RecurrentOutput

OPERATORS: dict[str, Callable[..., RecurrentOutput]] = {
    "delta_rule": ops.delta_rule,
    "dplr": ops.dplr,
}


@dataclass
class Call:
    """One call of a layer: what it was given, and the state it leaves behind."""

    x: Tensor
    layout: Layout
    before: State
    after: State
    shared: dict[str, Tensor]


class RecurrentMixer(Mixer):
    """A recurrent layer, as a drop-in module; each subclass names its rule and its own defaults.

    Args:
        hidden_size: Channels of x.
        num_heads: Query and key heads H.
        num_v_heads: Value heads HV, a multiple of num_heads. None: num_heads.
        head_k_dim: Channels K of a query or key. None: expand_k * hidden_size / num_heads.
        head_v_dim: Channels V of a value. None: expand_v * head_k_dim.
        conv_size: Taps of the short convolution; 0 removes it. None: the layer's default.
        output_gate: Whether to gate the output. None: the layer's default.
        beta_max: Largest write strength, in (0, 2]; 2.0 allows negative eigenvalues. Only for
            rules that erase. None: the layer's default.
        n_steps: Writes for each token, only for DeltaProduct. None: the layer's default.
        norm_eps: Added to the mean square in the norm of the output.
        layer_index: Which layer of the model this is, from 0 (Lightning and RWKV-7 depend on it).
        num_layers: Layers of the model.

    Raises:
        ValueError: A size is out of range, or an option means nothing for this rule.
    """

    rule: ClassVar[Rule]
    expand_k: ClassVar[float] = 1.0
    expand_v: ClassVar[int] = 1
    default_conv_size: ClassVar[int] = 0
    default_output_gate: ClassVar[bool] = False
    default_beta_max: ClassVar[float] = 1.0
    default_n_steps: ClassVar[int] = 1
    gate_activation: ClassVar[Activation] = "silu"
    # SiLU on q, k and v where no convolution brings its own.
    activates_projections: ClassVar[bool] = False
    float32_parameters: ClassVar[tuple[str, ...]] = ("A_log", "dt_bias", "D")

    A_log: nn.Parameter | None
    dt_bias: nn.Parameter | None
    D: nn.Parameter | None
    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    a_proj: nn.Module | None
    b_proj: nn.Module | None
    g_proj: nn.Module | None

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int,
        num_v_heads: int | None = None,
        head_k_dim: int | None = None,
        head_v_dim: int | None = None,
        conv_size: int | None = None,
        output_gate: bool | None = None,
        beta_max: float | None = None,
        n_steps: int | None = None,
        norm_eps: float = 1e-5,
        layer_index: int = 0,
        num_layers: int = 1,
    ) -> None:
        """Build the projections, the convolutions, the gates and the norm."""
        super().__init__()
        self.hidden_size = positive("hidden_size", hidden_size)
        self.num_heads = positive("num_heads", num_heads)
        self.num_v_heads = positive("num_v_heads", default(num_v_heads, num_heads))
        check_multiple("num_v_heads", self.num_v_heads, "num_heads", num_heads)
        head_k_dim = self.default_head_k_dim() if head_k_dim is None else head_k_dim
        self.head_k_dim = positive("head_k_dim", head_k_dim)
        head_v_dim = self.default_head_v_dim() if head_v_dim is None else head_v_dim
        self.head_v_dim = positive("head_v_dim", head_v_dim)
        self.beta_max = default(check_beta_max(beta_max, self.rule), self.default_beta_max)
        self.n_steps = check_n_steps(n_steps, self.rule, self.default_n_steps)
        self.norm_eps = above_zero("norm_eps", norm_eps)
        self.layer_index, self.num_layers = check_depth(layer_index, num_layers)
        conv_size = default(conv_size, self.default_conv_size)
        self.conv_size = positive("conv_size", conv_size) if conv_size != 0 else 0
        self.check_options()
        self.build_projections()
        self.build_gates()
        self.build_output(default(output_gate, self.default_output_gate))

    @classmethod
    def from_config(cls, config: MixerConfig, layer_index: int) -> Self:
        """Build the layer at layer_index of a model; options its rule lacks are left out."""
        erases = cls.rule.erase == "tied"
        return cls(
            config.hidden_size,
            num_heads=config.num_heads,
            num_v_heads=config.num_v_heads,
            head_k_dim=config.head_k_dim,
            head_v_dim=config.head_v_dim,
            conv_size=config.conv_size,
            output_gate=config.output_gate,
            beta_max=config.beta_max if erases else None,
            n_steps=config.n_steps if cls.default_n_steps > 1 else None,
            norm_eps=config.norm_eps,
            layer_index=layer_index,
            num_layers=config.num_layers,
        )

    def default_head_k_dim(self) -> int:
        """Channels of a key where none are given: expand_k * hidden_size / num_heads."""
        sizes = self.hidden_size, "num_heads", self.num_heads
        return default_head_dim("head_k_dim", self.expand_k, *sizes)

    def default_head_v_dim(self) -> int:
        """Channels of a value where none are given: expand_v * head_k_dim."""
        return self.expand_v * self.head_k_dim

    def check_options(self) -> None:
        """Refuse sizes that every layer has but that this one cannot follow; here none."""

    def build_projections(self) -> None:
        """Make q, k and v, n_steps times as wide where each step has its own, and their filters."""
        key_size = self.num_heads * self.head_k_dim
        value_size = self.num_v_heads * self.head_v_dim
        sizes = {"q": key_size, "k": key_size * self.n_steps, "v": value_size * self.n_steps}
        for name, size in sizes.items():
            setattr(self, f"{name}_proj", nn.Linear(self.hidden_size, size, bias=False))
            if self.conv_size:
                setattr(self, f"{name}_conv", ShortConv(size, self.conv_size))

    def build_gates(self) -> None:
        """Make what the rule's gates are computed from; here the write strength, if it erases."""
        for name in ("A_log", "dt_bias", "D"):
            self.register_parameter(name, None)
        self.a_proj = self.b_proj = None
        if self.rule.erase == "tied":
            self.b_proj = nn.Linear(self.hidden_size, self.num_v_heads * self.n_steps, bias=False)

    def build_output(self, gated: bool) -> None:
        """Make the norm of each head, the gate and the output projection."""
        value_size = self.num_v_heads * self.head_v_dim
        self.o_norm: nn.Module = GatedRMSNorm(self.head_v_dim, self.norm_eps, self.gate_activation)
        self.g_proj = self.output_gate_projection() if gated else None
        self.o_proj = nn.Linear(value_size, self.hidden_size, bias=False)

    def output_gate_projection(self) -> nn.Module:
        """From x to the gate of every output channel."""
        return nn.Linear(self.hidden_size, self.num_v_heads * self.head_v_dim, bias=False)

    def forward(
        self,
        x: Hidden,
        state: State | None = None,
        *,
        cu_seqlens: Offsets | None = None,
        mask: Mask | None = None,
        shared: dict[str, Tensor] | None = None,
    ) -> tuple[Hidden, State]:
        """Mix the tokens of x with what came before them.

        Args:
            x: [B, T, hidden_size].
            state: What an earlier call returned, to continue its N sequences. None starts afresh.
            cu_seqlens: Offsets [N + 1] of sequences packed into one row (B = 1). None: a row is a
                sequence.
            mask: [B, T] bool, True at real tokens, in any pattern. The others change no real
                output and no state; what is put out at them means nothing. None: all are real.
            shared: A dict that lives for one forward pass of a model, for what its layers share.

        Returns:
            y [B, T, hidden_size], and a new state; the given one is not written to.

        Raises:
            ValueError: An argument has the wrong shape, dtype or device; the message names it.
        """
        layout = make_layout(x, cu_seqlens, mask)
        check_input(x, self.hidden_size, self.o_proj.weight)
        if state is None:
            state = self.init_state(layout.sequences)
        before = check_state(state, self.init_state(0), layout.sequences)
        shared = {} if shared is None else shared
        call = Call(layout.to_front(x), layout, before, State(), shared)
        projections = self.project(call)
        o = self.run_operator(projections, call)
        return layout.to_place(self.finish(o, projections)), call.after

    def init_state(self, batch_size: int) -> State:
        """Return zeros: the matrix state in float32, and the convolutions' last inputs."""
        weight = self.o_proj.weight
        dtype = torch.promote_types(torch.float32, weight.dtype)
        sizes = (batch_size, self.num_v_heads, self.head_v_dim, self.head_k_dim)
        state = State(recurrent=weight.new_zeros(sizes, dtype=dtype))
        for name in ("q_conv", "k_conv", "v_conv") if self.conv_size else ():
            state[name] = getattr(self, name).init_history(batch_size)
        return state

    def project(self, call: Call) -> Projections:
        """Compute everything the rule may read."""
        x, steps = call.x, self.n_steps
        return Projections(
            q=split(self.stream("q", call), self.num_heads, self.head_k_dim),
            k=per_step(self.stream("k", call), steps, self.num_heads, self.head_k_dim),
            v=per_step(self.stream("v", call), steps, self.num_v_heads, self.head_v_dim),
            decay_logits=None if self.a_proj is None else self._decay_logits(self.a_proj(x)),
            beta_logits=None if self.b_proj is None else per_step(self.b_proj(x), steps),
            output_gate=None if self.g_proj is None else self._per_value_head(self.g_proj(x)),
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            D=self.D,
            beta_max=self.beta_max,
            n_steps=steps,
            depth=self.layer_index / self.num_layers,
        )

    def stream(self, name: str, call: Call) -> Tensor:
        """Project x to q, k or v, and convolve it."""
        y: Tensor = getattr(self, f"{name}_proj")(call.x)
        if self.conv_size:
            key = f"{name}_conv"
            y, call.after[key] = getattr(self, key)(y, call.before[key], call.layout)
        elif self.activates_projections:
            y = F.silu(y)
        return y

    def run_operator(self, projections: Projections, call: Call) -> Tensor:
        """Map the projections by the rule, blank the padding, run the operator, keep its state."""
        # No rule here carries anything beside the matrix state.
        arguments, _ = self.rule.arguments(projections)
        output = OPERATORS[self.rule.operator](
            **blank_padding(arguments, call.layout.real, self.n_steps),
            initial_state=call.before["recurrent"],
            cu_seqlens=call.layout.cu_seqlens,
        )
        assert output.final_state is not None
        call.after["recurrent"] = output.final_state
        return output.o

    def finish(self, o: Tensor, projections: Projections) -> Tensor:
        """Read out, normalise each head, gate, and project back to the stream."""
        o = self.rule.read_out_function(o, projections)
        y: Tensor = self.o_proj(self.o_norm(o, projections.output_gate).flatten(-2))
        return y

    def _decay_logits(self, logits: Tensor) -> Tensor:
        if self.rule.decay == "channel":
            return split(logits, self.num_v_heads, self.head_k_dim)
        return logits

    def _per_value_head(self, x: Tensor) -> Tensor:
        return split(x, self.num_v_heads, self.head_v_dim)
