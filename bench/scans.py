"""Layers without `delta_rule` on a GPU: our kernels, PyTorch's operations, sLSTM's authors' kernel.

    python -m bench.scans --output FILE

8x2048 tokens in bfloat16. Of layers over `selective_scan`, with 1024 channels, the operator alone
is timed, with what a new layer gives it for random tokens, and gradients by all of it. sLSTM, a
program a head and with heads split over programs, has gradients by its gates, and is called from
Python: the authors' CUDA kernel (`pip install xlstm`) cannot be captured in a CUDA graph. Its first
call compiles it, which takes half a minute.
"""

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from bench import results
from bench.timing import event_times, warm_ms
from deltarule import slstm
from deltarule.nn import MIXERS
from deltarule.ops.plain import PlainImpl
from deltarule.ops.selective_scan.api import IMPLEMENTATIONS
from deltarule.ops.selective_scan.inputs import ScanInputs
from deltarule.shapes import RecurrentOutput

BATCH, TOKENS, CHANNELS, HEADS = 8, 2048, 1024, 8
REPEATS, WARM_UP = 10, 3
# Longer calls are run once more only: PyTorch takes half a second for some.
LONG_MS = 300
SIDES = {"deltarule": "triton", "PyTorch": "torch"}
LAYERS = ["lru", "rg_lru", "hgrn", "rwkv4", "mamba1", "signed_mamba1", "dfw", "longhorn_released"]
# Of sLSTM, by their channels.
SLSTM_HEADS = {64: 16, 256: 4}
Run = Callable[[Tensor, Tensor], Tensor]


def milliseconds(run: Callable[[], object]) -> float:
    long = event_times([run], 1)[0] > LONG_MS
    return warm_ms(run, *((1, 0) if long else (REPEATS, WARM_UP)))


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
        yield side, {"apart": apart, "both_ms": milliseconds(both)}


def ours(gates: Tensor, recurrent: Tensor, impl: PlainImpl = "auto") -> Tensor:
    """o [B, T, heads, channels] of gates [B, T, 4, heads, channels]."""
    return slstm(gates.transpose(2, 3), recurrent.permute(0, 2, 3, 1).contiguous(), impl=impl).o


def theirs(heads: int, channels: int) -> Run:
    """The authors' cell, weights [heads, from, 4, to] in bfloat16."""
    cell = importlib.import_module("xlstm.blocks.slstm.cell")
    config = cell.sLSTMCellConfig(
        hidden_size=heads * channels, num_heads=heads, batch_size=BATCH, backend="cuda",
        dtype="bfloat16", dtype_b="float32", enable_automatic_mixed_precision=False,
    )  # fmt: skip
    layer = cell.sLSTMCell_cuda(config).cuda()
    torch.nn.init.zeros_(layer._bias_)

    def run(gates: Tensor, recurrent: Tensor) -> Tensor:
        with torch.no_grad():
            layer._recurrent_kernel_.copy_(layer._recurrent_kernel_ext2int(recurrent))
        o: Tensor = layer(gates.flatten(2))[0]
        return o.transpose(1, 2)

    return run


def slstm_figures(
    channels: int, sizes: tuple[int, int] = (BATCH, TOKENS)
) -> Iterator[tuple[str, results.Row]]:
    """Milliseconds of both passes, gradients by the gates, and the error of o, of each side."""
    from deltarule.ops.slstm.triton import split

    heads = SLSTM_HEADS[channels]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sides: dict[str, Run] = {"deltarule, a program a head": ours, "deltarule": ours}
    sides["PyTorch"] = partial(ours, impl="torch")
    if find_spec("xlstm"):
        sides["xlstm"] = theirs(heads, channels)
    gates = torch.randn(*sizes, 4, heads, channels, device=device).bfloat16()
    recurrent = torch.randn(heads, channels, 4, channels, device=device) / channels**0.5
    recurrent, weight = recurrent.bfloat16().float(), torch.randn_like(gates[:, :, 0])
    exact = ours(gates[:2].double(), recurrent.double())
    leaf = gates.clone().requires_grad_()
    for name, run in sides.items():

        def both(run: Run = run) -> Tensor:
            return torch.autograd.grad(run(leaf, recurrent), leaf, weight)[0]

        with mock.patch.object(split, "SPLITS", name != "deltarule, a program a head"):
            error = (run(gates, recurrent)[:2].double() - exact).norm() / exact.norm()
            forward, twice = milliseconds(partial(run, gates, recurrent)), milliseconds(both)
        yield name, {"relative_rms": error.item(), "forward_ms": forward, "both_ms": twice}


def found(report: results.Row) -> Iterator[results.Found]:
    for name in LAYERS:
        for side, row in figures(name):
            yield side, {"kind": "scan", "layer": name}, row
    if find_spec("xlstm"):
        report["versions"]["xlstm"] = version("xlstm")
    for channels, heads in SLSTM_HEADS.items():
        for side, row in slstm_figures(channels):
            yield side, {"kind": "slstm", "heads": heads, "channels": channels}, row


if __name__ == "__main__":
    results.run_program("bench.scans", __doc__, found)
