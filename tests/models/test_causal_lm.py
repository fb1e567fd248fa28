import math
import re

import pytest
import torch

from deltarule.models import CausalLM, next_token_loss
from deltarule.ops.context import Context
from nodes import kept
from small import small_model


def test_sizes_in_place_of_a_configuration_are_refused_by_name():
    with pytest.raises(ValueError, match="config must be a ModelConfig, got dict"):
        CausalLM({"vocab_size": 9})


def test_logits_and_state_have_the_promised_shapes(make_model, random_tokens):
    model = make_model()
    logits, state = model(random_tokens(3, 7))
    assert logits.shape == (3, 7, 257)
    assert logits.dtype == torch.float32
    assert len(state) == 4
    hidden, _ = model.hidden(random_tokens(3, 7))
    assert hidden.shape == (3, 7, 32)
    assert torch.equal(model.logits(hidden), logits)


def test_no_mlp_own_head_and_tied_head(make_model, random_tokens):
    model, tied = make_model(mlp_size=0, tie_embeddings=False), make_model()
    assert all(block.mlp is None for block in model.blocks)
    assert model(random_tokens(1, 3))[0].shape == (1, 3, 257)
    assert {*model.state_dict()} - {*tied.state_dict()} == {"head.weight"}
    next_token_loss(tied(random_tokens(1, 3))[0], random_tokens(1, 3)).backward()
    assert tied.embedding.weight.grad.abs().sum(1).count_nonzero() == 257


def kept_bytes(run):
    """What a call keeps for its backward pass, and what it returns."""
    with kept() as tensors:
        result = run()
    return sum({x.data_ptr(): x.nbytes for x in tensors}.values()), result


def test_checkpointing_keeps_less(make_model, random_tokens):
    model, sizes = make_model(), []
    for model.activation_checkpointing in (False, True):
        sizes.append(kept_bytes(lambda: model.hidden(random_tokens(2, 64)))[0])
    assert sizes[1] < 0.5 * sizes[0]


