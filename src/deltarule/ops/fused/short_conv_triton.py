"""What the kernels of the short convolution are given: of one stream, or of q, k and v at once."""

from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltarule.ops.fused.parts_triton import numbered, sums_of_parts
from deltarule.ops.fused.short_conv import ShortConv, ShortConvs
from deltarule.ops.fused.short_conv_kernels_triton import (
    beside_kernel,
    history_gradient_kernel,
    short_conv_backward_kernel,
    short_conv_kernel,
)
from deltarule.ops.fused_kernels import adjacent, as_rows
from deltarule.ops.registration import Backward, Gradients
from deltarule.ops.runtime.named import launch
from deltarule.ops.runtime.replay import Recorded
from deltarule.ops.runtime.sizes import cdiv, power_of_2

# Fused only where `tl.fma` says so: of a step's products and sums the compiler would fuse others
# than of the whole's, and the bits would differ. Written out, since Triton's default follows an
# environment variable.
OPTIONS = {"num_stages": 1, "enable_fp_fusion": False, "num_warps": 1}
CHANNELS = 128
WHOLE = torch.contiguous_format
# Runs in a tile, and tokens in a run.
TILE = (4, 16)
# Runs in a tile, and tokens in a run; R tokens past each run are computed twice. Tokens that are
# read at once, at least R, while those before them are computed.
BACKWARD_TILE, AT_ONCE = (4, 32), 4
# Rows of a tile of columns that are laid beside others, and the most columns.
BESIDE = (32, 128)


class Tiling(NamedTuple):
    """Channels of a program, runs in a tile, tokens in a run, and a warp for each run."""

    C: int
    BG: int
    RUN: int
    num_warps: int

    @classmethod
    def of(cls, streams: list[ShortConv], tile: tuple[int, int]) -> "Tiling":
        tokens = max(streams[0].x.shape[1], 1)
        size = min(CHANNELS, power_of_2(max(inputs.x.shape[2] for inputs in streams)))
        run = min(tile[1], power_of_2(tokens))
        runs = min(tile[0], power_of_2(cdiv(tokens, run)))
        return cls(size, runs, run, runs)

    def columns(self, streams: list[ShortConv]) -> int:
        return sum(cdiv(inputs.x.shape[2], self.C) for inputs in streams)


@Recorded
def short_conv(inputs: ShortConv) -> tuple[Tensor, Tensor]:
    """y [B, T, D] and the last R inputs of each sequence [N, R, D]."""
    ((y, final),) = convolved([inputs])
    return y, final


@Recorded
def short_convs(inputs: ShortConvs) -> tuple[Tensor, ...]:
    """y of each stream, then the last inputs of each."""
    found = chain(*map(convolved, launches(inputs.streams)))
    return tuple(chain(*zip(*found, strict=True)))


def launches(streams: list[ShortConv]) -> list[list[ShortConv]]:
    """Streams that one kernel convolves: all that are alike but in channels, or each alone."""
    kinds = {
        (x.dtype, w.dtype, w.shape[1], h is None, more[-1]) for x, w, h, *more in streams
    }  # fmt: skip
    return [streams] if len(kinds) == 1 else [[x] for x in streams]


def convolved(streams: list[ShortConv]) -> list[tuple[Tensor, Tensor]]:
    """Launch once for streams that are alike: y and the last inputs of each."""
    first = streams[0]
    (batch, tokens, _), sequences = first.x.shape, first.sequences
    tile = Tiling.of(streams, TILE)
    reach, found, values = first.weight.shape[1] - 1, [], []
    for inputs in streams:
        y = torch.empty_like(inputs.x, memory_format=WHOLE)
        found.append((y, y.new_empty(sequences, reach, y.shape[2])))
        values.append({**of_stream(inputs), "y": y, "final": found[-1][1]})
    blocks = cdiv(tokens, tile.BG * tile.RUN)
    extra = 0
    if found[0][1].numel():
        extra = 1 if first.cu_seqlens is None else cdiv(sequences, tile.BG)
    if batch * (blocks + extra):
        grid = blocks + extra, tile.columns(streams), batch
        launch(short_conv_kernel, grid, {**arguments(first, tile, values), "blocks": blocks})
    return found


def of_stream(inputs: ShortConv) -> dict[str, Any]:
    x, history = adjacent(inputs.x), inputs.history
    history = None if history is None else history.contiguous()
    values = {"x": x, "weight": inputs.weight.contiguous(), "history": history, "D": x.shape[2]}
    return values | steps(x)


def steps(x: Tensor, name: str = "") -> dict[str, int]:
    return {f"s{name}_b": x.stride(0), f"s{name}_t": x.stride(1)}


def arguments(first: ShortConv, tile: Tiling, each: list[dict[str, Any]]) -> dict[str, Any]:
    """What the kernels are given of a launch, and what they are compiled for."""
    return numbered(each, "D") | shared(first) | tile._asdict()


