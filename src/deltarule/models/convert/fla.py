"""Research checkpoints in the layout of flash-linear-attention: names are exchanged, no value is.

Each family is one mixer in every block; the rest of the model is the same for all of them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from deltarule.models.config import ModelConfig
from deltarule.models.convert.family import Family
from deltarule.models.convert.fields import Fields
from deltarule.models.convert.piece import Piece, Shapes, filters, flat, last_joined, plain

Options = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """What one family of that layout says of its mixer.

    Args:
        layers: From the options of its own to the options of `ModelConfig`.
        options: From a configuration back to the options of its own.
        names: Its names of submodules of the mixer, by ours, where they differ.
        gated_norm: Its name of the norm of a gated output.
        norm: Its name of the norm of an output without a gate.
        hidden_ratio: The width of the MLP over 2/3 of the stream, where none is given.
        norm_eps: Where none is given.
    """

    architecture: str
    layers: Callable[[Fields, int], Options]
    options: Callable[[ModelConfig], Options]
    names: Mapping[str, str]
    gated_norm: str = "o_norm"
    norm: str = "o_norm"
    hidden_ratio: int = 4
    norm_eps: float = 1e-6


def family(model_type: str, dialect: Dialect) -> Family:
    """Add to a dialect what all families of this layout share."""
    return Family(
        model_type=model_type,
        architecture=dialect.architecture,
        read=lambda fields: read(fields, dialect),
        write=lambda config: write(config, dialect),
        pieces=lambda config, shapes, has: pieces(config, shapes, dialect),
    )


def read(fields: Fields, dialect: Dialect) -> ModelConfig:
    """From config.json to a configuration."""
    hidden_size = fields.integer("hidden_size")
    fields.only("hidden_act", "swish", "silu")
    fields.only("attn", None)
    fields.only("attnres_block_size", None)
    ratio = fields.number("hidden_ratio", dialect.hidden_ratio)
    return ModelConfig(
        vocab_size=fields.integer("vocab_size", 32000),
        hidden_size=hidden_size,
        num_layers=fields.integer("num_hidden_layers"),
        mlp_size=fields.integer("intermediate_size", mlp_size(hidden_size, ratio), smallest=1),
        norm_eps=fields.number("norm_eps", dialect.norm_eps),
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        **dialect.layers(fields, hidden_size),
    )


def mlp_size(hidden_size: int, ratio: float) -> int:
    """2/3 of ratio times the stream, up to a multiple of 256."""
    return 256 * -(-int(hidden_size * ratio * 2 / 3) // 256)


def write(config: ModelConfig, dialect: Dialect) -> Options:
    """From a configuration to config.json."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "intermediate_size": config.mlp_size,
        "norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        # Unless they are known, no token is special.
        "bos_token_id": None,
        "eos_token_id": None,
        "hidden_act": "swish",
        **dialect.options(config),
    }


def pieces(config: ModelConfig, shapes: Shapes, dialect: Dialect) -> list[Piece]:
    """One stored tensor for each parameter."""
    return [piece(name, config, dialect) for name in shapes]


# Of the model, by the first word of ours.
MODEL = {"embedding": "model.embeddings", "norm": "model.norm", "head": "lm_head"}


def piece(name: str, config: ModelConfig, dialect: Dialect) -> Piece:
    """The stored tensor of one parameter."""
    first, _, rest = name.partition(".")
    if first in MODEL:
        return Piece(f"{MODEL[first]}.{rest}", (name,))
    index, half, own = rest.split(".", 2)
    layer = f"model.layers.{index}"
    if half != "mixer":
        half = half.replace("mixer", "attn")
        return Piece(f"{layer}.{half}.{own}", (name,))
    if own == "bound_logits":
        return Piece("model.lower_bounds", (name,), form=last_joined)
    module, dot, leaf = own.partition(".")
    norm = dialect.gated_norm if config.output_gate else dialect.norm
    names = {"o_norm": norm} | dict(dialect.names)
    form = filters if module.endswith("_conv") else flat if own == "dt_bias" else plain
    stored = names.get(module, module)
    stored = stored.removesuffix("_conv") + "_conv1d" if stored.endswith("_conv") else stored
    return Piece(f"{layer}.attn.{stored}{dot}{leaf}", (name,), form=form)


def conv_size(fields: Fields, used: bool) -> int:
    """Taps, 0 without a convolution."""
    taps = fields.integer("conv_size", 4)
    fields.only("conv_bias", False)
    return taps if fields.flag("use_short_conv", used) else 0


def conv_options(config: ModelConfig) -> Options:
    """Back from `conv_size`."""
    return {"use_short_conv": config.conv_size != 0, "conv_size": config.conv_size or 4}


