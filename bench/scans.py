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

    def keep(run: Callable[[ScanInputs], RecurrentOutput], inputs: ScanInputs) -> RecurrentOutput:
        found.append(inputs)
        return run(inputs)

    watched = {
        side: one._replace(run=partial(keep, one.run))
        for side, one in IMPLEMENTATIONS.items()
        if side in SIDES.values()
    }
    with mock.patch.dict(IMPLEMENTATIONS, watched), torch.no_grad():
        layer(x)
    copies: dict[str, Any] = {
        key: x.detach().clone().requires_grad_()
        for key, x in found[0]._asdict().items()
        if isinstance(x, Tensor) and x.is_floating_point()
    }
    return found[0]._replace(**copies)


def figures(
    name: str, device: str = "cuda", sizes: tuple[int, int, int] = (BATCH, TOKENS, CHANNELS)
) -> Iterator[tuple[str, results.Row]]:
    """Milliseconds of both passes of each side, and how far o and the gradients are apart."""
    inputs = inputs_of(name, device, sizes)
    weight = torch.randn_like(inputs.v)
    leaves = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    first: list[Tensor] = []
    for side, impl in SIDES.items():
        implementation = IMPLEMENTATIONS[impl]
        if (reason := implementation.why_not(inputs)) is not None:
            yield side, {"error": reason}
            continue

        def both(run: Callable[[ScanInputs], RecurrentOutput] = implementation.run) -> list[Tensor]:
            """o and the gradients by everything it depends on, in float32."""
            o = run(inputs).o
            gradients = torch.autograd.grad(o, leaves, weight, allow_unused=True)
            return [x.detach().float() for x in (o, *gradients) if x is not None]

        outputs = both()
        first = first or outputs
        pairs = zip(outputs, first, strict=True)
        apart = max(((x - y).norm() / y.norm()).item() for x, y in pairs)
        row: results.Row = {"apart": apart, "both_ms": None}
        if device == "cuda":
            long = event_times([both], 1)[0] > LONG_MS
            row["both_ms"] = warm_ms(both, *((1, 0) if long else (REPEATS, WARM_UP)))
        yield side, row


def found(_: results.Row) -> Iterator[results.Found]:
    for name in LAYERS:
        for side, row in figures(name):
            yield side, {"kind": "scan", "layer": name}, row


if __name__ == "__main__":
    results.run_program("bench.scans", __doc__, found)
