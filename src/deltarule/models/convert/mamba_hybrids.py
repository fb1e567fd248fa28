"""Hybrids of Mamba-2 and attention: in turns (Bamba, Granite-4-H) or side by side (Falcon-H1)."""

from deltarule.models.block import mlp_kinds
from deltarule.models.config import ModelConfig
from deltarule.models.convert import hybrid, options
from deltarule.models.convert.family import Family
from deltarule.models.convert.fields import Fields
from deltarule.models.convert.mamba2 import MIXER, NO_LIMIT, check_inner, inner
from deltarule.models.convert.names import ATTENTION, MLP, NORMS, Tensors, under
from deltarule.models.convert.options import Entry, Options


def read_head(fields: Fields, found: Options) -> Options:
    """Channels of a value: those of all values, if they are given, over the heads."""
    expanded = fields.integer("mamba_expand", 2) * found["hidden_size"]
    every = fields.integer("mamba_d_ssm", expanded)
    size = fields.take("mamba_d_head", "auto")
    return {"head_v_dim": every // found["num_heads"] if size == "auto" else size}


def write_head(config: ModelConfig) -> Options:
    return {"mamba_d_head": config.head_v_dim, "mamba_expand": inner(config) // config.hidden_size}


# Options of Mamba-2, after the stream.
MAMBA = (
    options.only({"mamba_proj_bias": False, "mlp_bias": False, "time_step_limit": NO_LIMIT}),
    options.silent("mamba_chunk_size"),
    options.integer("mamba_n_heads", "num_heads", 128, smallest=1),
    options.integer("mamba_n_groups", "n_groups", 1),
    options.integer("mamba_d_state", "head_k_dim", 256),
    Entry(read_head, write_head),
    options.integer("mamba_d_conv", "conv_size", 4, smallest=1),
    options.flag("mamba_conv_bias", "conv_bias", True),
    options.fixed({"output_gate": True}),
)


def digits(x: float) -> float:
    """Twelve digits, so that a factor that is divided and multiplied again comes back."""
    return float(f"{x:.12g}")


def read_indices(fields: Fields, found: Options) -> Options:
    """Bamba's layers, of which those of attention are listed."""
    attention = fields.listed("attn_layer_indices", [])
    count = min(found["num_layers"], hybrid.MOST_LAYERS)
    kinds = ("attention" if i in attention else "mamba2" for i in range(count))
    return {"layer_types": tuple(kinds)}


def write_indices(config: ModelConfig) -> Options:
    kinds = hybrid.in_words(config, "mamba2")
    return {"attn_layer_indices": [i for i, kind in enumerate(kinds) if kind == "full_attention"]}


BAMBA = (
    *hybrid.stream(otherwise=1e-5, num_layers=32),
    *MAMBA,
    options.silent("layer_types", "layers_block_type", "attn_rotary_emb"),
    Entry(read_indices, write_indices),
    hybrid.rope(0.5),
    options.integer("intermediate_size", "mlp_size", smallest=1),
)


def read_positions(fields: Fields, found: Options) -> Options:
    turned = fields.take("position_embedding_type") == "rope"
    return hybrid.read_rope(fields, 1.0) | ({} if turned else {"partial_rotary_factor": 0.0})


def write_positions(config: ModelConfig) -> Options:
    turned = config.partial_rotary_factor > 0
    return hybrid.write_rope(config) | {"position_embedding_type": "rope" if turned else None}


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
    sparse = "sparse" in mlp_kinds(config)
    return {
        "num_local_experts": config.num_experts,
        "num_experts_per_tok": config.num_experts_per_tok,
        "intermediate_size": config.moe_intermediate_size if sparse else config.mlp_size,
        "shared_intermediate_size": (
            config.shared_expert_intermediate_size if sparse else config.mlp_size
        ),
    }


def attention_scale(config: ModelConfig) -> float:
    size = config.attention_head_dim or config.hidden_size
    return config.attention_multiplier or size**-0.5


GRANITE = (
    options.only({"normalization_function": "rmsnorm", "init_method": "mup"}),
    *hybrid.stream(),
    *MAMBA,
    hybrid.layers("mamba2", lambda fields: lambda i: False),
    Entry(read_positions, write_positions),
    Entry(read_experts, write_experts),
    options.factor("embedding_multiplier"),
    options.factor("residual_multiplier"),
    options.factor("attention_multiplier", value=attention_scale),
    Entry(
        lambda fields, found: {"lm_head_multiplier": 1 / fields.factor("logits_scaling")},
        lambda config: {"logits_scaling": digits(1 / config.lm_head_multiplier)},
    ),
)


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
        "mamba_d_ssm": inner(config),
        "mamba_rms_norm": config.mamba_rms_norm,
        "mamba_norm_before_gate": False,
        "key_multiplier": digits((config.attention_multiplier or size**-0.5) * size**0.5),
        "attention_out_multiplier": config.attention_out_multiplier,
        "ssm_multipliers": list(config.ssm_multipliers),
        "mlp_multipliers": list(config.mlp_multipliers),
    }


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

MIXERS = {"mamba2": under("mamba.", MIXER, "mixer."), "attention": ATTENTION}
PLAIN = Tensors(norm="final_layernorm", layer={
    "": {"input_layernorm": "mixer_norm", "pre_ff_layernorm": "mlp_norm"},
    **MIXERS,
    "dense": under("feed_forward.", MLP, "mlp."),
})  # fmt: skip
# Gate and up lie in one matrix.
SHARED = {"input_linear": "gate_proj up_proj", "output_linear": "down_proj"}
ROUTED = {
    "router.layer": "router", "input_linear.weight": "up_proj", "output_linear.weight": "down_proj"
}  # fmt: skip
GRANITES = Tensors(layer={
    "": NORMS,
    **MIXERS,
    "dense": under("shared_mlp.", SHARED, "mlp."),
    "sparse": {
        **under("block_sparse_moe.", ROUTED, "mlp."),
        **under("shared_mlp.", SHARED, "mlp.shared."),
    },
})  # fmt: skip

FAMILIES = (
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
)  # fmt: skip
