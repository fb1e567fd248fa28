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
from experiments.words import Form, merged


@dataclass(frozen=True, kw_only=True)
class Training:
    """How the authors say they trained it; AdamW and a cosine schedule everywhere.

    Args:
        tokens: Tokens in all.
        batch_tokens: Tokens in a step.
        context: Tokens in a sequence.
        learning_rate: The highest.
        final_learning_rate: Where the cosine ends.
        first_learning_rate: Where the warm-up starts.
        warmup_tokens: Tokens until the highest learning rate.
        weight_decay: Of AdamW.
        clip: Largest norm of the gradient.
        data: What it was trained on, and with which tokenizer.
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
    """One model of one paper.

    Args:
        name: Key in `RECIPES`.
        title: What its authors call it.
        model: Its sizes, for `CausalLM`.
        training: How it was trained. None: unknown, or a model that we made up.
        parameters: How many its authors say it has. None: they do not say, or what they say does
            not agree with its sizes; see `unknown`.
        head_counted: Whether their number counts the output head beside the embedding.
        source: Where the sizes are from.
        unknown: What the source leaves open, and what is ours. "": nothing.
    """

    name: str
    title: str
    model: ModelConfig
    source: str
    training: Training | None = None
    parameters: float | None = None
    head_counted: bool = True
    unknown: str = ""


def read_recipes() -> dict[str, Recipe]:
    """Every recipe, with what it takes over from the tables that it names."""
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return {
        name: recipe(name, reduce(merged, [*map(table["bases"].get, row.pop("of")), row]))
        for name, row in table["recipes"].items()
    }


def recipe(name: str, row: Form) -> Recipe:
    training = row.pop("training", None)
    return Recipe(
        name=name,
        model=ModelConfig(**row.pop("model")),
        training=training and Training(**training),
        **row,
    )


RECIPES = read_recipes()


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


if __name__ == "__main__":
    print(patterns(), recipes(), unknowns(), sep="\n\n")
