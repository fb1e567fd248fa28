"""Small models of this library under transformers' interface."""

import torch

from deltarule.hf import DeltaruleForCausalLM, wrap
from deltarule.models import CausalLM, ModelConfig

HYBRID = ("gated_deltanet", "sliding_window", "mamba2", "attention")
LAYERS = {
    "gated_deltanet": ("gated_deltanet",) * 2, "kda": ("kda",) * 2, "rwkv7": ("rwkv7",) * 2,
    "mamba2": ("mamba2",) * 2, "mlstm": ("mlstm",) * 2, "hybrid": HYBRID,
}  # fmt: skip


def make(layers: str = "gated_deltanet", **tokens: int) -> DeltaruleForCausalLM:
    """A wrapped model of byte tokens in eval mode."""
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=257, hidden_size=64, num_layers=len(LAYERS[layers]), num_heads=2,
        layer_types=LAYERS[layers], window=16 if layers == "hybrid" else None,
    )  # fmt: skip
    return wrap(CausalLM(config), **tokens).eval()


def bytes_like(*shape: int) -> torch.Tensor:
    """Random byte tokens."""
    return torch.randint(256, shape)
