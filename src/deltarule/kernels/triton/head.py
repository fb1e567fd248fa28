"""Decay none or per head in Triton: launches of its two kernels over all chunks at once."""

import torch
from torch import Tensor

from deltarule.kernels.inputs import Inputs
from deltarule.kernels.triton.configurations import configuration
from deltarule.kernels.triton.gradients import gradients_kernel
from deltarule.kernels.triton.launch import OPTIONS, Plan, Scores, Shapes, precision, strides
from deltarule.kernels.triton.pair_scores import pair_scores_kernel


def score_shapes(inputs: Inputs, plan: Plan, save: bool) -> Shapes:
    """The buffers of `head_scores`, with those that only a backward reads if it may follow."""
    sizes, dtype = plan.sizes, inputs.q.dtype
    chunks, rows = (plan.chunks, sizes["HV"]), sizes["BT"]
    tied, scaled = inputs.beta is not None, inputs.log_decay is not None or inputs.normalize_qk
    shapes: Shapes = {"scores": ((*chunks, sizes["BQ"], rows), dtype)}
    if tied:
        shapes["corrections"] = (*chunks, rows, rows), dtype
    if tied or scaled:
        shapes["scalings"] = (*chunks, 4, rows), torch.float32
    if scaled:
        shapes["chunk_decay"] = chunks, torch.float32
    if save and inputs.log_decay is not None:
        shapes["decays"] = (*chunks, rows, rows), dtype
    return shapes


def kept_scores(inputs: Inputs, buffers: dict[str, Tensor]) -> Scores:
    """The buffers by the names that `next_state` knows."""
    return Scores(
        inputs.q, inputs.k, None, None, buffers["scores"], None, buffers.get("corrections"), None,
        buffers.get("scalings"), buffers.get("chunk_decay"),
    )  # fmt: skip


def head_scores(inputs: Inputs, plan: Plan, buffers: dict[str, Tensor]) -> Scores:
    """Launch `pair_scores_kernel`."""
    sizes, x, out = plan.sizes, inputs.q, kept_scores(inputs, buffers)
    pair_scores_kernel[plan.chunks, sizes["HV"]](
        x, inputs.k, inputs.beta, inputs.log_decay, inputs.cu_seqlens, out.scores,
        out.corrections, out.scalings, out.chunk_decay, buffers.get("decays"), inputs.scale,
        x.shape[1], inputs.sequences, *strides(inputs.beta), *strides(inputs.log_decay),
        **{name: size for name, size in sizes.items() if name != "V"}, **flags(inputs),
        **configuration("pair_scores", plan.call), **OPTIONS,
    )  # fmt: skip
    return out


def head_gradients(
    inputs: Inputs, plan: Plan, buffers: dict[str, Tensor], d_o: Tensor, d_states: Tensor,
    d_errors: Tensor,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Launch `gradients_kernel`: gradients by q, k, v, beta, and log_decay."""
    sizes, x = plan.sizes, inputs.q
    d_q, d_k, d_v = (torch.empty_like(y) for y in (x, inputs.k, inputs.v))
    d_beta = d_decay = None
    # In float32 a program of its own sums the pairs of rows around a decay.
    parts = 3 if inputs.log_decay is not None and x.dtype == torch.float32 else 2
    if inputs.beta is not None:
        d_beta = torch.empty(inputs.beta.shape, dtype=torch.float32, device=x.device)
    if inputs.log_decay is not None:
        d_decay = torch.empty(parts, *inputs.log_decay.shape, dtype=torch.float32, device=x.device)
    gradients_kernel[parts, sizes["H"], plan.chunks](
        x, inputs.k, inputs.v, inputs.log_decay, inputs.cu_seqlens, buffers.get("scalings"),
        buffers.get("chunk_decay"), buffers.get("decays"), buffers["states"],
        buffers.get("errors"), d_o, d_states, d_errors, d_q, d_k, d_v, d_beta, d_decay,
        inputs.scale, x.shape[1], inputs.sequences, *strides(inputs.log_decay),
        0 if d_decay is None else d_decay[0].numel(), **sizes, **flags(inputs),
        **configuration("gradients", plan.call), **OPTIONS,
    )  # fmt: skip
    if d_decay is not None:
        d_decay = d_decay.sum(0)
    return d_q, d_k, d_v, d_beta, None, None, d_decay


def flags(inputs: Inputs) -> dict[str, object]:
    """The compile-time choices of both kernels."""
    return {
        "HAS_DECAY": inputs.log_decay is not None, "TIED": inputs.beta is not None,
        "UNIT_NORM": inputs.normalize_qk, "PACKED": inputs.cu_seqlens is not None,
        "PRECISION": precision(inputs.q.dtype),
    }  # fmt: skip
