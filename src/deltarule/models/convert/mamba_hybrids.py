"""Hybrids of Mamba-2 and attention: in turns (Bamba, Granite-4-H) or side by side (Falcon-H1)."""

from collections.abc import Callable, Iterator
from typing import Any

from deltarule.models.block import mlp_kinds
from deltarule.models.config import ModelConfig
from deltarule.models.convert.family import Family
from deltarule.models.convert.fields import Fields
from deltarule.models.convert.hybrid import (
    ATTENTION,
    MATRICES,
    in_words,
    mixers,
    read_rope,
    read_stream,
    words,
    write_rope,
    write_stream,
)
from deltarule.models.convert.mamba2 import NO_LIMIT, mixer_pieces
from deltarule.models.convert.piece import Has, Piece, Shapes, present, renamed

Options = dict[str, Any]
SELF_ATTENTION = {f"{x}_proj.weight": f"{x}_proj.weight" for x in "qkvo"}
NORMS = {"input_layernorm.weight": "mixer_norm.weight"}


def read_mamba(fields: Fields) -> Options:
    """Options of Mamba-2 that begin with `mamba_`."""
    fields.only("mamba_proj_bias", False)
    fields.only("mlp_bias", False)
    fields.only("time_step_limit", *NO_LIMIT)
    fields.drop("mamba_chunk_size")
    heads = fields.integer("mamba_n_heads", 128, smallest=1)
    expanded = fields.integer("mamba_expand", 2) * fields.integer("hidden_size", keep=True)
    inner = fields.integer("mamba_d_ssm", expanded)
    size = fields.take("mamba_d_head", "auto")
    return {
        "num_heads": heads,
        "n_groups": fields.integer("mamba_n_groups", 1),
        "head_k_dim": fields.integer("mamba_d_state", 256),
        "head_v_dim": inner // heads if size == "auto" else size,
        "conv_size": fields.integer("mamba_d_conv", 4, smallest=1),
        "conv_bias": fields.flag("mamba_conv_bias", True),
        "output_gate": True,
    }


def write_mamba(config: ModelConfig) -> Options:
    """Back from `read_mamba`."""
    inner = config.num_heads * (config.head_v_dim or 0)
    return {
        "mamba_n_heads": config.num_heads,
        "mamba_n_groups": config.n_groups,
        "mamba_d_state": config.head_k_dim,
        "mamba_d_head": config.head_v_dim,
        "mamba_d_conv": config.conv_size,
        "mamba_conv_bias": config.conv_bias,
        "mamba_expand": inner // config.hidden_size,
        "intermediate_size": config.mlp_size,
    }


def expands(config: ModelConfig) -> ModelConfig:
    """Refuse an inside of Mamba-2 that is no multiple of the stream."""
    if config.num_heads * (config.head_v_dim or 0) % config.hidden_size:
        raise ValueError("num_heads * head_v_dim must be a multiple of hidden_size")
    return config


def digits(x: float) -> float:
    """Twelve digits, so that a factor that is divided and multiplied again comes back."""
    return float(f"{x:.12g}")


def read_bamba(fields: Fields) -> ModelConfig:
    """From config.json to a configuration."""
    num_layers = fields.integer("num_hidden_layers", 32, keep=True)
    attention = fields.listed("attn_layer_indices", [])
    fields.drop("layer_types", "layers_block_type", "attn_rotary_emb")
    kinds = ["attention" if i in attention else "mamba2" for i in range(min(num_layers, 10_000))]
    return ModelConfig(
        **read_mamba(fields), **read_stream(fields, otherwise=1e-5), **read_rope(fields, 0.5),
        layer_types=tuple(kinds), mlp_size=fields.integer("intermediate_size", smallest=1),
    )  # fmt: skip


def write_bamba(config: ModelConfig) -> Options:
    """From a configuration to config.json."""
    kinds = in_words(expands(config), "mamba2")
    layers = [i for i, kind in enumerate(kinds) if kind in ATTENTION]
    own = write_mamba(config) | {"attn_layer_indices": layers}
    return write_stream(config) | own | write_rope(config)


