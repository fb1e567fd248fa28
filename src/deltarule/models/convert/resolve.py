"""A configuration with every option written out, as its layers have taken it."""

import dataclasses
from typing import Any

from torch import nn

from deltarule.models.block import mlp_size
from deltarule.models.config import ModelConfig
from deltarule.nn import Attention
from deltarule.nn.mixer import Mixer

# What a recurrent layer has become, by the option that says it.
_RECURRENT = (
    "num_v_heads", "head_k_dim", "head_v_dim", "conv_size", "conv_bias", "beta_max", "n_steps",
    "feature_map", "qk_norm", "normalizer",
)  # fmt: skip


def resolved(config: ModelConfig, blocks: nn.ModuleList) -> ModelConfig:
    """Write out what the layers took for the options that are None.

    An option that no layer takes becomes None, and so does one that they have taken differently.

    Args:
        config: The configuration of the model.
        blocks: Its blocks, of shapes only or not.
    """
    seen: dict[str, set[Any]] = {name: set() for name in (*_RECURRENT, "output_gate")}
    for block in blocks:
        mixer = block.mixer
        assert isinstance(mixer, Mixer)
        if isinstance(mixer, Attention):
            continue
        seen["output_gate"].add(mixer.g_proj is not None)
        for name in _RECURRENT:
            if mixer.takes(name):
                seen[name].add(getattr(mixer, name))
    taken: dict[str, Any] = {
        name: values.pop() if len(values) == 1 else None for name, values in seen.items()
    }
    return dataclasses.replace(config, mlp_size=mlp_size(config), **taken)


def differences(one: ModelConfig, other: ModelConfig) -> list[str]:
    """Name the options in which two configurations differ, with both values."""
    names = [field.name for field in dataclasses.fields(ModelConfig)]
    pairs = {name: (getattr(one, name), getattr(other, name)) for name in names}
    return [f"{name}={a!r} ({b!r})" for name, (a, b) in pairs.items() if a != b]
