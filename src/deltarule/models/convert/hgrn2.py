"""HGRN-2 in the layout of flash-linear-attention: f is what other layers have as keys, i as values.

The least decays of all layers lie together, as they do here.
"""

from typing import Any

from deltarule.models.config import ModelConfig
from deltarule.models.convert.fields import Fields
from deltarule.models.convert.fla import Dialect, conv_options, conv_size, family

# Of the norm of the output, whatever norm_eps says.
OUTPUT_NORM_EPS = 1e-5


def layers(fields: Fields, hidden_size: int) -> dict[str, Any]:
    """From the options of its own."""
    fields.only("use_lower_bound", True)
    heads = fields.take("num_heads")
    ratio = fields.integer("expand_ratio", 128 if heads is None else hidden_size // heads, 1)
    if hidden_size % ratio:
        raise ValueError(f"expand_ratio must divide hidden_size={hidden_size}, got {ratio}")
    if heads not in (None, hidden_size // ratio):
        raise ValueError(f"num_heads must be {hidden_size // ratio} with expand_ratio, got {heads}")
    return {
        "layer_types": "hgrn2", "num_heads": hidden_size // ratio, "head_k_dim": ratio,
        "head_v_dim": ratio, "conv_size": conv_size(fields, False), "output_gate": False,
        "output_norm_eps": OUTPUT_NORM_EPS,
    }  # fmt: skip


def options(config: ModelConfig) -> dict[str, Any]:
    """Back from `layers`."""
    sizes = {"num_heads": config.num_heads, "expand_ratio": config.head_k_dim}
    return sizes | conv_options(config) | {"use_lower_bound": True}


FAMILY = family(
    "hgrn2",
    Dialect(
        architecture="HGRN2ForCausalLM", layers=layers, options=options,
        names={"k_proj": "f_proj", "v_proj": "i_proj", "k_conv": "f_conv", "v_conv": "i_conv"},
        norm="g_norm",
    ),
)  # fmt: skip
