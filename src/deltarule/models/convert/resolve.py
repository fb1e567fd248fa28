"""A configuration with every option written out, as its layers have taken it."""

import dataclasses
from typing import Any

from torch import nn

from deltarule.models.block import mlp_kinds, mlp_size
from deltarule.models.config import ModelConfig
from deltarule.nn import RWKV7, Attention, LatentAttention, Mamba1
from deltarule.nn.mixer import Mixer

# What a recurrent layer has become, by the option that says it.
_RECURRENT = (
    "num_v_heads", "head_k_dim", "head_v_dim", "conv_size", "conv_bias", "beta_max", "n_steps",
    "gate_lower_bound", "feature_map", "qk_norm", "output_norm", "normalizer",
)  # fmt: skip


# What attention has become, by the option that says it.
_ATTENTION = {
    "num_attention_heads": "num_heads", "num_kv_heads": "num_kv_heads",
    "attention_head_dim": "head_dim", "attention_qk_norm": "attention_qk_norm",
    "partial_rotary_factor": "partial_rotary_factor", "attention_multiplier": "scale",
}  # fmt: skip
_LATENT = {"num_attention_heads": "num_heads"}
_OTHER = ("low_rank_dims", "attention_gate", "output_gate", "output_norm_eps", "rope_theta")
# Options that are never None, where no layer has taken them.
_UNUSED = {"attention_gate": False, "partial_rotary_factor": 1.0, "rope_theta": 10000.0}


def resolved(config: ModelConfig, blocks: nn.ModuleList) -> ModelConfig:
    """Write out what the layers took for the options that are None.

    An option that no layer takes becomes None, and so does one that they have taken differently.
    """
    seen: dict[str, set[Any]] = {name: set() for name in (*_RECURRENT, *_ATTENTION, *_OTHER)}
    for mixer in (module for module in blocks.modules() if isinstance(module, Mixer)):
        if mixer.takes("rope_theta"):
            seen["rope_theta"].add(mixer.rope_theta or config.rope_theta)
        if isinstance(mixer, Attention):
            seen["attention_gate"].add(mixer.g_proj is not None)
            latent = isinstance(mixer, LatentAttention)
            for option, name in (_LATENT if latent else _ATTENTION).items():
                seen[option].add(getattr(mixer, name))
            continue
        seen["output_gate"].add(mixer.g_proj is not None)
        if mixer.takes("norm_eps"):
            seen["output_norm_eps"].add(mixer.norm_eps)
        if isinstance(mixer, Mamba1) and config.mamba_inner_norm is not None:
            seen["output_norm_eps"].add(mixer.inner_norm_eps)
        if isinstance(mixer, RWKV7) and mixer.value_proj is not None:
            seen["low_rank_dims"].add(mixer.low_rank_dims())
        for name in _RECURRENT:
            if mixer.takes(name):
                seen[name].add(getattr(mixer, name))
    taken: dict[str, Any] = {
        name: values.pop() if len(values) == 1 else None for name, values in seen.items()
    }
    taken |= {name: value for name, value in _UNUSED.items() if taken[name] is None}
    if config.post_norm not in config.layer_types:
        taken["post_norm"] = None
    taken |= {"mlp_size": mlp_size(config), "mlp_layer_types": mlp_kinds(config)}
    return dataclasses.replace(config, **taken)


def differences(one: ModelConfig, other: ModelConfig) -> list[str]:
    """Name the options in which two configurations differ, with both values."""
    names = [field.name for field in dataclasses.fields(ModelConfig)]
    pairs = {name: (getattr(one, name), getattr(other, name)) for name in names}
    return [f"{name} {a!r} would be read as {b!r}" for name, (a, b) in pairs.items() if a != b]
