"""OLMo-hybrid: Gated DeltaNet with norms before, attention without positions with norms after."""

from collections.abc import Iterator
from typing import Any

from deltarule.models.config import ModelConfig
from deltarule.models.convert.family import Family
from deltarule.models.convert.fields import Fields
from deltarule.models.convert.hybrid import (
    outer_pieces,
    read_common,
    read_rope,
    write_common,
    write_rope,
)
from deltarule.models.convert.piece import Has, Piece, Shapes, filters, renamed

# Of the output norm of a linear layer, whatever rms_norm_eps is.
OUTPUT_NORM_EPS = 1e-5


def read(fields: Fields) -> ModelConfig:
    """From config.json to a configuration."""
    common = read_common(fields)
    heads = common["num_attention_heads"]
    key_heads = fields.integer("linear_num_key_heads", heads, smallest=1)
    size = fields.integer("linear_key_head_dim", int(0.75 * common["hidden_size"] / key_heads))
    rope: dict[str, Any] = {"partial_rotary_factor": 0.0}
    if fields.has("rope_parameters") or fields.has("rope_theta"):
        rope = read_rope(fields, 1.0)
    return ModelConfig(
        **common,
        **rope,
        num_heads=key_heads,
        num_v_heads=fields.integer("linear_num_value_heads", heads),
        head_k_dim=size,
        head_v_dim=fields.integer("linear_value_head_dim", 2 * size),
        attention_head_dim=fields.integer("head_dim", common["hidden_size"] // heads),
        beta_max=2.0 if fields.flag("linear_allow_neg_eigval", True) else 1.0,
        attention_qk_norm="all",
        output_norm_eps=OUTPUT_NORM_EPS,
        post_norm="attention",
    )


def write(config: ModelConfig) -> dict[str, Any]:
    """From a configuration to config.json."""
    rope = write_rope(config) if config.partial_rotary_factor else {"rope_parameters": None}
    return write_common(config) | rope | {"linear_allow_neg_eigval": config.beta_max == 2}


def pieces(config: ModelConfig, shapes: Shapes, has: Has) -> list[Piece]:
    """All stored tensors."""
    found = list(outer_pieces(config, has))
    for index, kind in enumerate(config.layer_types):
        layer, block = f"model.layers.{index}.", f"blocks.{index}."
        found += attention(layer, block, has) if kind == "attention" else recurrent(layer, block)
    return found


def attention(layer: str, block: str, has: Has) -> Iterator[Piece]:
    """A block of attention."""
    # transformers writes the first of these norms under the name of another.
    first = f"{layer}post_attention_layernorm.weight"
    other = f"{layer}feedforward_layer_norm.weight"
    yield Piece(other if has(other) else first, (f"{block}mixer_norm.weight",))
    yield Piece(f"{layer}post_feedforward_layernorm.weight", (f"{block}mlp_norm.weight",))
    same = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
    own = {f"{name}.weight": f"{name}.weight" for name in same}
    yield from renamed(f"{layer}self_attn.", f"{block}mixer.", own)


def recurrent(layer: str, block: str) -> Iterator[Piece]:
    """A block of Gated DeltaNet."""
    names = {
        "attention_layer_norm.weight": "mixer_norm.weight",
        "feedforward_layer_norm.weight": "mlp_norm.weight",
    }
    yield from renamed(layer, block, names)
    theirs, ours = f"{layer}linear_attn.", f"{block}mixer."
    own = {f"{letter}_proj.weight": f"{letter}_proj.weight" for letter in "qkvbago"}
    own |= {name: name for name in ("A_log", "dt_bias", "o_norm.weight")}
    yield from renamed(theirs, ours, own)
    for letter in "qkv":
        conv = f"{ours}{letter}_conv.weight"
        yield Piece(f"{theirs}{letter}_conv1d.weight", (conv,), form=filters)


FAMILY = Family(
    model_type="olmo_hybrid",
    architecture="OlmoHybridForCausalLM",
    read=read,
    write=write,
    pieces=pieces,
)
