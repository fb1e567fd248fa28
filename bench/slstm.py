"""sLSTM on a GPU: a program a head, heads split over programs, PyTorch, and the authors' kernel.

    python -m bench.slstm --output FILE

8x2048 tokens, gates in bfloat16, called from Python: the authors' CUDA kernel (`pip install xlstm`)
cannot be captured in a CUDA graph. Its first call compiles it, which takes half a minute.
"""

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from unittest import mock

import torch
from torch import Tensor

from bench import results
from bench.timing import warm_ms
from deltarule import slstm
from deltarule.ops.plain import PlainImpl

BATCH, TOKENS, REPEATS, WARM_UP = 8, 2048, 10, 3
HEADS = {64: 16, 256: 4}
Run = Callable[[Tensor, Tensor], Tensor]


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


def figures(
    channels: int, sizes: tuple[int, int] = (BATCH, TOKENS)
) -> Iterator[tuple[str, results.Row]]:
    """Milliseconds of both passes, gradients by the gates, and the error of o, of each side."""
    from deltarule.ops.slstm.triton import split

    heads = HEADS[channels]
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
            calls = partial(run, gates, recurrent), both
            forward, twice = (warm_ms(call, REPEATS, WARM_UP) for call in calls)
        yield name, {"relative_rms": error.item(), "forward_ms": forward, "both_ms": twice}


def found(report: results.Row) -> Iterator[results.Found]:
    if find_spec("xlstm"):
        report["versions"]["xlstm"] = version("xlstm")
    for channels, heads in HEADS.items():
        for side, row in figures(channels):
            yield side, {"kind": "slstm", "heads": heads, "channels": channels}, row


if __name__ == "__main__":
    results.run_program("bench.slstm", __doc__, found)
