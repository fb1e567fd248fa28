"""More chunks, and more rows, than the last axis of a CUDA grid can count: 65535."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import truth
from deltarule import delta_rule, recurrent_step
from truth import assert_alike, results_of

pytestmark = pytest.mark.gpu

MANY = 65600
N_STEPS, SIZE = 4, 16
# Chunks hold 64 rows, of 4 steps a token.
CHUNK = 64 // N_STEPS


def drawn(batch: int, tokens: int, decay: str) -> dict[str, Tensor]:
    """The tensors of a call with one head of 16 channels."""

    def normal(rows: int, *sizes: int) -> Tensor:
        return torch.randn(batch, rows, 1, *sizes, device=truth.DEVICE)

    channels = (SIZE,) if decay == "channel" else ()
    rows = tokens * N_STEPS
    return {
        "q": normal(tokens, SIZE).bfloat16(),
        "k": F.normalize(normal(rows, SIZE), dim=-1).bfloat16(),
        "v": normal(rows, SIZE).bfloat16(), "beta": normal(rows).sigmoid().bfloat16(),
        "log_decay": -0.1 * normal(tokens, *channels).abs(),
    }  # fmt: skip


def run(x: dict[str, Tensor], state: Tensor | None = None) -> dict[str, Tensor]:
    """Outputs and gradients, the values being the gradient by the output's first step."""
    options = {"n_steps": N_STEPS, "batch_invariant": True, "impl": truth.IMPL}
    call = partial(delta_rule, initial_state=state, **options)
    steps = x["v"][:, ::N_STEPS].contiguous()
    return results_of(x, call, lambda out: (steps, torch.zeros_like(out.final_state)))


def later(x: dict[str, Tensor], start: int) -> dict[str, Tensor]:
    """From a token on."""
    return {
        name: y if name == "final_state"
        else y[:, start * (N_STEPS if name.removeprefix("d ") in ("k", "v", "beta") else 1) :]
        for name, y in x.items()
    }  # fmt: skip


@pytest.mark.parametrize("decay", ["head", "channel"])
def test_chunks_of_one_sequence(decay: str) -> None:
    tokens = CHUNK * MANY
    x, half = drawn(1, tokens, decay), tokens // 2
    whole = run(x)
    first = {name: y[:, : y.shape[1] // 2] for name, y in x.items()}
    second = run(later(x, half), run(first)["final_state"])
    assert_alike(later(whole, half), second, torch.bfloat16)


@pytest.mark.parametrize("decay", ["head", "channel"])
def test_rows_of_a_batch(decay: str) -> None:
    x = drawn(MANY, 1, decay)
    together, last = run(x), slice(MANY - 8, MANY)
    alone = run({name: y[last] for name, y in x.items()})
    for name, y in alone.items():
        assert torch.equal(together[name][last], y), name


def test_rows_of_a_step() -> None:
    x = drawn(MANY, 1, "head")
    state = torch.randn(MANY, 1, SIZE, SIZE, device=truth.DEVICE)
    last = slice(MANY - 8, MANY)
    own = state[last].clone()
    o = recurrent_step(**x, n_steps=N_STEPS, state=state, impl=truth.IMPL)
    few = {name: y[last] for name, y in x.items()}
    alone = recurrent_step(**few, n_steps=N_STEPS, state=own, impl=truth.IMPL)
    assert torch.equal(o[last], alone)
    assert torch.equal(state[last], own)
