"""The models of the papers, with the papers' sizes, and what is not known about them.

They stand in `recipes.toml`; `python -m experiments.recipes` prints the tables of docs/recipes.md.

>>> from deltarule.models import count_parameters
>>> count_parameters(RECIPES["samba_421m"].model)
421774848
"""

import tomllib
from dataclasses import dataclass
from functools import reduce
from itertools import groupby
from pathlib import Path

from bench.markdown import markdown_table
from deltarule.models import PATTERNS, ModelConfig, count_parameters
from experiments.experiment import merged


@dataclass(frozen=True, kw_only=True)
class Training:
    """How the authors say they trained it; AdamW and a cosine schedule everywhere.

    `tokens` in all, in a step (`batch_tokens`) and in a sequence (`context`); the highest learning
    rate, where the warm-up of so many tokens starts and where the cosine ends; `clip`, the largest
    norm of the gradient; `data` with the tokenizer.
    """

    tokens: float
    batch_tokens: float
    context: int
    learning_rate: float
    final_learning_rate: float
    warmup_tokens: float
    weight_decay: float
    clip: float
    data: str
    first_learning_rate: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One model of one paper, by what its authors call it."""

    name: str
    title: str
    model: ModelConfig
    source: str
    training: Training | None = None
    """None: unknown, or a model that we made up."""
    parameters: float | None = None
    """How many its authors say it has. None: they do not say, or what they say does not agree with
    its sizes; see `unknown`."""
    head_counted: bool = True
    """Whether their number counts the output head beside the embedding."""
    unknown: str = ""
    """What the source leaves open, and what is ours."""


def read_recipes() -> dict[str, Recipe]:
    table, found = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8")), {}
    for name, own in table["recipes"].items():
        row = reduce(merged, [*map(table["bases"].get, own.pop("of")), own])
        training = Training(**row.pop("training")) if "training" in row else None
        model = ModelConfig(**row.pop("model"))
        found[name] = Recipe(name=name, model=model, training=training, **row)
    return found


RECIPES = read_recipes()


def patterns() -> str:
    rows = [[f"`{p.name}`", p.title, p.rule, p.source] for p in PATTERNS.values()]
    return markdown_table(["`layer_types`", "system", "layers", "source"], rows)


def recipes() -> str:
    """A line for each recipe, its parameters counted as its authors count them."""
    heads = ["recipe", "layers", "width", "heads", "key, value", "MLP", "theirs", "ours", "all"]
    rows = []
    for recipe in RECIPES.values():
        model, number = recipe.model, recipe.parameters
        theirs = "" if number is None else f"{number / 1e6:,.0f} M"
        ours = [f"{count / 1e6:,.1f} M" for count in (counted(recipe), count_parameters(model))]
        more = model.num_attention_heads
        count = str(model.num_heads) if more is None else f"{model.num_heads}, attention {more}"
        channels = model.head_k_dim, model.head_v_dim
        head = ", ".join("default" if x is None else str(x) for x in channels)
        sizes = [str(model.num_layers), str(model.hidden_size), count, head, str(model.mlp_size)]
        rows.append([f"`{recipe.name}`", *sizes, theirs, *ours])
    return markdown_table(heads, rows)


def unknowns() -> str:
    """What each source leaves open, recipes that leave open the same together."""
    told = [recipe for recipe in RECIPES.values() if recipe.unknown]
    groups = groupby(told, key=lambda recipe: recipe.unknown)
    return "\n".join(f"- {', '.join(f'`{x.name}`' for x in group)}: {why}" for why, group in groups)


def counted(recipe: Recipe) -> int:
    """Parameters of the recipe's model, as its authors count: with the output head, or without."""
    model = recipe.model
    separate = not (recipe.head_counted or model.tie_embeddings)
    return count_parameters(model) - separate * model.vocab_size * model.hidden_size


if __name__ == "__main__":
    print(patterns(), recipes(), unknowns(), sep="\n\n")
