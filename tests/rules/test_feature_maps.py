"""Each feature map against its paper's formula, and the norms of queries and keys."""

import math

import pytest
import torch
import torch.nn.functional as F

from deltarule.nn import RULES
from deltarule.nn.feature_maps import FEATURE_MAPS, LONGEST, NORMS
from rules.drawn import HV, B, H, K, T, V, draw, draw_projections, each_head, largest_error, run


def mapped(name, x, weight=None, position=None):
    return FEATURE_MAPS[name].function(x, weight, position)


def arguments_of(name, channels=K):
    """A weight and a position, where the map needs them."""
    entry = FEATURE_MAPS[name]
    weight = None if entry.weight == "none" else draw(H, channels, channels)
    return weight, torch.arange(T).expand(B, T) if entry.positional else None


@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_sizes_signs_and_gradients(name):
    entry, x = FEATURE_MAPS[name], draw(B, T, H, K).requires_grad_()
    features = mapped(name, x, *arguments_of(name))
    assert features.shape == (B, T, H, entry.size(K))
    if name in ("elu", "relu", "dpfp", "hedgehog", "performer"):
        assert (features >= 0).all()
    features.square().sum().backward()
    assert x.grad.isfinite().all()
    assert entry.source


@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_no_token_sees_another(name):
    x, changed = draw(B, T, H, K), draw(B, T, H, K)
    changed[:, :4] = x[:, :4]
    given = arguments_of(name)
    assert torch.equal(mapped(name, x, *given)[:, :4], mapped(name, changed, *given)[:, :4])


def test_elementwise_maps():
    x = draw(B, T, H, K)
    assert torch.equal(mapped("identity", x), x)
    torch.testing.assert_close(mapped("elu", x), torch.where(x > 0, x + 1, x.exp()))
    torch.testing.assert_close(mapped("relu", x), x.clamp(min=0))
    torch.testing.assert_close(mapped("silu", x), x / (1 + torch.exp(-x)))


def test_dpfp_multiplies_neighbours():
    x = draw(1, 1, 1, K)
    r = [max(c, 0) for c in x.flatten().tolist()] + [max(-c, 0) for c in x.flatten().tolist()]
    expected = [r[i] * r[i - 1] for i in range(2 * K)]
    torch.testing.assert_close(mapped("dpfp", x).flatten(), torch.tensor(expected).double())


def test_taylor_is_the_second_order_of_exp():
    q, k = draw(B, T, H, K), draw(B, T, H, K)
    s = (q * k).sum(-1) / math.sqrt(K)
    product = (mapped("taylor", q) * mapped("taylor", k)).sum(-1)
    torch.testing.assert_close(product, 1 + s + s * s / 2)


def test_hedgehog_is_a_softmax_over_both_signs():
    x, W = draw(B, T, H, K), draw(H, K, K)
    features = mapped("hedgehog", x, W)
    y = torch.stack([x[:, :, h] @ W[h] for h in range(H)], dim=2)
    both = torch.cat([y.exp(), (-y).exp()], dim=-1)
    torch.testing.assert_close(features, both / both.sum(-1, keepdim=True))


@pytest.mark.parametrize("name", ["random_fourier", "performer"])
def test_random_features_approximate_their_kernel(name):
    q, k = draw(1, 1, 1, K), draw(1, 1, 1, K)
    weight = draw(1, K, 200_000)
    product = (mapped(name, q, weight) * mapped(name, k, weight)).sum()
    if name == "random_fourier":
        distance = F.normalize(q, dim=-1) - F.normalize(k, dim=-1)
        expected = torch.exp(-distance.square().sum() / 2)
    else:
        expected = torch.exp((q * k).sum() / math.sqrt(K))
    torch.testing.assert_close(product, expected, rtol=0.05, atol=0.01)


def test_cosformer_weighs_by_the_distance():
    q, k = draw(B, T, H, K), draw(B, T, H, K)
    position = torch.tensor([0, 3, 7, 50, 51, 400, 900, 2000, 4000]).expand(B, T)
    product = torch.einsum(
        "bthm,bshm->bhts", mapped("cosformer", q, None, position),
        mapped("cosformer", k, None, position),
    )  # fmt: skip
    distance = (position[0][:, None] - position[0][None, :]).double()
    cosine = torch.cos(math.pi / 2 * distance / LONGEST)
    expected = torch.einsum("bthk,bshk->bhts", q.relu(), k.relu()) * cosine
    torch.testing.assert_close(product, expected)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", ["linear_attention", "deltanet"])
def test_norm_of_queries_and_keys(name, norm):
    p = draw_projections(beta_logits=draw(B, T, HV), qk_norm=norm)
    expected = torch.zeros_like(p.v)
    for row, head, key_head, v, logits in each_head(p.v, p.beta_logits):
        S = torch.zeros(V, K, dtype=torch.float64)
        for t in range(T):
            q, k = (divided(x[row, t, key_head], norm) for x in (p.q, p.k))
            if name == "deltanet":
                S = S + torch.sigmoid(logits[t]) * torch.outer(v[t] - S @ k, k)
            else:
                S = S + torch.outer(v[t], k)
            expected[row, t, head] = S @ q / math.sqrt(K)
    assert largest_error(run(RULES[name], p), expected) <= 1e-12


def divided(x, norm):
    if norm == "l1":
        return x / (x.abs().sum() + 1e-6)
    return x if norm == "none" else x / torch.sqrt((x * x).sum() + 1e-6)


def test_l1_norm_of_no_features_is_zero():
    p = draw_projections(qk_norm="l1")
    p.k.zero_()
    arguments, _ = RULES["linear_attention"].arguments(p)
    assert (arguments["k"] == 0).all()


def test_normaliser_divides_by_the_sum_of_similarities():
    """arXiv 2006.16236, eq. 12: sum_j sim(q_i, k_j) v_j / sum_j sim(q_i, k_j)."""
    p = draw_projections(normalizer=True)
    p.q.abs_()
    p.k.abs_()
    expected = torch.zeros_like(p.v)
    for row, head, key_head, v in each_head(p.v):
        for t in range(T):
            similarity = p.k[row, : t + 1, key_head] @ p.q[row, t, key_head]
            expected[row, t, head] = similarity @ v[: t + 1] / similarity.sum()
    assert largest_error(run(RULES["linear_attention"], p), expected) <= 1e-12


def test_normaliser_of_nothing_is_nothing():
    p = draw_projections(normalizer=True)
    p.k.zero_()
    assert (run(RULES["linear_attention"], p) == 0).all()
