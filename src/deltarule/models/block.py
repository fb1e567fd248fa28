"""A block of the language model: mixers and an MLP, each half with its norm and its residual."""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from deltarule.models.config import ModelConfig
from deltarule.nn import (
    MIXERS,
    Attention,
    DeltaMixer,
    Experts,
    LatentAttention,
    RMSNorm,
    State,
    SwiGLU,
    one_token,
)
from deltarule.nn.experts import ROUTING
from deltarule.nn.frame import Frame
from deltarule.nn.linears import is_hooked
from deltarule.nn.mlp import make_mlp
from deltarule.nn.norm import LayerNorm, norm_for_products
from deltarule.nn.recomputed import recomputed
from deltarule.nn.state import DraftedState, LentState
from deltarule.nn.token_shift import ChannelMix
from deltarule.ops.context import Context
from deltarule.shapes import Hidden, Mask, Offsets


class Block(nn.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x)), if any; the next norm makes the last sum.

    With the mixer of `post_norm` x + norm(mixer(x)), then x + norm(mlp(x)). With `deepnorm_alpha`
    alpha n + mixer(n) of n = norm(x), then the same of the MLP. Several parts side by side in place
    of the mixer read the same norm, and what they put out is summed.
    """

    mixer: nn.Module
    mlp: nn.Module | None

    def __init__(self, config: ModelConfig, layer_index: int) -> None:
        super().__init__()
        name = config.layer_types[layer_index]
        self.post_norm = name == config.post_norm
        self.deepnorm_alpha = config.deepnorm_alpha
        self.mixer_norm = stream_norm(config)
        parts = {part: make_part(config, part, layer_index) for part in name.split("+")}
        self.multipliers = {part: out_multiplier(config, part) for part in parts}
        self.mixer = parts[name] if len(parts) == 1 else nn.ModuleDict(parts)
        self.mlp_norm: RMSNorm | LayerNorm | None = None
        self.mlp, self.mlp_multiplier = None, out_multiplier(config, "mlp")
        if (kind := mlp_kinds(config)[layer_index]) != "none":
            self.mlp_norm = stream_norm(config)
            self.mlp = make_part(config, "moe" if kind == "sparse" else "mlp", layer_index)

    def forward(
        self,
        x: Hidden,
        branch: Hidden | None,
        state: State | None,
        cu_seqlens: Offsets | None,
        mask: Mask | None,
        shared: dict[str, Tensor],
        context: Context | None = None,
    ) -> tuple[Hidden, Hidden | None, State]:
        """Add the branch and apply both halves; return stream, branch and the mixers' state."""
        alone = cu_seqlens is None and mask is None and context is None
        one = alone and x.shape[0] * x.shape[1] == 1
        if one and (done := self._one_token(x, branch, state)) is not None:
            return done
        given = {"cu_seqlens": cu_seqlens, "mask": mask, "shared": shared, "context": context}
        mix = partial(self.mix, given)
        if self.post_norm:
            x = x if branch is None else x + branch
            y, state = mix(x, state)
            y = self.mixer_norm(y)
            if self.mlp is None or self.mlp_norm is None:
                return x, y, state
            x = x + y
            return x, self.mlp_norm(scaled(self.mlp(x), self.mlp_multiplier)), state
        norm, alpha = self.mixer_norm, self.deepnorm_alpha
        rounds = context is None and alpha is None
        x, normed = norm_of_sum(norm, x, branch, self.mixer if rounds else None)
        # A norm that is rounded takes what its reader would keep of it; another is made again.
        again = [(normed, partial(norm.forward, x))] if normed.dtype == x.dtype else []
        with recomputed(*again):
            y, state = mix(normed, state)
        # A branch is added to the stream, or to alpha times its norm.
        x, mlp, second = x if alpha is None else scaled(normed, alpha), self.mlp, self.mlp_norm
        if mlp is None or second is None:
            return x, y, state
        x, normed = norm_of_sum(second, x, y, mlp if rounds else None)
        again = [(normed, partial(second.forward, x))] if normed.dtype == x.dtype else []
        with recomputed(*again):
            y = scaled(mlp(normed), self.mlp_multiplier)
        return x if alpha is None else scaled(normed, alpha), y, state

    def mix(self, given: dict[str, Any], x: Hidden, state: State | None) -> tuple[Hidden, State]:
        """Apply the parts of the first half to x; sum them and put their states together."""
        outputs, after = [], State()
        for prefix, part, multiplier in self.parts():
            if isinstance(part, Frame):
                before = None if state is None else taken(state, prefix)
                y, own = part(x, before, **given)
                if isinstance(before, DraftedState) and isinstance(state, DraftedState):
                    state.kept.update({prefix + n: tensor for n, tensor in before.kept.items()})
                after.update({prefix + name: tensor for name, tensor in own.items()})
            else:
                y = part(x)
            outputs.append(scaled(y, multiplier))
        total = outputs[0]
        for y in outputs[1:]:
            total = total + y
        return total, after

    def parts(self) -> Iterator[tuple[str, nn.Module, float]]:
        if not isinstance(self.mixer, nn.ModuleDict):
            yield "", self.mixer, next(iter(self.multipliers.values()))
            return
        for name, part in self.mixer.items():
            yield f"{name}.", part, self.multipliers[name]

    def init_state(self, batch_size: int) -> State:
        """Return the state before the first token, for batch_size sequences."""
        return State({
            prefix + name: tensor for prefix, part, _ in self.parts() if isinstance(part, Frame)
            for name, tensor in part.init_state(batch_size).items()
        })  # fmt: skip

    def lend(self, state: State, tokens: int) -> LentState:
        """Return a state such that so many calls of one token may overwrite it."""
        return LentState({
            prefix + name: tensor for prefix, part, _ in self.parts() if isinstance(part, Frame)
            for name, tensor in part.lend(taken(state, prefix), tokens).items()
        })  # fmt: skip

    @property
    def appended(self) -> bool:
        """Whether later tokens are written to new rows of the state."""
        return any(part.appended for _, part, _ in self.parts() if isinstance(part, Frame))

    def _one_token(
        self, x: Hidden, branch: Hidden | None, state: State | None
    ) -> tuple[Hidden, None, State] | None:
        """One token by few kernels, without a branch that is left to add."""
        mixer, mlp = self.mixer, self.mlp
        plain = not self.post_norm and self.deepnorm_alpha is None
        if not plain or not isinstance(mixer, DeltaMixer) or type(mlp) is not SwiGLU:
            return None
        norm = self.mlp_norm
        assert norm is not None
        factors = {*self.multipliers.values(), self.mlp_multiplier, mlp.gate_multiplier}
        if factors != {1.0}:
            return None
        modules = *mlp.of_input().values(), mlp.down_proj
        if not one_token.fits(x, mlp, (norm,), modules):
            return None
        total = x if branch is None else x + branch
        if (mixed := mixer.add_one_token(total, self.mixer_norm, state)) is None:
            return None
        x, after = mixed
        return one_token.add_mlp(x, norm, mlp), None, after


