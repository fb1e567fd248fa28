"""Mamba-2 and its hybrids with attention, in the layout of transformers.

In Mamba-2's letters z is the output gate, x the value, B the key, C the query and dt the decay: one
projection holds them in this order, and one convolution holds x, B and C. Its own layout is
flash-linear-attention's, too. Attention stands in turns with it (Bamba, Granite-4-H), side by side
(Falcon-H1), or is a layer of its own, as an MLP and experts are (Nemotron-H).
"""

import math

from deltarule.models.block import mlp_kinds
from deltarule.models.config import ModelConfig
from deltarule.models.convert import hybrid, names, options
from deltarule.models.convert.names import MLP, Experts, Tensors, backbone, same, under
from deltarule.models.convert.options import Entry, Family, Fields, Options
from deltarule.nn.checks import check_multiple

# transformers writes an infinite number in two ways.
NO_LIMIT = ([0.0, math.inf], [0.0, {"__float__": "Infinity"}])


def inner(config: ModelConfig) -> int:
    return config.num_heads * (config.head_v_dim or 0)


def check_inner(config: ModelConfig) -> None:
    check_multiple("num_heads * head_v_dim", inner(config), "hidden_size", config.hidden_size)


MAMBA2 = (
    options.older({"norm_eps": "layer_norm_epsilon", "dt_limit": "time_step_limit"}),
    options.only({
        "use_bias": False, "hidden_act": ("silu", "swish"), "time_step_limit": NO_LIMIT,
        # Of flash-linear-attention.
        "D_has_hdim": False, "rmsnorm": True, "norm_before_gate": False,
    }),
    options.silent("expand", "time_step_rank"),
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
    Entry(lambda *_: None, lambda config: {"expand": inner(config) // config.hidden_size}),
)  # fmt: skip
# Of a layer.
MIXER = {
    "in_proj": "g_proj v_proj k_proj q_proj a_proj", "conv1d": "v_conv k_conv q_conv",
    "norm": "o_norm", "out_proj": "o_proj", **same("A_log", "dt_bias", "D"),
}  # fmt: skip


def read_head(fields: Fields, found: Options) -> Options:
    """Channels of a value: those of all values, if they are given, over the heads."""
    expanded = fields.integer("mamba_expand", 2) * found["hidden_size"]
    every = fields.integer("mamba_d_ssm", expanded)
    size = fields.take("mamba_d_head", "auto")
    return {"head_v_dim": every // found["num_heads"] if size == "auto" else size}


# Options of Mamba-2 in a hybrid, after the stream.
MAMBA = (
    options.only({"mamba_proj_bias": False, "mlp_bias": False, "time_step_limit": NO_LIMIT}),
    options.integer("mamba_n_heads", "num_heads", 128, smallest=1),
    options.integer("mamba_n_groups", "n_groups", 1),
    options.integer("mamba_d_state", "head_k_dim", 256),
    Entry(read_head, lambda config: {
        "mamba_d_head": config.head_v_dim,
        "mamba_expand": inner(config) // config.hidden_size or None,
    }),
    options.integer("mamba_d_conv", "conv_size", 4, smallest=1),
    options.flag("mamba_conv_bias", "conv_bias", True),
    options.fixed({"output_gate": True}),
)  # fmt: skip


def digits(x: float) -> float:
    """Twelve digits, so that a factor that is divided and multiplied again comes back."""
    return float(f"{x:.12g}")


def read_indices(fields: Fields, found: Options) -> Options:
    """Bamba's layers, of which those of attention are listed."""
    attention = fields.listed("attn_layer_indices", [])
    kinds = ("attention" if i in attention else "mamba2" for i in hybrid.places(found))
    return {"layer_types": tuple(kinds)}


BAMBA = (
    *hybrid.stream(otherwise=1e-5, num_layers=32),
    *MAMBA,
    options.silent("layer_types", "layers_block_type", "attn_rotary_emb"),
    Entry(read_indices, lambda config: {"attn_layer_indices": [
        i for i, x in enumerate(hybrid.in_words(config, "mamba2")) if x == "full_attention"
    ]}),
    hybrid.rope(0.5),
    options.integer("intermediate_size", "mlp_size", smallest=1),
)  # fmt: skip


def read_positions(fields: Fields, found: Options) -> Options:
    share = float(fields.take("position_embedding_type") == "rope")
    return hybrid.read_rope(fields, share) | ({} if share else {"partial_rotary_factor": 0.0})


def read_experts(fields: Fields, found: Options) -> Options:
    """Experts beside an MLP for every token, or that MLP alone."""
    experts = fields.integer("num_local_experts", 8)
    shared = fields.integer("shared_intermediate_size", 1024)
    chosen, own = fields.integer("num_experts_per_tok", 2), fields.integer("intermediate_size")
    if not experts:
        return {"mlp_size": shared}
    return {
        "mlp_layer_types": "sparse", "num_experts": experts, "num_experts_per_tok": chosen,
        "moe_intermediate_size": own, "shared_expert_intermediate_size": shared, "mlp_size": 0,
    }  # fmt: skip


def write_experts(config: ModelConfig) -> Options:
    own = shared = config.mlp_size
    if "sparse" in mlp_kinds(config):
        own, shared = config.moe_intermediate_size, config.shared_expert_intermediate_size
    return {
        "num_local_experts": config.num_experts, "num_experts_per_tok": config.num_experts_per_tok,
        "intermediate_size": own, "shared_intermediate_size": shared,
    }  # fmt: skip


def read_scale(fields: Fields, found: Options) -> Options:
    """Of scores: absent, it is 1, as any factor; null, PyTorch's attention takes the usual one."""
    usual = (found["hidden_size"] / found["num_attention_heads"]) ** -0.5
    null = fields.left.get("attention_multiplier", 1.0) is None
    factor = fields.factor("attention_multiplier")
    return {"attention_multiplier": usual if null else factor}


GRANITE = (
    options.only({"normalization_function": "rmsnorm", "init_method": "mup"}),
    *hybrid.stream(),
    *MAMBA,
    hybrid.layers("mamba2", lambda fields: lambda i: False),
    Entry(read_positions, lambda config: hybrid.write_rope(config) | {
        "position_embedding_type": "rope" if config.partial_rotary_factor > 0 else None
    }),
    Entry(read_experts, write_experts),
    options.factor("embedding_multiplier"),
    options.factor("residual_multiplier"),
    Entry(read_scale, lambda config: {"attention_multiplier": config.attention_multiplier}),
    Entry(
        lambda fields, found: {"lm_head_multiplier": 1 / fields.factor("logits_scaling")},
        lambda config: {"logits_scaling": digits(1 / config.lm_head_multiplier)},
    ),
)  # fmt: skip


def read_multipliers(fields: Fields, found: Options) -> Options:
    normed = fields.flag("mamba_rms_norm", False)
    if fields.flag("mamba_norm_before_gate", True) and normed:
        raise ValueError("mamba_norm_before_gate must be False with mamba_rms_norm, got True")
    into = fields.factor("attention_in_multiplier")
    key, out = (fields.factor(f"{x}_multiplier") for x in ("key", "attention_out"))
    ssm_in, ssm = fields.factor("ssm_in_multiplier"), fields.listed("ssm_multipliers", [1.0] * 5)
    return {
        "mamba_rms_norm": normed,
        "attention_multiplier": digits(key * into**2) * found["attention_head_dim"] ** -0.5,
        "attention_out_multiplier": digits(out * into),
        "ssm_multipliers": tuple(digits(x * ssm_in) for x in ssm),
        "mlp_multipliers": tuple(fields.listed("mlp_multipliers", [1.0, 1.0])),
    }


def write_multipliers(config: ModelConfig) -> Options:
    size = config.attention_head_dim or 1
    return {
        "mamba_d_ssm": inner(config), "mamba_rms_norm": config.mamba_rms_norm,
        "mamba_norm_before_gate": False,
        "key_multiplier": digits((config.attention_multiplier or size**-0.5) * size**0.5),
        "attention_out_multiplier": config.attention_out_multiplier,
        "ssm_multipliers": list(config.ssm_multipliers),
        "mlp_multipliers": list(config.mlp_multipliers),
    }  # fmt: skip


FALCON = (
    options.only({"mamba_use_mlp": True, "attn_layer_indices": None, "projectors_bias": False}),
    options.silent("mlp_expansion_factor", "layers_block_type", "layer_types"),
    *hybrid.stream(otherwise=1e-5),
    *MAMBA,
    hybrid.rope(1.0),
    options.fixed({"layer_types": "mamba2+attention"}),
    options.integer("intermediate_size", "mlp_size", smallest=1),
    options.integer(
        "head_dim", "attention_head_dim",
        lambda found: found["hidden_size"] // found["num_attention_heads"],
        smallest=1, value=lambda config: config.attention_head_dim or 1,
    ),
    Entry(read_multipliers, write_multipliers),
    options.factor("ssm_out_multiplier"),
    options.factor("embedding_multiplier"),
    options.factor("lm_head_multiplier"),
)  # fmt: skip

# Letters of Nemotron-H's older pattern of layers.
LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}


def read_layers(fields: Fields, found: Options) -> Options:
    """One part a layer, from a list of words or a text of letters."""
    pattern = str(fields.take("hybrid_override_pattern", ""))
    kinds = fields.listed("layers_block_type", []) or [LETTERS.get(x, x) for x in pattern]
    parts = hybrid.words(kinds, len(kinds), "mamba2", "mlp", "moe")
    return {"layer_types": parts, "mlp_layer_types": "none"}


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
NEMOTRON = (
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
        "expand", "mamba_expand", "moe_shared_expert_overlap", "mtp_layers_block_type",
        "mtp_hybrid_override_pattern", "num_nextn_predict_layers",
    ),
    Entry(read_layers, write_layers),
    options.where(lambda found: "moe" in found["layer_types"], ROUTED),
    *hybrid.stream("layer_norm_epsilon", 1e-5, lambda found: len(found["layer_types"])),
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

MIXERS = {"mamba2": under("mamba.", MIXER, "mixer."), "attention": names.ATTENTION}
PLAIN = Tensors(norm="final_layernorm", layer={
    "": {"input_layernorm": "mixer_norm", "pre_ff_layernorm": "mlp_norm"},
    **MIXERS,
    "dense": under("feed_forward.", MLP, "mlp."),
})  # fmt: skip
# Gate and up lie in one matrix.
SHARED = {"input_linear": "gate_proj up_proj", "output_linear": "down_proj"}
GRANITES = Tensors(layer={
    "": names.NORMS,
    **MIXERS,
    "dense": under("shared_mlp.", SHARED, "mlp."),
    "sparse": {
        **under("block_sparse_moe.", {
            "router.layer": "router", "input_linear.weight": "up_proj",
            "output_linear.weight": "down_proj",
        }, "mlp."),
        **under("shared_mlp.", SHARED, "mlp.shared."),
    },
})  # fmt: skip
SQUARED = same("up_proj", "down_proj")
ALONE = backbone({
    "mamba2": MIXER, "attention": same("q_proj", "k_proj", "v_proj", "o_proj"), "mlp": SQUARED,
    "moe": {
        "gate": "router", "gate.e_score_correction_bias": "e_score_correction_bias",
        "experts.": Experts(("up_proj", "down_proj"), ("up_proj", "down_proj")),
        **under("shared_experts.", SQUARED, "shared."),
    },
})  # fmt: skip

FAMILIES = (
    Family(
        model_type="mamba2", architecture="Mamba2ForCausalLM", options=MAMBA2, check=check_inner,
        tensors=backbone({"mamba2": MIXER}),
    ),
    Family(
        model_type="bamba", architecture="BambaForCausalLM", options=BAMBA, tensors=PLAIN,
        check=check_inner,
    ),
    Family(
        model_type="granitemoehybrid", architecture="GraniteMoeHybridForCausalLM",
        options=GRANITE, tensors=GRANITES, check=check_inner,
    ),
    Family(
        model_type="falcon_h1", architecture="FalconH1ForCausalLM", options=FALCON, tensors=PLAIN,
    ),
    Family(
        model_type="nemotron_h", architecture="NemotronHForCausalLM", options=NEMOTRON,
        tensors=ALONE, ignored=("mtp.",), unwritten=("num_hidden_layers",),
    ),
)  # fmt: skip
