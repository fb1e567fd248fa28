"""RWKV-7 in the layout of flash-linear-attention: a layer there is two blocks here.

RWKV-7 and its feed-forward half, which looks back a token, each behind a norm of mean and variance.
"""

from deltarule.models.config import ModelConfig
from deltarule.models.convert import options
from deltarule.models.convert.names import Rows, Tensors, flat, same, under
from deltarule.models.convert.options import Entry, Family, Fields, Options
from deltarule.nn.checks import check_that
from deltarule.nn.token_shift import GROUP_NORM_EPS

# Channels that decay, erase, value and gate come through.
RANKS = ("decay_low_rank_dim", "a_low_rank_dim", "v_low_rank_dim", "gate_low_rank_dim")


def read_heads(fields: Fields, found: Options) -> Options:
    hidden, size = found["hidden_size"], found["head_k_dim"]
    heads = fields.take("num_heads")
    own = hidden // size
    check_that(heads in (None, own), f"num_heads must be hidden_size / head_dim={own}", heads)
    said, eps = f"norm_eps must be {GROUP_NORM_EPS} / head_dim={size}", found["norm_eps"]
    check_that(abs(size * eps - GROUP_NORM_EPS) <= 1e-9, said, eps)
    values = fields.listed("value_dim", []) or [hidden]
    alike = len({*map(str, values)}) == 1 and isinstance(values[0], int)
    check_that(alike, "value_dim must be one number for all layers", values)
    return {"num_heads": own, "head_v_dim": values[0] // own}


def read_blocks(fields: Fields, found: Options) -> Options:
    """Two blocks for each layer, and the width of the feed-forward half."""
    wide = found["hidden_size"] * fields.number("hidden_ratio", 4)
    inner = fields.integer("intermediate_size", 32 * -(-int(wide) // 32), smallest=1)
    return {"num_layers": 2 * found["num_layers"], "mlp_size": inner}


def write_ranks(config: ModelConfig) -> Options:
    if config.low_rank_dims is None:
        raise ValueError("low_rank_dims must be given for a model with one rwkv7 layer, got None")
    return dict(zip(RANKS, config.low_rank_dims, strict=True))


OPTIONS = (
    options.only({"hidden_act": "sqrelu", "norm_bias": True, "attn": None}),
    *options.sizes(vocab_size=32000, hidden_size=2048, num_layers=24),
    options.integer("head_dim", "head_k_dim", 64, smallest=1),
    options.number("norm_eps", "norm_eps", 1e-5),
    Entry(read_heads, lambda config: {
        "num_heads": config.num_heads,
        "value_dim": [config.num_heads * (config.head_v_dim or 0)] * (config.num_layers // 2),
    }),
    Entry(read_blocks, lambda config: {
        "num_hidden_layers": config.num_layers // 2, "intermediate_size": config.mlp_size,
    }),
    Entry(
        lambda fields, found: {"low_rank_dims": tuple(fields.integer(name) for name in RANKS)},
        write_ranks,
    ),
    options.flag("norm_first", "embedding_norm", True),
    options.tied(False),
    options.fixed(
        {
            "layer_types": ("rwkv7", "channel_mix"), "mlp_layer_types": "none",
            "norm_type": "layer", "output_gate": True,
        },
        {"hidden_act": "sqrelu"},
    ),
)  # fmt: skip

# Letters of low-rank maps, of which the last comes third where an activation is before it.
MAPS = {"w": ("a_proj", 2), "a": ("erase_proj", 1), "v": ("value_proj", 1), "g": ("g_proj", 2)}
ATTENTION = {
    **{
        f"x_{letter}": Rows("shift_mix", form=lambda shape: (1, 1, *shape), share=(i, 6))
        for i, letter in enumerate("rwkvag")
    },
    **{f"{letter}_lora.lora.0": f"{name}.0" for letter, (name, _) in MAPS.items()},
    **{f"{letter}_lora.lora.2": f"{name}.{last}" for letter, (name, last) in MAPS.items()},
    "w_lora.lora.2.bias": Rows("decay_bias", form=flat),
    "a_lora.lora.2.bias": Rows("erase_bias", form=flat),
    "v_lora.lora.2.bias": Rows("value_bias", form=flat),
    "k_k": Rows("erase_scale", form=flat), "k_a": Rows("replace_scale", form=flat),
    "r_k": "bonus", "r_proj": "q_proj", "g_norm": "o_norm", **same("k_proj", "v_proj", "o_proj"),
}  # fmt: skip
NETWORK = {"x_k": "shift_mix", "key": "up_proj", "value": "o_proj"}

FAMILY = Family(
    model_type="rwkv7", architecture="RWKV7ForCausalLM", options=OPTIONS,
    tensors=Tensors(
        embedding="embeddings", blocks=2, model={"model.layers.0.pre_norm": "embedding_norm"},
        layer={
            "rwkv7": {"attn_norm": "mixer_norm", **under("attn.", ATTENTION, "mixer.")},
            "channel_mix": {"ffn_norm": "mixer_norm", **under("ffn.", NETWORK, "mixer.")},
        },
    ),
)  # fmt: skip
