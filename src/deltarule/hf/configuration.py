"""`ModelConfig` as a configuration of transformers."""

import dataclasses
from typing import Any, Self

from transformers import PreTrainedConfig

from deltarule.models import ModelConfig
from deltarule.models.config import MODEL_TYPE, RENAMED

# Each option of ours, by its name in config.json.
_FIELDS = {RENAMED.get(field.name, field.name): field for field in dataclasses.fields(ModelConfig)}


class DeltaruleConfig(PreTrainedConfig):  # type: ignore[misc]
    """Sizes and layers of a `DeltaruleForCausalLM`: the options of `ModelConfig`, by their names.

    Three have names that transformers knows: `num_hidden_layers` (num_layers), `mixers`
    (layer_types) and `tie_word_embeddings` (tie_embeddings). Beside them stands what transformers
    has for every model, such as `pad_token_id`.

    Args:
        vocab_size: As for `ModelConfig`, like all that follow here and there; required.
        hidden_size: Required.
        num_hidden_layers: Required.
        num_heads: Required.
        mixers: One name of `deltarule.nn.MIXERS`, a list of them, or a published pattern; required.
        tie_word_embeddings: Use the embedding as the output head.

    Examples:
        >>> config = DeltaruleConfig(vocab_size=257, hidden_size=32, num_hidden_layers=2,
        ...                          num_heads=2, mixers="gated_deltanet", conv_size=4)
        >>> config.to_model_config().layer_types
        ('gated_deltanet', 'gated_deltanet')
    """

    model_type = MODEL_TYPE

    # transformers builds one without arguments, to see what differs from the defaults.
    vocab_size: int | None = None
    hidden_size: int | None = None
    num_hidden_layers: int | None = None
    num_heads: int | None = None
    mixers: str | list[str] | None = None
    tie_word_embeddings: bool = True

    def __post_init__(self, **options: Any) -> None:
        """Take the options that `ModelConfig` has, and leave the others to transformers."""
        for name, field in _FIELDS.items():
            if name not in vars(DeltaruleConfig):
                setattr(self, name, options.pop(name, field.default))
        super().__post_init__(**options)

    @classmethod
    def from_model_config(
        cls,
        config: ModelConfig,
        *,
        pad_token_id: int | None = None,
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
    ) -> Self:
        """Make one of a model's configuration and of its tokenizer's special tokens."""
        fields = {RENAMED.get(name, name): value for name, value in vars(config).items()}
        fields["mixers"] = list(config.layer_types)
        tokens = {"pad_token_id": pad_token_id, "bos_token_id": bos_token_id}
        return cls(**fields, **tokens, eos_token_id=eos_token_id)

    def to_model_config(self) -> ModelConfig:
        """Return the configuration of the model itself.

        Raises:
            ValueError: An option is missing or refused; the message names it as `ModelConfig` does.
        """
        return ModelConfig.from_fields({name: getattr(self, name) for name in _FIELDS})
