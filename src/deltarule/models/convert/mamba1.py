"""Mamba, Falcon-Mamba, which norms what it computes from the values, and Jamba, which does so too.

Jamba mixes in attention without positions and experts, in layers a fixed distance apart.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from deltarule.models.block import mlp_kinds
from deltarule.models.config import ModelConfig
from deltarule.models.convert.experts import expert_pieces
from deltarule.models.convert.family import Family
from deltarule.models.convert.fields import Fields
from deltarule.models.convert.hybrid import (
    MATRICES,
    NO_TOKENS,
    in_words,
    read_stream,
    write_stream,
)
from deltarule.models.convert.mamba_hybrids import NORMS, SELF_ATTENTION, pieces
from deltarule.models.convert.piece import Has, Piece, Shape, filters, flat, renamed

Options = dict[str, Any]
# How parameters were drawn, and what changes no more than rounding.
DRAWN = (
    "d_inner", "d_model", "fused_add_norm", "n_layer", "pad_vocab_size_multiple", "ssm_cfg",
    "intermediate_size", "rescale_prenorm_residual", "residual_in_fp32", "time_step_floor",
    "time_step_init_scheme", "time_step_max", "time_step_min", "time_step_scale",
    "use_associative_scan", "use_falcon_mambapy", "use_mamba_kernels", "use_mambapy",
)  # fmt: skip


def read(fields: Fields) -> ModelConfig:
    """Mamba, from config.json to a configuration."""
    fields.only("use_bias", False)
    fields.only("rms_norm", True)
    fields.only("hidden_act", "silu", "swish")
    fields.drop(*DRAWN)
    sizes = read_sizes(fields, "state_size", "conv_kernel", "expand", "time_step_rank")
    return ModelConfig(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        num_layers=fields.integer("num_hidden_layers"),
        layer_types="mamba1",
        conv_bias=fields.flag("use_conv_bias", True),
        mlp_size=0,
        norm_eps=fields.number("layer_norm_epsilon", 1e-5),
        tie_embeddings=fields.flag("tie_word_embeddings", True),
        **sizes,
    )


def read_sizes(fields: Fields, state: str, taps: str, expand: str, rank: str) -> Options:
    """Sizes of Mamba by the names of a family."""
    hidden = fields.integer("hidden_size", keep=True)
    through = fields.take(rank, "auto")
    return {
        "num_heads": 1,
        "head_k_dim": fields.integer(state, 16),
        "head_v_dim": fields.integer(expand, 2) * hidden,
        "conv_size": fields.integer(taps, 4, smallest=1),
        "time_step_rank": -(-hidden // 16) if through == "auto" else through,
        "output_gate": True,
    }


def write(config: ModelConfig) -> Options:
    """Back from `read`."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "state_size": config.head_k_dim,
        "conv_kernel": config.conv_size,
        "expand": expansion(config),
        "time_step_rank": rank(config),
        "use_conv_bias": config.conv_bias,
        "layer_norm_epsilon": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        **NO_TOKENS,
    }


def expansion(config: ModelConfig) -> int:
    """Value channels over those of the stream."""
    if config.num_heads != 1 or (config.head_v_dim or 0) % config.hidden_size:
        raise ValueError("num_heads must be 1 and head_v_dim a multiple of hidden_size")
    return (config.head_v_dim or 0) // config.hidden_size


