"""config.json in words that transformers reads as they are, so that one folder serves both.

transformers reads some names from every configuration and gives `layer_types` words of its own.
"""

from typing import Any

MODEL_TYPE = "deltarule"
ARCHITECTURE = "DeltaruleForCausalLM"
# Ours: theirs. `mixers` is a name of nobody's.
RENAMED = {
    "num_layers": "num_hidden_layers",
    "layer_types": "mixers",
    "tie_embeddings": "tie_word_embeddings",
}
# What transformers writes beside a model's own options, for itself.
THEIRS = (
    "architectures", "bos_token_id", "chunk_size_feed_forward", "dtype", "eos_token_id", "id2label",
    "is_encoder_decoder", "label2id", "output_attentions", "output_hidden_states", "pad_token_id",
    "problem_type", "return_dict", "torch_dtype", "transformers_version", "use_cache",
)  # fmt: skip


def for_file(fields: dict[str, Any]) -> dict[str, Any]:
    named = {RENAMED.get(name, name): value for name, value in fields.items()}
    return {"model_type": MODEL_TYPE, "architectures": [ARCHITECTURE], **named}


def from_file(stored: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a `ModelConfig` from config.json, by either side's names."""
    fields = dict(stored)
    if (model_type := fields.pop("model_type", MODEL_TYPE)) != MODEL_TYPE:
        raise ValueError(f"model_type must be {MODEL_TYPE!r}, got {model_type!r}")
    for name in THEIRS:
        fields.pop(name, None)
    for ours, theirs in RENAMED.items():
        if theirs in fields and ours in fields:
            raise ValueError(f"keys {ours!r} and {theirs!r} are one option: give one of them")
        if theirs in fields:
            fields[ours] = fields.pop(theirs)
    return fields
