"""RWKV-7 in the layout of flash-linear-attention: a layer there is two blocks here.

RWKV-7 and its feed-forward half, which looks back a token, each behind a norm of mean and variance.
"""

from typing import Any

from deltarule.models.config import ModelConfig
from deltarule.models.convert.family import Family
from deltarule.models.convert.fields import Fields
from deltarule.models.convert.hybrid import NO_TOKENS
from deltarule.models.convert.piece import Has, Piece, Shape, Shapes, flat, present, renamed
from deltarule.nn.rwkv7 import GROUP_NORM_EPS

RANKS = ("decay_low_rank_dim", "a_low_rank_dim", "v_low_rank_dim", "gate_low_rank_dim")
LAYERS = ("rwkv7", "channel_mix")


def read(fields: Fields) -> ModelConfig:
    """From config.json to a configuration."""
    fields.only("hidden_act", "sqrelu")
    fields.only("norm_bias", True)
    fields.only("attn", None)
    hidden = fields.integer("hidden_size", 2048, smallest=1)
    heads, size = fields.take("num_heads"), fields.integer("head_dim", 64, smallest=1)
    if heads not in (None, hidden // size):
        raise ValueError(f"num_heads must be hidden_size / head_dim={hidden // size}, got {heads}")
    eps = fields.number("norm_eps", 1e-5)
    if abs(size * eps - GROUP_NORM_EPS) > 1e-9:
        raise ValueError(f"norm_eps must be {GROUP_NORM_EPS} / head_dim={size}, got {eps}")
    layers = fields.integer("num_hidden_layers", 24)
    values = fields.listed("value_dim", []) or [hidden]
    if len({*map(str, values)}) > 1 or not isinstance(values[0], int):
        raise ValueError(f"value_dim must be one number for all layers, got {values!r}")
    ratio = fields.number("hidden_ratio", 4)
    inner = fields.integer("intermediate_size", 32 * -(-int(hidden * ratio) // 32), smallest=1)
    return ModelConfig(
        vocab_size=fields.integer("vocab_size", 32000),
        hidden_size=hidden,
        num_layers=2 * layers,
        layer_types=LAYERS,
        num_heads=hidden // size,
        head_k_dim=size,
        head_v_dim=values[0] // (hidden // size),
        output_gate=True,
        low_rank_dims=tuple(fields.integer(name) for name in RANKS),
        mlp_size=inner,
        mlp_layer_types="none",
        norm_type="layer",
        norm_eps=eps,
        embedding_norm=fields.flag("norm_first", True),
        tie_embeddings=fields.flag("tie_word_embeddings", False),
    )


def write(config: ModelConfig) -> dict[str, Any]:
    """From a configuration to config.json."""
    if config.low_rank_dims is None:
        raise ValueError("low_rank_dims must be given where one layer has no value of another")
    layers = config.num_layers // 2
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": layers,
        "num_heads": config.num_heads,
        "head_dim": config.head_k_dim,
        "value_dim": [config.num_heads * (config.head_v_dim or 0)] * layers,
        **dict(zip(RANKS, config.low_rank_dims, strict=True)),
        "intermediate_size": config.mlp_size,
        "hidden_act": "sqrelu",
        "norm_first": config.embedding_norm,
        "norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        **NO_TOKENS,
    }


def one_token(shape: Shape) -> Shape:
    """[D] as [1, 1, D]."""
    return 1, 1, *shape


def both(theirs: str, ours: str) -> dict[str, str]:
    """Weight and bias."""
    return {f"{theirs}.{name}": f"{ours}.{name}" for name in ("weight", "bias")}


def pieces(config: ModelConfig, shapes: Shapes, has: Has) -> list[Piece]:
    """All stored tensors."""
    names = {"model.embeddings.weight": "embedding.weight", "lm_head.weight": "head.weight"}
    names |= both("model.norm", "norm") | both("model.layers.0.pre_norm", "embedding_norm")
    found = list(renamed("", "", names))
    for index in range(config.num_layers // 2):
        layer, mixer = f"model.layers.{index}.", f"blocks.{2 * index}."
        network = f"blocks.{2 * index + 1}."
        found += renamed(layer, mixer, both("attn_norm", "mixer_norm"))
        found += renamed(layer, network, both("ffn_norm", "mixer_norm"))
        names = {
            "x_k": "shift_mix",
            "key.weight": "up_proj.weight",
            "value.weight": "o_proj.weight",
        }
        found += renamed(f"{layer}ffn.", f"{network}mixer.", names)
        found += attention(f"{layer}attn.", f"{mixer}mixer.", config.hidden_size)
    return present(found, shapes)


def attention(theirs: str, ours: str, hidden: int) -> list[Piece]:
    """RWKV-7 itself; the first layer has no v_lora."""
    found = [
        Piece(
            f"{theirs}x_{letter}",
            (f"{ours}shift_mix",),
            form=one_token,
            rows=(i * hidden, (i + 1) * hidden),
        )
        for i, letter in enumerate("rwkvag")
    ]
    names = {"r_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "o_proj": "o_proj"}
    # The last of a map with an activation in it comes third.
    maps = {"w": "a_proj.2", "a": "erase_proj.1", "v": "value_proj.1", "g": "g_proj.2"}
    for letter, last in maps.items():
        names |= {f"{letter}_lora.lora.0": f"{last[:-1]}0", f"{letter}_lora.lora.2": last}
    names = {f"{a}.weight": f"{b}.weight" for a, b in names.items()} | both("g_norm", "o_norm")
    flats = {
        "w_lora.lora.2.bias": "decay_bias", "a_lora.lora.2.bias": "erase_bias",
        "v_lora.lora.2.bias": "value_bias", "k_k": "erase_scale", "k_a": "replace_scale",
    }  # fmt: skip
    found += renamed(theirs, ours, names | {"r_k": "bonus"})
    return found + [Piece(theirs + a, (ours + b,), form=flat) for a, b in flats.items()]


FAMILY = Family(
    model_type="rwkv7", architecture="RWKV7ForCausalLM", read=read, write=write, pieces=pieces
)
