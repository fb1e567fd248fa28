"""Mamba-2 in the layout of transformers, which flash-linear-attention shares.

In its letters z is the output gate, x the value, B the key, C the query and dt the decay: one
projection holds them in this order, and one convolution holds x, B and C.
"""

import math
from typing import Any

from deltarule.models.config import ModelConfig
from deltarule.models.convert.family import Family
from deltarule.models.convert.fields import Fields
from deltarule.models.convert.piece import Has, Piece, Shapes, filters, present, renamed

# transformers writes an infinite number in two ways.
NO_LIMIT = ([0.0, math.inf], [0.0, {"__float__": "Infinity"}])
# How parameters were drawn, and what changes no more than rounding.
DRAWN = (
    "A_init_range", "conv_init", "dt_init_floor", "dt_max", "dt_min", "expand",
    "rescale_prenorm_residual", "residual_in_fp32", "time_step_floor", "time_step_max",
    "time_step_min", "time_step_rank",
)  # fmt: skip


def read(fields: Fields) -> ModelConfig:
    """From config.json to a configuration."""
    fields.only("use_bias", False)
    fields.only("hidden_act", "silu", "swish")
    fields.only("time_step_limit", *NO_LIMIT)
    # Of flash-linear-attention.
    fields.only("dt_limit", *NO_LIMIT)
    for name, only in {"D_has_hdim": False, "rmsnorm": True, "norm_before_gate": False}.items():
        fields.only(name, only)
    fields.drop(*DRAWN)
    eps = fields.number("norm_eps", 1e-5)
    return ModelConfig(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        num_layers=fields.integer("num_hidden_layers"),
        layer_types="mamba2",
        num_heads=fields.integer("num_heads"),
        n_groups=fields.integer("n_groups", 8),
        head_k_dim=fields.integer("state_size", 128),
        head_v_dim=fields.integer("head_dim", 64),
        conv_size=fields.integer("conv_kernel", 4, smallest=1),
        conv_bias=fields.flag("use_conv_bias", True),
        output_gate=True,
        mlp_size=0,
        norm_eps=fields.number("layer_norm_epsilon", eps),
        tie_embeddings=fields.flag("tie_word_embeddings", False),
    )


def write(config: ModelConfig) -> dict[str, Any]:
    """From a configuration to config.json."""
    inner = config.num_heads * (config.head_v_dim or 0)
    if inner % config.hidden_size:
        raise ValueError(
            f"num_heads * head_v_dim must be a multiple of hidden_size={config.hidden_size}, "
            f"got {inner}"
        )
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_heads": config.num_heads,
        "n_groups": config.n_groups,
        "state_size": config.head_k_dim,
        "head_dim": config.head_v_dim,
        "expand": inner // config.hidden_size,
        "conv_kernel": config.conv_size,
        "use_conv_bias": config.conv_bias,
        "layer_norm_epsilon": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        # Unless they are known, no token is special.
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def pieces(config: ModelConfig, shapes: Shapes, has: Has) -> list[Piece]:
    """Eight tensors of a block, or nine with a bias, and those of the model."""
    found = [Piece("backbone.embeddings.weight", ("embedding.weight",))]
    for index in range(config.num_layers):
        layer, block = f"backbone.layers.{index}.", f"blocks.{index}."
        found.append(Piece(f"{layer}norm.weight", (f"{block}mixer_norm.weight",)))
        found += mixer_pieces(f"{layer}mixer.", f"{block}mixer.")
    found.append(Piece("backbone.norm_f.weight", ("norm.weight",)))
    found.append(Piece("lm_head.weight", ("head.weight",)))
    return present(found, shapes)


OUT = {"norm.weight": "o_norm.weight", "out_proj.weight": "o_proj.weight"}


def mixer_pieces(theirs: str, ours: str) -> list[Piece]:
    """The tensors of one layer, some of which a model may lack."""
    convs = [f"{ours}{name}_conv." for name in "vkq"]
    found = [
        Piece(f"{theirs}in_proj.weight", tuple(f"{ours}{name}_proj.weight" for name in "gvkqa")),
        Piece(f"{theirs}conv1d.weight", tuple(f"{conv}weight" for conv in convs), form=filters),
        Piece(f"{theirs}conv1d.bias", tuple(f"{conv}bias" for conv in convs)),
    ]
    same = {name: name for name in ("A_log", "dt_bias", "D")}
    return [*found, *renamed(theirs, ours, OUT | same)]


FAMILY = Family(
    model_type="mamba2", architecture="Mamba2ForCausalLM", read=read, write=write, pieces=pieces
)
