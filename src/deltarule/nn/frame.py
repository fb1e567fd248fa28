"""How a call goes through a layer: checked, laid out, mixed, and put back in place.

Gates stay in float32 in layers of 16 bits: a decay of 0.999 has no neighbour in bfloat16.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltarule.nn.checks import check_input, check_integer, check_state
from deltarule.nn.gates import computed
from deltarule.nn.layout import Layout, shared_layout, split
from deltarule.nn.norm import Activation
from deltarule.nn.rule import LayerCall, System
from deltarule.nn.state import DraftedState, LentState, State
from deltarule.ops.context import Context
from deltarule.shapes import Hidden, Mask, Offsets


class Frame(nn.Module, ABC):
    """What every layer does with a call, whatever it is made of."""

    # Its row in the table of systems.
    rule: ClassVar[System]
    # Parameters that stay in float32 in a 16-bit layer, and that weight decay skips.
    float32_parameters: ClassVar[tuple[str, ...]] = ()
    # Whether the output has no norm.
    normless: ClassVar[bool] = False
    # Whether the norm goes over all heads together.
    norm_of_all: bool = False
    # What the gate of the output goes through.
    gate_activation: ClassVar[Activation] = "silu"
    # Which streams are convolved.
    convolved: ClassVar[tuple[str, ...]] = ("q", "k", "v")
    # Whether the last state depends linearly on the first, so that a context can be exact.
    linear_state: ClassVar[bool] = True
    # Whether a head needs nothing of the others, so that processes can have some of them each.
    heads_alone: ClassVar[bool] = True
    # Whether the state counts tokens, as `length` [N].
    counts: bool = False
    # Whether the state keeps the last token's x, as `shift` [N, 1, hidden_size].
    shifts: ClassVar[bool] = False
    # What a recurrent state starts at where that is not zero.
    first_values: ClassVar[Mapping[str, float]] = {}
    # Tensors of every token, [B, T, ...], that layers of this kind share.
    of_tokens: ClassVar[tuple[str, ...]] = ()
    # Rows of a lent state that later tokens are written to, and that are not read before.
    appended: tuple[str, ...] = ()

    hidden_size: int
    num_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    conv_size: int
    o_norm: nn.Module
    g_proj: nn.Module | None
    o_proj: nn.Module

    def forward(
        self,
        x: Hidden,
        state: State | None = None,
        *,
        cu_seqlens: Offsets | None = None,
        mask: Mask | None = None,
        shared: dict[str, Any] | None = None,
        context: Context | None = None,
    ) -> tuple[Hidden, State]:
        """Mix the tokens of x with what came before them.

        Args:
            x: [B, T, hidden_size].
            state: What an earlier call returned, to continue its N sequences. None starts afresh.
            cu_seqlens: Offsets [N + 1] of sequences packed into one row (B = 1). None: a row is a
                sequence.
            mask: [B, T] bool, True at real tokens, in any pattern. The others change no real
                output and no state; their own outputs mean nothing. None: all are real.
            shared: A dict that lives for one forward pass of a model, for what its layers share.
            context: The processes that hold the other tokens of the rows; x then has those of this
                process, and `cu_seqlens` and `mask` are None. None: all tokens are here.

        Returns:
            y [B, T, hidden_size], and a new state; the given one is not written to.

        Raises:
            ValueError: An argument has the wrong shape, dtype or device; the message names it.
        """
        shared = {} if shared is None else shared
        if isinstance(state, DraftedState) and not self.keeps_tokens():
            return self.one_by_one(x, state, shared)
        if context is not None and not self.linear_state:
            raise ValueError(
                f"context must be None for {self.rule.name}, whose state needs all tokens before: "
                "run it on one process"
            )
        layout = shared_layout(x, cu_seqlens, mask, context, shared)
        # A wrapped projection (LoRA, quantised) has no one dtype to compare with.
        plain = type(self.o_proj) is nn.Linear
        check_input(x, self.hidden_size, self.reference(), plain)
        before = self.state_before(state, layout)
        call = LayerCall(layout.to_front(x), layout, before, State(), shared)
        return layout.to_place(self.mix(call)), call.after

    if TYPE_CHECKING:
        # PyTorch's own annotation says Any, and of parts made by name Tensor or Module.
        __call__ = forward

        def __getattr__(self, name: str) -> Any: ...

    def keeps_tokens(self) -> bool:
        """Whether the layer fills the `kept` of a drafted state itself."""
        return False

    def one_by_one(
        self, x: Hidden, state: DraftedState, shared: dict[str, Any]
    ) -> tuple[Hidden, State]:
        outputs, kept, parts = [], [], []
        current = LentState(state)
        for t in range(x.shape[1]):
            part = shared | {n: shared[n][:, t : t + 1] for n in self.of_tokens if n in shared}
            y, after = self.forward(x[:, t : t + 1], current, shared=part)
            current = LentState(after)
            outputs.append(y)
            parts.append(part)
            kept.append({n: x.clone() for n, x in after.items() if n not in self.appended})
        shared.update(parts[-1])
        names = [name for name in self.of_tokens if name in shared]
        shared.update({name: torch.cat([part[name] for part in parts], 1) for name in names})
        state.kept = {name: torch.stack([x[name] for x in kept], 1) for name in kept[0]}
        return torch.cat(outputs, 1), current

    def reference(self) -> Tensor:
        """Return a tensor in the dtype and on the device in which the layer computes."""
        o_proj = self.o_proj
        if type(o_proj) is nn.Linear:
            return o_proj.weight
        tensors = (*self.parameters(), *self.buffers())
        floating = (x for x in tensors if x.is_floating_point())
        return next(floating, torch.empty(0, device=tensors[0].device if tensors else None))

    def init_state(self, batch_size: int) -> State:
        """Return the state before the first token, for batch_size sequences."""
        check_integer("batch_size", batch_size, 0)
        like = self.reference()
        dtype = torch.promote_types(torch.float32, like.dtype)
        state = State()
        for name, sizes in self.memories().items():
            first = self.first_values.get(name, 0.0)
            state[name] = torch.full((batch_size, *sizes), first, dtype=dtype, device=like.device)
        for name in self.convolved if self.conv_size else ():
            state[f"{name}_conv"] = getattr(self, f"{name}_conv").init_history(batch_size)
        # Not by `new_zeros`, which the weights of others (quantised ones) may lack.
        if self.shifts:
            sizes = batch_size, 1, self.hidden_size
            state["shift"] = torch.zeros(sizes, dtype=like.dtype, device=like.device)
        if self.counts:
            state["length"] = torch.zeros(batch_size, dtype=torch.int64, device=like.device)
        return state

    def lend(self, state: State, tokens: int) -> LentState:
        """Return a state such that so many calls of one token may overwrite it."""
        return LentState(state)

    def state_before(self, state: State | None, layout: Layout) -> State:
        if state is None:
            return self.init_state(layout.sequences)
        if isinstance(state, LentState):
            # The layer's own, from the call before.
            return state
        return check_state(state, self.init_state(0), layout.sequences, self.exact())

    @abstractmethod
    def memories(self) -> dict[str, tuple[int, ...]]:
        """Name the recurrent states, which start at `first_values`, with one sequence's sizes."""

    def exact(self) -> tuple[str, ...]:
        """Names of what sums over all tokens, and is never in 16 bits."""
        return tuple(self.memories())

    def mix(self, call: LayerCall) -> Tensor:
        """Mix call.x, whose real tokens are in front; fill call.after."""
        if self.g_proj is not None and call.layout.context is not None:
            call.defer(self.g_proj)
        o, gate = self.read(call), None
        if self.g_proj is not None:
            gate = call.projected.get("g")
            gate = self.by_head(self.g_proj(call.x) if gate is None else gate)
        return self.o_proj(self.normed(o, gate))

    def read(self, call: LayerCall) -> Tensor:
        """Project, run the operator and fill call.after; return [B, T, HV, head_v_dim]."""
        raise NotImplementedError

    def by_head(self, x: Tensor) -> Tensor:
        return split(x, self.num_v_heads, self.head_v_dim)

    def by_key(self, x: Tensor) -> Tensor:
        return split(x, self.num_heads, self.head_k_dim)

    def normed(self, o: Tensor, gate: Tensor | None) -> Tensor:
        """Normalise and gate [B, T, HV, head_v_dim]; return [B, T, HV * head_v_dim]."""
        if not self.norm_of_all:
            return self.o_norm(o, gate).flatten(-2)
        y: Tensor = self.o_norm(o.flatten(-2), None if gate is None else gate.flatten(-2))
        return y

    def streams(self, call: LayerCall) -> list[Tensor]:
        sizes = {"q": self.head_k_dim, "k": self.head_k_dim, "v": self.head_v_dim}
        return [split(self.stream(name, call), self.num_heads, n) for name, n in sizes.items()]

    def stream(self, name: str, call: LayerCall) -> Tensor:
        """Project x to a stream, and convolve it if it is one that is."""
        y: Tensor = getattr(self, f"{name}_proj")(call.x)
        if self.conv_size and name in self.convolved:
            key = f"{name}_conv"
            history = call.layout.history(y, call.before[key])
            y, call.after[key] = getattr(self, key)(y, history, call.layout)
        return y

    def activated(self, *streams: Tensor) -> tuple[Tensor, ...]:
        """SiLU, where no convolution has brought its own."""
        return streams if self.conv_size else tuple(F.silu(x) for x in streams)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        """Load the parameters; with assign=True, 16-bit ones of float32_parameters are widened."""
        for name in self.float32_parameters:
            if isinstance(given := state_dict.get(prefix + name), Tensor):
                state_dict[prefix + name] = computed(given)
        super()._load_from_state_dict(state_dict, prefix, *others)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        kept = [self._parameters.get(name) for name in self.float32_parameters]
        exact = {id(t) for p in kept if p is not None for t in (p, p.grad) if t is not None}

        def careful(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if id(tensor) not in exact or moved.dtype.itemsize >= tensor.dtype.itemsize:
                return moved
            return tensor.to(moved.device, torch.promote_types(moved.dtype, torch.float32))

        super()._apply(careful, recurse)  # type: ignore[no-untyped-call]
        return self