def read_granite(fields: Fields) -> ModelConfig:
    """From config.json to a configuration."""
    fields.only("normalization_function", "rmsnorm")
    fields.only("init_method", "mup")
    num_layers = fields.integer("num_hidden_layers", keep=True)
    kinds = fields.take("layer_types", ["mamba"] * min(num_layers, 10_000))
    turned = fields.take("position_embedding_type") == "rope"
    rope = read_rope(fields, 1.0)
    experts = fields.integer("num_local_experts", 8)
    shared = fields.integer("shared_intermediate_size", 1024)
    chosen, inner = fields.integer("num_experts_per_tok", 2), fields.integer("intermediate_size")
    mlp: Options = {"mlp_size": shared}
    if experts:
        mlp = {
            "mlp_layer_types": "sparse", "num_experts": experts, "num_experts_per_tok": chosen,
            "moe_intermediate_size": inner, "shared_expert_intermediate_size": shared,
            "mlp_size": 0,
        }  # fmt: skip
    return ModelConfig(
        **read_mamba(fields), **read_stream(fields), **mlp,
        **rope | ({} if turned else {"partial_rotary_factor": 0.0}),
        layer_types=words(kinds, mixers("mamba2"), num_layers),
        embedding_multiplier=fields.factor("embedding_multiplier"),
        residual_multiplier=fields.factor("residual_multiplier"),
        attention_multiplier=fields.factor("attention_multiplier"),
        lm_head_multiplier=1 / fields.factor("logits_scaling"),
    )  # fmt: skip


def write_granite(config: ModelConfig) -> Options:
    """From a configuration to config.json."""
    turned = config.partial_rotary_factor > 0
    sparse = "sparse" in mlp_kinds(config)
    inner = config.moe_intermediate_size if sparse else config.mlp_size
    shared = config.shared_expert_intermediate_size if sparse else config.mlp_size
    size = (config.attention_head_dim or config.hidden_size) ** -0.5
    scale = config.attention_multiplier or size
    own = {
        "layer_types": in_words(expands(config), "mamba2"),
        "position_embedding_type": "rope" if turned else None,
        "embedding_multiplier": config.embedding_multiplier,
        "residual_multiplier": config.residual_multiplier,
        "attention_multiplier": scale,
        "logits_scaling": digits(1 / config.lm_head_multiplier),
        "num_local_experts": config.num_experts,
        "num_experts_per_tok": config.num_experts_per_tok,
        "intermediate_size": inner,
        "shared_intermediate_size": shared,
    }
    return write_stream(config) | write_mamba(config) | write_rope(config) | own


def read_falcon(fields: Fields) -> ModelConfig:
    """From config.json to a configuration; factors of inputs become factors of what they feed."""
    fields.only("mamba_use_mlp", True)
    fields.only("attn_layer_indices", None)
    fields.only("projectors_bias", False)
    fields.drop("mlp_expansion_factor", "layers_block_type", "layer_types")
    normed = fields.flag("mamba_rms_norm", False)
    if fields.flag("mamba_norm_before_gate", True) and normed:
        raise ValueError("mamba_norm_before_gate must be False with mamba_rms_norm, got True")
    mamba, stream = read_mamba(fields), read_stream(fields, otherwise=1e-5)
    size = stream["hidden_size"] // stream["num_attention_heads"]
    size = fields.integer("head_dim", size, smallest=1)
    factors: Options = {name: fields.factor(name) for name in FACTORS}
    into = fields.factor("attention_in_multiplier")
    key, out = (fields.factor(f"{x}_multiplier") for x in ("key", "attention_out"))
    ssm_in, ssm = fields.factor("ssm_in_multiplier"), fields.listed("ssm_multipliers", [1.0] * 5)
    return ModelConfig(
        **mamba, **stream, **read_rope(fields, 1.0),
        layer_types="mamba2+attention",
        mlp_size=fields.integer("intermediate_size", smallest=1),
        attention_head_dim=size,
        mamba_rms_norm=normed,
        attention_multiplier=digits(key * into**2) * size**-0.5,
        attention_out_multiplier=digits(out * into),
        ssm_multipliers=tuple(digits(x * ssm_in) for x in ssm),
        mlp_multipliers=tuple(fields.listed("mlp_multipliers", [1.0, 1.0])),
        **factors,
    )  # fmt: skip


FACTORS = ("ssm_out_multiplier", "embedding_multiplier", "lm_head_multiplier")


