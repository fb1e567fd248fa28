"""Language models: one configuration, one model, generation, files, byte tokens."""

from deltarule.models.causal_lm import CausalLM, count_parameters
from deltarule.models.compiled import compile_blocks, warmup_model
from deltarule.models.config import ModelConfig
from deltarule.models.convert.families import FAMILIES
from deltarule.models.decoder import release_graphs
from deltarule.models.files import CheckpointError
from deltarule.models.loss import linear_next_token_loss, next_token_loss
from deltarule.models.patterns import PATTERNS, Pattern

__all__ = [
    "FAMILIES", "PATTERNS", "CausalLM", "CheckpointError", "ModelConfig", "Pattern",
    "compile_blocks", "count_parameters", "linear_next_token_loss", "next_token_loss",
    "release_graphs", "warmup_model",
]  # fmt: skip
