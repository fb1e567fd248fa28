"""The models of the DeltaNet paper, arXiv 2406.06484: 340 M and 1.3 B, pure and hybrid.

Sizes from the released configuration files (flame's delta_net_340M, the published weights
delta_net-1.3B-100B) and appendix D; the paper itself gives the head size and the convolution.
"""

from deltarule.models import ModelConfig
from experiments.recipes.recipe import Recipe, Training

PAPER = "arXiv 2406.06484, appendix D"
WINDOW = (
    "The size of the window and the heads of attention: the paper gives neither. Here the layer's "
    "default of 2048 tokens, and as many heads as DeltaNet has."
)
HEADS = "The heads of attention: the paper does not give them. Here as many as DeltaNet has."
LAST = " Where the second of them is: the paper says N / 2 + 1, the authors' blog N / 2 - 1."


def training(size: str) -> Training:
    """Appendix D; the context is that of the released configuration."""
    small = size == "340m"
    return Training(
        tokens=15e9 if small else 100e9,
        batch_tokens=0.5e6 if small else 2e6,
        context=2048,
        first_learning_rate=3e-5,
        learning_rate=3e-4,
        final_learning_rate=3e-5,
        warmup_tokens=0.5e9 if small else 1e9,
        weight_decay=0.01,
        clip=1.0,
        data="a subset of SlimPajama, Mistral's tokenizer",
    )


def model(size: str, layer_types: str, attention_heads: int | None = None) -> ModelConfig:
    """24 layers of heads of 128 channels, an MLP of 8/3 up to a multiple of 256, two embeddings."""
    small = size == "340m"
    return ModelConfig(
        vocab_size=32_000,
        hidden_size=1024 if small else 2048,
        num_layers=24,
        layer_types=layer_types,
        num_heads=8 if small else 16,
        num_attention_heads=attention_heads,
        mlp_size=2816 if small else 5632,
        norm_eps=1e-6,
        tie_embeddings=False,
    )


def recipe(size: str, kind: str, title: str, unknown: str = "") -> Recipe:
    """One row; the paper's sizes count a single embedding, its released weights both."""
    heads = None
    if kind == "attention":
        heads = 16 if size == "340m" else 32
    name = "transformer" if kind == "attention" else kind
    return Recipe(
        name=f"{name}_{size}",
        title=f"{title} {'340 M' if size == '340m' else '1.3 B'}",
        model=model(size, kind, heads),
        training=training(size),
        parameters=340e6 if size == "340m" else 1.3e9,
        head_counted=False,
        source=PAPER,
        unknown=unknown,
    )


RECIPES = [
    recipe(size, kind, title, unknown)
    for kind, title, unknown in (
        ("deltanet", "DeltaNet", ""),
        ("deltanet_sliding_window", "DeltaNet + sliding-window attention", WINDOW),
        ("deltanet_global_attention", "DeltaNet + global attention", HEADS + LAST),
        ("attention", "Transformer++", ""),
    )
    for size in ("340m", "1b3")
]