def write_falcon(config: ModelConfig) -> Options:
    """From a configuration to config.json."""
    size = config.attention_head_dim or 1
    own = {
        "mamba_d_ssm": config.num_heads * (config.head_v_dim or 0),
        "head_dim": size,
        "mamba_rms_norm": config.mamba_rms_norm,
        "mamba_norm_before_gate": False,
        "key_multiplier": digits((config.attention_multiplier or size**-0.5) * size**0.5),
        "attention_out_multiplier": config.attention_out_multiplier,
        "ssm_multipliers": list(config.ssm_multipliers),
        "mlp_multipliers": list(config.mlp_multipliers),
        **{name: getattr(config, name) for name in FACTORS},
    }
    return write_stream(config) | write_mamba(config) | write_rope(config) | own


# The stored tensors of one layer, from its name, ours, and its parts.
Layer = Callable[[ModelConfig, str, str, str, Has], Iterator[Piece]]


def pieces(
    root: str, last: str, layer: Layer, layers: str = "layers"
) -> Callable[[ModelConfig, Shapes, Has], list[Piece]]:
    """All stored tensors, of which a layer's are given by a function."""

    def found(config: ModelConfig, shapes: Shapes, has: Has) -> list[Piece]:
        embedding = "embed_tokens" if root == "model." else "embeddings"
        # transformers takes both roots.
        there = "model." if has(f"model.{embedding}.weight") else root
        every = [
            Piece(f"{there}{embedding}.weight", ("embedding.weight",)),
            Piece(f"{there}{last}.weight", ("norm.weight",)),
            Piece("lm_head.weight", ("head.weight",)),
        ]
        for index, parts in enumerate(config.layer_types):
            every += layer(config, f"{there}{layers}.{index}.", f"blocks.{index}.", parts, has)
        return present(every, shapes)

    return found


def halves(config: ModelConfig, theirs: str, ours: str, parts: str, has: Has) -> Iterator[Piece]:
    """A layer of Bamba or Falcon-H1."""
    yield from mixer_half(theirs, ours, parts)
    yield from renamed(theirs, ours, {"pre_ff_layernorm.weight": "mlp_norm.weight"})
    yield from renamed(f"{theirs}feed_forward.", f"{ours}mlp.", {name: name for name in MATRICES})


def mixer_half(theirs: str, ours: str, parts: str) -> Iterator[Piece]:
    """The first half of a layer: Mamba-2, attention, or both."""
    yield from renamed(theirs, ours, NORMS)
    for part in parts.split("+"):
        own = f"{ours}mixer.{part}." if "+" in parts else f"{ours}mixer."
        if part == "mamba2":
            yield from mixer_pieces(f"{theirs}mamba.", own)
        else:
            yield from renamed(f"{theirs}self_attn.", own, SELF_ATTENTION)


def granite(config: ModelConfig, theirs: str, ours: str, parts: str, has: Has) -> Iterator[Piece]:
    """A layer of Granite-4-H, whose gate and up lie in one matrix."""
    yield from mixer_half(theirs, ours, parts)
    names = {
        "post_attention_layernorm.weight": "mlp_norm.weight",
        "block_sparse_moe.router.layer.weight": "mlp.router.weight",
        "block_sparse_moe.input_linear.weight": "mlp.up_proj",
        "block_sparse_moe.output_linear.weight": "mlp.down_proj",
    }
    own = f"{ours}mlp.shared." if "sparse" in mlp_kinds(config) else f"{ours}mlp."
    yield from renamed(theirs, ours, names)
    into = tuple(f"{own}{name}_proj.weight" for name in ("gate", "up"))
    yield Piece(f"{theirs}shared_mlp.input_linear.weight", into)
    yield Piece(f"{theirs}shared_mlp.output_linear.weight", (f"{own}down_proj.weight",))


FAMILIES = {
    family.model_type: family for family in (
        Family(
            model_type="bamba", architecture="BambaForCausalLM", read=read_bamba,
            write=write_bamba, pieces=pieces("model.", "final_layernorm", halves),
        ),
        Family(
            model_type="granitemoehybrid", architecture="GraniteMoeHybridForCausalLM",
            read=read_granite, write=write_granite, pieces=pieces("model.", "norm", granite),
        ),
        Family(
            model_type="falcon_h1", architecture="FalconH1ForCausalLM", read=read_falcon,
            write=write_falcon, pieces=pieces("model.", "final_layernorm", halves),
        ),
    )
}  # fmt: skip
