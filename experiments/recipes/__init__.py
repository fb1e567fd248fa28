"""The models of the papers, with the papers' sizes, and what is not known about them.

>>> from deltarule.models import count_parameters
>>> count_parameters(RECIPES["samba_421m"].model)
421774848
"""

from experiments.recipes import deltanet, gated_deltanet, hybrids
from experiments.recipes.recipe import Recipe, Training

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe for recipe in (*deltanet.RECIPES, *gated_deltanet.RECIPES, *hybrids.RECIPES)
}

__all__ = ["RECIPES", "Recipe", "Training"]
