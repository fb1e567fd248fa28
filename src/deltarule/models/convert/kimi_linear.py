"""Kimi Linear: KDA and latent attention without positions, experts with sigmoid scores."""

from deltarule.models.block import mlp_kinds
from deltarule.models.config import ModelConfig
from deltarule.models.convert import hybrid, names, options
from deltarule.models.convert.options import Entry, Family, Fields, Options


def read_linear(fields: Fields, found: Options) -> Options:
    """Sizes of KDA, and which layer is which, counted from 1; in an object of their own or not."""
    inside = fields.inside("linear_attn_config")
    heads = inside.integer("num_heads", fields.integer("linear_num_heads", 32))
    size = inside.integer("head_dim", fields.integer("linear_head_dim", 128))
    taps = fields.integer("linear_conv_kernel_dim", 4, smallest=1)
    taps = inside.integer("short_conv_kernel_size", taps, smallest=1)
    full = inside.listed("full_attn_layers", [])
    bound = inside.take("gate_lower_bound")
    inside.only("use_full_rank_gate", False)
    inside.drop("kda_layers")
    inside.done()
    layers = hybrid.layers("kda", lambda _: lambda i: i + 1 in full)
    sizes: Options = {"num_heads": heads, "head_k_dim": size, "head_v_dim": size, "conv_size": taps}
    sizes |= layers.read(fields, found) or {}
    return sizes | {"gate_lower_bound": bound}


def read_halves(fields: Fields, found: Options) -> Options:
    dense = fields.integer("first_k_dense_replace", 1)
    regular = ["dense" if i < dense else "sparse" for i in hybrid.places(found)]
    return {"mlp_layer_types": tuple(fields.listed("mlp_layer_types", []) or regular)}


def write_shared(config: ModelConfig) -> Options:
    inner, shared = config.moe_intermediate_size or 1, config.shared_expert_intermediate_size
    if shared % inner:
        raise ValueError(f"shared_expert_intermediate_size={shared} must be a multiple of {inner}")
    return {"num_shared_experts": shared // inner}


ROUTED = (
    options.integer("num_experts"),
    options.integer("num_experts_per_token", "num_experts_per_tok"),
    options.integer(
        "moe_intermediate_size", value=lambda config: config.moe_intermediate_size or 1
    ),
    # Experts for every token are one of their width here.
    Entry(
        lambda fields, found: {
            "shared_expert_intermediate_size":
            found["moe_intermediate_size"] * fields.integer("num_shared_experts", 1),
        },
        write_shared,
    ),
    options.fixed({"scoring_func": "sigmoid"}),
    options.flag("moe_renormalize", "norm_topk_prob", True),
    options.integer("num_expert_group", "n_group", 1),
    options.integer("topk_group", default=1),
    options.number("routed_scaling_factor", "routed_scaling_factor", 1.0),
)  # fmt: skip
OPTIONS = (
    # Names of transformers, and those of the released files, which it reads, too.
    options.older({
        "num_experts_per_tok": "num_experts_per_token", "n_group": "num_expert_group",
        "norm_topk_prob": "moe_renormalize", "n_shared_experts": "num_shared_experts",
        "num_local_experts": "num_experts",
    }),
    options.only({
        "q_lora_rank": None, "mla_use_nope": True, "moe_layer_freq": 1,
        "moe_router_activation_func": "sigmoid", "topk_method": "noaux_tc",
    }),
    *hybrid.stream(otherwise=1e-5),
    # Derived from others, or without a meaning where nothing turns.
    options.silent(
        "head_dim", "model_max_length", "num_nextn_predict_layers", "pretraining_tp",
        "qk_head_dim", "rope_parameters", "rope_scaling", "rope_theta", "use_grouped_topk",
    ),
    Entry(read_linear, lambda config: {
        "layer_types": hybrid.in_words(config, "kda"), "linear_num_heads": config.num_heads,
        "linear_head_dim": config.head_k_dim, "linear_conv_kernel_dim": config.conv_size,
    }),
    Entry(read_halves, lambda config: {"mlp_layer_types": list(mlp_kinds(config))}),
    options.where(lambda found: "sparse" in found["mlp_layer_types"], ROUTED, always=True),
    options.integer("kv_lora_rank", default=512),
    options.integer("qk_nope_head_dim"),
    options.integer("qk_rope_head_dim"),
    options.integer("v_head_dim"),
    options.integer("intermediate_size", "mlp_size"),
    options.fixed({
        "output_gate": True, "output_gate_bias": False, "partial_rotary_factor": 0.0,
        "num_kv_heads": None,
    }),
)  # fmt: skip

KDA = {
    **names.same("q_proj", "k_proj", "v_proj", "b_proj", "o_proj", "o_norm"),
    **names.CONVOLUTIONS,
    "f_a_proj": "a_proj.0", "f_b_proj": "a_proj.1", "g_a_proj": "g_proj.0", "g_b_proj": "g_proj.1",
    "A_log": names.Rows("A_log", form=lambda shape: (1, 1, shape[0], 1)),
    "dt_bias": names.Rows("dt_bias", form=names.flat),
}  # fmt: skip
LATENT = {
    "kv_a_proj_with_mqa": "kv_a_proj",
    "kv_a_layernorm": "kv_norm",
    **names.same("q_proj", "kv_b_proj", "o_proj"),
}
EXPERTS = {
    "gate": "router", "gate.e_score_correction_bias": "e_score_correction_bias",
    "experts.": names.Experts(("w1", "w3", "w2")),
    **names.under("shared_experts.", names.MLP, "shared."),
}  # fmt: skip

FAMILY = Family(
    model_type="kimi_linear", architecture="KimiLinearForCausalLM", options=OPTIONS,
    ignored=("mtp.",),
    tensors=names.Tensors(layer={
        "": names.NORMS,
        "kda": names.under("self_attn.", KDA, "mixer."),
        "attention": names.under("self_attn.", LATENT, "mixer."),
        # transformers writes the dense layer under the experts' name.
        "dense": {f"mlp.{name}|block_sparse_moe.{name}": f"mlp.{name}" for name in names.MLP},
        "sparse": names.under("block_sparse_moe.", EXPERTS, "mlp."),
    }),
)  # fmt: skip
