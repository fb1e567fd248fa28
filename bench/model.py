"""Training speed of a DeltaNet language model of 1.3 billion parameters, ours or FLA's.

A step is a forward and a backward pass in bfloat16; no optimizer takes it further, so that only the
model is compared.
"""

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bench import timing
from deltarule.models import CausalLM, ModelConfig, linear_next_token_loss

Loss = Callable[[Tensor], Tensor]

GIB = 2**30
WARM_UP, STEPS = 3, 8


# The 1.3 B of the DeltaNet paper; FLA rounds 8/3 of its width up to a multiple of 256.
SIZES = {
    "vocab_size": 32000, "hidden_size": 2048, "num_layers": 24, "num_heads": 16, "mlp_size": 5632,
}  # fmt: skip
# Of a step, whatever its rows.
TOKENS = 32_768


def time_model(case: dict[str, Any], peer: str, device: str) -> dict[str, Any]:
    """Tokens a second and peak memory of training steps, as of `time_steps`, of a package's model.

    The case has `batch`, `tokens`, and `sizes` of the model if they are not those of the 1.3 B.
    """
    sizes = SIZES | case.get("sizes", {})
    config = ModelConfig(layer_types="deltanet", tie_embeddings=False, **sizes)
    if peer == "fla":
        # Ours has no output gate.
        options = {"num_heads": config.num_heads, "use_gate": False}
        built = build_fla("DeltaNet", config, options, device, whole_logits=False)
    else:
        built = build_ours(config, device)
    given = {name: case[name] for name in ("batch", "tokens", "steps", "warm_up") if name in case}
    return time_steps(*built, vocab_size=config.vocab_size, device=device, **given)


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
    """Time training steps of a model on random text [batch, tokens + 1], after `warm_up` steps.

    tokens_per_s, seconds of the first and of a later step, peak_GiB (None on the CPU), parameters,
    and the loss of the last step, by which a broken run is seen.
    """
    # The one after the last is a target only.
    text = torch.randint(vocab_size, (batch, tokens + 1), device=device)
    losses: list[Tensor] = []

    def several(count: int) -> None:
        for _ in range(count):
            loss = loss_of(text)
            loss.backward()
            model.zero_grad(set_to_none=True)
            losses[:] = [loss.detach()]

    first = timing.host_seconds(lambda: several(1))
    several(warm_up)
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    seconds = timing.host_seconds(lambda: several(steps)) / steps
    return {
        "first_s": first, "step_s": seconds, "tokens_per_s": batch * tokens / seconds,
        "peak_GiB": None if device == "cpu" else torch.cuda.max_memory_allocated() / GIB,
        "parameters": sum(x.numel() for x in model.parameters()), "loss": losses[0].item(),
    }  # fmt: skip


def build_ours(config: ModelConfig, device: str) -> tuple[nn.Module, Loss]:
    """A model of ours in bfloat16, and its loss."""
    with torch.device(device):
        model = CausalLM(config).to(torch.bfloat16)
    return model, own_loss(model)


def own_loss(model: CausalLM) -> Loss:
    head = model.embedding if model.head is None else model.head
    return linear_loss(lambda tokens: model.hidden(tokens)[0], head)


def linear_loss(hidden: Callable[[Tensor], Tensor], head: Any) -> Loss:
    """The loss of text that never holds all logits."""
    return lambda text: linear_next_token_loss(hidden(text[:, :-1]), head.weight, text[:, 1:])


def build_fla(
    prefix: str,
    ours: ModelConfig,
    options: Mapping[str, Any],
    device: str,
    *,
    whole_logits: bool = True,
) -> tuple[nn.Module, Loss]:
    """FLA's model in bfloat16 by the prefix of its classes, with a fused loss of logits or none.

    Its sizes are ours in its names, and `options` what ours does not decide.
    """
    models = importlib.import_module("fla.models")
    sizes = {
        "hidden_size": ours.hidden_size, "num_hidden_layers": ours.num_layers,
        "vocab_size": ours.vocab_size, "tie_word_embeddings": ours.tie_embeddings,
    }  # fmt: skip
    mlp = {"intermediate_size": ours.mlp_size} if ours.mlp_size else {}
    config = getattr(models, f"{prefix}Config")(**{**sizes, **mlp, **options})
    config.fuse_cross_entropy, config.fuse_linear_cross_entropy = whole_logits, not whole_logits
    model = getattr(models, f"{prefix}ForCausalLM")(config).to(device, torch.bfloat16)

    def loss_of(text: Tensor) -> Tensor:
        # It shifts the labels itself, and trains on one token fewer a row.
        return model(text[:, :-1], labels=text[:, :-1], use_cache=False).loss

    return model, loss_of