def expanded(fields: Fields, hidden_size: int, k: float, v: float) -> Options:
    """Heads whose channels are given as shares of the stream."""
    heads = fields.integer("num_heads")
    keys, values = (
        round(hidden_size * fields.number(name, share))
        for name, share in (("expand_k", k), ("expand_v", v))
    )
    for name, size in (("expand_k", keys), ("expand_v", values)):
        if heads < 1 or size % heads:
            raise ValueError(f"{name} must give {heads} heads equal channels, got {size} in all")
    return {"num_heads": heads, "head_k_dim": keys // heads, "head_v_dim": values // heads}


def expansion(config: ModelConfig) -> Options:
    """Back from `expanded`."""
    heads, hidden = config.num_heads, config.hidden_size
    keys, values = (heads * (size or 0) for size in (config.head_k_dim, config.head_v_dim))
    return {"num_heads": heads, "expand_k": keys / hidden, "expand_v": values / hidden}


def sized(fields: Fields, heads: int, size: int, expand_v: float) -> Options:
    """Heads whose channels are given."""
    size = fields.integer("head_dim", size)
    return {
        "num_heads": fields.integer("num_heads", heads),
        "head_k_dim": size,
        "head_v_dim": int(size * fields.number("expand_v", expand_v)),
    }


def size_options(config: ModelConfig) -> Options:
    """Back from `sized`."""
    size, value_size = config.head_k_dim or 1, config.head_v_dim or 1
    return {"num_heads": config.num_heads, "head_dim": size, "expand_v": value_size / size}


def negative(fields: Fields) -> Options:
    """Write strengths up to 1, or up to 2."""
    return {"beta_max": 2.0 if fields.flag("allow_neg_eigval", False) else 1.0}


# Down to where its kernels for a bounded decay go.
SAFE = -5.0
# DeltaNet's words for what q and k go through, and ours.
ACTIVATIONS = {"silu": None, "elu": "elu", "relu": "relu", "identity": "identity"}
FEATURE_MAPS = {"identity": None, "elu": "elu", "relu": "relu"}
NORMS = {"l2": None, "sum": "l1"}


def delta_net(fields: Fields, hidden_size: int) -> Options:
    """DeltaNet."""
    fields.only("use_beta", True)
    fields.only("use_output_norm", True)
    activation, norm = fields.take("qk_activation", "silu"), fields.take("qk_norm", "l2")
    if activation not in ACTIVATIONS or norm not in NORMS:
        raise ValueError(
            f"qk_activation must be one of {', '.join(ACTIVATIONS)} and qk_norm one of "
            f"{', '.join(NORMS)}, got {activation!r} and {norm!r}"
        )
    gate = {"output_gate": fields.flag("use_gate", False)}
    maps = {"feature_map": ACTIVATIONS[activation], "qk_norm": NORMS[norm]}
    sizes = expanded(fields, hidden_size, 1, 1) | {"conv_size": conv_size(fields, True)}
    return {"layer_types": "deltanet"} | sizes | gate | maps | negative(fields)


def delta_net_options(config: ModelConfig) -> Options:
    """Back from `delta_net`."""
    activation = {ours: theirs for theirs, ours in ACTIVATIONS.items()}.get(config.feature_map)
    norm = {ours: theirs for theirs, ours in NORMS.items()}.get(config.qk_norm)
    words = {"qk_activation": activation, "qk_norm": norm}
    flags = {"use_gate": config.output_gate, "allow_neg_eigval": config.beta_max == 2}
    return expansion(config) | conv_options(config) | words | flags


def gated_deltanet(fields: Fields, hidden_size: int) -> Options:
    """Gated DeltaNet."""
    fields.only("output_gate_activation", "swish", "silu")
    sizes = sized(fields, 6, 256, 2) | {"conv_size": conv_size(fields, True)}
    sizes |= {"num_v_heads": fields.integer("num_v_heads", sizes["num_heads"])}
    gate = {"output_gate": fields.flag("use_gate", True)}
    return {"layer_types": "gated_deltanet"} | sizes | gate | negative(fields)


def gated_deltanet_options(config: ModelConfig) -> Options:
    """Back from `gated_deltanet`."""
    flags = {"use_gate": config.output_gate, "allow_neg_eigval": config.beta_max == 2}
    heads = {"num_v_heads": config.num_v_heads}
    return size_options(config) | heads | conv_options(config) | flags


def kda(fields: Fields, hidden_size: int) -> Options:
    """Kimi Delta Attention."""
    bound = fields.take("lower_bound")
    # What kernels may count on, and so only with a bound.
    if fields.flag("safe_gate", False) and bound is None:
        raise ValueError("lower_bound must be given with safe_gate, got None")
    sizes = sized(fields, 16, 128, 1) | {"conv_size": conv_size(fields, True)}
    sizes |= {"num_v_heads": fields.integer("num_v_heads", sizes["num_heads"])}
    own = {"layer_types": "kda", "output_gate": True, "gate_lower_bound": bound}
    return own | sizes | negative(fields)


def kda_options(config: ModelConfig) -> Options:
    """Back from `kda`."""
    flags: Options = {"num_v_heads": config.num_v_heads, "allow_neg_eigval": config.beta_max == 2}
    if (bound := config.gate_lower_bound) is not None:
        flags |= {"safe_gate": bound >= SAFE, "lower_bound": bound}
    return size_options(config) | conv_options(config) | flags


def deltaproduct(fields: Fields, hidden_size: int) -> Options:
    """DeltaProduct, with a decay or without."""
    gated = fields.flag("use_forget_gate", False)
    sizes = sized(fields, 6, 256, 2) | {"conv_size": conv_size(fields, True)}
    steps = {"n_steps": fields.integer("num_householder", 1)}
    gate = {"output_gate": fields.flag("use_output_gate", True)}
    name = {"layer_types": "gated_delta_product" if gated else "delta_product"}
    return name | sizes | steps | gate | negative(fields)


def deltaproduct_options(config: ModelConfig) -> Options:
    """Back from `deltaproduct`."""
    flags = {
        "use_forget_gate": config.layer_types[0] == "gated_delta_product",
        "use_output_gate": config.output_gate,
        "allow_neg_eigval": config.beta_max == 2,
        "num_householder": config.n_steps,
    }
    return size_options(config) | conv_options(config) | flags


def gla(fields: Fields, hidden_size: int) -> Options:
    """Gated Linear Attention."""
    for name, only in {"use_gk": True, "use_gv": False, "clamp_min": None}.items():
        fields.only(name, only)
    taps = {"conv_size": conv_size(fields, False)}
    return {"layer_types": "gla"} | decaying(fields, hidden_size, 0.5, 1) | taps


def gla_options(config: ModelConfig) -> Options:
    """Back from `gla`."""
    return decaying_options(config) | conv_options(config)


def retnet(fields: Fields, hidden_size: int) -> Options:
    """RetNet, whose layers have no convolution whatever its options say."""
    fields.drop("use_short_conv", "conv_size")
    return {"layer_types": "retnet", "conv_size": 0} | decaying(fields, hidden_size, 1, 2)


def decaying(fields: Fields, hidden_size: int, k: float, v: float) -> Options:
    """What GLA and RetNet share."""
    fields.only("num_kv_heads", None)
    fields.only("feature_map", None)
    gate = {"output_gate": fields.flag("use_output_gate", True)}
    return expanded(fields, hidden_size, k, v) | gate


def decaying_options(config: ModelConfig) -> Options:
    """Back from `decaying`."""
    return expansion(config) | {"use_output_gate": config.output_gate}


def linear_attn(fields: Fields, hidden_size: int) -> Options:
    """Linear attention."""
    fields.only("num_kv_heads", None)
    for name in ("norm_q", "norm_k", "norm_feature_map", "tie_feature_map_qk"):
        fields.only(name, False)
    given = fields.take("feature_map", "elementwise_product")
    if given not in FEATURE_MAPS:
        raise ValueError(f"feature_map must be one of {', '.join(FEATURE_MAPS)}, got {given!r}")
    sizes = expanded(fields, hidden_size, 1, 1)
    return {"layer_types": "linear_attention", "feature_map": FEATURE_MAPS[given]} | sizes


def linear_attn_options(config: ModelConfig) -> Options:
    """Back from `linear_attn`."""
    return expansion(config) | {"feature_map": config.feature_map or "identity"}


FAMILIES = {
    name: family(name, dialect)
    for name, dialect in {
        "delta_net": Dialect(
            architecture="DeltaNetForCausalLM", layers=delta_net, options=delta_net_options,
            names={},
        ),
        "gated_deltanet": Dialect(
            architecture="GatedDeltaNetForCausalLM", layers=gated_deltanet,
            options=gated_deltanet_options, names={},
        ),
        "kda": Dialect(
            architecture="KDAForCausalLM", layers=kda, options=kda_options,
            names={"a_proj": "f_proj"},
        ),
        "gated_deltaproduct": Dialect(
            architecture="GatedDeltaProductForCausalLM", layers=deltaproduct,
            options=deltaproduct_options, names={},
        ),
        "gla": Dialect(
            architecture="GLAForCausalLM", layers=gla, options=gla_options,
            names={"a_proj": "gk_proj"}, gated_norm="g_norm_swish_gate", norm="g_norm",
        ),
        "retnet": Dialect(
            architecture="RetNetForCausalLM", layers=retnet, options=decaying_options, names={},
            gated_norm="g_norm_swish_gate", norm="g_norm", hidden_ratio=2,
        ),
        "linear_attn": Dialect(
            architecture="LinearAttentionForCausalLM", layers=linear_attn,
            options=linear_attn_options, names={"o_norm": "norm"},
        ),
    }.items()
}  # fmt: skip
