"""Every layer learns: in 20 steps a small model finds out what only a memory can tell.

There is no MLP and the head is its own, so that nothing but the mixers computes.
"""

import pytest
import torch

from deltarule.models import CausalLM, ModelConfig
from deltarule.models.loss import next_token_loss
from nn.layers import NAMES

STEPS, BATCH, TOKENS, VOCABULARY = 20, 8, 32, 16
# Who forgets the last token cannot know the stride, and loses ln 2 = 0.69 a token.
WITHOUT_MEMORY = 0.69
# What these layers need beside the sizes that all share.
OPTIONS: dict[str, dict[str, object]] = {
    "sliding_window": {"window": 16},
    "hyena": {"filter_size": 64},
    "multi_head_hyena": {"filter_size": 64},
}
# With its filters a step as large as the others' throws the loss about by its roundings.
STEP_SIZE, SMALLER = 2e-2, {"hyena": 1.3e-2, "multi_head_hyena": 1.3e-2}


def model(name: str) -> CausalLM:
    torch.manual_seed(0)
    stream = {"vocab_size": VOCABULARY, "hidden_size": 32, "mlp_size": 0, "tie_embeddings": False}
    heads = {"num_layers": 2, "num_heads": 2, "head_k_dim": 8, "head_v_dim": 8}
    return CausalLM(ModelConfig(layer_types=name, **stream, **heads, **OPTIONS.get(name, {})))


def batch(step: int) -> torch.Tensor:
    """Sequences that count upwards from a random start, by one or by two."""
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(VOCABULARY, (BATCH, 1), generator=generator)
    stride = torch.randint(1, 3, (BATCH, 1), generator=generator)
    return (start + stride * torch.arange(TOKENS)) % VOCABULARY


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("name", NAMES)
def test_twenty_steps_lower_the_loss(name, autocast):
    lm = model(name)
    optimizer = torch.optim.AdamW(lm.parameters(), lr=SMALLER.get(name, STEP_SIZE))
    losses = []
    for step in range(STEPS):
        tokens = batch(step)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = next_token_loss(lm(tokens[:, :-1])[0], tokens[:, 1:])
        loss.backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in lm.parameters())
        torch.nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    # A step of this size may overshoot: one loss of the last few says little.
    last = sorted(losses[-5:])[2]
    assert last < 0.8 * WITHOUT_MEMORY < losses[0], losses
