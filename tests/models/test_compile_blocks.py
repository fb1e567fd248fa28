"""Compilation block by block: no graph breaks, and equal blocks share what was compiled."""

import pytest
import torch

from deltarule.models import linear_next_token_loss
from deltarule.models.compiled import compile_blocks

# In Lightning each layer has decays of its own.
NAMES = ["gated_deltanet", "delta_product", "kda", "mamba2", "rwkv7", "attention"]


@pytest.mark.parametrize("name", NAMES)
def test_equal_blocks_are_compiled_once(name, make_model, random_tokens):
    torch.compiler.reset()
    model, tokens, compiled = make_model(layer_types=name), random_tokens(2, 21), []

    def loss() -> torch.Tensor:
        x, _ = model.hidden(tokens[:, :-1])
        return linear_next_token_loss(x, model.embedding.weight, tokens[:, 1:])

    expected = loss()
    gradients = torch.autograd.grad(expected, list(model.parameters()))
    compile_blocks(model, backend=lambda graph, _: compiled.append(graph) or graph.forward)
    for _ in range(2):
        value = loss()
        found = torch.autograd.grad(value, list(model.parameters()))
    # The first block adds no branch to the stream; the other three are one.
    assert len(compiled) == 2
    torch.testing.assert_close(value, expected)
    for gradient, same in zip(found, gradients, strict=True):
        torch.testing.assert_close(gradient, same)


def test_many_kinds_of_blocks_and_many_models_are_compiled(make_model, random_tokens):
    torch.compiler.reset()
    with torch._dynamo.config.patch(recompile_limit=8):
        # Each Lightning layer is compiled for itself, and each width of a model.
        for layers, name, width in [
            (9, "lightning", 32),
            *((2, "deltanet", 16 * i) for i in (1, 2, 3)),
        ]:
            model = make_model(layer_types=name, num_layers=layers, hidden_size=width)
            compile_blocks(model, backend="eager")
            for length in (5, 9):
                model.hidden(random_tokens(2, length))


def test_generation_compiles_nothing(make_model, random_tokens):
    torch.compiler.reset()
    model, prompts, compiled = make_model(layer_types="gated_deltanet"), [[1, 2], [3] * 20], []
    options = {"max_new_tokens": 4, "seed": 0}
    expected = [model.generate(prompts, draft=draft, **options) for draft in (0, 2)]
    compile_blocks(model, backend=lambda graph, _: compiled.append(graph) or graph.forward)
    assert [model.generate(prompts, draft=draft, **options) for draft in (0, 2)] == expected
    assert compiled == []
    # Blocks are compiled again after it.
    model.hidden(random_tokens(2, 20))
    assert len(compiled) == 2
