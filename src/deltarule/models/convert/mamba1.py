"""Mamba, Falcon-Mamba, which norms what it computes from the values, and Jamba, which does so too.

Jamba mixes in attention without positions and experts, in layers a fixed distance apart.
"""

from deltarule.models.block import mlp_kinds
from deltarule.models.config import ModelConfig
from deltarule.models.convert import names, options
from deltarule.models.convert.hybrid import in_words, places, stream
from deltarule.models.convert.names import flat
from deltarule.models.convert.options import Entry, Family, Fields, Options, Table


def mamba(state: str, taps: str, expand: str, rank: str, bias: str) -> Table:
    """Sizes of Mamba by the names of a family, after those of the stream."""

    def read_inside(fields: Fields, found: Options) -> Options:
        """Value channels, and those that the step size comes through."""
        hidden, through = found["hidden_size"], fields.take(rank, "auto")
        return {
            "head_v_dim": fields.integer(expand, 2) * hidden,
            "time_step_rank": -(-hidden // 16) if through == "auto" else through,
        }

    return (
        options.silent("d_inner", "d_model", "n_layer", "ssm_cfg"),
        options.integer(state, "head_k_dim", 16),
        options.integer(taps, "conv_size", 4, smallest=1),
        Entry(read_inside, lambda config: {
            expand: (config.head_v_dim or 0) // config.hidden_size or None,
            rank: config.time_step_rank or -(-config.hidden_size // 16),
        }),
        options.flag(bias, "conv_bias", True),
        options.fixed({"num_heads": 1, "output_gate": True}),
    )  # fmt: skip


def check_inner(config: ModelConfig) -> None:
    if config.num_heads != 1 or (config.head_v_dim or 0) % config.hidden_size:
        raise ValueError("num_heads must be 1 and head_v_dim a multiple of hidden_size")


MAMBA = (
    options.only({"use_bias": False, "rms_norm": True, "hidden_act": ("silu", "swish")}),
    options.silent("intermediate_size"),
    *options.sizes(),
    *mamba("state_size", "conv_kernel", "expand", "time_step_rank", "use_conv_bias"),
    options.fixed({"layer_types": "mamba1", "mlp_size": 0}),
    options.number("layer_norm_epsilon", "norm_eps", 1e-5),
    options.tied(True),
)
FALCON_MAMBA = (
    *MAMBA,
    options.number("mixer_rms_eps", "output_norm_eps", 1e-6),
    options.fixed({"mamba_inner_norm": "plain"}),
)


def read_periods(fields: Fields, found: Options) -> Options:
    """Which layers of Jamba have attention and which have experts."""
    layers = places(found)
    attention, sparse = (
        (fields.integer(f"{x}_layer_period", n, smallest=1), fields.integer(f"{x}_layer_offset", m))
        for x, n, m in (("attn", 8, 4), ("expert", 2, 1))
    )
    experts = fields.integer("num_experts", 16)
    chosen = fields.integer("num_experts_per_tok", 2)
    kinds = ["attention" if i % attention[0] == attention[1] else "mamba1" for i in layers]
    halves = ["sparse" if i % sparse[0] == sparse[1] and experts > 1 else "dense" for i in layers]
    own: Options = {"layer_types": tuple(kinds), "mlp_layer_types": tuple(halves)}
    if "sparse" in halves:
        own |= {"num_experts": experts, "num_experts_per_tok": chosen, "norm_topk_prob": False}
        own |= {"moe_intermediate_size": found["mlp_size"]}
    return own


def write_periods(config: ModelConfig) -> Options:
    attention = [i for i, x in enumerate(in_words(config, "mamba1")) if x == "full_attention"]
    sparse = [i for i, kind in enumerate(mlp_kinds(config)) if kind == "sparse"]
    own: Options = {
        "num_experts": max(config.num_experts, 1),
        "num_experts_per_tok": config.num_experts_per_tok,
    }
    for name, layers in (("attn", attention), ("expert", sparse)):
        # A distance that no layer reaches names one at most.
        period = layers[1] - layers[0] if len(layers) > 1 else config.num_layers + 1
        first = layers[0] if layers else config.num_layers
        own |= {f"{name}_layer_period": period, f"{name}_layer_offset": first}
    return own


JAMBA = (
    options.only({"mamba_proj_bias": False}),
    options.silent("layer_types", "layers_block_type", "layers_num_experts"),
    *stream(),
    *mamba("mamba_d_state", "mamba_d_conv", "mamba_expand", "mamba_dt_rank", "mamba_conv_bias"),
    options.integer("intermediate_size", "mlp_size", smallest=1),
    Entry(read_periods, write_periods),
    options.fixed({"partial_rotary_factor": 0.0, "mamba_inner_norm": "weighted"}),
)


def mixer(last: int) -> names.Names:
    """Mamba; the last map of the step size comes third where a norm is before it."""
    return {
        "in_proj": "v_proj g_proj", "conv1d": "v_conv", "x_proj": "a_proj.0 k_proj q_proj",
        "dt_proj": f"a_proj.{last}", "dt_proj.bias": names.Rows("dt_bias", form=flat),
        "out_proj": "o_proj", "A_log": names.Rows("A_log", form=lambda shape: shape[1:]),
        "D": names.Rows("D", form=flat),
        "b_layernorm": "k_norm", "c_layernorm": "q_norm",
        **({} if last == 1 else {"dt_layernorm": "a_proj.1"}),
    }  # fmt: skip


MIXED = names.Tensors(norm="final_layernorm", layer={
    "": {"input_layernorm": "mixer_norm", "pre_ff_layernorm": "mlp_norm"},
    "attention": names.ATTENTION,
    "mamba1": names.under("mamba.", mixer(2), "mixer."),
    "dense": names.under("feed_forward.", names.MLP, "mlp."),
    "sparse": names.under(
        "feed_forward.", {"router": "router", "experts.": names.Experts()}, "mlp."
    ),
})  # fmt: skip

FAMILIES = (
    Family(
        model_type="mamba", architecture="MambaForCausalLM", options=MAMBA,
        tensors=names.backbone({"mamba1": mixer(1)}), check=check_inner,
    ),
    Family(
        model_type="falcon_mamba", architecture="FalconMambaForCausalLM", options=FALCON_MAMBA,
        tensors=names.backbone({"mamba1": mixer(2)}), check=check_inner,
    ),
    Family(
        model_type="jamba", architecture="JambaForCausalLM", options=JAMBA, tensors=MIXED,
        check=check_inner,
    ),
)  # fmt: skip