def rank(config: ModelConfig) -> int:
    """Channels that the step size comes through."""
    return config.time_step_rank or -(-config.hidden_size // 16)


def read_falcon(fields: Fields) -> ModelConfig:
    """Falcon-Mamba, from config.json to a configuration."""
    eps = fields.number("mixer_rms_eps", 1e-6)
    return dataclasses.replace(read(fields), mamba_inner_norm="plain", output_norm_eps=eps)


def write_falcon(config: ModelConfig) -> Options:
    """Back from `read_falcon`."""
    return write(config) | {"mixer_rms_eps": config.output_norm_eps}


def read_jamba(fields: Fields) -> ModelConfig:
    """Jamba, from config.json to a configuration."""
    fields.only("mamba_proj_bias", False)
    inner = fields.integer("intermediate_size", smallest=1)
    fields.drop(*DRAWN, "layer_types", "layers_block_type", "layers_num_experts")
    layers = range(min(fields.integer("num_hidden_layers", keep=True), 10_000))
    attention, sparse = (
        (fields.integer(f"{x}_layer_period", n, smallest=1), fields.integer(f"{x}_layer_offset", m))
        for x, n, m in (("attn", 8, 4), ("expert", 2, 1))
    )
    experts = fields.integer("num_experts", 16)
    chosen = fields.integer("num_experts_per_tok", 2)
    kinds = ["attention" if i % attention[0] == attention[1] else "mamba1" for i in layers]
    halves = ["sparse" if i % sparse[0] == sparse[1] and experts > 1 else "dense" for i in layers]
    mlp: Options = {"mlp_size": inner, "mlp_layer_types": tuple(halves)}
    if "sparse" in halves:
        mlp |= {"num_experts": experts, "num_experts_per_tok": chosen, "norm_topk_prob": False}
        mlp |= {"moe_intermediate_size": inner}
    names = "mamba_d_state", "mamba_d_conv", "mamba_expand", "mamba_dt_rank"
    return ModelConfig(
        **read_sizes(fields, *names),
        **read_stream(fields),
        **mlp,
        layer_types=tuple(kinds),
        conv_bias=fields.flag("mamba_conv_bias", True),
        partial_rotary_factor=0.0,
        mamba_inner_norm="weighted",
    )


def write_jamba(config: ModelConfig) -> Options:
    """Back from `read_jamba`."""
    attention = [i for i, x in enumerate(in_words(config, "mamba1")) if x == "full_attention"]
    sparse = [i for i, kind in enumerate(mlp_kinds(config)) if kind == "sparse"]
    own = {
        "intermediate_size": config.mlp_size,
        "num_experts": max(config.num_experts, 1),
        "num_experts_per_tok": config.num_experts_per_tok,
        "mamba_d_state": config.head_k_dim,
        "mamba_d_conv": config.conv_size,
        "mamba_expand": expansion(config),
        "mamba_dt_rank": rank(config),
        "mamba_conv_bias": config.conv_bias,
    }
    for name, layers in (("attn", attention), ("expert", sparse)):
        # A distance that no layer reaches names one at most.
        beyond = config.num_layers + 1
        period = layers[1] - layers[0] if len(layers) > 1 else beyond
        first = layers[0] if layers else config.num_layers
        own |= {f"{name}_layer_period": period, f"{name}_layer_offset": first}
    return write_stream(config) | own


def without_first(shape: Shape) -> Shape:
    """[1, I, N] as [I, N]."""
    return shape[1:]


def mixer(config: ModelConfig, theirs: str, ours: str) -> Iterator[Piece]:
    """Mamba; what it norms inside has names of its own."""
    yield Piece(f"{theirs}in_proj.weight", (f"{ours}v_proj.weight", f"{ours}g_proj.weight"))
    yield Piece(f"{theirs}conv1d.weight", (f"{ours}v_conv.weight",), form=filters)
    first = ("a_proj.0", "k_proj", "q_proj")
    yield Piece(f"{theirs}x_proj.weight", tuple(f"{ours}{name}.weight" for name in first))
    last = 1 if config.mamba_inner_norm is None else 2
    names = {
        "conv1d.bias": "v_conv.bias", "dt_proj.weight": f"a_proj.{last}.weight",
        "out_proj.weight": "o_proj.weight", "b_layernorm.weight": "k_norm.weight",
        "c_layernorm.weight": "q_norm.weight",
    }  # fmt: skip
    if config.mamba_inner_norm == "weighted":
        names["dt_layernorm.weight"] = "a_proj.1.weight"
    yield from renamed(theirs, ours, names)
    yield Piece(f"{theirs}dt_proj.bias", (f"{ours}dt_bias",), form=flat)
    yield Piece(f"{theirs}A_log", (f"{ours}A_log",), form=without_first)
    yield Piece(f"{theirs}D", (f"{ours}D",), form=flat)


def layer(config: ModelConfig, theirs: str, ours: str, parts: str, has: Has) -> Iterator[Piece]:
    """A layer of Mamba or Falcon-Mamba."""
    yield Piece(f"{theirs}norm.weight", (f"{ours}mixer_norm.weight",))
    yield from mixer(config, f"{theirs}mixer.", f"{ours}mixer.")


def jamba(config: ModelConfig, theirs: str, ours: str, parts: str, has: Has) -> Iterator[Piece]:
    """A layer of Jamba, by the names of an MLP and of experts."""
    yield from renamed(theirs, ours, NORMS | {"pre_ff_layernorm.weight": "mlp_norm.weight"})
    if parts == "attention":
        yield from renamed(f"{theirs}self_attn.", f"{ours}mixer.", SELF_ATTENTION)
    else:
        yield from mixer(config, f"{theirs}mamba.", f"{ours}mixer.")
    theirs, ours = f"{theirs}feed_forward.", f"{ours}mlp."
    yield from renamed(theirs, ours, {name: name for name in (*MATRICES, "router.weight")})
    yield from expert_pieces(f"{theirs}experts.", ours, config, has)


FAMILIES = {
    family.model_type: family for family in (
        Family(
            model_type="mamba", architecture="MambaForCausalLM", read=read, write=write,
            pieces=pieces("backbone.", "norm_f", layer),
        ),
        Family(
            model_type="falcon_mamba", architecture="FalconMambaForCausalLM", read=read_falcon,
            write=write_falcon, pieces=pieces("backbone.", "norm_f", layer),
        ),
        Family(
            model_type="jamba", architecture="JambaForCausalLM", read=read_jamba,
            write=write_jamba, pieces=pieces("model.", "final_layernorm", jamba),
        ),
    )
}  # fmt: skip
