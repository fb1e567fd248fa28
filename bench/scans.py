"""The layers over `selective_scan` on a GPU: the operator's kernels beside PyTorch's operations.

    python -m bench.scans --output FILE

8x2048 tokens, 1024 channels, bfloat16. What is timed is the operator alone, with what a new layer
gives it for random tokens, and gradients by all of it.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from bench import results
from bench.timing import event_times, warm_ms
from deltarule.nn import MIXERS
from deltarule.ops.selective_scan.api import IMPLEMENTATIONS
from deltarule.ops.selective_scan.inputs import ScanInputs
from deltarule.shapes import RecurrentOutput

BATCH, TOKENS, CHANNELS, HEADS = 8, 2048, 1024, 8
REPEATS, WARM_UP = 5, 2
# Longer calls are run once more only: PyTorch takes half a second for some.
LONG_MS = 100
SIDES = {"deltarule": "triton", "PyTorch": "torch"}
LAYERS = ["lru", "rg_lru", "hgrn", "rwkv4", "mamba1", "signed_mamba1", "dfw", "longhorn_released"]


def inputs_of(name: str, device: str, sizes: tuple[int, int, int]) -> ScanInputs:
    """What a layer of this name gives the operator, every number of it a leaf with a gradient."""
    batch, tokens, channels = sizes
    torch.manual_seed(0)
    layer = MIXERS[name](channels, num_heads=HEADS).to(device)
    x = torch.randn(batch, tokens, channels, device=device)
    if device == "cuda":
        layer, x = layer.bfloat16(), x.bfloat16()
    found: list[ScanInputs] = []

    def kept(side: str) -> Callable[[ScanInputs], RecurrentOutput]:
        def run(inputs: ScanInputs) -> RecurrentOutput:
            found.append(inputs)
            return implementation.run(inputs)

        implementation = IMPLEMENTATIONS[side]
        return run

    watched = {side: IMPLEMENTATIONS[side]._replace(run=kept(side)) for side in ("triton", "torch")}
    with mock.patch.dict(IMPLEMENTATIONS, watched), torch.no_grad():
        layer(x)
    return ScanInputs(*map(leaf, found[0]))


def leaf(x: Any) -> Any:
    """A copy of a tensor with a gradient of its own; anything else unchanged."""
    if isinstance(x, Tensor) and x.is_floating_point():
        return x.detach().clone().requires_grad_()
    return x


def figures(
    name: str, device: str = "cuda", sizes: tuple[int, int, int] = (BATCH, TOKENS, CHANNELS)
) -> Iterator[tuple[str, results.Row]]:
    """Milliseconds of both passes of each side, and how far o and the gradients are apart."""
    inputs = inputs_of(name, device, sizes)
    sides = {side: IMPLEMENTATIONS[impl] for side, impl in SIDES.items()}
    weight = torch.randn_like(inputs.v)
    first: list[Tensor] = []
    for side, implementation in sides.items():
        if (reason := implementation.why_not(inputs)) is not None:
            yield side, {"error": reason}
            continue
        both = partial(both_passes, implementation.run, inputs, weight)
        outputs = both()
        first = first or outputs
        pairs = zip(outputs, first, strict=True)
        apart = max(((x - y).norm() / y.norm()).item() for x, y in pairs)
        yield side, {"apart": apart, "both_ms": milliseconds(both) if device == "cuda" else None}


def both_passes(
    run: Callable[[ScanInputs], RecurrentOutput], inputs: ScanInputs, weight: Tensor
) -> list[Tensor]:
    """o and the gradients by everything it depends on, in float32."""
    o = run(inputs).o
    leaves = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    gradients = torch.autograd.grad(o, leaves, weight, allow_unused=True)
    return [x.detach().float() for x in (o, *gradients) if x is not None]


def milliseconds(run: Callable[[], object]) -> float:
    """Median on the GPU's clock, warm."""
    first = event_times([run], 1)[0]
    return warm_ms(run, *((1, 0) if first > LONG_MS else (REPEATS, WARM_UP)))


def found(_: results.Row) -> Iterator[results.Found]:
    """The figures of all layers."""
    for name in LAYERS:
        for side, row in figures(name):
            yield side, {"kind": "scan", "layer": name}, row


if __name__ == "__main__":
    results.run_program("bench.scans", __doc__, found)
