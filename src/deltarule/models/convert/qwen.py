"""Qwen3-Next and Qwen3.5 without experts: Gated DeltaNet and gated attention, norms less one.

Qwen3-Next stores q, k, v and gate of a linear layer in one matrix, key head by key head, and its
b and a likewise; Qwen3.5 keeps them apart. Both store each head of attention's query with its gate.
"""

from collections.abc import Iterator
from typing import Any

from deltarule.models.config import ModelConfig
from deltarule.models.convert.family import Family
from deltarule.models.convert.fields import Fields
from deltarule.models.convert.hybrid import (
    outer_pieces,
    read_common,
    read_rope,
    renamed,
    write_common,
)
from deltarule.models.convert.piece import Piece, Shapes, filters

# Of what stands beside the language model, and of the heads that predict further tokens.
BESIDE = (
    "image_token_id", "video_token_id", "vision_config", "vision_end_token_id",
    "vision_start_token_id",
)  # fmt: skip
FURTHER = ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "language_model_only")
EXPERTS = (
    "decoder_sparse_step", "mlp_only_layers", "moe_intermediate_size", "norm_topk_prob",
    "num_experts", "num_experts_per_tok", "shared_expert_intermediate_size",
)  # fmt: skip


def read(fields: Fields) -> ModelConfig:
    """From config.json to a configuration."""
    fields.only("attn_output_gate", True)
    fields.drop(*FURTHER)
    key_heads = fields.integer("linear_num_key_heads", 16)
    return ModelConfig(
        **read_common(fields),
        **read_rope(fields, 0.25),
        num_heads=key_heads,
        num_v_heads=fields.integer("linear_num_value_heads", 32),
        head_k_dim=fields.integer("linear_key_head_dim", 128),
        head_v_dim=fields.integer("linear_value_head_dim", 128),
        beta_max=1.0,
        attention_head_dim=fields.integer("head_dim", 256),
        attention_qk_norm="head",
        attention_gate=True,
        zero_centered_norm=True,
    )


def read_next(fields: Fields) -> ModelConfig:
    """Qwen3-Next, if every layer's MLP is dense."""
    dense = fields.take("mlp_only_layers", [])
    layers = range(min(fields.integer("num_hidden_layers", keep=True), 10_000))
    experts = fields.integer("num_experts", 512)
    if experts and not (isinstance(dense, list) and {*layers} <= {*dense}):
        raise ValueError(
            f"num_experts must be 0 or mlp_only_layers name every layer, got {experts}: "
            "no option of CausalLM says experts"
        )
    fields.drop(*EXPERTS)
    return read(fields)


def read_3_5(fields: Fields) -> ModelConfig:
    """Qwen3.5, alone or beside a vision tower."""
    text = fields.take("text_config")
    if text is None:
        return read(fields)
    if not isinstance(text, dict):
        raise ValueError(f"text_config must be an object, got {text!r}")
    fields.drop(*BESIDE)
    tied = fields.flag("tie_word_embeddings", text.get("tie_word_embeddings", False))
    inner = Fields(text | {"tie_word_embeddings": tied})
    config = read(inner)
    inner.done()
    return config


def write(config: ModelConfig) -> dict[str, Any]:
    """From a configuration to config.json."""
    rope = {
        "rope_type": "default",
        "rope_theta": config.rope_theta,
        "partial_rotary_factor": config.partial_rotary_factor,
    }
    size = config.attention_head_dim or config.head_v_dim
    return write_common(config) | {"head_dim": size, "rope_parameters": rope}


def write_next(config: ModelConfig) -> dict[str, Any]:
    """The same, and no experts."""
    return write(config) | {"num_experts": 0, "mlp_only_layers": list(range(config.num_layers))}


def pieces_next(config: ModelConfig, shapes: Shapes) -> list[Piece]:
    """The stored tensors of Qwen3-Next."""
    return list(pieces(config, together=True))


def pieces_3_5(config: ModelConfig, shapes: Shapes) -> list[Piece]:
    """The stored tensors of Qwen3.5."""
    return list(pieces(config, together=False))


def pieces(config: ModelConfig, *, together: bool) -> Iterator[Piece]:
    """All stored tensors; `together` is Qwen3-Next's way of keeping a linear layer's matrices."""
    yield from outer_pieces(config)
    norms = {"input_layernorm": "mixer_norm", "post_attention_layernorm": "mlp_norm"}
    for index, kind in enumerate(config.layer_types):
        layer, block = f"model.layers.{index}.", f"blocks.{index}."
        names = {f"{theirs}.weight": f"{ours}.weight" for theirs, ours in norms.items()}
        yield from renamed(layer, block, names)
        theirs, ours = f"{layer}linear_attn.", f"{block}mixer."
        if kind == "attention":
            yield from attention(f"{layer}self_attn.", ours, config.num_attention_heads or 1)
        elif together:
            yield from joined(theirs, ours, config.num_heads)
            yield from recurrent(theirs, ours)
        else:
            yield from apart(theirs, ours)
            yield from recurrent(theirs, ours)


def weights(ours: str, letters: str, kind: str = "proj") -> tuple[str, ...]:
    """Names of the weights of several projections or convolutions."""
    return tuple(f"{ours}{letter}_{kind}.weight" for letter in letters)


def joined(theirs: str, ours: str, heads: int) -> Iterator[Piece]:
    """Two matrices, key head by key head."""
    yield Piece(f"{theirs}in_proj_qkvz.weight", weights(ours, "qkvg"), groups=heads)
    yield Piece(f"{theirs}in_proj_ba.weight", weights(ours, "ba"), groups=heads)


def apart(theirs: str, ours: str) -> Iterator[Piece]:
    """Four matrices."""
    for name, letters in {"qkv": "qkv", "z": "g", "b": "b", "a": "a"}.items():
        yield Piece(f"{theirs}in_proj_{name}.weight", weights(ours, letters))


def recurrent(theirs: str, ours: str) -> Iterator[Piece]:
    """What the linear layers of both have beside their matrices."""
    yield Piece(f"{theirs}conv1d.weight", weights(ours, "qkv", "conv"), form=filters)
    names = {
        "A_log": "A_log", "dt_bias": "dt_bias", "norm.weight": "o_norm.weight",
        "out_proj.weight": "o_proj.weight",
    }  # fmt: skip
    yield from renamed(theirs, ours, names)


def attention(theirs: str, ours: str, heads: int) -> Iterator[Piece]:
    """Each head's query lies with its gate."""
    yield Piece(f"{theirs}q_proj.weight", weights(ours, "qg"), groups=heads)
    same = ("k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
    yield from renamed(theirs, ours, {f"{name}.weight": f"{name}.weight" for name in same})


QWEN3_NEXT = Family(
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    read=read_next,
    write=write_next,
    pieces=pieces_next,
    ignored=("mtp.",),
)
QWEN3_5 = Family(
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    read=read_3_5,
    write=write,
    pieces=pieces_3_5,
    ignored=("mtp.", "visual."),
)
