"""Lightning Attention against its token loop, with the slopes as released."""

import pytest
import torch

from deltarule.nn import RULES, Lightning
from nn.drawn import HV, K, draw_projections, each_head, largest_error, run
from oracles import lightning


@pytest.mark.parametrize(("layer", "layers"), [(0, 1), (3, 12), (11, 12)])
def test_token_loop(layer, layers):
    p = draw_projections(depth=layer / max(layers - 1, 1))
    slopes = lightning.released_slopes(HV, layer, layers)
    expected = torch.zeros_like(p.v)
    for row, head, key_head, v in each_head(p.v):
        q, k = (x[row, :, key_head] for x in (p.q, p.k))
        expected[row, :, head], _ = lightning.recurrence(q / K**0.5, k, v, slopes[head])
    assert largest_error(run(RULES["lightning"], p), expected) <= 1e-12


@pytest.mark.parametrize("heads", [1, 2, 6, 12, 64])
@pytest.mark.parametrize(("layer", "layers"), [(0, 1), (0, 80), (40, 80), (79, 80)])
def test_slopes_of_a_layer(heads, layer, layers):
    slopes = slopes_of(Lightning(heads * 4, num_heads=heads, layer_index=layer, num_layers=layers))
    torch.testing.assert_close(
        slopes, lightning.released_slopes(heads, layer, layers), rtol=0, atol=1e-13
    )


def test_slopes_of_the_released_model_in_transformers():
    """MiniMax-01 has 64 heads and 80 layers; the two formulas differ in 1e-5 / 79 of a slope."""
    for layer in (0, 40, 79):
        slopes = slopes_of(Lightning(256, num_heads=64, layer_index=layer, num_layers=80))
        expected = lightning.transformers_slopes(64, layer, 80)
        torch.testing.assert_close(slopes, expected, rtol=0, atol=2e-7)


def slopes_of(layer: Lightning) -> torch.Tensor:
    """By what an empty token leaves of the state."""
    layer.double()
    _, state = layer(torch.randn(1, 3, layer.hidden_size, dtype=torch.float64))
    _, after = layer(torch.zeros(1, 1, layer.hidden_size, dtype=torch.float64), state)
    return -(after["recurrent"] / state["recurrent"])[0].flatten(1).mean(-1).log().detach()
