"""The recipes as the tables of docs/recipes.md."""

from itertools import groupby

from bench.markdown import markdown_table
from deltarule.models import PATTERNS, count_parameters
from experiments.recipes import RECIPES
from experiments.recipes.recipe import Recipe


def patterns() -> str:
    """A line for each named pattern."""
    rows = [[f"`{p.name}`", p.title, p.rule, p.source] for p in PATTERNS.values()]
    return markdown_table(["`layer_types`", "system", "layers", "source"], rows)


def recipes() -> str:
    """A line for each recipe, its parameters counted as its authors count them."""
    heads = ["recipe", "layers", "width", "heads", "key, value", "MLP", "theirs", "ours", "all"]
    return markdown_table(heads, map(row_of, RECIPES.values()))


def unknowns() -> str:
    """What each source leaves open, recipes that leave open the same together."""
    told = [recipe for recipe in RECIPES.values() if recipe.unknown]
    lines = []
    for unknown, group in groupby(told, key=lambda recipe: recipe.unknown):
        lines.append(f"- {', '.join(f'`{recipe.name}`' for recipe in group)}: {unknown}")
    return "\n".join(lines)


def counted(recipe: Recipe) -> int:
    """Parameters of the recipe's model, as its authors count: with the output head, or without."""
    model = recipe.model
    separate = not (recipe.head_counted or model.tie_embeddings)
    return count_parameters(model) - separate * model.vocab_size * model.hidden_size


def row_of(recipe: Recipe) -> list[str]:
    model, number = recipe.model, recipe.parameters
    theirs = "" if number is None else f"{number / 1e6:,.0f} M"
    ours = [f"{count / 1e6:,.1f} M" for count in (counted(recipe), count_parameters(model))]
    heads, more = str(model.num_heads), model.num_attention_heads
    if more is not None:
        heads += f", attention {more}"
    head = ", ".join(
        "default" if x is None else str(x) for x in (model.head_k_dim, model.head_v_dim)
    )
    sizes = [str(model.num_layers), str(model.hidden_size), heads, head, str(model.mlp_size)]
    return [f"`{recipe.name}`", *sizes, theirs, *ours]