@pytest.mark.parametrize("layer", ["deltanet", "gated_deltanet", "kda", "mamba2", "rwkv7"])
def test_states_computed_again_keep_less_and_give_the_same_bits(layer):
    model = small_model(layer, "attention", hidden_size=32, num_heads=2)
    tokens, kept, gradients = torch.randint(50, (1, 300)), [], []
    assert model.save_states
    for model.save_states in (True, False):
        size, loss = kept_bytes(lambda: model.hidden(tokens)[0].square().sum())
        kept.append(size)
        gradients.append(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True))
    assert not model.save_states
    assert not model.blocks[0].mixer.save_states
    assert kept[1] < kept[0]
    for one, other in zip(*gradients, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


def initialised(num_layers, **changes):
    return small_model(*["gated_deltanet"] * num_layers, hidden_size=128, num_heads=2, **changes)


@torch.no_grad()
def test_a_new_model_guesses(random_tokens):
    tokens = random_tokens(2, 64)
    loss = next_token_loss(initialised(4)(tokens)[0][:, :-1], tokens[:, 1:])
    # Logits of variance 1 cost half a nat more than no opinion.
    assert abs(loss - math.log(257) - 0.5) < 0.3


@torch.no_grad()
def test_the_stream_of_a_new_model_does_not_grow_with_depth(random_tokens):
    sizes = []
    for num_layers in (1, 12):
        model = initialised(num_layers)
        x, branch = model.embedding(random_tokens(2, 64)), None
        for block in model.blocks:
            x, branch, _ = block(x, branch, None, None, None, {})
        sizes.append((x + branch).pow(2).mean().sqrt())
    assert 0.2 < sizes[0] < 1.5
    assert 0.7 < sizes[1] / sizes[0] < 1.5


def test_the_scales_are_those_of_the_table():
    shallow, deep = (initialised(n, tie_embeddings=False).state_dict() for n in (1, 4))
    scales = {
        "embedding.weight": 128**-0.5, "head.weight": 128**-0.5,
        "blocks.0.mlp.gate_proj.weight": 128**-0.5, "blocks.0.mlp.up_proj.weight": 128**-0.5,
        "blocks.0.mlp.down_proj.weight": 352**-0.5 / 8**0.5,
    }  # fmt: skip
    for name, scale in scales.items():
        assert abs(deep[name].std() / scale - 1) < 0.03, name
    branch = "blocks.0.mixer.o_proj.weight"
    torch.testing.assert_close(shallow[branch].std() / 2, deep[branch].std(), rtol=0.03, atol=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": torch.zeros(2, 3)}, "tokens must be an int64 or int32 tensor, got torch.float"),
        ({"tokens": [[1]]}, "tokens must be a tensor [B, T], got list"),
        ({"tokens": torch.zeros(3, dtype=torch.long)}, "tokens must have 2 axes [B, T], got [3]"),
        ({"tokens": torch.full((1, 3), 257)}, "tokens must lie in [0, vocab_size=257), got 257"),
        ({"tokens": torch.tensor([[3, -1]])}, "got -1 to 3"),
        ({"mask": torch.ones(2, 4, dtype=torch.bool)}, "a bool tensor [B, T] = [2, 3]"),
        ({"mask": torch.ones(2, 3)}, "[2, 3], True at real tokens, got torch.float32"),
        ({"cu_seqlens": torch.tensor([0, 3])}, "B must be 1, got 2"),
        ({"tokens": torch.zeros(1, 3, dtype=torch.long), "cu_seqlens": torch.tensor([1, 3])},
         "cu_seqlens must start at 0, got 1"),
        ({"tokens": torch.zeros(1, 3, dtype=torch.long), "cu_seqlens": torch.tensor([0, 4])},
         "cu_seqlens must end at T = 3, got 4"),
        ({"tokens": torch.zeros(1, 3, dtype=torch.long), "cu_seqlens": torch.tensor([0, 3, 2])},
         "cu_seqlens must not decrease"),
        ({"context": 2}, "context must be what make_context returns, or None, got int"),
        ({"context": Context(None, 0, (0, 9))}, "tokens must have the 9 tokens of process 0"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(arguments, message, make_model):
    model = make_model()
    arguments = {"tokens": torch.zeros(2, 3, dtype=torch.long)} | arguments
    with pytest.raises(ValueError, match=re.escape(message)):
        model(arguments.pop("tokens"), **arguments)


@pytest.mark.parametrize("layer", ["attention", "sliding_window"])
def test_going_on_from_packed_rows_of_attention_is_refused_with_the_reason(make_model, layer):
    model, tokens = make_model(layer_types=layer), torch.zeros(1, 5, dtype=torch.long)
    _, state = model(tokens, cu_seqlens=torch.tensor([0, 3, 5]))
    with pytest.raises(ValueError, match=r"got \[\]: attention keeps none of packed rows"):
        model(tokens[:, :1].expand(2, 1), state)


def test_a_state_of_another_model_or_batch_is_refused(make_model, random_tokens):
    model = make_model()
    _, state = model(random_tokens(2, 3))
    with pytest.raises(ValueError, match=r"state must hold 3 rows, one a sequence, got \[2\]"):
        model(random_tokens(3, 1), state)
    with pytest.raises(ValueError, match="states of 4 layers, got 2"):
        model(random_tokens(2, 1), type(state)(state[:2]))
    tokens = random_tokens(2, 3)
    for wrong, found in ((model(tokens), "tuple"), (tokens, "Tensor")):
        says = f"of 4 layers, got {found}: give what this model returned"
        with pytest.raises(ValueError, match=says):
            model(tokens, wrong)
        with pytest.raises(ValueError, match=says):
            model.generate([[1], [2]], max_new_tokens=1, state=wrong)
