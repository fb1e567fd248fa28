"""Scores of bfloat16 inputs with a decay per key channel: launches for even and steep chunks.

bfloat16 has the range of float32, so that the pairs of rows of a whole chunk may take one product.
What is steep is known on the GPU alone: the kernel for it is launched after, always, and mostly
finds nothing to do.
"""

import torch
from torch import Tensor

from deltarule.kernels.inputs import Inputs
from deltarule.kernels.triton import channel
from deltarule.kernels.triton.channel_even_scores import even_scores_kernel
from deltarule.kernels.triton.channel_steep import steep_scores_kernel
from deltarule.kernels.triton.channel_sums import decay_sums_kernel
from deltarule.kernels.triton.configurations import configuration
from deltarule.kernels.triton.direct import Launch
from deltarule.kernels.triton.launch import Plan, Scores, strides

# Powers of 2: see channel_even.py.
SHIFT, RANGE = 64.0, 160.0


def even_scores(inputs: Inputs, plan: Plan, buffers: dict[str, Tensor]) -> Scores:
    """Launch `even_scores_kernel`, and after it the one for what it leaves over."""
    x, sizes, out = inputs.q, plan.sizes, channel.score_buffers(inputs, plan, buffers)
    heads = plan.chunks * sizes["HV"]
    even_rows = plan.empty((plan.chunks, sizes["HV"]), torch.int32, x.device)
    written = (
        out.q, out.erase, out.write, out.scores, out.corrections, out.scalings, out.chunk_decay,
        even_rows,
    )  # fmt: skip
    given = inputs.q, inputs.k, inputs.beta, inputs.log_decay, inputs.cu_seqlens, *written
    plan.once(even_scores_launch, inputs)((heads, 1, 1), *given, *places(inputs))
    programs = min(channel.PROGRAMS, heads)
    sums = plan.empty((programs, channel.SUMS, sizes["K"]), torch.float32, x.device)
    plan.once(steep_scores_launch, inputs)(
        (programs, 1, 1), *given, sums, plan.chunks, *places(inputs)
    )
    return out


def places(inputs: Inputs) -> tuple[float, ...]:
    """The numbers that every kernel here takes last."""
    return (
        inputs.scale, inputs.q.shape[1], inputs.sequences, *strides(inputs.beta),
        *channel.decay_strides(inputs.log_decay),
    )  # fmt: skip


def even_scores_launch(inputs: Inputs, plan: Plan) -> Launch:
    """`even_scores_kernel` with its constants."""
    config = configuration("even_scores", plan.call)
    constants = channel.options(inputs, plan, config)
    own = ("H", "HV", "K", "N_STEPS", "CT", "BT", "ERASE", "UNIT_NORM", "PACKED", *config)
    kept = {name: constants[name] for name in own}
    more = {"BQ": plan.sizes["BQ"], "SHIFT": SHIFT, "RANGE": RANGE}
    return Launch(even_scores_kernel, kept | more | channel.score_precisions(inputs))


def steep_scores_launch(inputs: Inputs, plan: Plan) -> Launch:
    """`steep_scores_kernel` with its constants."""
    constants = dict(channel.scores_launch(inputs, plan, False).constants)
    del constants["ERASING_ROWS"], constants["HAS_DECAY"]
    # Around this kernel's loops more channels at once are too many registers.
    constants["BC"] = min(int(constants["BC"]), 16)
    return Launch(steep_scores_kernel, constants)


def decay_sums(inputs: Inputs, plan: Plan, scores: Scores) -> Tensor:
    """Launch `decay_sums_kernel`: what gradients need besides scores, but for anchored chunks."""
    sizes, x = plan.sizes, inputs.q
    known = scores.chunk_decay if channel.has_anchored_chunks(inputs, plan) else None
    shape = plan.chunks, sizes["HV"], channel.SUMS, sizes["K"]
    sums = torch.empty(shape, dtype=torch.float32, device=x.device)
    # The scores have theirs already, the same but for rounding: forward and backward take that.
    chunk_decay = torch.empty_like(sums[:, :, 0], memory_format=torch.contiguous_format)
    plan.once(sums_launch, inputs)(
        channel.chunk_grid(inputs, plan, sizes["HV"]),
        inputs.log_decay, inputs.cu_seqlens, known, chunk_decay, sums, plan.chunks, x.shape[1],
        inputs.sequences, *channel.decay_strides(inputs.log_decay),
    )  # fmt: skip
    return sums


def sums_launch(inputs: Inputs, plan: Plan) -> Launch:
    """`decay_sums_kernel` with its constants."""
    constants = {
        **{name: plan.sizes[name] for name in ("H", "HV", "K", "N_STEPS", "CT", "BK")},
        "PACKED": inputs.cu_seqlens is not None, "EXACT": inputs.q.dtype == torch.float32,
        "num_warps": 2, "num_stages": 1,
    }  # fmt: skip
    return Launch(decay_sums_kernel, constants)
