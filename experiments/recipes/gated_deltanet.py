"""The models of the Gated DeltaNet paper, arXiv 2412.06464, and Samba beside them.

Sizes from the authors' release (lit_gpt/config.py: keys of 3/4 and values of 3/2 of the stream in
nine heads, one embedding) and from Samba's; the paper gives none but the window.
"""

from dataclasses import replace

from deltarule.models import ModelConfig
from experiments.recipes.recipe import Recipe, Training

RELEASE = "arXiv 2412.06464, section 4, and lit_gpt/config.py of the authors' release"
SAMBA = "arXiv 2406.07522, and lit_gpt/config.py of its release"
FIVE_HUNDRED = (
    "Which sizes the paper's 400 M models have. The release names this configuration 0.4B, but it "
    "has {count} parameters; with Samba's MLP of 4096 channels in place of 6144 it would have "
    "{narrow}."
)


# Section 4; the final learning rate is that of the release, a tenth.
LONG = Training(
    tokens=100e9,
    batch_tokens=0.5e6,
    context=4096,
    learning_rate=4e-4,
    final_learning_rate=4e-5,
    warmup_tokens=1e9,
    weight_decay=0.1,
    clip=1.0,
    data="FineWeb-Edu, Llama 2's tokenizer",
)
SHORT = replace(LONG, tokens=15e9)
COMMON = ModelConfig(
    vocab_size=32_000,
    hidden_size=2304,
    num_layers=18,
    layer_types="gated_deltanet_h2",
    num_heads=18,
    window=2048,
    mlp_size=5888,
)


def model(layer_types: str, num_layers: int, hidden_size: int, mlp_size: int) -> ModelConfig:
    """Nine heads of Gated DeltaNet, and attention heads of 128 channels."""
    return replace(
        COMMON,
        hidden_size=hidden_size,
        num_layers=num_layers,
        layer_types=layer_types,
        num_heads=9,
        head_k_dim=hidden_size * 3 // 4 // 9,
        head_v_dim=hidden_size * 3 // 2 // 9,
        num_attention_heads=None if hidden_size % 128 else hidden_size // 128,
        mlp_size=mlp_size,
    )


def samba(hidden_size: int, num_layers: int, mlp_size: int) -> ModelConfig:
    """Mamba with a state of 16 and attention heads of 128 channels, in turns."""
    heads = hidden_size // 128
    return replace(
        COMMON,
        hidden_size=hidden_size,
        num_layers=num_layers,
        layer_types="samba",
        num_heads=heads,
        mlp_size=mlp_size,
    )


RECIPES = [
    Recipe(
        name="gated_deltanet_400m",
        title="Gated DeltaNet 400 M",
        model=model("gated_deltanet", 11, 1536, 6144),
        training=SHORT,
        source=RELEASE,
        unknown=FIVE_HUNDRED.format(count="517 M", narrow="413 M"),
    ),
    Recipe(
        name="gated_deltanet_1b3",
        title="Gated DeltaNet 1.3 B",
        model=model("gated_deltanet", 16, 2400, 5888),
        training=LONG,
        parameters=1.3e9,
        source=RELEASE,
    ),
    Recipe(
        name="gated_deltanet_h1_400m",
        title="Gated DeltaNet-H1 400 M",
        model=model("gated_deltanet_h1", 12, 1536, 6144),
        training=SHORT,
        source=RELEASE,
        unknown=FIVE_HUNDRED.format(count="531 M", narrow="418 M"),
    ),
    Recipe(
        name="gated_deltanet_h1_1b3",
        title="Gated DeltaNet-H1 1.3 B",
        model=model("gated_deltanet_h1", 18, 2304, 6144),
        training=LONG,
        parameters=1.3e9,
        source=RELEASE,
    ),
    Recipe(
        name="gated_deltanet_h2_1b3",
        title="Gated DeltaNet-H2 1.3 B",
        model=COMMON,
        training=LONG,
        parameters=1.3e9,
        source="arXiv 2412.06464, section 4",
        unknown="All sizes: the release has no H2. Here H1's width and depth with 18 heads in "
        "every layer, and the MLP that makes 1.3 B.",
    ),
    Recipe(
        name="samba_421m",
        title="Samba 421 M",
        model=samba(1536, 12, 4096),
        parameters=421e6,
        source=SAMBA,
    ),
    Recipe(
        name="samba_1b3",
        title="Samba 1.3 B",
        model=samba(2304, 18, 6144),
        training=LONG,
        source=SAMBA,
        unknown="Whether 1.3 B is a rounded number: this configuration of the release, named "
        "1.3B, has 1.33 B parameters.",
    ),
]
