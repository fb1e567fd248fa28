"""Kimi Linear: KDA and latent attention without positions, experts with sigmoid scores."""

from collections.abc import Iterator
from typing import Any

from deltarule.models.block import mlp_kinds
from deltarule.models.config import ModelConfig
from deltarule.models.convert.experts import expert_pieces
from deltarule.models.convert.family import Family
from deltarule.models.convert.fields import Fields
from deltarule.models.convert.hybrid import (
    ATTENTION,
    MATRICES,
    RECURRENT,
    in_words,
    mixers,
    read_stream,
    words,
    write_stream,
)
from deltarule.models.convert.piece import (
    Has,
    Piece,
    Shape,
    Shapes,
    filters,
    flat,
    present,
    renamed,
)

Options = dict[str, Any]
# Names of transformers, and those of the released files, which it reads, too.
RELEASED = {
    "num_experts_per_tok": "num_experts_per_token", "n_group": "num_expert_group",
    "norm_topk_prob": "moe_renormalize", "n_shared_experts": "num_shared_experts",
    "num_local_experts": "num_experts",
}  # fmt: skip
LATENT = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
# Derived from others, or without a meaning where nothing turns.
SILENT = (
    "head_dim", "model_max_length", "num_key_value_heads", "num_nextn_predict_layers",
    "pretraining_tp", "qk_head_dim", "rope_parameters", "rope_scaling", "rope_theta",
    "use_grouped_topk",
)  # fmt: skip


def read(fields: Fields) -> ModelConfig:
    """From config.json to a configuration."""
    fields.rename(RELEASED)
    only = {
        "q_lora_rank": None, "mla_use_nope": True, "moe_layer_freq": 1,
        "moe_router_activation_func": "sigmoid", "topk_method": "noaux_tc",
    }  # fmt: skip
    for name, value in only.items():
        fields.only(name, value)
    fields.drop(*SILENT)
    stream = read_stream(fields, otherwise=1e-5)
    layers = range(min(stream["num_layers"], 10_000))
    linear, kinds = read_linear(fields, len(layers))
    dense = fields.integer("first_k_dense_replace", 1)
    halves = fields.listed("mlp_layer_types", []) or [
        "dense" if i < dense else "sparse" for i in layers
    ]
    inner, shared = fields.integer("moe_intermediate_size"), fields.integer("num_shared_experts", 1)
    experts: Options = {
        "num_experts": fields.integer("num_experts"),
        "num_experts_per_tok": fields.integer("num_experts_per_token"),
        "moe_intermediate_size": inner,
        "shared_expert_intermediate_size": inner * shared,
        "scoring_func": "sigmoid",
        "norm_topk_prob": fields.flag("moe_renormalize", True),
        "n_group": fields.integer("num_expert_group", 1),
        "topk_group": fields.integer("topk_group", 1),
        "routed_scaling_factor": fields.number("routed_scaling_factor", 1.0),
    }
    sizes: Options = {name: fields.integer(name) for name in LATENT}
    return ModelConfig(
        **stream | linear | sizes | (experts if "sparse" in halves else {}),
        layer_types=kinds,
        mlp_layer_types=tuple(halves),
        mlp_size=fields.integer("intermediate_size"),
        output_gate_bias=False,
        partial_rotary_factor=0.0,
    )


def read_linear(fields: Fields, num_layers: int) -> tuple[Options, tuple[str, ...]]:
    """Sizes of KDA, and which layer is which, counted from 1; in an object of their own or not."""
    given = fields.take("linear_attn_config", {})
    if not isinstance(given, dict):
        raise ValueError(f"linear_attn_config must be an object, got {given!r}")
    inside = Fields(given)
    heads = inside.integer("num_heads", fields.integer("linear_num_heads", 32))
    size = inside.integer("head_dim", fields.integer("linear_head_dim", 128))
    taps = fields.integer("linear_conv_kernel_dim", 4, smallest=1)
    taps = inside.integer("short_conv_kernel_size", taps, smallest=1)
    full = inside.listed("full_attn_layers", [])
    bound = inside.take("gate_lower_bound")
    inside.only("use_full_rank_gate", False)
    inside.drop("kda_layers")
    inside.done()
    regular = [(ATTENTION if i + 1 in full else RECURRENT)[0] for i in range(num_layers)]
    kinds = words(fields.take("layer_types", regular), mixers("kda"), num_layers)
    sizes = {"head_k_dim": size, "head_v_dim": size, "conv_size": taps, "output_gate": True}
    own = {"num_heads": heads, "num_kv_heads": None, "gate_lower_bound": bound}
    return own | sizes, kinds


