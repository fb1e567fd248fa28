"""Qwen3-Next and Qwen3.5, with and without experts: Gated DeltaNet and gated attention.

Qwen3-Next stores q, k, v and gate of a linear layer in one matrix, key head by key head, and its
b and a likewise; Qwen3.5 keeps them apart. Both store each head of attention's query with its gate.
"""

from collections.abc import Callable, Iterator
from typing import Any

from deltarule.models.block import mlp_kinds
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

# Of what stands beside the language model, and of the heads that predict further tokens.
BESIDE = (
    "image_token_id", "video_token_id", "vision_config", "vision_end_token_id",
    "vision_start_token_id",
)  # fmt: skip
FURTHER = ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "language_model_only")
EXPERTS = (
    "num_experts", "num_experts_per_tok", "moe_intermediate_size",
    "shared_expert_intermediate_size",
)  # fmt: skip


def read(fields: Fields, experts: dict[str, Any] | None = None) -> ModelConfig:
    """From config.json to a configuration, with options of experts if there are any."""
    fields.only("attn_output_gate", True)
    fields.drop(*FURTHER)
    key_heads = fields.integer("linear_num_key_heads", 16)
    return ModelConfig(
        **read_common(fields, 0 if experts else None),
        **(experts or {}),
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


def read_experts(fields: Fields) -> ModelConfig:
    """A model of which each layer but those named has experts, one shared expert among them."""
    dense = fields.listed("mlp_only_layers", [])
    step = fields.integer("decoder_sparse_step", 1, smallest=1)
    # A damaged number could ask for any amount of memory.
    layers = range(min(fields.integer("num_hidden_layers", keep=True), 10_000))
    sizes = {name: fields.integer(name, 0) for name in EXPERTS}
    sparse = [i not in dense and (i + 1) % step == 0 and sizes["num_experts"] > 0 for i in layers]
    normed = fields.flag("norm_topk_prob", True)
    if not any(sparse):
        return read(fields)
    kinds = tuple("sparse" if there else "dense" for there in sparse)
    own = {"mlp_layer_types": kinds, "norm_topk_prob": normed, "shared_expert_gate": True}
    return read(fields, sizes | own)


def read_3_5(fields: Fields) -> ModelConfig:
    """Qwen3.5, alone or beside a vision tower."""
    return read_text(fields, read)


def read_3_5_moe(fields: Fields) -> ModelConfig:
    """Qwen3.5 with experts, alone or beside a vision tower."""
    return read_text(fields, read_experts)


def read_text(fields: Fields, read: Callable[[Fields], ModelConfig]) -> ModelConfig:
    """The language model of a folder."""
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
    size = config.attention_head_dim or config.head_v_dim
    return write_common(config) | write_rope(config) | {"head_dim": size}


def write_experts(config: ModelConfig) -> dict[str, Any]:
    """The same with experts."""
    dense = [i for i, kind in enumerate(mlp_kinds(config)) if kind == "dense"]
    sizes = {name: getattr(config, name) or 0 for name in EXPERTS}
    sizes |= {"norm_topk_prob": config.norm_topk_prob, "mlp_only_layers": dense}
    return write(config) | sizes | {"decoder_sparse_step": 1}


def write_3_5_moe(config: ModelConfig) -> dict[str, Any]:
    """The same where no layer is without experts."""
    fields = write_experts(config)
    if fields.pop("mlp_only_layers"):
        raise ValueError("mlp_layer_types must be sparse in every layer")
    # Its class divides by the sum of the chosen scores, whatever config.json says.
    for name in ("decoder_sparse_step", "norm_topk_prob", "intermediate_size"):
        del fields[name]
    return fields


def pieces_next(config: ModelConfig, shapes: Shapes, has: Has) -> list[Piece]:
    """The stored tensors of Qwen3-Next."""
    return list(pieces(config, has, together=True))


def pieces_3_5(config: ModelConfig, shapes: Shapes, has: Has) -> list[Piece]:
    """The stored tensors of Qwen3.5."""
    return list(pieces(config, has, together=False))


def pieces(config: ModelConfig, has: Has, *, together: bool) -> Iterator[Piece]:
    """All stored tensors; `together` is Qwen3-Next's way of keeping a linear layer's matrices."""
    yield from outer_pieces(config, has)
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
    read=read_experts,
    write=write_experts,
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
QWEN3_5_MOE = Family(
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    read=read_3_5_moe,
    write=write_3_5_moe,
    pieces=pieces_3_5,
    ignored=("mtp.", "visual."),
)
