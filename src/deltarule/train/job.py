"""What a training loop is given: how long and where to train, and on what."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

import torch
from torch import Tensor

from deltarule.models import CausalLM
from deltarule.nn.checks import check_least

# Whether the figures of a short evaluation are good enough to end training.
StopWhen = Callable[[dict[str, float]], bool]
B = TypeVar("B")


@dataclass(frozen=True)
class LoopOptions:
    """How long, how and where to train."""

    steps: int = 1000
    """Optimizer steps; the learning rate follows this number."""
    max_seconds: float | None = None
    """End after this many seconds, all that precedes and follows training included; the schedule
    still follows --steps."""
    accumulate: int = 1
    """Split each step's batch into this many rows, one backward pass each: less memory."""
    activation_checkpointing: bool = False
    """Compute each block twice instead of keeping its inner results: less memory, more time."""
    seed: int = 0
    """Decides the first weights, the data order and the sample."""
    device: str = "auto"
    """"cpu", "cuda", "cuda:1", "mps"; "auto" takes a GPU if PyTorch sees one."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """"bfloat16" computes in bfloat16 (autocast) with float32 weights."""
    cuda_graphs: bool = True
    """On a GPU, replay each step as a CUDA graph where batches are of few shapes; the bits are
    those of eager steps. A CPU has none."""
    compile: bool = False
    """Compile the model with torch.compile first."""
    save_every: int = 500
    """Steps between two checkpoints; one more is written at the end."""
    keep: int = 2
    """Keep this many of the newest checkpoints."""
    evaluate_every: int = 250
    """Steps between two short evaluations for the loss curve; 0 for none."""

    def __post_init__(self) -> None:
        check_least(self, 1, "steps", "accumulate", "save_every", "keep")
        check_least(self, 0, "evaluate_every", "max_seconds", "seed")


class Job(Protocol[B]):
    """What a run trains on: batches, a loss, and the position to resume from."""

    batch_tokens: int
    """Tokens in the batch of one optimizer step."""
    static: bool
    """Whether the tensors of all batches are of few shapes, and `loss` reads nothing else."""

    def next(self) -> B:
        """One of the `accumulate` parts of the next step's batch."""

    def tensors(self, batch: B, device: torch.device) -> tuple[Tensor, ...]:
        """What `loss` reads of a batch, on the device."""

    def loss(self, model: CausalLM, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        """The loss to minimise, and what to report: a tensor of the figures in `shown`'s order."""

    def shown(self, figures: list[float]) -> dict[str, float]:
        """Names for the figures that `loss` returned, averaged over the parts."""

    def evaluate(self, model: CausalLM) -> dict[str, float]:
        """A short evaluation for the loss curve."""

    def position(self) -> dict[str, int]:
        """Start of the next batch."""

    def seek(self, position: dict[str, int]) -> None:
        """Go to a position."""
