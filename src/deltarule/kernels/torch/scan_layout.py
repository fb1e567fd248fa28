"""The way of a scan's tensors into the chunks of a slab, and of their gradients back."""

from typing import NamedTuple

import torch
from torch import Tensor

from deltarule.kernels.scan_inputs import ScanInputs
from deltarule.kernels.torch.chunks import (
    Group,
    Slab,
    batch_groups,
    chunk_count,
    chunk_size,
    cut,
    join,
    packed_groups,
)


class Chunks(NamedTuple):
    """Inputs cut into chunks: [M, HV, C, channels], or [HV, V, K] where constant over time."""

    q: Tensor
    k: Tensor
    v: Tensor
    delta: Tensor | None
    A: Tensor | None
    value_log_decay: Tensor | None
    log_decay: Tensor | None
    beta: Tensor | None


def slab_elements(device: torch.device) -> int:
    """Most numbers in the states of a slab's tokens, all of which the backward pass keeps."""
    return 2**22 if device.type == "cpu" else 2**26


def plan(inputs: ScanInputs) -> tuple[int, list[Group]]:
    """Tokens in a chunk, and how the chunks of this call are computed."""
    batch, tokens, heads, value_size = inputs.v.shape
    size = tokens_in_chunk(inputs)
    elements = heads * value_size * inputs.q.shape[-1] * size
    slab = max(slab_elements(inputs.v.device) // elements, 1)
    if inputs.cu_seqlens is None:
        return size, batch_groups(batch, tokens, size, slab, inputs.v.device)
    return size, packed_groups(inputs.cu_seqlens, tokens, size, slab, inputs.v.device)


def tokens_in_chunk(inputs: ScanInputs) -> int:
    """As many as a sequence has on average, and 64 at most."""
    tokens, sequences = inputs.v.shape[1], inputs.sequences
    if inputs.cu_seqlens is not None and sequences > 0:
        tokens = -(-tokens // sequences)
    return chunk_size(tokens, 1)


def chunk_states_shape(inputs: ScanInputs) -> tuple[int, int, int, int]:
    """[M, HV, V, K]: room for the state at the start of each chunk."""
    packed = None if inputs.cu_seqlens is None else inputs.sequences
    batch, tokens = inputs.v.shape[:2]
    chunks = chunk_count(batch, tokens, packed, tokens_in_chunk(inputs))
    return chunks, *inputs.state_shape[1:]


def cut_inputs(inputs: ScanInputs, slab: Slab, size: int) -> Chunks:
    """Cut every tensor; the empty places of a chunk neither decay nor write."""
    heads = inputs.v.shape[2]

    def chunked(x: Tensor | None) -> Tensor | None:
        if x is None or x.ndim == 3:
            return None if x is None else x.to(inputs.dtype)
        return cut(x, slab, size, 1, inputs.dtype).repeat_interleave(heads // x.shape[2], dim=1)

    q, k, v, *others = (chunked(x) for x in inputs[:8])
    assert q is not None
    assert k is not None
    assert v is not None
    return Chunks(q * inputs.scale, k, v, *others)


def join_gradients(
    d: Chunks, inputs: ScanInputs, out: list[Tensor | None], slab: Slab, size: int
) -> None:
    """Write the gradients by the chunks into those by the inputs, or add them to a constant's."""
    for dx, to in zip(d._replace(q=d.q * inputs.scale), out, strict=True):
        if dx is None or to is None:
            continue
        if to.ndim == 3:
            to += dx
        else:
            join(dx.unflatten(1, (to.shape[2], -1)).sum(2), to, slab, size, 1)
