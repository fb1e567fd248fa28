"""Guessed tokens: whatever is guessed, the tokens are those of steps of one token."""

import pytest
import torch

from deltarule.models.decoder import Decoder, lend, release_graphs
from deltarule.models.generate import Lookup
from deltarule.nn import MIXERS, ModelState
from deltarule.nn.state import DraftedState, LentState
from models.checkpoints import MIXED, check_graphs
from tolerance import relative_rms

TOKENS = 4
BESIDE = {"layer_types": ("mamba2+attention", "mlp")}
LAYERS = {
    "gated_deltanet": {"layer_types": "gated_deltanet", "num_layers": 2}, "mixed": {},
    "side by side, without a state": BESIDE, "latent": BESIDE | {"kv_lora_rank": 8},
    "no state at all": {"layer_types": "mlp", "num_layers": 2},
}  # fmt: skip


@pytest.mark.parametrize("name", [*MIXERS, MIXED])
def test_tokens_are_taken_back_to_the_state_before_them(name, make_model, random_tokens):
    model = make_model(layer_types=name, num_layers=4 if name == MIXED else 2).double()
    tokens = torch.stack([random_tokens(9 + TOKENS, seed=seed) for seed in (1, 2)])
    with torch.no_grad():
        lent = lend(model, model(tokens[:, :9])[1], 40)
        before = [DraftedState(layer.clone()) for layer in lent]
        x, after = model.hidden(tokens[:, 9:], ModelState(before))
        single = ModelState(map(LentState, lent))
        for count in range(1, TOKENS + 1):
            y, single = model.hidden(tokens[:, 8 + count, None], single)
            single = ModelState(map(LentState, single))
            assert relative_rms(x[:, count - 1 : count], y) < 1e-12
            taken = torch.tensor([count, TOKENS + 1 - count])
            pairs = zip(before, after, strict=True)
            rolled = [d.up_to(s, torch.arange(2), taken - 1) for d, s in pairs]
            for state, expected in zip(rolled, single, strict=True):
                for key, tensor in expected.items():
                    # Of a cache, the rows that are looked at.
                    cache = "valid" in expected and key in ("keys", "values")
                    seen = expected["valid"][0] if cache else ...
                    assert torch.allclose(state[key][0][seen], tensor[0][seen], 1e-9, 1e-9), key


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("draft", [1, 5])
def test_guesses_change_no_token(name, draft, device, make_model, random_tokens, on_buffers):
    model = make_model(**LAYERS[name]).to(device)
    prompts = [[1, 2, 3, 4] * 4, random_tokens(5, seed=3).tolist(), [9] * 9]
    for options in ({"temperature": 0}, {"seed": 3, "top_k": 40}, {"seed": 1, "temperature": 0.1}):
        options |= {"max_new_tokens": 30}
        expected = check_graphs(model, prompts, **options)
        assert check_graphs(model, prompts, draft=draft, **options) == expected
    release_graphs(model)


def test_repetition_takes_fewer_steps(make_model, monkeypatch):
    model, steps = make_model(), []
    with torch.no_grad():
        # Always the same token.
        for parameter in model.blocks.parameters():
            parameter.zero_()
        model.embedding.weight.copy_(model.embedding.weight[:1] * torch.ones(257, 1))
        model.embedding.weight[7] *= 2
    advance = Decoder.step
    monkeypatch.setattr(Decoder, "step", lambda self, m: steps.append(1) or advance(self, m))
    added = model.generate([[7, 7, 7]], max_new_tokens=21, temperature=0, draft=4)
    assert len(added[0]) == 21
    if len(set(added[0])) == 1:
        assert len(steps) == 4


def test_what_followed_before_is_guessed():
    assert Lookup([1, 2, 3]).guesses(4) == [0] * 4
    assert Lookup([1, 2, 3, 9, 2, 3]).guesses(2) == [9, 2]
    # The longest match counts, of several the latest, and what repeats itself goes on.
    assert Lookup([1, 2, 5, 4, 2, 6, 1, 2]).guesses(1) == [5]
    assert Lookup([2, 5, 2, 6, 2]).guesses(1) == [6]
    assert Lookup([8, 8]).guesses(3) == [8, 8, 8]
