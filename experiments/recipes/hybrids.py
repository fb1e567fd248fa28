"""Models of 400 M and 1.3 B in the patterns of MiniMax-01, Qwen3-Next and Kimi Linear.

Those are mixtures of experts of 80 to 456 billion parameters; their patterns are theirs, the sizes
are ours: the depth and width of the DeltaNet paper's models, and an MLP that makes up the number.
"""

from deltarule.models import PATTERNS, ModelConfig
from experiments.recipes.recipe import Recipe

OURS = "All sizes but the pattern: ours. {difference}"
DIFFERENCES = {
    "minimax01": "The original has experts in place of the MLP and one norm for all heads.",
    "qwen3_next": "The original has experts in place of the MLP, gates its attention, and "
    "rotates a quarter of each head's channels.",
    "kimi_linear": "The original has experts in place of the MLP, and latent attention without "
    "positions.",
}
MLP_SIZES = {"minimax01": (2816, 5120), "qwen3_next": (2688, 4608), "kimi_linear": (3072, 5504)}


def recipe(pattern: str, small: bool) -> Recipe:
    """24 layers of heads of 128 channels, with two embeddings where small and one where large."""
    return Recipe(
        name=f"{pattern}_{'400m' if small else '1b3'}",
        title=f"{PATTERNS[pattern].title} pattern {'400 M' if small else '1.3 B'}",
        model=ModelConfig(
            vocab_size=32_000,
            hidden_size=1024 if small else 2048,
            num_layers=24,
            layer_types=pattern,
            num_heads=8 if small else 16,
            mlp_size=MLP_SIZES[pattern][0 if small else 1],
            tie_embeddings=not small,
        ),
        parameters=400e6 if small else 1.3e9,
        source=PATTERNS[pattern].source,
        unknown=OURS.format(difference=DIFFERENCES[pattern]),
    )


RECIPES = [recipe(pattern, small) for pattern in DIFFERENCES for small in (True, False)]
