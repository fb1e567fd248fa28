"""xLSTM-7B: mLSTM with bounded gates, and bounded logits."""

from collections.abc import Iterator
from typing import Any

from deltarule.models.config import ModelConfig
from deltarule.models.convert.family import Family
from deltarule.models.convert.fields import Fields
from deltarule.models.convert.hybrid import NO_TOKENS
from deltarule.models.convert.mamba_hybrids import pieces
from deltarule.models.convert.piece import Has, Piece, renamed
from deltarule.nn.mlstm import EPS, SOFT_CAP

ONLY = {
    "add_out_norm": True, "eps": EPS, "gate_soft_cap": SOFT_CAP, "use_bias": False,
    "weight_mode": "single",
}  # fmt: skip
# How its own kernels compute.
KERNELS = (
    "autocast_kernel_dtype", "chunkwise_kernel", "embedding_dim", "inference_state_dtype",
    "max_inference_chunksize", "mode", "norm_reduction_force_float32", "num_blocks",
    "return_last_states", "sequence_kernel", "step_kernel",
)  # fmt: skip
MULTIPLE = 64


def read(fields: Fields) -> ModelConfig:
    """From config.json to a configuration."""
    for name, value in ONLY.items():
        fields.only(name, value)
    fields.rename({"num_blocks": "num_hidden_layers"})
    fields.drop(*KERNELS)
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_heads", 8, smallest=1)
    qk, v = (
        rounded(hidden * fields.number(name, otherwise), MULTIPLE) // heads
        for name, otherwise in (("qk_dim_factor", 0.5), ("v_dim_factor", 1.0))
    )
    multiple = fields.integer("ffn_round_up_to_multiple_of", 64, smallest=1)
    return ModelConfig(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        num_layers=fields.integer("num_hidden_layers"),
        layer_types="xlstm_7b",
        num_heads=heads,
        head_k_dim=qk,
        head_v_dim=v,
        output_norm_bias=False,
        mlp_size=rounded(hidden * fields.number("ffn_proj_factor", 2.667), multiple),
        norm_eps=fields.number("norm_eps", 1e-6),
        final_logit_softcapping=fields.number("output_logit_soft_cap", 30.0),
        tie_embeddings=fields.flag("tie_word_embeddings", False),
    )


def rounded(size: float, multiple: int) -> int:
    """The next multiple."""
    return int((size + multiple - 1) // multiple * multiple)


def write(config: ModelConfig) -> dict[str, Any]:
    """From a configuration to config.json."""
    hidden, heads = config.hidden_size, config.num_heads
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": hidden,
        "num_hidden_layers": config.num_layers,
        "num_heads": heads,
        "qk_dim_factor": heads * (config.head_k_dim or 0) / hidden,
        "v_dim_factor": heads * (config.head_v_dim or 0) / hidden,
        # Multiples of 1 are rounded down: with half a channel more never one less.
        "ffn_proj_factor": ((config.mlp_size or 0) + 0.5) / hidden,
        "ffn_round_up_to_multiple_of": 1,
        "norm_eps": config.norm_eps,
        "output_logit_soft_cap": config.final_logit_softcapping,
        "tie_word_embeddings": config.tie_embeddings,
        **NO_TOKENS,
    }


def layer(config: ModelConfig, theirs: str, ours: str, parts: str, has: Has) -> Iterator[Piece]:
    """One block."""
    names = {"norm_mlstm": "mixer_norm", "norm_ffn": "mlp_norm"}
    names |= {f"mlstm_layer.{letter}": f"mixer.{letter}_proj" for letter in "qkv"}
    names |= {
        "mlstm_layer.ogate_preact": "mixer.g_proj", "mlstm_layer.fgate_preact": "mixer.a_proj",
        "mlstm_layer.igate_preact": "mixer.b_proj", "mlstm_layer.multihead_norm": "mixer.o_norm",
        "mlstm_layer.out_proj": "mixer.o_proj", "ffn.proj_up_gate": "mlp.gate_proj",
        "ffn.proj_up": "mlp.up_proj", "ffn.proj_down": "mlp.down_proj",
    }  # fmt: skip
    yield from renamed(theirs, ours, {f"{a}.weight": f"{b}.weight" for a, b in names.items()})
    biases = {"fgate_preact": "decay_bias", "igate_preact": "beta_bias"}
    for stored, own in biases.items():
        yield Piece(f"{theirs}mlstm_layer.{stored}.bias", (f"{ours}mixer.{own}",))


FAMILY = Family(
    model_type="xlstm",
    architecture="xLSTMForCausalLM",
    read=read,
    write=write,
    pieces=pieces("backbone.", "out_norm", layer, "blocks"),
)
