"""The way of one call's tensors into the chunks of a window, and of their gradients back."""

from typing import NamedTuple

import torch
from torch import Tensor

from deltarule.ops.chunks import (
    Group,
    Window,
    batch_groups,
    chunk_count,
    chunk_size,
    cut,
    join,
    packed_groups,
)
from deltarule.ops.delta_rule.inputs import Inputs
from deltarule.ops.delta_rule.torch.scores import LOWEST


class Chunks(NamedTuple):
    """Inputs cut into chunks: [M, H, G or 1, rows, channels], in the dtype of the state.

    q and k are of unit norm where that was asked, and q holds the scale.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor | None
    a: Tensor | None
    b: Tensor | None
    log_decay: Tensor | None


def window_elements(device: torch.device) -> int:
    """Most elements of a window's tensors: what a core's cache holds, or fills another device.

    It changes no result, bit by bit: chunks are independent but for the scan.
    """
    if device.type == "cpu":
        return max(16 * torch.get_num_threads(), 32) * 64 * 64
    return 2**25


def leaks(inputs: Inputs) -> bool:
    """Whether a NaN or an infinity would reach earlier tokens of its chunk, by products with zeros.

    Only asked on a CPU, where the answer needs no waiting; a sum over each tensor shows it.
    """
    if inputs.q.device.type != "cpu":
        return False
    finite = (inputs.k, inputs.v, inputs.beta, inputs.a, inputs.b)
    sums = [x.sum(dtype=inputs.dtype).isfinite() for x in finite if x is not None]
    if inputs.log_decay is not None:
        # A reset is -inf.
        sums.append(~inputs.log_decay.sum(dtype=inputs.dtype).isnan())
    return not all(sums)


def plan(inputs: Inputs, size: int | None = None) -> tuple[int, list[Group]]:
    """Tokens in a chunk, `size` or the usual number, and how these chunks are computed."""
    batch, tokens = inputs.q.shape[:2]
    size = size or _chunk_size(inputs)
    rows = size * inputs.n_steps
    elements = inputs.v.shape[2] * rows * max(rows, *inputs.state_shape[2:])
    window = max(window_elements(inputs.q.device) // elements, 1)
    if inputs.cu_seqlens is None:
        return size, batch_groups(batch, tokens, size, window, inputs.q.device)
    return size, packed_groups(inputs.cu_seqlens, tokens, size, window, inputs.q.device)


def chunk_states_shape(inputs: Inputs) -> tuple[int, int, int, int]:
    """[M, HV, V, K]: room for the state at the start of each chunk."""
    packed = None if inputs.cu_seqlens is None else inputs.sequences
    chunks = chunk_count(inputs.q.shape[0], inputs.q.shape[1], packed, _chunk_size(inputs))
    return chunks, *inputs.state_shape[1:]


def cut_inputs(inputs: Inputs, window: Window, size: int) -> Chunks:
    """Cut every tensor; the empty places of a chunk decay, erase and write nothing."""
    q = _chunked(inputs.q, inputs, window, size, 1)
    k, v = (_chunked(x, inputs, window, size, inputs.n_steps) for x in (inputs.k, inputs.v))
    if inputs.normalize_qk:
        q, k = unit_norm(q), unit_norm(k)
    beta, log_decay, a, b = inputs.beta, inputs.log_decay, inputs.a, inputs.b
    if beta is not None:
        beta = _chunked(beta.unsqueeze(-1), inputs, window, size, inputs.n_steps)
    if log_decay is not None:
        log_decay = log_decay if log_decay.ndim == 4 else log_decay.unsqueeze(-1)
        log_decay = _chunked(log_decay, inputs, window, size, 1).clamp_(min=LOWEST)
    if a is not None and b is not None:
        a, b = (_chunked(x, inputs, window, size, 1) for x in (a, b))
    return Chunks(q * inputs.scale, k, v, beta, a, b, log_decay)


def join_gradients(
    d: Chunks, inputs: Inputs, out: list[Tensor | None], window: Window, size: int
) -> None:
    """Write the gradients by the chunks into those by q, k, v, beta, a, b and log_decay."""
    dq, dk, n_steps = d.q * inputs.scale, d.k, inputs.n_steps
    if inputs.normalize_qk:
        dq = unit_norm_backward(dq, _chunked(inputs.q, inputs, window, size, 1))
        dk = unit_norm_backward(dk, _chunked(inputs.k, inputs, window, size, n_steps))
    steps = (1, n_steps, n_steps, n_steps, 1, 1, 1)
    for dx, x, n in zip((dq, dk, *d[2:]), out, steps, strict=True):
        if dx is not None and x is not None:
            join(dx.flatten(1, 2), x if x.ndim == 4 else x.unsqueeze(-1), window, size, n)


def cut_output(d_o: Tensor, inputs: Inputs, window: Window, size: int) -> Tensor:
    """Gradient by the outputs [B, T, HV, V] -> [M, H, G, C, V]."""
    return _chunked(d_o, inputs, window, size, 1)


def empty_gradients(inputs: Inputs) -> list[Tensor | None]:
    """Room for the gradients by q, k, v, beta, a, b and log_decay."""
    return [
        None if x is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
        for x in inputs[:7]
    ]


def _chunked(x: Tensor, inputs: Inputs, window: Window, size: int, n_steps: int) -> Tensor:
    return cut(x, window, size, n_steps, inputs.dtype).unflatten(1, (inputs.q.shape[2], -1))


def _chunk_size(inputs: Inputs) -> int:
    tokens, sequences = inputs.q.shape[1], inputs.sequences
    if inputs.cu_seqlens is not None and sequences > 0 and not inputs.batch_invariant:
        tokens = -(-tokens // sequences)
    return chunk_size(tokens, inputs.n_steps)


# x / |x| for the rows of q and k, as a factor of each row.
#
# y = x r        r = (sum x^2 + 1e-6)^(-1/2)        dx = r (dy - y (y.dy))


EPSILON = 1e-6


def unit_norm(x: Tensor) -> Tensor:
    """Rows [.., K] divided by their norm; a zero row stays zero."""
    return x * _factor(x)


def unit_norm_backward(dy: Tensor, x: Tensor) -> Tensor:
    factor = _factor(x)
    y = x * factor
    return factor * (dy - y * (y * dy).sum(-1, keepdim=True))


def _factor(x: Tensor) -> Tensor:
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return (norm * norm + EPSILON).rsqrt_()
