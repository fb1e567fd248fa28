"""Compile and load the kernels of a whole model before its first training step."""

import torch

from deltarule.models.causal_lm import CausalLM
from deltarule.models.config import ModelConfig
from deltarule.models.loss import next_token_loss
from deltarule.ops.warmup import Warmed, require_gpu, warmed


def warmup_model(
    config: ModelConfig, *, batch: int = 1, tokens: int = 2048, backward: bool = True
) -> Warmed:
    """Compile and load what a `CausalLM` of this configuration launches in bfloat16 autocast.

    Args:
        config: Of the model; its blocks of one kind share their kernels.
        batch: Rows of a step.
        tokens: Tokens of a row.
        backward: Whether training follows, or evaluation only.

    Returns:
        The kernels with their seconds, and the seconds in all.

    Raises:
        RuntimeError: There is no CUDA device, or no Triton.

    Examples:
        >>> config = ModelConfig(vocab_size=257, hidden_size=64, num_layers=2, num_heads=2,
        ...                      layer_types="gated_deltanet")
        >>> if torch.cuda.is_available():
        ...     warmup_model(config)
    """
    require_gpu()
    with torch.device("cuda"):
        model = CausalLM(config)
        ids = torch.randint(config.vocab_size, (batch, tokens))

    def run() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16), torch.set_grad_enabled(backward):
            loss = next_token_loss(model(ids)[0], ids)
        if backward:
            loss.backward()

    return warmed(run)
