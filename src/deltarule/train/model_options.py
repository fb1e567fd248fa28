"""The sizes of a model, as the command line asks for them."""

import dataclasses
from dataclasses import dataclass

from deltarule.models import ModelConfig
from deltarule.models.bytes import VOCAB_SIZE
from deltarule.nn.rule import QueryKeyNorm


@dataclass(frozen=True)
class ModelOptions:
    """The model's sizes; see `deltarule.models.ModelConfig`."""

    layer_types: tuple[str, ...] = ("gated_deltanet",)
    """Mixer of each block: one name, several that repeat, or a published pattern such as samba;
    `deltarule rules` lists the names, `python -m experiments.recipes` the patterns."""
    num_layers: int = 2
    """Blocks, each a mixer and an MLP."""
    hidden_size: int = 128
    """Channels of the residual stream."""
    num_heads: int = 2
    """Heads of each mixer."""
    head_k_dim: int | None = 32
    """Channels of a query or key; None is the layer's own default."""
    head_v_dim: int | None = 64
    """Channels of a value; None is the layer's own default."""
    mlp_size: int | None = None
    """Channels inside the MLP; None is 8/3 of the hidden size, 0 leaves the MLP out."""
    conv_size: int | None = None
    """Taps of the short convolution, 0 leaves it out; None is the layer's own default."""
    output_gate: bool | None = None
    """Gate each mixer's output; None is the layer's own default."""
    beta_max: float | None = None
    """Largest write strength, 2 allows negative eigenvalues; None is the layer's own default."""
    n_steps: int | None = None
    """Writes for each token in DeltaProduct layers; None is the layer's own default."""
    feature_map: str | None = None
    """What q and k of linear attention and delta layers go through: identity, elu, relu, silu,
    dpfp, taylor, hedgehog, random_fourier, performer, cosformer, rebased or dijiang; None is the
    layer's own default."""
    qk_norm: QueryKeyNorm | None = None
    """What those divide q and k by: none, l1 or l2; None is the layer's own default."""
    normalizer: bool | None = None
    """Divide linear attention's read-out by z^T q; None is the layer's own default."""
    window: int | None = None
    """Tokens that sliding-window attention sees; None is the layer's own default."""
    norm_eps: float = 1e-5
    """Added to the mean square in every norm."""
    tie_embeddings: bool = True
    """Use the embedding as the output head too."""

    def config(self, vocab_size: int = VOCAB_SIZE) -> ModelConfig:
        return ModelConfig(vocab_size=vocab_size, **dataclasses.asdict(self))
