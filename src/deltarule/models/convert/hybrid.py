"""What hybrids of recurrent layers and attention share in the layout of transformers."""

from collections.abc import Iterator
from typing import Any

from deltarule.models.block import mlp_kinds
from deltarule.models.config import ModelConfig
from deltarule.models.convert.experts import expert_pieces
from deltarule.models.convert.fields import Fields
from deltarule.models.convert.piece import Has, Piece, renamed

Options = dict[str, Any]
MATRICES = tuple(f"{name}_proj.weight" for name in ("gate", "up", "down"))
# Words of config.json, those of older ones among them, by ours.
ATTENTION = ("full_attention", "attention")
RECURRENT = ("linear_attention", "mamba")
# Unless they are known, no token is special.
NO_TOKENS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
# How a model was trained or drawn.
DRAWN = (
    "attention_dropout", "hidden_dropout", "linear_a_log_max", "linear_a_log_min",
    "linear_dt_init_floor", "linear_dt_max", "linear_dt_min", "mamba_ssm_dtype",
    "num_logits_to_keep", "output_router_logits", "router_aux_loss_coef", "z_loss_coefficient",
)  # fmt: skip


def read_common(fields: Fields, dense: int | None = None) -> Options:
    """What all have, and Gated DeltaNet's options of their names.

    `dense` is the size of an MLP where none is given; None: it is needed.
    """
    num_layers = fields.integer("num_hidden_layers", keep=True)
    return read_stream(fields) | {
        "layer_types": read_layers(fields, num_layers),
        "mlp_size": fields.integer("intermediate_size", dense),
        "conv_size": fields.integer("linear_conv_kernel_dim", 4, smallest=1),
        "output_gate": True,
    }


def read_stream(fields: Fields, eps: str = "rms_norm_eps", otherwise: float = 1e-6) -> Options:
    """Sizes of the stream and of attention; `eps` of the norms is `otherwise` if not given."""
    fields.only("hidden_act", "silu", "swish")
    fields.only("attention_bias", False)
    fields.drop(*DRAWN)
    heads = fields.integer("num_attention_heads", smallest=1)
    return {
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": fields.integer("hidden_size"),
        "num_layers": fields.integer("num_hidden_layers"),
        "num_attention_heads": heads,
        "num_kv_heads": fields.integer("num_key_value_heads", heads),
        "norm_eps": fields.number(eps, otherwise),
        "tie_embeddings": fields.flag("tie_word_embeddings", False),
    }


def write_stream(config: ModelConfig, eps: str = "rms_norm_eps") -> Options:
    """Back from `read_stream`."""
    # Where a model has no attention, its sizes say nothing.
    heads = config.num_attention_heads or config.num_heads
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": config.num_kv_heads or heads,
        eps: config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        **NO_TOKENS,
    }


def words(given: object, known: dict[str, str], num_layers: int) -> tuple[str, ...]:
    """The parts of each layer, from a list of a word for each."""
    if not isinstance(given, list) or not all(kind in known for kind in given):
        raise ValueError(f"layer_types must be a list of {', '.join(known)}, got {given!r}")
    if len(given) != num_layers:
        raise ValueError(f"layer_types must name {num_layers} layers, got {len(given)}")
    return tuple(known[kind] for kind in given)


def mixers(recurrent: str) -> dict[str, str]:
    """Mixers by their words."""
    return dict.fromkeys(RECURRENT, recurrent) | dict.fromkeys(ATTENTION, "attention")


def in_words(config: ModelConfig, recurrent: str) -> list[str]:
    """The words of a model's layers."""
    known = {recurrent: RECURRENT[0], "attention": ATTENTION[0]}
    if unknown := {*config.layer_types} - {*known}:
        raise ValueError(f"layer_types must be of {' and '.join(known)}, got {sorted(unknown)}")
    return [known[name] for name in config.layer_types]


def read_layers(fields: Fields, num_layers: int) -> tuple[str, ...]:
    """The mixer of each layer, from their list or from the distance of two of attention."""
    every = fields.integer("full_attention_interval", 4, smallest=1)
    # A damaged number could ask for any amount of memory.
    regular = [
        "linear_attention" if (i + 1) % every else "full_attention"
        for i in range(min(num_layers, 10_000))
    ]
    return words(fields.take("layer_types", regular), mixers("gated_deltanet"), len(regular))


def read_rope(fields: Fields, share: float) -> Options:
    """Wavelengths and the share of channels that turn; without `rope_parameters` in either form."""
    fields.only("rope_scaling", None)
    given = fields.take("rope_parameters", {})
    if not isinstance(given, dict):
        raise ValueError(f"rope_parameters must be an object, got {given!r}")
    rope = Fields(given)
    rope.only("rope_type", "default")
    # Of images and videos; the positions of text are the same on all axes.
    rope.drop("mrope_section", "mrope_interleaved", "type")
    theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
    factor = fields.number("partial_rotary_factor", share)
    factor = rope.number("partial_rotary_factor", factor)
    rope.done()
    return {"rope_theta": float(theta), "partial_rotary_factor": factor}


def write_common(config: ModelConfig) -> Options:
    """Back from `read_common`."""
    return write_stream(config) | {
        "layer_types": in_words(config, "gated_deltanet"),
        "intermediate_size": config.mlp_size,
        "linear_conv_kernel_dim": config.conv_size,
        "linear_num_key_heads": config.num_heads,
        "linear_num_value_heads": config.num_v_heads,
        "linear_key_head_dim": config.head_k_dim,
        "linear_value_head_dim": config.head_v_dim,
        "hidden_act": "silu",
    }


def write_rope(config: ModelConfig) -> Options:
    """Back from `read_rope`."""
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    share = {"partial_rotary_factor": config.partial_rotary_factor}
    return {"rope_parameters": rope | share}


def outer_pieces(config: ModelConfig, has: Has) -> Iterator[Piece]:
    """Embedding, last norm, head and the MLPs or experts."""
    yield Piece("model.embed_tokens.weight", ("embedding.weight",))
    yield Piece("model.norm.weight", ("norm.weight",))
    if not config.tie_embeddings:
        yield Piece("lm_head.weight", ("head.weight",))
    for index, kind in enumerate(mlp_kinds(config)):
        theirs, ours = f"model.layers.{index}.mlp.", f"blocks.{index}.mlp."
        if kind == "dense":
            yield from renamed(theirs, ours, {name: name for name in MATRICES})
            continue
        names = {"gate.weight": "router.weight", "shared_expert_gate.weight": "shared_gate.weight"}
        names |= {f"shared_expert.{name}": f"shared.{name}" for name in MATRICES}
        yield from renamed(theirs, ours, names)
        yield from expert_pieces(f"{theirs}experts.", ours, config, has)
