"""Training speed of a DeltaNet language model of 1.3 billion parameters, ours or FLA's.

A step is a forward and a backward pass in bfloat16; no optimizer takes it further, so that only the
model is compared.
"""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from deltarule.bench import timing
from deltarule.models import CausalLM, ModelConfig, linear_next_token_loss

Loss = Callable[[Tensor], Tensor]

GIB = 2**30
WARM_UP, STEPS = 3, 8


class Sizes(NamedTuple):
    """Of the model: the 1.3 B of the DeltaNet paper; tests take a small one."""

    vocab_size: int = 32000
    hidden_size: int = 2048
    num_layers: int = 24
    num_heads: int = 16
    # FLA rounds 8/3 of hidden_size up to a multiple of 256.
    mlp_size: int = 5632


# Batch rows and tokens of a step: 32,768 tokens each.
BATCHES = ((16, 2048), (8, 4096), (2, 16384))
PEERS = ("deltarule", "fla")


def time_model(case: dict[str, Any], peer: str, device: str) -> dict[str, Any]:
    """Tokens a second and peak memory of training steps at one batch size.

    Args:
        case: `batch`, `tokens`, and `sizes` if they are not those of the 1.3 B model.
        peer: "deltarule" or "fla".
        device: Where the model is built.

    Returns:
        tokens_per_s, seconds of a step, peak_GiB (None on the CPU), parameters, and the loss of
        the last step, by which a broken run is seen.
    """
    sizes = Sizes(*case.get("sizes", ()))
    model, loss_of = BUILDERS[peer](sizes, device)
    batch, tokens = case["batch"], case["tokens"]
    # The one after the last is a target only.
    text = torch.randint(sizes.vocab_size, (batch, tokens + 1), device=device)
    steps = case.get("steps", STEPS)
    losses: list[Tensor] = []

    def step() -> None:
        loss = loss_of(text)
        loss.backward()
        model.zero_grad(set_to_none=True)
        losses[:] = [loss.detach()]

    def several() -> None:
        for _ in range(steps):
            step()

    first = timing.host_seconds(step)
    for _ in range(case.get("warm_up", WARM_UP)):
        step()
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    seconds = timing.host_seconds(several) / steps
    return {
        "first_s": first, "step_s": seconds, "tokens_per_s": batch * tokens / seconds,
        "peak_GiB": None if device == "cpu" else torch.cuda.max_memory_allocated() / GIB,
        "parameters": sum(x.numel() for x in model.parameters()), "loss": losses[0].item(),
    }  # fmt: skip


def build_ours(sizes: Sizes, device: str) -> tuple[nn.Module, Loss]:
    """Our model with DeltaNet layers, and the loss that never holds all logits."""
    config = ModelConfig(layer_types="deltanet", tie_embeddings=False, **sizes._asdict())
    with torch.device(device):
        model = CausalLM(config).to(torch.bfloat16)

    def loss_of(text: Tensor) -> Tensor:
        x, _ = model.hidden(text[:, :-1])
        head = model.embedding if model.head is None else model.head
        return linear_next_token_loss(x, head.weight, text[:, 1:])

    return model, loss_of


def build_fla(sizes: Sizes, device: str) -> tuple[nn.Module, Loss]:
    """FLA's model of the same sizes, with its fused cross entropy."""
    models = importlib.import_module("fla.models")
    config = models.DeltaNetConfig(
        hidden_size=sizes.hidden_size, num_hidden_layers=sizes.num_layers,
        num_heads=sizes.num_heads, vocab_size=sizes.vocab_size, intermediate_size=sizes.mlp_size,
        use_gate=False, tie_word_embeddings=False,
    )  # fmt: skip
    config.fuse_cross_entropy = True
    model = models.DeltaNetForCausalLM(config).to(device, torch.bfloat16)

    def loss_of(text: Tensor) -> Tensor:
        # It shifts the labels itself, and trains on one token fewer a row.
        loss: Tensor = model(text[:, :-1], labels=text[:, :-1], use_cache=False).loss
        return loss

    return model, loss_of


BUILDERS: dict[str, Callable[[Sizes, str], tuple[nn.Module, Loss]]] = {
    "deltarule": build_ours,
    "fla": build_fla,
}
