import pytest
import torch

from deltarule.models.generate import generate
from deltarule.models.sampling import kept
from deltarule.nn import ModelState

LOGITS = torch.tensor([[0.1, 2.0, -1.0, 1.5, 0.1, -3.0], [0.0, 0.0, 5.0, 0.0, 1.0, 2.0]])


def allowed(temperature, top_k, top_p, row):
    """The kept set by definition: go down the list while the sum before stays below top_p."""
    p = (LOGITS[row].double() / temperature).softmax(-1).tolist()
    ranked = sorted(range(len(p)), key=lambda i: -p[i])[: top_k or len(p)]
    total, result = sum(p[i] for i in ranked), []
    for i in ranked:
        if top_p is not None and sum(p[j] for j in result) / total >= top_p:
            break
        result.append(i)
    return result, [p[i] for i in result]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("top_k", [None, 1, 3, 100])
@pytest.mark.parametrize("top_p", [None, 1e-9, 0.3, 0.9, 1.0])
def test_the_kept_set_is_that_of_the_definition(temperature, top_k, top_p):
    got = kept(LOGITS, temperature=temperature, top_k=top_k, top_p=top_p)
    for row in range(2):
        expected, _ = allowed(temperature, top_k, top_p, row)
        assert got.order[row, : int(got.size[row])].tolist() == expected


class Fixed(torch.nn.Module):
    """A stand-in for a model: the same logits always."""

    def __init__(self, logits):
        super().__init__()
        self.embedding = torch.nn.Embedding(len(logits), 1)
        self.config = type("Config", (), {"vocab_size": len(logits), "num_layers": 0})
        self.fixed = logits

    def hidden(self, tokens, state=None, *, mask=None):
        return torch.zeros(*tokens.shape, 1), ModelState(())

    def logits(self, x):
        return self.fixed.expand(len(x), -1)


def draw(logits, count, **options):
    return generate(Fixed(logits), [[0]], max_new_tokens=count, seed=0, **options)[0]


@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.9}, {"temperature": 2.0}])
def test_frequencies_follow_the_probabilities(options):
    drawn = torch.tensor(draw(LOGITS[0], 4000, **options)).bincount(minlength=6) / 4000
    tokens, weights = allowed(
        options.get("temperature", 1.0), options.get("top_k"), options.get("top_p"), 0
    )
    expected = torch.zeros(6, dtype=torch.float64)
    expected[tokens] = torch.tensor(weights, dtype=torch.float64) / sum(weights)
    assert (drawn[expected == 0] == 0).all()
    assert (drawn - expected).abs().max() < 0.03


def test_a_tiny_temperature_is_greedy_and_finite():
    assert set(draw(LOGITS[0], 20, temperature=1e-30)) == {1}


def test_impossible_tokens_are_never_drawn():
    logits = torch.tensor([float("-inf"), 0.0, float("-inf"), 0.0])
    assert set(draw(logits, 200)) == {1, 3}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_damaged_logits_are_refused(bad, temperature):
    with pytest.raises(ValueError, match="logits are NaN or infinite"):
        draw(torch.tensor([0.0, bad]), 1, temperature=temperature)
