"""Two figures of a benchmark on a CPU: seconds, and bytes saved for the backward pass."""

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

# Keyword tensors -> output; what is compared is a pair of these on the same inputs.
Operator = Callable[[Mapping[str, Tensor]], Tensor]


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """The middle one of repeated timings, and the middle half of them."""
    lower, median, upper = np.percentile(seconds, [25, 50, 75]).tolist()
    return {"median": median, "lower_quartile": lower, "upper_quartile": upper}


def forward_backward(
    operator: Operator, inputs: Mapping[str, Tensor], grad_output: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """The output, and the gradient of sum(output * grad_output) for every input."""
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    output = operator(leaves)
    gradients = torch.autograd.grad(output, list(leaves.values()), grad_output.to(output.dtype))
    return output.detach(), dict(zip(leaves, gradients, strict=True))


def interleaved_seconds(
    runs: Mapping[str, Callable[[], object]], repeats: int
) -> dict[str, list[float]]:
    """Seconds of each run, in turns, so that a slow moment of the machine meets all of them."""
    for run in runs.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def saved_bytes(operator: Operator, inputs: Mapping[str, Tensor]) -> int:
    """Bytes that autograd holds between forward and backward, each storage counted once."""
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(x: Tensor) -> Tensor:
        # Held until the end: a freed address could be given to another storage.
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        operator(leaves)
    return sum(storage.nbytes() for storage in storages.values())
