"""Training speed of a DeltaNet language model of 1.3 billion parameters, ours or FLA's.

A step is a forward and a backward pass in bfloat16; no optimizer takes it further, so that only the
model is compared.
"""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bench import timing
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
        As `time_steps`.

    Raises:
        ValueError: The peer has no model here.
    """
    if peer not in PEERS:
        raise ValueError(f"peer must be one of {', '.join(PEERS)}, got {peer!r}")
    sizes = Sizes(*case.get("sizes", ()))
    if peer == "fla":
        built = build_fla("DeltaNet", fla_settings(sizes), device, whole_logits=False)
    else:
        config = ModelConfig(layer_types="deltanet", tie_embeddings=False, **sizes._asdict())
        built = build_ours(config, device)
    batch, tokens = case["batch"], case["tokens"]
    counts = {"steps": case.get("steps", STEPS), "warm_up": case.get("warm_up", WARM_UP)}
    given = {"vocab_size": sizes.vocab_size, "batch": batch, "tokens": tokens} | counts
    return time_steps(*built, device=device, **given)


def time_steps(
    model: nn.Module,
    loss_of: Loss,
    *,
    vocab_size: int,
    batch: int,
    tokens: int,
    device: str,
    steps: int = STEPS,
    warm_up: int = WARM_UP,
) -> dict[str, Any]:
    """Time training steps of a model on random text.

    Args:
        model: On the device; its gradients are dropped after each step.
        loss_of: From text [batch, tokens + 1] to the loss.
        vocab_size: Of the text.
        batch: Rows of a step.
        tokens: Of a row.
        device: Where the text is made.
        steps: That are timed.
        warm_up: Steps before those, after the first.

    Returns:
        tokens_per_s, seconds of the first and of a later step, peak_GiB (None on the CPU),
        parameters, and the loss of the last step, by which a broken run is seen.
    """
    # The one after the last is a target only.
    text = torch.randint(vocab_size, (batch, tokens + 1), device=device)
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
    for _ in range(warm_up):
        step()
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    seconds = timing.host_seconds(several) / steps
    return {
        "first_s": first,
        "step_s": seconds,
        "tokens_per_s": batch * tokens / seconds,
        "peak_GiB": None if device == "cpu" else torch.cuda.max_memory_allocated() / GIB,
        "parameters": sum(x.numel() for x in model.parameters()),
        "loss": losses[0].item(),
    }


def build_ours(config: ModelConfig, device: str) -> tuple[nn.Module, Loss]:
    """A model of ours in bfloat16, and its loss."""
    with torch.device(device):
        model = CausalLM(config).to(torch.bfloat16)
    return model, own_loss(model)


def own_loss(model: CausalLM) -> Loss:
    """The loss of text that never holds all logits."""
    head = model.embedding if model.head is None else model.head

    def loss_of(text: Tensor) -> Tensor:
        return linear_next_token_loss(model.hidden(text[:, :-1])[0], head.weight, text[:, 1:])

    return loss_of


def build_fla(
    prefix: str, settings: dict[str, Any], device: str, *, whole_logits: bool = True
) -> tuple[nn.Module, Loss]:
    """FLA's model in bfloat16 by the prefix of its classes, with a fused loss of logits or none."""
    models = importlib.import_module("fla.models")
    config = getattr(models, f"{prefix}Config")(**settings)
    config.fuse_cross_entropy, config.fuse_linear_cross_entropy = whole_logits, not whole_logits
    model = getattr(models, f"{prefix}ForCausalLM")(config).to(device, torch.bfloat16)

    def loss_of(text: Tensor) -> Tensor:
        # It shifts the labels itself, and trains on one token fewer a row.
        loss: Tensor = model(text[:, :-1], labels=text[:, :-1], use_cache=False).loss
        return loss

    return model, loss_of


def fla_settings(sizes: Sizes) -> dict[str, Any]:
    names = {"num_layers": "num_hidden_layers", "mlp_size": "intermediate_size"}
    ours = {names.get(name, name): size for name, size in sizes._asdict().items()}
    return ours | {"use_gate": False, "tie_word_embeddings": False}
