"""The one frame of every recurrent layer.

    project -> short convolution -> rule -> operator -> read-out, norm, output gate -> project

A layer on top of it says which rule it follows, which gates feed the rule, and its defaults.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltarule import ops
from deltarule.nn.arguments import check_input, check_state
from deltarule.nn.call import Call
from deltarule.nn.heads import per_step, split
from deltarule.nn.layout import blank_padding, make_layout
from deltarule.nn.linears import linears
from deltarule.nn.parts import RecurrentParts
from deltarule.nn.recomputed import recomputed
from deltarule.nn.rule import Arguments, Carry, Projections
from deltarule.nn.state import LentState, State
from deltarule.ops.context import Context
from deltarule.ops.few_tokens import decodes
from deltarule.shapes import Hidden, Mask, Offsets, RecurrentOutput

OPERATORS: dict[str, Callable[..., RecurrentOutput]] = {
    "delta_rule": ops.delta_rule,
    "dplr": ops.dplr,
}


class RecurrentMixer(RecurrentParts):
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
        feature_map: What q and k go through, by its name in `deltarule.nn.feature_maps`; only
            for linear attention, Gated RFA, DeltaNet and DeltaProduct. None: the layer's default.
        qk_norm: What q and k are divided by: "none", "l1", "l2"; only for layers with a feature
            map. None: the rule's own choice.
        normalizer: Whether to divide the read-out by z^T q, in place of the norm of the output;
            only for linear attention. None: the layer's default.
        norm_eps: Added to the mean square in the norm of the output.
        layer_index: Which layer of the model this is, from 0 (Lightning and RWKV-7 depend on it).
        num_layers: Layers of the model.

    Attributes:
        save_states: Whether the states of chunks are kept for the backward pass. False computes
            them again there, for less memory in between; the gradients are the same.

    Raises:
        ValueError: A size is out of range, or an option means nothing for this rule.
    """

    def forward(
        self,
        x: Hidden,
        state: State | None = None,
        *,
        cu_seqlens: Offsets | None = None,
        mask: Mask | None = None,
        shared: dict[str, Tensor] | None = None,
        context: Context | None = None,
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
            context: The processes that hold the other tokens of the rows; x then has those of this
                process, and `cu_seqlens` and `mask` are None. None: all tokens are here.

        Returns:
            y [B, T, hidden_size], and a new state; the given one is not written to.

        Raises:
            ValueError: An argument has the wrong shape, dtype or device; the message names it.
        """
        layout = make_layout(x, cu_seqlens, mask, context)
        check_input(x, self.hidden_size, self.o_proj.weight)
        if state is None:
            state = self.init_state(layout.sequences)
        exact = ("recurrent", *self.rule.carries)
        before = check_state(state, self.init_state(0), layout.sequences, exact)
        shared = {} if shared is None else shared
        call = Call(layout.to_front(x), layout, before, State(), shared)
        projections = self.project(call)
        with nullcontext() if call.values is None else recomputed(*call.values):
            o = self.run_operator(projections, call)
        return layout.to_place(self.finish(o, projections, call)), call.after

    def init_state(self, batch_size: int) -> State:
        """Return zeros: the matrix state and what the rule carries, both in float32, and the rest.

        The rest is the convolutions' last inputs, and the number of tokens where it matters.
        """
        weight = self.o_proj.weight
        dtype = torch.promote_types(torch.float32, weight.dtype)
        features = self.head_k_dim if self.qk_map is None else self.qk_map.features
        sizes = {"HV": self.num_v_heads, "V": self.head_v_dim + self.normalizer, "K": features}
        kept = {"recurrent": ("HV", "V", "K"), **self.rule.carries}
        state = State()
        for name, letters in kept.items():
            size = (batch_size, *(sizes[letter] for letter in letters))
            # Not from the weight itself, which may be quantised and then makes no new tensor.
            state[name] = torch.zeros(size, dtype=dtype, device=weight.device)
        for name in ("q_conv", "k_conv", "v_conv") if self.conv_size else ():
            state[name] = getattr(self, name).init_history(batch_size)
        if self.qk_map is not None and self.qk_map.map.positional:
            state["length"] = torch.zeros(batch_size, dtype=torch.int64, device=weight.device)
        return state

    def project(self, call: Call) -> Projections:
        """Compute everything the rule may read."""
        steps, projected = self.n_steps, call.projected
        modules = self.of_input()
        outputs = linears(call.x, tuple(modules.values()))
        projected.update(zip(modules, outputs, strict=True))
        if self.conv_size:
            call.ask_before({f"{name}_conv": projected[name] for name in "qkv"})
        q = split(self.stream("q", call), self.heads_of("q"), self.head_k_dim)
        k = per_step(self.stream("k", call), steps, self.heads_of("k"), self.head_k_dim)
        if self.qk_map is not None:
            q, k = self.qk_map(q, k, call.positions() if self.qk_map.map.positional else None)
        return Projections(
            q=q,
            k=k,
            v=per_step(self.stream("v", call), steps, self.heads_of("v"), self.head_v_dim),
            decay_logits=self._decay_logits(projected["a"]) if self.a_proj is not None else None,
            beta_logits=per_step(projected["b"], steps) if self.b_proj is not None else None,
            output_gate=self._per_value_head(projected["g"]) if self.g_proj is not None else None,
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            D=self.D,
            beta_max=self.beta_max,
            n_steps=steps,
            depth=self.layer_index / self.num_layers,
            qk_norm=self.qk_norm,
            normalizer=self.normalizer,
            cu_seqlens=call.layout.cu_seqlens,
            real=call.layout.real,
        )

    def of_input(self) -> dict[str, nn.Module]:
        """What is applied to x itself, by the name of its result."""
        modules = {name: getattr(self, f"{name}_proj") for name in "qkvabg"}
        return {name: module for name, module in modules.items() if module is not None}

    def stream(self, name: str, call: Call) -> Tensor:
        """Convolve what x was projected to: q, k or v."""
        # Taken out: without a gradient nobody needs it after its convolution.
        y = call.projected.pop(name)
        if self.conv_size:
            key = f"{name}_conv"
            convolve = partial(getattr(self, key), y, call.before[key], call.layout)
            y, call.after[key] = convolve()
            if name == "v" and y.requires_grad:
                call.values = y, lambda: convolve()[0]
        elif self.activates_projections and self.activates(name):
            y = F.silu(y)
        return y

    def run_operator(self, projections: Projections, call: Call) -> Tensor:
        """Map the projections by the rule, blank the padding, run the operator, keep its state."""
        arguments, carry = self.rule.arguments(projections, self.carry(call))
        arguments = blank_padding(arguments, call.layout.real, self.n_steps)
        before = call.before["recurrent"]
        if call.layout.context is None and decodes(
            call.x, call.layout.cu_seqlens, (*arguments.values(), before)
        ):
            o, state = self.step(arguments, call)
        else:
            o, final_state = OPERATORS[self.rule.operator](
                **arguments,
                **call.layout.spans,
                initial_state=before,
                save_states=self.save_states,
            )
            assert final_state is not None
            state = final_state
        call.after["recurrent"] = self.rule.final_state(state, projections)
        call.after.update(carry or {})
        return o

    def step(self, arguments: Arguments, call: Call) -> tuple[Tensor, Tensor]:
        """Carry the state token by token: a copy of the one before, unless that is lent."""
        before = call.before["recurrent"]
        state = before if isinstance(call.before, LentState) else before.clone()
        return ops.recurrent_step(**{"beta": None, **arguments}, state=state), state

    def carry(self, call: Call) -> Carry | None:
        """What the rule handed on from the call before."""
        return {name: call.before[name] for name in self.rule.carries} or None

    def finish(self, o: Tensor, projections: Projections, call: Call) -> Tensor:
        """Read out, normalise each head, gate, and project back to the stream."""
        o = self.rule.read_out_function(o, projections, self.carry(call))
        # Of the projections the gate alone: what computes the norm again must not hold the rest.
        gate = projections.output_gate
        normed = self.o_norm(o, gate).flatten(-2)
        with recomputed(normed, lambda: self.o_norm(o, gate).flatten(-2)):
            y: Tensor = self.o_proj(normed)
        return y

    def _decay_logits(self, logits: Tensor) -> Tensor:
        if self.rule.decay == "channel":
            return split(logits, self.num_v_heads, self.head_k_dim)
        return logits

    def _per_value_head(self, x: Tensor) -> Tensor:
        return split(x, self.num_v_heads, self.head_v_dim)
