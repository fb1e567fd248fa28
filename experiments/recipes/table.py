"""The recipes as the tables of docs/recipes.md."""

from itertools import groupby

from deltarule.models import PATTERNS, ModelConfig, count_parameters
from experiments.recipes import RECIPES
from experiments.recipes.recipe import Recipe


def patterns() -> str:
    """A line for each named pattern."""
    head = ["| `layer_types` | system | layers | source |", "|---|---|---|---|"]
    rows = [f"| `{p.name}` | {p.title} | {p.rule} | {p.source} |" for p in PATTERNS.values()]
    return "\n".join([*head, *rows])


def recipes() -> str:
    """A line for each recipe, its parameters counted as its authors count them."""
    columns = "recipe", "layers", "width", "heads", "key, value", "MLP", "theirs", "ours", "all"
    head = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    return "\n".join([*head, *map(_row, RECIPES.values())])


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


def _row(recipe: Recipe) -> str:
    model, number = recipe.model, recipe.parameters
    theirs = "" if number is None else f"{number / 1e6:,.0f} M"
    cells = [
        f"`{recipe.name}`", str(model.num_layers), str(model.hidden_size), _heads(model),
        f"{_size(model.head_k_dim)}, {_size(model.head_v_dim)}", str(model.mlp_size), theirs,
        f"{counted(recipe) / 1e6:,.1f} M", f"{count_parameters(model) / 1e6:,.1f} M",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _heads(model: ModelConfig) -> str:
    if model.num_attention_heads is None:
        return str(model.num_heads)
    return f"{model.num_heads}, attention {model.num_attention_heads}"


def _size(channels: int | None) -> str:
    return "default" if channels is None else str(channels)