def write(config: ModelConfig) -> Options:
    """From a configuration to config.json."""
    inner, shared = config.moe_intermediate_size or 1, config.shared_expert_intermediate_size
    if shared % inner:
        raise ValueError(f"shared_expert_intermediate_size must be a multiple of {inner}")
    return write_stream(config) | {name: getattr(config, name) for name in LATENT} | {
        "layer_types": in_words(config, "kda"),
        "mlp_layer_types": list(mlp_kinds(config)),
        "intermediate_size": config.mlp_size,
        "linear_num_heads": config.num_heads,
        "linear_head_dim": config.head_k_dim,
        "linear_conv_kernel_dim": config.conv_size,
        "num_experts": config.num_experts,
        "num_experts_per_token": config.num_experts_per_tok,
        "moe_intermediate_size": inner,
        "num_shared_experts": shared // inner,
        "moe_renormalize": config.norm_topk_prob,
        "num_expert_group": config.n_group,
        "topk_group": config.topk_group,
        "routed_scaling_factor": config.routed_scaling_factor,
    }  # fmt: skip


def in_the_middle(shape: Shape) -> Shape:
    """[H] as [1, 1, H, 1]."""
    return 1, 1, shape[0], 1


def pieces(config: ModelConfig, shapes: Shapes, has: Has) -> list[Piece]:
    """All stored tensors."""
    outer = {"model.embed_tokens": "embedding", "model.norm": "norm", "lm_head": "head"}
    found = list(renamed("", "", {f"{a}.weight": f"{b}.weight" for a, b in outer.items()}))
    for index, (kind, half) in enumerate(zip(config.layer_types, mlp_kinds(config), strict=True)):
        layer, block = f"model.layers.{index}.", f"blocks.{index}."
        norms = {"input_layernorm": "mixer_norm", "post_attention_layernorm": "mlp_norm"}
        found += renamed(layer, block, {f"{a}.weight": f"{b}.weight" for a, b in norms.items()})
        mixer = latent if kind == "attention" else recurrent
        found += mixer(f"{layer}self_attn.", f"{block}mixer.")
        moe, ours = f"{layer}block_sparse_moe.", f"{block}mlp."
        if half == "dense":
            # transformers writes the dense layer under the experts' name.
            dense = moe if has(moe + MATRICES[0]) else f"{layer}mlp."
            found += renamed(dense, ours, {name: name for name in MATRICES})
            continue
        bias = "e_score_correction_bias"
        found += renamed(moe, ours, {"gate.weight": "router.weight", f"gate.{bias}": bias})
        found += renamed(f"{moe}shared_experts.", f"{ours}shared.", {x: x for x in MATRICES})
        found += expert_pieces(f"{moe}experts.", ours, config, has, ("w1", "w3", "w2"))
    return present(found, shapes)


def recurrent(theirs: str, ours: str) -> Iterator[Piece]:
    """KDA."""
    names = {f"{letter}_proj": f"{letter}_proj" for letter in "qkvbo"} | {"o_norm": "o_norm"}
    for letter, own in {"f": "a", "g": "g"}.items():
        names |= {f"{letter}_a_proj": f"{own}_proj.0", f"{letter}_b_proj": f"{own}_proj.1"}
    yield from renamed(theirs, ours, {f"{a}.weight": f"{b}.weight" for a, b in names.items()})
    for letter in "qkv":
        yield Piece(
            f"{theirs}{letter}_conv1d.weight", (f"{ours}{letter}_conv.weight",), form=filters
        )
    yield Piece(f"{theirs}A_log", (f"{ours}A_log",), form=in_the_middle)
    yield Piece(f"{theirs}dt_bias", (f"{ours}dt_bias",), form=flat)


def latent(theirs: str, ours: str) -> Iterator[Piece]:
    """Latent attention."""
    names = {
        "q_proj": "q_proj", "kv_a_proj_with_mqa": "kv_a_proj", "kv_a_layernorm": "kv_norm",
        "kv_b_proj": "kv_b_proj", "o_proj": "o_proj",
    }  # fmt: skip
    yield from renamed(theirs, ours, {f"{a}.weight": f"{b}.weight" for a, b in names.items()})


FAMILY = Family(
    model_type="kimi_linear",
    architecture="KimiLinearForCausalLM",
    read=read,
    write=write,
    pieces=pieces,
    ignored=("mtp.",),
)
