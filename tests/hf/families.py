"""One tiny random model of every family of transformers whose recurrent layers are patched."""

from typing import NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DataCollatorWithFlattening,
)

from deltarule.hf.hooks import CACHE

VOCABULARY = 128
COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 96, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
GATED_DELTANET = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 24, "linear_conv_kernel_dim": 4, "head_dim": 16,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHARED = EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 32}
LATENT = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "qk_nope_head_dim": 16}
MAMBA2 = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16,
    "mamba_chunk_size": 32, "mamba_expand": 2,
}  # fmt: skip
VISION = {
    "depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 64,
}  # fmt: skip
HYBRID = ["linear_attention"] * 3 + ["full_attention"]


class Family(NamedTuple):
    """A configuration class of transformers, its arguments, and what the sizes above are not for.

    A multimodal family takes them as its `text_config`, and this as its `vision_config`.
    """

    config: str
    options: dict
    without: tuple[str, ...] = ()
    vision: dict | None = None


ATTENTION_FREE = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
FAMILIES = {
    "qwen3_next": Family("Qwen3NextConfig", GATED_DELTANET | SHARED),
    "qwen3_5": Family("Qwen3_5TextConfig", GATED_DELTANET),
    "qwen3_5_moe": Family(
        "Qwen3_5MoeTextConfig", GATED_DELTANET | SHARED, without=("intermediate_size",)
    ),
    "qwen4_exp": Family(
        "Qwen4ExpTextConfig",
        GATED_DELTANET | SHARED
        | {"hc_count": 2, "hc_lowrank": 8, "indexer_n_heads": 2, "indexer_kv_heads": 1,
           "indexer_head_dim": 16, "indexer_budget": 128, "indexer_compress_ratio": 4,
           "layer_types": HYBRID},
        without=("intermediate_size",),
    ),
    "olmo_hybrid": Family("OlmoHybridConfig", GATED_DELTANET | {"linear_num_key_heads": 4}),
    "kimi_linear": Family(
        "KimiLinearConfig",
        EXPERTS | LATENT
        | {"linear_head_dim": 16, "linear_num_heads": 4, "num_key_value_heads": 4,
           "num_local_experts": 4, "layer_types": HYBRID},
    ),
    "bailing_hybrid": Family(
        "BailingHybridConfig",
        EXPERTS | LATENT
        | {"head_dim": 16, "num_key_value_heads": 4, "num_local_experts": 8, "n_group": 2,
           "topk_group": 1, "layer_group_size": 4},
    ),
    "glm5_next": Family(
        "Glm5NextConfig",
        EXPERTS | LATENT
        | {"q_lora_rank": 16, "qk_rope_head_dim": 0, "num_key_value_heads": 4,
           "n_routed_experts": 4, "linear_head_dim": 16, "linear_num_heads": 4, "index_topk": 128,
           "index_head_dim": 16, "index_n_heads": 2, "index_kpool": 4, "hc_mult": 2,
           "layer_types": HYBRID},
        vision=VISION,
    ),
    "mamba2": Family(
        "Mamba2Config",
        {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "chunk_size": 32},
        without=ATTENTION_FREE,
    ),
    "bamba": Family("BambaConfig", MAMBA2 | {"attn_layer_indices": [3]}),
    "falcon_h1": Family(
        "FalconH1Config",
        MAMBA2
        | {"mamba_d_ssm": 128, "ssm_multipliers": [0.5, 0.7, 1.1, 0.9, 0.8],
           "key_multiplier": 0.6, "attention_out_multiplier": 0.9, "ssm_out_multiplier": 0.7,
           "embedding_multiplier": 1.5, "lm_head_multiplier": 0.3},
    ),
    "granitemoehybrid": Family(
        "GraniteMoeHybridConfig",
        MAMBA2
        | {"layer_types": HYBRID, "num_local_experts": 4, "num_experts_per_tok": 2,
           "shared_intermediate_size": 32},
    ),
    "nemotron_h": Family(
        "NemotronHConfig",
        {"head_dim": 16, "ssm_state_size": 16, "mamba_num_heads": 8, "mamba_head_dim": 16,
         "n_groups": 2, "chunk_size": 32,
         "layer_types": ["linear_attention", "mlp", "full_attention", "linear_attention"]},
        without=("num_hidden_layers",),
    ),
    "zamba2": Family(
        "Zamba2Config",
        {"num_key_value_heads": 4, "mamba_d_state": 16, "mamba_ngroups": 1, "n_mamba_heads": 8,
         "chunk_size": 32,
         "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"]},
    ),
    "mamba": Family("MambaConfig", {"state_size": 16}, without=ATTENTION_FREE),
    "zamba": Family(
        "ZambaConfig",
        {"num_key_value_heads": 4, "n_mamba_heads": 2, "mamba_d_state": 16,
         "layers_block_type": ["linear_attention", "hybrid"] * 2},
    ),
    "falcon_mamba": Family("FalconMambaConfig", {"state_size": 16}, without=ATTENTION_FREE),
    "jamba": Family(
        "JambaConfig",
        {"attn_layer_period": 4, "attn_layer_offset": 2, "num_experts": 2,
         "num_experts_per_tok": 1, "mamba_d_state": 16},
    ),
    "minimax": Family(
        "MiniMaxConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "block_size": 32,
         "layer_types": HYBRID},
    ),
}  # fmt: skip


