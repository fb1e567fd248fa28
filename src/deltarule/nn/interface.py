"""What the blocks of a model expect of any mixer, recurrent or attention."""

# The options of MixerConfig are described where they are used: in RecurrentMixer and Attention.
# ruff: noqa: D102

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor, nn

from deltarule.nn.gates import computed
from deltarule.nn.rule import QueryKeyNorm, System
from deltarule.nn.state import LentState, State
from deltarule.ops.context import Context
from deltarule.shapes import Hidden, Mask, Offsets


class MixerConfig(Protocol):
    """What `from_config` reads; None means the layer's own default."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def layer_types(self) -> Any: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_v_heads(self) -> int | None: ...
    @property
    def head_k_dim(self) -> int | None: ...
    @property
    def head_v_dim(self) -> int | None: ...
    @property
    def num_attention_heads(self) -> int | None: ...
    @property
    def num_kv_heads(self) -> int | None: ...
    @property
    def conv_size(self) -> int | None: ...
    @property
    def output_gate(self) -> bool | None: ...
    @property
    def beta_max(self) -> float | None: ...
    @property
    def n_steps(self) -> int | None: ...
    @property
    def feature_map(self) -> str | None: ...
    @property
    def qk_norm(self) -> QueryKeyNorm | None: ...
    @property
    def normalizer(self) -> bool | None: ...
    @property
    def window(self) -> int | None: ...
    @property
    def rope_theta(self) -> float: ...
    @property
    def norm_eps(self) -> float: ...


class Mixer(nn.Module, ABC):
    """What mixes tokens in a block: `mixer(x, state) -> (y, state)`."""

    # Its row in the table of systems.
    rule: ClassVar[System]
    # Parameters that stay in float32 in a 16-bit layer, and that weight decay skips.
    float32_parameters: ClassVar[tuple[str, ...]] = ()
    # Whether the last state depends linearly on the first, so that a context can be exact.
    linear_state: ClassVar[bool] = True

    @classmethod
    @abstractmethod
    def from_config(cls, config: MixerConfig, layer_index: int) -> Self:
        """Build the layer at layer_index of a model."""

    @classmethod
    def takes(cls, option: str) -> bool:
        """Whether an option of only some layers is one of this; `from_config` leaves out others."""
        return False

    @abstractmethod
    def init_state(self, batch_size: int) -> State:
        """Return the state before the first token, for batch_size sequences."""

    @abstractmethod
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
        """Mix the tokens of x; see `RecurrentMixer.forward` for the arguments."""

    def check_context(self, context: Context | None) -> Context | None:
        """Refuse to share sequences out where the last state is not linear in the first."""
        if context is not None and not self.linear_state:
            raise ValueError(
                f"context must be None for {self.rule.name}: its state is a network, which no "
                "process can know before those before it are done"
            )
        return context

    def lend(self, state: State, tokens: int) -> LentState:
        """Return a copy of a state that calls of one token may overwrite, for so many tokens."""
        return LentState(state.clone())

    def gate_parameter(self, name: str, value: Tensor) -> None:
        """Add one of float32_parameters, whatever torch's default dtype."""
        assert name in self.float32_parameters
        self.register_parameter(name, nn.Parameter(value.float()))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        """Load the parameters; with assign=True, 16-bit ones of float32_parameters are widened."""
        for name in self.float32_parameters:
            if isinstance(given := state_dict.get(prefix + name), Tensor):
                state_dict[prefix + name] = computed(given)
        super()._load_from_state_dict(state_dict, prefix, *others)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move and cast the parameters, but never those of float32_parameters to 16 bits."""
        kept = [self._parameters.get(name) for name in self.float32_parameters]
        exact = {id(t) for p in kept if p is not None for t in (p, p.grad) if t is not None}

        def careful(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if id(tensor) not in exact or moved.dtype.itemsize >= tensor.dtype.itemsize:
                return moved
            return tensor.to(moved.device, torch.promote_types(moved.dtype, torch.float32))

        super()._apply(careful, recurse)  # type: ignore[no-untyped-call]
        return self