def make_part(config: ModelConfig, name: str, layer_index: int) -> nn.Module:
    if name == "mlp":
        gate = config.mlp_multipliers[0]
        return make_mlp(config.hidden_size, mlp_size(config), config.hidden_act, gate)
    if name == "channel_mix":
        place = {"layer_index": layer_index, "num_layers": config.num_layers}
        return ChannelMix(config.hidden_size, mlp_size(config), **place)
    if name == "attention" and config.kv_lora_rank is not None:
        return LatentAttention.from_config(config, layer_index)
    if name != "moe":
        return MIXERS[name].from_config(config, layer_index)
    assert config.moe_intermediate_size is not None
    routing: dict[str, Any] = {name: getattr(config, name) for name in ROUTING}
    return Experts(
        config.hidden_size, config.moe_intermediate_size, activation=config.hidden_act,
        shared_size=config.shared_expert_intermediate_size,
        shared_gate=config.shared_expert_gate, **routing,
    )  # fmt: skip


def out_multiplier(config: ModelConfig, part: str) -> float:
    """What a part's output is multiplied by on its way to the stream."""
    own = {
        "attention": config.attention_out_multiplier, "mamba2": config.ssm_out_multiplier,
        "sliding_window": config.attention_out_multiplier, "mlp": config.mlp_multipliers[1],
    }  # fmt: skip
    return config.residual_multiplier * own.get(part, 1.0)


def scaled(x: Tensor, multiplier: float) -> Tensor:
    return x if multiplier == 1 else x * multiplier


def taken(state: State, prefix: str) -> State:
    if not prefix:
        return state
    kept = {n.removeprefix(prefix): x for n, x in state.items() if n.startswith(prefix)}
    return type(state)(kept)


def stream_norm(config: ModelConfig) -> RMSNorm | LayerNorm:
    if config.norm_type == "layer":
        return LayerNorm(config.hidden_size, eps=config.norm_eps)
    zero_centered = config.zero_centered_norm
    return RMSNorm(config.hidden_size, eps=config.norm_eps, zero_centered=zero_centered)


def norm_of_sum(
    norm: RMSNorm | LayerNorm, x: Hidden, branch: Hidden | None, reader: nn.Module | None = None
) -> tuple[Hidden, Hidden]:
    """x + branch and its norm, rounded by then if autocast would round it for its only reader."""
    if reader is not None and not x.is_meta and torch.is_autocast_enabled(x.device.type):
        found = norm_for_products(norm, x, branch, products_of_input(reader))
        if found is not None:
            return found
    return (x, norm(x)) if branch is None else norm.of_sum(x, branch)


def products_of_input(part: nn.Module) -> list[nn.Module]:
    """Modules whose products, all in one node of autograd, are what a part takes its input for."""
    own = type(part) is SwiGLU or (type(part) is Attention and part.g_proj is None)
    if isinstance(part, DeltaMixer):
        names = "forward", "mix", "project"
        own = all(getattr(type(part), name) is getattr(DeltaMixer, name) for name in names)
    return [*part.of_input().values()] if own and not is_hooked(part) else []  # type: ignore[operator]


def mlp_size(config: ModelConfig) -> int:
    """Return the channels inside the MLP: as given, or 8/3 of the stream, in multiples of 16."""
    if config.mlp_size is not None:
        return config.mlp_size
    return 16 * math.ceil(config.hidden_size * 8 / 3 / 16)


def mlp_kinds(config: ModelConfig) -> tuple[str, ...]:
    """The second half of every block: "dense", "sparse" or "none"."""
    if config.mlp_layer_types is not None:
        return tuple(config.mlp_layer_types)
    return ("none" if config.mlp_size == 0 else "dense",) * config.num_layers
