"""Mamba-2 in the layout of transformers, which flash-linear-attention shares.

In its letters z is the output gate, x the value, B the key, C the query and dt the decay: one
projection holds them in this order, and one convolution holds x, B and C.
"""

import math

from deltarule.models.config import ModelConfig
from deltarule.models.convert import options
from deltarule.models.convert.family import Family
from deltarule.models.convert.names import backbone, same
from deltarule.models.convert.options import Entry

# transformers writes an infinite number in two ways.
NO_LIMIT = ([0.0, math.inf], [0.0, {"__float__": "Infinity"}])


def inner(config: ModelConfig) -> int:
    return config.num_heads * (config.head_v_dim or 0)


def check_inner(config: ModelConfig) -> None:
    """Refuse an inside of Mamba-2 that is no multiple of the stream."""
    if inner(config) % config.hidden_size:
        raise ValueError(
            f"num_heads * head_v_dim must be a multiple of hidden_size={config.hidden_size}, "
            f"got {inner(config)}"
        )


OPTIONS = (
    options.older({"norm_eps": "layer_norm_epsilon", "dt_limit": "time_step_limit"}),
    options.only({
        "use_bias": False, "hidden_act": ("silu", "swish"), "time_step_limit": NO_LIMIT,
        # Of flash-linear-attention.
        "D_has_hdim": False, "rmsnorm": True, "norm_before_gate": False,
    }),
    # How parameters were drawn, and what changes no more than rounding.
    options.silent(
        "A_init_range", "conv_init", "dt_init_floor", "dt_max", "dt_min", "expand",
        "rescale_prenorm_residual", "residual_in_fp32", "time_step_floor", "time_step_max",
        "time_step_min", "time_step_rank",
    ),
    *options.sizes(),
    options.fixed({"layer_types": "mamba2", "output_gate": True, "mlp_size": 0}),
    options.integer("num_heads"),
    options.integer("n_groups", default=8),
    options.integer("state_size", "head_k_dim", 128),
    options.integer("head_dim", "head_v_dim", 64),
    options.integer("conv_kernel", "conv_size", 4, smallest=1),
    options.flag("use_conv_bias", "conv_bias", True),
    options.number("layer_norm_epsilon", "norm_eps", 1e-5),
    options.tied(False),
    Entry(lambda fields, found: {}, lambda c: {"expand": inner(c) // c.hidden_size}),
)  # fmt: skip

# Of a layer.
MIXER = {
    "in_proj": "g_proj v_proj k_proj q_proj a_proj", "conv1d": "v_conv k_conv q_conv",
    "norm": "o_norm", "out_proj": "o_proj", **same("A_log", "dt_bias", "D"),
}  # fmt: skip

FAMILY = Family(
    model_type="mamba2", architecture="Mamba2ForCausalLM", options=OPTIONS, check=check_inner,
    tensors=backbone({"mamba2": MIXER}),
)  # fmt: skip
