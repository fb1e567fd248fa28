"""The operator of sLSTM: a memory of numbers whose gates see what was put out last."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from deltarule.ops.checks import FLOATS, check_dense, shape
from deltarule.ops.fused_kernels import why_not_fused
from deltarule.ops.operators import Operator, differentiated
from deltarule.ops.plain import (
    PlainImpl,
    check_per_head,
    check_state_tensor,
    count_sequences,
    forms,
    run_plain,
)
from deltarule.ops.registration import Backward, Gradients, Rules
from deltarule.ops.slstm import definition as reference
from deltarule.ops.slstm import torch as plain
from deltarule.ops.slstm.inputs import SLSTMInputs
from deltarule.shapes import Offsets, RecurrentOutput

# Channels of a head in the Triton kernels.
MAX_CHANNELS = 256


def why_not_triton(inputs: SLSTMInputs) -> str | None:
    if (size := inputs.gates.shape[-1]) > MAX_CHANNELS:
        return f"the Triton kernels take heads of up to {MAX_CHANNELS} channels, got {size}"
    return why_not_fused(inputs.gates, "gates")


def backend_of(name: str, inputs: SLSTMInputs) -> Any:
    if name == "torch":
        return plain
    from deltarule.ops.slstm.triton import heads, split

    return split if split.takes(inputs) else heads


def backward(given: Backward[SLSTMInputs], save: bool, backend: str) -> Gradients:
    (d_o, d_final), (states,), inputs = given.gradients, given.saved, given.inputs
    shape = inputs.gates.shape
    d_o = states.new_zeros(shape[:3] + shape[4:]) if d_o is None else d_o.to(inputs.dtype)
    if d_final is None:
        d_final = torch.zeros_like(inputs.before)
    # The output before each token, [B T, H, D].
    sequence, token = inputs.places
    shifted = torch.cat([torch.zeros_like(states[:1, :, 0]), states[:-1, :, 0]])
    first = (token == 0)[:, None, None]
    h_before = torch.where(first, inputs.before[sequence, :, 0], shifted)
    # What the input and that output give to all gates, [B T, H, 4, D]; zero at padding.
    weights = inputs.recurrent.to(inputs.dtype).flatten(1, 2)
    seen = (h_before.transpose(0, 1) @ weights.mT).transpose(0, 1)
    raw = inputs.gates.to(inputs.dtype).flatten(0, 1) + seen.view(-1, *shape[2:])
    if inputs.lengths is not None:
        raw = torch.where((token < inputs.lengths[sequence])[:, None, None, None], raw, 0)
    raw = raw.contiguous()
    d_gates, d_before = backend_of(backend, inputs).backward(d_o, d_final, inputs, raw, states)
    # [H, 4 D, B T] [H, B T, D]: every token's gate and the output that it saw.
    d_recurrent = d_gates.flatten(-2).permute(1, 2, 0) @ h_before.transpose(0, 1)
    d_recurrent = d_recurrent.view(inputs.recurrent.shape).to(inputs.recurrent.dtype)
    return d_gates.view(shape).to(inputs.gates.dtype), d_recurrent, d_before.contiguous()


def fake(inputs: SLSTMInputs, save: bool, backend: str) -> tuple[Tensor, Tensor, Tensor]:
    batch, tokens, heads, _, size = inputs.gates.shape
    rows = batch * tokens if save else 0
    o = inputs.gates.new_empty(batch, tokens, heads, size)
    return o, torch.empty_like(inputs.before), inputs.before.new_empty(rows, heads, 4, size)


rules = Rules(2, (2,), SLSTMInputs._fields[:3], otherwise='use impl="reference"')
operator: Operator[SLSTMInputs] = Operator(
    "slstm", SLSTMInputs,
    # Outputs, the last state, and the states of all tokens with `save`.
    lambda inputs, save, backend: backend_of(backend, inputs).forward(inputs, save),
    backward, fake, returned=3, options={"save": bool, "backend": str}, rules=rules,
)  # fmt: skip


def run(inputs: SLSTMInputs, backend: str) -> RecurrentOutput:
    """Call the operator, keeping states only where a backward may follow."""
    save = torch._C._are_functorch_transforms_active() or differentiated(inputs[:3])
    return RecurrentOutput(*operator(*inputs, save, backend))


IMPLEMENTATIONS = forms(why_not_triton, run, reference.slstm)


def slstm(
    gates: Float[Tensor, "B T H 4 D"],
    recurrent: Float[Tensor, "H 4 D D"],
    *,
    initial_state: Float[Tensor, "N H 4 D"] | None = None,
    lengths: Int[Tensor, "B"] | None = None,
    cu_seqlens: Offsets | None = None,
    return_state: bool = True,
    impl: PlainImpl = "auto",
) -> RecurrentOutput:
    r"""Keep a decayed mean of what is written, with gates that see the last output.

    .. math::
        (i, f, z, o)_t &= \mathrm{gates}_t + R h_{t-1} \\
        c_t &= \sigma(f_t) c_{t-1} + e^{i_t} \tanh z_t \qquad
        n_t = \sigma(f_t) n_{t-1} + e^{i_t} \\
        h_t &= \sigma(o_t) \, c_t / n_t

    c and n are kept times exp(-m), m a running maximum that cancels. Each head has weights R of its
    own, and sees its own last output alone. No two tokens can be computed at once.

    Args:
        gates: The input's part of the gates i, f, z and o of every channel, biases included,
            [B, T, H, 4, D] in float64, float32, bfloat16 or float16.
        recurrent: Weights R [H, 4, D, D] of the last output's part: gate x of channel d has
            sum_e R[h, x, d, e] h_e.
        initial_state: h, c, n and m [N, H, 4, D], float32 (float64 with float64 gates); n = 0 means
            that no token came before. None means zeros.
        lengths: [B] int64, the number of real tokens at the front of each row; outputs at the
            others mean nothing. None means all.
        cu_seqlens: Offsets [N + 1] of sequences packed into one row (B = 1), from 0 to T; see
            `deltarule.pack`. None means that each batch row is a sequence.
        return_state: False gives None in place of the final state.
        impl: "auto", "triton" (D up to 256), "torch" or "reference".

    Returns:
        o [B, T, H, D] = h in the gates' dtype, and final_state like initial_state, a new tensor.

    Raises:
        ValueError: An argument has the wrong shape, dtype or device; the message names it.

    Example, gates that never forget: the mean of what was written:
        >>> gates = torch.zeros(1, 3, 1, 4, 1)
        >>> gates[..., 1, :], gates[..., 3, :] = 50.0, 50.0
        >>> gates[0, :, 0, 2, 0] = torch.tensor([0.2, 0.4, 0.9]).atanh()
        >>> slstm(gates, torch.zeros(1, 4, 1, 1)).o.flatten()
        tensor([0.2000, 0.3000, 0.5000])

    Source: xLSTM, arXiv 2405.04517, eq. 8 to 17, with sigmoid forget gates.
    """
    check_dense("gates", gates, " [B, T, H, 4, D]")
    if gates.ndim != 5 or gates.shape[3] != 4 or gates.dtype not in FLOATS:
        given = f"{gates.dtype} {shape(gates)}"
        raise ValueError(f"gates must be a floating-point tensor [B, T, H, 4, D], got {given}")
    heads, _, channels = gates.shape[2:]
    weights = heads, 4, channels, channels
    check_per_head("recurrent", recurrent, "[H, 4, D, D]", weights, gates)
    size = count_sequences(gates, lengths, cu_seqlens), *gates.shape[2:]
    if initial_state is None:
        wide = torch.promote_types(gates.dtype, torch.float32)
        initial_state = gates.new_zeros(size, dtype=wide)
    check_state_tensor("initial_state", initial_state, "[N, H, 4, D]", size, gates)
    inputs = SLSTMInputs(gates, recurrent, initial_state, lengths, cu_seqlens)
    return run_plain(IMPLEMENTATIONS, inputs, impl, gates.device, return_state)