def shared(inputs: ShortConv) -> dict[str, Any]:
    names = "cu_seqlens", "sequence", "counts"
    values: dict[str, Any] = {name: getattr(inputs, name) for name in names}
    values |= {**OPTIONS, "W": inputs.weight.shape[1], "T": inputs.x.shape[1]}
    values |= {"N": inputs.sequences, "ACTIVATED": inputs.activated}
    return values | {"PACKED": inputs.cu_seqlens is not None, "PADDED": inputs.counts is not None}


def short_conv_backward(given: Backward[ShortConv]) -> Gradients:
    (d_y, d_final), inputs = given.gradients, given.inputs
    d_y = torch.zeros_like(inputs.x) if d_y is None else d_y
    return short_conv_gradients(inputs, d_y, d_final, given.wanted[2])


def short_convs_backward(given: Backward[ShortConvs]) -> Gradients:
    inputs = given.inputs
    pairs = zip(inputs[:3], given.gradients[:3], strict=True)
    d_y = [torch.zeros_like(x) if d is None else d for x, d in pairs]
    return short_convs_gradients(inputs, *d_y, *given.gradients[3:], *given.wanted[6:])


def lay_beside(given: Tensor | None, out: Tensor) -> None:
    """Copy [..., C] to the first columns of out [M, C'], whose other columns become zeros."""
    given = None if given is None else adjacent(as_rows(given))
    (rows, whole), (height, most) = out.shape, BESIDE
    width = min(power_of_2(whole), most)
    values = {"given": given, "out": out, "rows": rows, "s_out": out.stride(0), "WHOLE": whole}
    values |= {"s_given": 0 if given is None else given.stride(0), "BC": width, "BR": height}
    values["C"] = 0 if given is None else given.shape[1]
    if rows:
        launch(beside_kernel, (cdiv(rows, height), cdiv(whole, width), 1), values)


@Recorded
def short_conv_gradients(
    inputs: ShortConv, d_y: Tensor, d_final: Tensor | None, wants_history: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    (found,) = gradients([inputs], [(d_y, d_final, wants_history)])
    return found


@Recorded
def short_convs_gradients(inputs: ShortConvs, *given: Any) -> tuple[Tensor | None, ...]:
    """The same of each stream: all x, all taps, all histories.

    Given are all d_y, d_final and wants. If all d_x follow, these are written and not returned;
    after them come pairs of what is to be laid beside them, and where.
    """
    more = [given[i : len(given[:12]) : 3] for i in range(3)]
    found: list[Any] = []
    for alike in launches(inputs.streams):
        found += gradients(alike, more[len(found) : len(found) + len(alike)])
    for i in range(12, len(given), 2):
        lay_beside(*given[i : i + 2])
    return tuple(chain(*zip(*found, strict=True)))


def gradients(streams: list[ShortConv], given: list[Any]) -> list[Any]:
    """Launch once for streams that are alike; given are d_y, d_final, wants and, maybe, d_x."""
    first, tile = streams[0], Tiling.of(streams, BACKWARD_TILE)
    (batch, tokens, _), taps = first.x.shape, first.weight.shape[1]
    at_once = max(AT_ONCE, power_of_2(taps - 1))
    tile = tile._replace(RUN=max(tile.RUN, at_once))
    blocks, values = cdiv(tokens, tile.BG * tile.RUN), list[dict[str, Any]]()
    final = any(d_final is not None for _, d_final, *_ in given)
    for inputs, (d_y, d_final, _, *out) in zip(streams, given, strict=True):
        own = {**of_stream(inputs), "d_y": adjacent(d_y), "d_final": None}
        if final:
            shape = inputs.sequences, taps - 1, own["D"]
            own["d_final"] = d_y.new_zeros(shape) if d_final is None else d_final.contiguous()
        own["d_x"] = out[0] if out else torch.empty_like(inputs.x, memory_format=WHOLE)
        shape = batch * blocks, taps, own["D"]
        own["d_taps"] = torch.empty(shape, dtype=torch.float32, device=d_y.device)
        values.append(own | steps(own["d_y"], "_dy") | steps(own["d_x"], "_dx"))
    if batch * blocks:
        grid = blocks, tile.columns(streams), batch
        of_all = {"AT_ONCE": at_once, "FINAL": final}
        launch(short_conv_backward_kernel, grid, arguments(first, tile, values) | of_all)
    pairs = [(own["d_taps"], x.weight) for own, x in zip(values, streams, strict=True)]
    d_weights = sums_of_parts(pairs, taps)
    found = []
    for inputs, own, d_weight, (_, _, wants, *out) in zip(
        streams, values, d_weights, given, strict=True
    ):
        d_history = None
        if inputs.history is not None and wants:
            d_history = torch.empty_like(inputs.history, memory_format=WHOLE)
            grid = cdiv(len(d_history), tile.BG), cdiv(own["D"], tile.C), 1
            own |= {**shared(inputs), **tile._asdict(), "FINAL": final, "d_history": d_history}
            if d_history.numel():
                launch(history_gradient_kernel, grid, own)
        found.append((None if out else own["d_x"], d_weight, d_history))
    return found
