"""The registered operator behind `long_convolution`, on rows that begin with their history."""

import torch
from torch import Tensor

from deltarule.ops.long_convolution.inputs import ConvolutionInputs
from deltarule.ops.long_convolution.torch import halves, products
from deltarule.ops.operators import Operator
from deltarule.ops.registration import Backward, Gradients, Rules


def forward(inputs: ConvolutionInputs) -> tuple[Tensor, Tensor]:
    """Outputs [B, T, H, V]; and what a query of one channel reads, for its gradient."""
    q, k, v, taps, sequence = prepared(inputs)
    if q is not None and k is not None and q.shape[-1] > 1:
        o = products.convolve(q, k, v, taps, sequence)
        return tokens_first(o).to(inputs.v.dtype), v.new_empty(0)
    y = convolve(v if k is None else k * v, taps, sequence)
    o = tokens_first(y if q is None else q * y).to(inputs.v.dtype)
    return o, y.new_empty(0) if q is None else tokens_first(y)


def backward(given: Backward[ConvolutionInputs]) -> Gradients:
    """Gradients by v, taps, q and k."""
    (d_o,), (read,), inputs = given.gradients, given.saved, given.inputs
    assert d_o is not None
    q, k, v, taps, sequence = prepared(inputs)
    d_o = heads_first(d_o.to(inputs.dtype))
    d_q: Tensor | None = None
    d_k: Tensor | None = None
    if q is not None and k is not None and q.shape[-1] > 1:
        d_q, d_k, d_v, d_taps = products.gradients(d_o, q, k, v, taps, sequence)
    else:
        d_y, x = (d_o, v) if q is None or k is None else (d_o * q, k * v)
        rows = rows_of(x)
        d_x, d_taps = halves.gradients(rows_of(d_y), rows, taps, sequence)
        d_v = d_x.view(x.shape[1], x.shape[0], x.shape[3], x.shape[2]).permute(1, 0, 3, 2)
        if q is not None and k is not None:
            d_q = (d_o * heads_first(read)).sum(-1, keepdim=True)
            d_v, d_k = d_v * k, (d_v * v).sum(-1, keepdim=True)
    dtype = inputs.v.dtype
    d_q, d_k = (None if d is None else tokens_first(d).to(dtype) for d in (d_q, d_k))
    return tokens_first(d_v).to(dtype), d_taps.to(inputs.taps.dtype), d_q, d_k


Prepared = tuple[Tensor | None, Tensor | None, Tensor, Tensor, Tensor | None]


def prepared(inputs: ConvolutionInputs) -> Prepared:
    """q, k and v with the heads first and the taps, all wide; and the sequence of each token."""
    wide = [None if x is None else x.to(inputs.dtype) for x in inputs[:4]]
    v, taps, q, k = (x if x is None or x is wide[1] else heads_first(x) for x in wide)
    assert v is not None
    assert taps is not None
    sequence = None
    if inputs.cu_seqlens is not None:
        token = torch.arange(v.shape[2], device=v.device)
        ends = inputs.cu_seqlens[1:].to(v.device)
        sequence = torch.searchsorted(ends, token.to(ends.dtype), right=True)
    return q, k, v, taps, sequence


def convolve(x: Tensor, taps: Tensor, sequence: Tensor | None) -> Tensor:
    """[B, H, T, V] -> [B, H, T, V]."""
    y = halves.convolve(rows_of(x), taps, sequence)
    return y.view(x.shape[1], x.shape[0], x.shape[3], x.shape[2]).permute(1, 0, 3, 2)


def rows_of(x: Tensor) -> Tensor:
    """[B, H, T, V] -> [H, B V, T]."""
    return x.permute(1, 0, 3, 2).flatten(1, 2).contiguous()


def heads_first(x: Tensor) -> Tensor:
    """[B, T, H, C] -> [B, H, T, C]."""
    return x.transpose(1, 2)


def tokens_first(x: Tensor) -> Tensor:
    """[B, H, T, C] -> [B, T, H, C]."""
    return x.transpose(1, 2).contiguous()


def fake(inputs: ConvolutionInputs) -> tuple[Tensor, Tensor]:
    """Shapes and types of what the forward returns."""
    saves = inputs.q is not None and inputs.q.shape[-1] == 1
    shape = inputs.v.shape if saves else (0,)
    return inputs.v.new_empty(inputs.v.shape), inputs.v.new_empty(shape, dtype=inputs.dtype)


rules = Rules(1, (1,), ("v", "taps", "q", "k"), otherwise='use impl="reference"')
operator: Operator[ConvolutionInputs] = Operator(
    "long_convolution", ConvolutionInputs, forward, backward, fake, returned=2, rules=rules
)
