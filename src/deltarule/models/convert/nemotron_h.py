"""Nemotron-H: a layer is Mamba-2, attention without positions, an MLP or experts, and no more."""

from deltarule.models.config import ModelConfig
from deltarule.models.convert import options
from deltarule.models.convert.family import Family
from deltarule.models.convert.fields import Fields
from deltarule.models.convert.hybrid import mixers, stream, words
from deltarule.models.convert.mamba2 import MIXER, NO_LIMIT
from deltarule.models.convert.names import Experts, backbone, same, under
from deltarule.models.convert.options import Entry, Options

# Letters of its older pattern of layers.
LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}


def read_layers(fields: Fields, found: Options) -> Options:
    """One part a layer, from a list of words or a text of letters."""
    pattern = str(fields.take("hybrid_override_pattern", ""))
    kinds = [LETTERS.get(letter, letter) for letter in pattern]
    kinds = fields.listed("layers_block_type", []) or kinds
    known = mixers("mamba2") | {"mlp": "mlp", "moe": "moe"}
    return {"layer_types": words(kinds, known, len(kinds)), "mlp_layer_types": "none"}


def write_layers(config: ModelConfig) -> Options:
    known = {"mamba2": "linear_attention", "attention": "full_attention"}
    return {"layers_block_type": [known.get(name, name) for name in config.layer_types]}


ROUTED = (
    options.silent("n_shared_experts"),
    options.integer("num_experts_per_tok", default=1),
    options.integer("moe_intermediate_size", default=1),
    options.integer("n_group", default=1),
    options.integer("topk_group", default=1),
    options.integer("n_routed_experts", "num_experts", 8),
    options.integer("moe_shared_expert_intermediate_size", "shared_expert_intermediate_size", 0),
    options.flag("norm_topk_prob", "norm_topk_prob", True),
    options.number("routed_scaling_factor", "routed_scaling_factor", 1.0),
    options.fixed({"scoring_func": "sigmoid"}),
)
OPTIONS = (
    options.older({
        "mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel",
        "mamba_conv_bias": "use_conv_bias", "mamba_dt_limit": "time_step_limit",
        "layer_types": "layers_block_type", "rms_norm_eps": "layer_norm_epsilon",
    }),
    options.only({
        "mamba_proj_bias": False, "use_bias": False, "mlp_bias": False, "sliding_window": None,
        "mamba_hidden_act": "silu", "moe_latent_size": None, "time_step_limit": NO_LIMIT,
        "mlp_hidden_act": "relu2",
    }),
    options.silent(
        "expand", "mamba_expand", "mamba_chunk_size", "mamba_dt_init_floor", "mamba_dt_max",
        "mamba_dt_min", "mamba_ssm_cache_dtype", "moe_shared_expert_overlap",
        "mtp_layers_block_type", "mtp_hybrid_override_pattern", "num_nextn_predict_layers",
        "rescale_prenorm_residual", "residual_in_fp32", "time_step_floor", "time_step_max",
        "time_step_min", "use_mamba_kernels",
    ),
    Entry(read_layers, write_layers),
    options.where(lambda found: "moe" in found["layer_types"], ROUTED),
    *stream("layer_norm_epsilon", 1e-5, lambda found: len(found["layer_types"])),
    options.integer("intermediate_size", "mlp_size", 0),
    options.fixed(
        {"hidden_act": "relu2", "output_gate": True, "partial_rotary_factor": 0.0},
        {"mlp_hidden_act": "relu2"},
    ),
    options.integer("mamba_num_heads", "num_heads", 128),
    options.integer("n_groups", default=8),
    options.integer("ssm_state_size", "head_k_dim", 128),
    options.integer("mamba_head_dim", "head_v_dim", 64),
    options.integer("conv_kernel", "conv_size", 4, smallest=1),
    options.flag("use_conv_bias", "conv_bias", True),
    options.integer(
        "head_dim", "attention_head_dim", 128,
        value=lambda config: config.attention_head_dim or 1,
    ),
)  # fmt: skip

MLP = same("up_proj", "down_proj")
EXPERTS = {
    "gate": "router",
    "gate.e_score_correction_bias": "e_score_correction_bias",
    "experts.": Experts(("up_proj", "down_proj"), ("up_proj", "down_proj")),
    **under("shared_experts.", MLP, "shared."),
}
PARTS = {
    "mamba2": MIXER, "attention": same("q_proj", "k_proj", "v_proj", "o_proj"), "mlp": MLP,
    "moe": EXPERTS,
}  # fmt: skip

FAMILY = Family(
    model_type="nemotron_h", architecture="NemotronHForCausalLM", options=OPTIONS,
    ignored=("mtp.",), unwritten=("num_hidden_layers",),
    tensors=backbone(PARTS),
)  # fmt: skip
