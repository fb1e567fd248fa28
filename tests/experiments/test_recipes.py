"""The models of the papers have the papers' parameters, and the page says what is not known."""

from pathlib import Path

import pytest
import torch

from deltarule.models import CausalLM, count_parameters
from deltarule.nn import MIXERS
from experiments.recipes import RECIPES, counted, patterns, recipes, unknowns

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"
KNOWN = [name for name, recipe in RECIPES.items() if recipe.parameters is not None]


@pytest.mark.parametrize("name", KNOWN)
def test_parameters_are_theirs_within_two_percent(name):
    recipe = RECIPES[name]
    assert counted(recipe) == pytest.approx(recipe.parameters, rel=0.02)


def test_released_deltanet_weights_have_as_many_numbers():
    """delta_net-1.3B-100B is one file of 2.73 GB in bfloat16, both embeddings in it."""
    assert 2 * count_parameters(RECIPES["deltanet_1b3"].model) == pytest.approx(2.73e9, abs=5e6)


def mlp(d, size):
    return 3 * d * size


def attention(d):
    return 4 * d * d


def gated_deltanet(d):
    """Modules of the release's GatedDeltaNet: expand_k 3/4, expand_v 3/2, 9 heads, convolutions."""
    keys, values, heads = d * 3 // 4, d * 3 // 2, 9
    projections = d * (2 * keys + 3 * values) + heads * (2 * d + 1)
    return projections + 4 * (2 * keys + values) + 3 * heads + values // heads


def mamba(d):
    """Modules of Mamba with expand 2, d_state 16, dt_rank d / 16 and a convolution with bias."""
    inner, rank = 2 * d, d // 16
    return 3 * d * inner + inner * (rank + 32) + inner * (rank + 1) + 16 * inner + 6 * inner


# (layers as modules of the release, layers, width, MLP): lit_gpt/config.py of both releases.
RELEASED = {
    "gated_deltanet_400m": ([gated_deltanet], 11, 1536, 6144),
    "gated_deltanet_1b3": ([gated_deltanet], 16, 2400, 5888),
    "gated_deltanet_h1_400m": ([gated_deltanet, attention], 12, 1536, 6144),
    "gated_deltanet_h1_1b3": ([gated_deltanet, attention], 18, 2304, 6144),
    "samba_421m": ([mamba, attention], 12, 1536, 4096),
    "samba_1b3": ([mamba, attention], 18, 2304, 6144),
}


@pytest.mark.parametrize("name", RELEASED)
def test_parameters_equal_those_of_the_released_modules(name):
    """Counted from the shapes in the authors' code; one embedding, two norms a layer, one after."""
    kinds, layers, d, size = RELEASED[name]
    mixers = sum(kinds[i % len(kinds)](d) for i in range(layers))
    theirs = 32_000 * d + mixers + layers * (mlp(d, size) + 2 * d) + d
    assert count_parameters(RECIPES[name].model) == pytest.approx(theirs, rel=5e-4)


@pytest.mark.parametrize("name", RECIPES)
def test_what_has_no_number_says_why(name):
    recipe = RECIPES[name]
    assert recipe.name == name
    assert recipe.source
    assert recipe.parameters is not None or recipe.unknown
    assert recipe.title.endswith((" M", " B"))
    if "400m" in name and recipe.parameters is None:
        count = count_parameters(recipe.model)
        assert f"{count / 1e6:.0f} M" in recipe.unknown
        model = recipe.model
        narrow = count - model.num_layers * 3 * model.hidden_size * (model.mlp_size - 4096)
        assert f"{narrow / 1e6:.0f} M" in recipe.unknown


@pytest.mark.parametrize("name", RECIPES)
def test_models_can_be_built(name):
    with torch.device("meta"):
        model = CausalLM(RECIPES[name].model)
    kinds = {type(block.mixer) for block in model.blocks}
    assert kinds == {MIXERS[layer] for layer in RECIPES[name].model.layer_types}


def test_the_page_holds_the_tables():
    page = PAGE.read_text()
    for table in (patterns(), recipes(), unknowns()):
        assert table in page, "replace it in docs/recipes.md: python -m experiments.recipes"
