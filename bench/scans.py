"""Layers without `delta_rule` on a GPU: our kernels, PyTorch's operations, sLSTM's authors' kernel.

    python -m bench.scans --output FILE

8x2048 tokens in bfloat16. Of layers over `selective_scan`, with 1024 channels, the operator alone
is timed, with what a new layer gives it for random tokens, and gradients by all of it; sLSTM has
gradients by its gates. All is called from Python: the authors' CUDA kernel (`pip install xlstm`)
cannot be captured in a CUDA graph. Its first call compiles it, which takes half a minute.
"""

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from bench.sides import Case, run_cases
from bench.timing import Operator
from deltarule import slstm
from deltarule.nn import MIXERS
from deltarule.ops.plain import PlainImpl
from deltarule.ops.selective_scan.api import IMPLEMENTATIONS
from deltarule.ops.selective_scan.inputs import ScanInputs
from deltarule.shapes import RecurrentOutput

BATCH, TOKENS, CHANNELS, HEADS = 8, 2048, 1024, 8
SIDES = {"deltarule": "triton", "PyTorch": "torch"}
LAYERS = ["lru", "rg_lru", "hgrn", "rwkv4", "mamba1", "signed_mamba1", "dfw", "longhorn_released"]
# Of sLSTM, by their channels.
SLSTM_HEADS = {64: 16, 256: 4}


def inputs_of(name: str, device: str, sizes: tuple[int, int, int]) -> ScanInputs:
    """What a layer of this name gives the operator."""
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
    return found[0]


def scan_case(
    name: str, device: str = "cuda", sizes: tuple[int, int, int] = (BATCH, TOKENS, CHANNELS)
) -> Case:
    whole = inputs_of(name, device, sizes)
    inputs = {
        key: x.clone()
        for key, x in whole._asdict().items()
        if isinstance(x, Tensor) and x.is_floating_point()
    }

    def run(impl: str, x: Mapping[str, Tensor]) -> Tensor:
        changed: dict[str, Any] = dict(x)
        given, implementation = whole._replace(**changed), IMPLEMENTATIONS[impl]
        if (why_not := implementation.why_not(given)) is not None:
            raise ValueError(why_not)
        return implementation.run(given).o

    return Case(inputs, {side: partial(run, impl) for side, impl in SIDES.items()}, captured=False)


def ours(recurrent: Tensor, x: Mapping[str, Tensor], impl: PlainImpl = "auto") -> Tensor:
    """o [B, T, heads, channels] of gates [B, T, 4, heads, channels]."""
    weights = recurrent.permute(0, 2, 3, 1).contiguous()
    return slstm(x["gates"].transpose(2, 3), weights, impl=impl).o


def theirs(recurrent: Tensor) -> Operator:
    """The authors' cell, weights [heads, from, 4, to] in bfloat16."""
    cell = importlib.import_module("xlstm.blocks.slstm.cell")
    heads, channels = recurrent.shape[:2]
    config = cell.sLSTMCellConfig(
        hidden_size=heads * channels, num_heads=heads, batch_size=BATCH, backend="cuda",
        dtype="bfloat16", dtype_b="float32", enable_automatic_mixed_precision=False,
    )  # fmt: skip
    layer = cell.sLSTMCell_cuda(config).cuda()
    torch.nn.init.zeros_(layer._bias_)
    with torch.no_grad():
        layer._recurrent_kernel_.copy_(layer._recurrent_kernel_ext2int(recurrent))

    def run(x: Mapping[str, Tensor]) -> Tensor:
        o: Tensor = layer(x["gates"].flatten(2))[0]
        return o.transpose(1, 2)

    return run


def slstm_case(channels: int, sizes: tuple[int, int] = (BATCH, TOKENS)) -> Case:
    """The result in float64 comes first, as the others are compared with the first."""
    heads, device = SLSTM_HEADS[channels], "cuda" if torch.cuda.is_available() else "cpu"
    gates = torch.randn(*sizes, 4, heads, channels, device=device).bfloat16()
    recurrent = torch.randn(heads, channels, 4, channels, device=device) / channels**0.5
    recurrent = recurrent.bfloat16().float()
    ours_here = partial(ours, recurrent)
    sides: dict[str, Operator] = {
        "float64": lambda x: ours(recurrent.double(), {"gates": x["gates"].double()})
    }
    sides |= {"deltarule": ours_here, "PyTorch": partial(ours_here, impl="torch")}
    if find_spec("xlstm"):
        sides["xlstm"] = theirs(recurrent)

    return Case({"gates": gates}, sides, captured=False)


CASES = {name: partial(scan_case, name) for name in LAYERS}
CASES |= {
    f"sLSTM, {heads} heads of {channels}": partial(slstm_case, channels)
    for channels, heads in SLSTM_HEADS.items()
}

if __name__ == "__main__":
    run_cases("bench.scans", __doc__, "scan", CASES)