# Those that patch leaves as they are.
OTHERS = {
    "xlstm": Family(
        "xLSTMConfig",
        {"num_heads": 4, "mode": "inference", "autocast_kernel_dtype": "float32",
         "hidden_size": 128},
        without=ATTENTION_FREE,
    ),
}  # fmt: skip
# Of transformers since 5.24.
if hasattr(transformers, "LaraMiniConfig"):
    FAMILIES["lara_mini"] = Family(
        "LaraMiniConfig",
        GATED_DELTANET | SHARED | {"layer_types": HYBRID},
        without=("intermediate_size",),
    )
MULTIMODAL = Family("Qwen3_5Config", GATED_DELTANET, vision=VISION)


def tiny(name: str, **options: object) -> nn.Module:
    """A model of a family."""
    return make((FAMILIES | OTHERS)[name], **options)


def make(family: Family, **options: object) -> nn.Module:
    """A model with every parameter drawn at random, so that no zero or one hides an error."""
    common = {key: value for key, value in COMMON.items() if key not in family.without}
    options, auto = common | family.options | options, AutoModelForCausalLM
    if family.vision is not None:
        options = {"text_config": options, "vision_config": family.vision}
        auto = AutoModelForImageTextToText
    torch.manual_seed(0)
    model = auto.from_config(getattr(transformers, family.config)(**options)).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.copy_(drawn(key, parameter))
    return model


def drawn(key: str, parameter: Tensor) -> Tensor:
    """Of a size that keeps the stream and the gates in their usual range."""
    if key.endswith("A_log"):
        return torch.rand_like(parameter) * 2 - 1
    if key.endswith(("dt_bias", "dt_proj.bias")):
        return torch.rand_like(parameter) * 2 - 3
    if parameter.ndim <= 1:
        return parameter + 0.1 * torch.randn_like(parameter)
    size = 0.5 if "conv" in key else parameter.shape[-1] ** -0.5
    return torch.randn_like(parameter) * size


def tokens(*shape: int) -> Tensor:
    """Random tokens, none of them special."""
    return torch.randint(3, VOCABULARY, shape)


def cache_name(model: nn.Module) -> str:
    """What the model calls its cache; since transformers 5.24 all say the same."""
    return CACHE if CACHE == "cache" or takes_positions(model) else "cache_params"


def takes_positions(model: nn.Module) -> bool:
    """Whether a step is given its tokens' positions."""
    return "mamba" not in model.config.model_type


# The ways in which a collator says where documents begin.
FORMS = {
    "position_ids": {},
    "cu_seq_lens_q": {"return_flash_attn_kwargs": True},
    "seq_idx": {"return_seq_idx": True},
}


def collated(documents: list[Tensor], form: str) -> dict[str, Tensor]:
    """The documents as transformers packs them into one row."""
    collate = DataCollatorWithFlattening(return_tensors="pt", **FORMS[form])
    return dict(collate([{"input_ids": document.tolist()} for document in documents]))


def in_one_row(documents: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The row, and its positions."""
    places = torch.cat([torch.arange(len(document)) for document in documents])
    return torch.cat(documents)[None], places[None]


def alone(model: nn.Module, documents: list[Tensor]) -> Tensor:
    """What the model computes from each document, side by side."""
    return torch.cat([logits(model, document[None]) for document in documents], 1)


def logits(model: nn.Module, ids: Tensor, **options: object) -> Tensor:
    """What a model computes from whole rows."""
    with torch.no_grad():
        return model(ids, use_cache=False, **options).logits


def error(x: Tensor, reference: Tensor) -> float:
    """Relative RMS."""
    return ((x.double() - reference.double()).norm() / reference.double().norm()).item()
