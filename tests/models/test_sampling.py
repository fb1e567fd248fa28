import pytest
import torch

from deltarule.models.generate import generate
from deltarule.models.sampling import Sampling, kept
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
@pytest.mark.parametrize("min_p", [None, 1e-9, 0.05, 0.4, 1.0])
def test_the_kept_set_is_that_of_the_definition(temperature, top_k, top_p, min_p):
    got = kept(LOGITS, Sampling(temperature, top_k, top_p, min_p))
    for row in range(2):
        tokens, p = allowed(temperature, top_k, top_p, row)
        pairs = zip(tokens, p, strict=True)
        expected = [token for token, share in pairs if share >= (min_p or 0) * p[0]]
        assert got.order[row, : int(got.size[row])].tolist() == expected


@pytest.mark.parametrize("small", [1e-30, 1e-45, 1e-46, 5e-324])
def test_what_float32_cannot_hold_keeps_the_likeliest(small):
    assert draw(LOGITS[0], 5, temperature=small) == [1] * 5
    for temperature in (0.5, small):
        assert draw(LOGITS[0], 5, top_p=small, temperature=temperature) == [1] * 5
    assert len(draw(LOGITS[0], 5, temperature=1e300)) == 5


def test_a_repetition_is_punished_once_it_was_seen():
    """By the definition of CTRL, of what was added and of the prompt, token 0."""
    logits, seen, expected = LOGITS[0].clone(), {0}, []
    for _ in range(8):
        punished = [
            (x / 3 if x > 0 else x * 3) if t in seen else x for t, x in enumerate(logits.tolist())
        ]
        expected.append(max(range(6), key=punished.__getitem__))
        seen.add(expected[-1])
    assert draw(LOGITS[0], 8, temperature=0, repetition_penalty=3.0) == expected
    assert expected[:3] == [1, 3, 1]
    assert draw(LOGITS[0], 8, temperature=0) == [1] * 8


class Fixed(torch.nn.Module):
    """A stand-in for a model: the same logits always."""

    def __init__(self, logits):
        super().__init__()
        self.blocks = torch.nn.ModuleList()
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


def test_impossible_tokens_are_never_drawn():
    logits = torch.tensor([float("-inf"), 0.0, float("-inf"), 0.0])
    assert set(draw(logits, 200)) == {1, 3}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_damaged_logits_are_refused(bad, temperature):
    with pytest.raises(ValueError, match="logits are NaN or infinite"):
        draw(torch.tensor([0.0, bad]), 1, temperature=temperature)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_kernel_takes_the_likeliest(dtype):
    from deltarule.ops.fused.likeliest_triton import likeliest

    device = "cuda" if torch.cuda.is_available() else "cpu"
    logits = torch.randn(6, 2, 9000, device=device).to(dtype)[:, 1]
    logits[1, 8999] = logits[1, 17] = 50
    logits[2, 5], logits[3, 3] = float("nan"), float("inf")
    logits[4] = float("-inf")
    found = likeliest(logits).tolist()
    assert found[0] == logits[0].argmax()
    assert found[1:5] == [17, -1, -1, -1]
    assert found[5] == (logits[5] == logits[5].max()).nonzero()[0]
