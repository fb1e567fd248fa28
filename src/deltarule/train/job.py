"""What training is given: how long and where to train, a model of which sizes, and on what."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from deltarule.models import CausalLM, ModelConfig
from deltarule.models.bytes import VOCAB_SIZE
from deltarule.nn.checks import check_least
from deltarule.nn.rule import QueryKeyNorm


@dataclass(frozen=True)
class LoopOptions:
    """How long, how and where to train."""

    steps: int = 1000
    """Optimizer steps; the learning rate follows this number."""
    max_seconds: float | None = None
    """End after this many seconds, reading the data and validation included; the learning rate
    still follows --steps."""
    accumulate: int = 1
    """Split each step's batch into this many rows with a backward pass each: less memory."""
    activation_checkpointing: bool = False
    """Compute each block twice instead of keeping its inner results: less memory, more time."""
    seed: int = 0
    """Seed of the first weights, the order of the data and the sample."""
    device: str = "auto"
    """"cpu", "cuda", "cuda:1", "mps"; "auto" takes a GPU if PyTorch sees one."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """"bfloat16" computes in bfloat16 (autocast) with float32 weights."""
    cuda_graphs: bool = True
    """On a GPU, replay each step as a CUDA graph if batches have few shapes; the results are those
    of eager steps, bit for bit."""
    compile: bool = False
    """Compile the blocks of the model with torch.compile for training steps."""
    save_every: int = 500
    """Steps between two checkpoints; one more is written at the end."""
    keep: int = 2
    """Keep this many of the newest checkpoints."""
    evaluate_every: int = 250
    """Steps between two short evaluations for the loss curve; 0 for none."""

    def __post_init__(self) -> None:
        check_least(self, 1, "steps", "accumulate", "save_every", "keep")
        check_least(self, 0, "evaluate_every", "max_seconds", "seed")


@dataclass(frozen=True)
class ModelOptions:
    """Sizes of the model; see `deltarule.models.ModelConfig`."""

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
    """Channels of a query or key of recurrent layers; None is the layer's own default."""
    head_v_dim: int | None = 64
    """Channels of a value of recurrent layers; None is the layer's own default."""
    mlp_size: int | None = None
    """Channels inside the MLP; None is 8/3 of the hidden size, 0 leaves the MLP out."""
    conv_size: int | None = None
    """Tokens that the short convolution reads, 0 for none; None is the layer's own default."""
    output_gate: bool | None = None
    """Gate each mixer's output; None is the layer's own default."""
    beta_max: float | None = None
    """Largest write strength, 2 allows negative eigenvalues; None is the layer's own default."""
    n_steps: int | None = None
    """Writes per token in DeltaProduct layers; None is the layer's own default."""
    feature_map: str | None = None
    """Function of q and k in linear attention and delta layers: identity, elu, relu, silu,
    dpfp, taylor, hedgehog, random_fourier, performer, cosformer, rebased or dijiang; None is the
    layer's own default."""
    qk_norm: QueryKeyNorm | None = None
    """Norm that divides q and k there: none, l1 or l2; None is the layer's own default."""
    normalizer: bool | None = None
    """Divide linear attention's output by z^T q; None is the layer's own default."""
    window: int | None = None
    """Tokens that sliding-window attention sees; None is the layer's own default."""
    norm_eps: float = 1e-5
    """Added to the mean square in every norm."""
    tie_embeddings: bool = True
    """Use the embedding as the output head too."""

    def config(self, vocab_size: int = VOCAB_SIZE) -> ModelConfig:
        return ModelConfig(vocab_size=vocab_size, **dataclasses.asdict(self))


class Job(Protocol):
    """What a run trains on: batches, a loss, and the position to resume from."""

    batch_tokens: int
    """Tokens in the batch of one optimizer step."""

    def next(self) -> Any:
        """One of the `accumulate` parts of the next step's batch."""

    def tensors(self, batch: Any, device: torch.device) -> tuple[Tensor, ...]:
        """What `loss` reads of a batch, on the device."""

    def loss(self, model: CausalLM, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        """The loss to minimise, and the figures in `shown`'s order; it reads nothing else."""

    def shown(self, figures: list[float]) -> dict[str, float]:
        """Names for the figures that `loss` returned, averaged over the parts."""

    def evaluate(self, model: CausalLM) -> dict[str, float]:
        """A short evaluation for the loss curve."""

    def position(self) -> dict[str, int]:
        """Start of the next batch."""

    def seek(self, position: dict[str, int]) -> None:
        """Go to a position."""
