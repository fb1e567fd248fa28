"""Nemotron-H: a layer is Mamba-2, attention without positions, an MLP or experts, and no more."""

from collections.abc import Iterator
from typing import Any

from deltarule.models.config import ModelConfig
from deltarule.models.convert.experts import expert_pieces
from deltarule.models.convert.family import Family
from deltarule.models.convert.fields import Fields
from deltarule.models.convert.hybrid import mixers, read_stream, words, write_stream
from deltarule.models.convert.mamba2 import NO_LIMIT, mixer_pieces
from deltarule.models.convert.mamba_hybrids import SELF_ATTENTION, pieces
from deltarule.models.convert.piece import Has, Piece, renamed

Options = dict[str, Any]
# Older names in Nemotron-H's config.json, and the letters of its pattern.
OLDER = {
    "mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel", "mamba_conv_bias": "use_conv_bias",
    "mamba_dt_limit": "time_step_limit", "layer_types": "layers_block_type",
    "rms_norm_eps": "layer_norm_epsilon",
}  # fmt: skip
LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
DRAWN = (
    "expand", "mamba_expand", "mamba_chunk_size", "mamba_dt_init_floor", "mamba_dt_max",
    "mamba_dt_min", "mamba_ssm_cache_dtype", "moe_shared_expert_overlap", "mtp_layers_block_type",
    "mtp_hybrid_override_pattern", "num_nextn_predict_layers", "rescale_prenorm_residual",
    "residual_in_fp32", "time_step_floor", "time_step_max", "time_step_min", "use_mamba_kernels",
)  # fmt: skip
ROUTED = ("num_experts_per_tok", "moe_intermediate_size", "n_group", "topk_group")


def read(fields: Fields) -> ModelConfig:
    """From config.json to a configuration."""
    fields.rename(OLDER)
    only = {
        "mamba_proj_bias": False, "use_bias": False, "mlp_bias": False, "sliding_window": None,
        "mamba_hidden_act": "silu", "mlp_hidden_act": "relu2", "moe_latent_size": None,
    }  # fmt: skip
    for name, value in only.items():
        fields.only(name, value)
    fields.only("time_step_limit", *NO_LIMIT)
    fields.drop(*DRAWN)
    pattern = str(fields.take("hybrid_override_pattern", ""))
    kinds = [LETTERS.get(letter, letter) for letter in pattern]
    kinds = fields.listed("layers_block_type", []) or kinds
    fields.setdefault("num_hidden_layers", len(kinds))
    parts = words(kinds, mixers("mamba2") | {"mlp": "mlp", "moe": "moe"}, len(kinds))
    experts: Options = {name: fields.integer(name, 1) for name in ROUTED}
    experts |= {
        "num_experts": fields.integer("n_routed_experts", 8),
        "shared_expert_intermediate_size": fields.integer("moe_shared_expert_intermediate_size", 0),
        "norm_topk_prob": fields.flag("norm_topk_prob", True),
        "routed_scaling_factor": fields.number("routed_scaling_factor", 1.0),
        "scoring_func": "sigmoid",
    }
    fields.drop("n_shared_experts")
    return ModelConfig(
        **read_stream(fields, "layer_norm_epsilon", 1e-5), **(experts if "moe" in parts else {}),
        layer_types=parts,
        mlp_layer_types="none",
        mlp_size=fields.integer("intermediate_size", 0),
        hidden_act="relu2",
        num_heads=fields.integer("mamba_num_heads", 128),
        n_groups=fields.integer("n_groups", 8),
        head_k_dim=fields.integer("ssm_state_size", 128),
        head_v_dim=fields.integer("mamba_head_dim", 64),
        conv_size=fields.integer("conv_kernel", 4, smallest=1),
        conv_bias=fields.flag("use_conv_bias", True),
        output_gate=True,
        attention_head_dim=fields.integer("head_dim", 128),
        partial_rotary_factor=0.0,
    )  # fmt: skip


def write(config: ModelConfig) -> Options:
    """From a configuration to config.json."""
    known = {"mamba2": "linear_attention", "attention": "full_attention"}
    kinds = [known.get(name, name) for name in config.layer_types]
    own = {
        "layers_block_type": kinds,
        "intermediate_size": config.mlp_size,
        "mlp_hidden_act": config.hidden_act,
        "mamba_num_heads": config.num_heads,
        "n_groups": config.n_groups,
        "ssm_state_size": config.head_k_dim,
        "mamba_head_dim": config.head_v_dim,
        "conv_kernel": config.conv_size,
        "use_conv_bias": config.conv_bias,
        "head_dim": config.attention_head_dim or 1,
    }
    if "moe" in kinds:
        own |= {name: getattr(config, name) for name in (*ROUTED, "norm_topk_prob")} | {
            "n_routed_experts": config.num_experts,
            "moe_shared_expert_intermediate_size": config.shared_expert_intermediate_size,
            "routed_scaling_factor": config.routed_scaling_factor,
        }
    stream = write_stream(config, "layer_norm_epsilon")
    del stream["num_hidden_layers"]
    return stream | own


def one_part(config: ModelConfig, theirs: str, ours: str, parts: str, has: Has) -> Iterator[Piece]:
    """A layer of Nemotron-H."""
    yield Piece(f"{theirs}norm.weight", (f"{ours}mixer_norm.weight",))
    theirs, ours = f"{theirs}mixer.", f"{ours}mixer."
    plain = {name: name for name in ("up_proj.weight", "down_proj.weight")}
    if parts == "mamba2":
        yield from mixer_pieces(theirs, ours)
    elif parts == "attention":
        yield from renamed(theirs, ours, SELF_ATTENTION)
    elif parts == "mlp":
        yield from renamed(theirs, ours, plain)
    else:
        bias = "e_score_correction_bias"
        yield from renamed(theirs, ours, {"gate.weight": "router.weight", f"gate.{bias}": bias})
        yield from renamed(f"{theirs}shared_experts.", f"{ours}shared.", plain)
        names = "up_proj", "down_proj"
        yield from expert_pieces(f"{theirs}experts.", ours, config, has, names, names)


FAMILY = Family(
    model_type="nemotron_h",
    architecture="NemotronHForCausalLM",
    read=read,
    write=write,
    pieces=pieces("backbone.", "norm_f", one_part),
    ignored=("mtp.",),
)
