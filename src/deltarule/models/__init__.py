"""Language models: one configuration, one model, generation, files, byte tokens."""

from deltarule.models.causal_lm import CausalLM, count_parameters
from deltarule.models.config import ModelConfig
from deltarule.models.files import CheckpointError
from deltarule.models.loss import next_token_loss

__all__ = ["CausalLM", "CheckpointError", "ModelConfig", "count_parameters", "next_token_loss"]
