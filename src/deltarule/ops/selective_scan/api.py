"""The operator for every rule whose state decays entry by entry, or from the left."""

import torch
from torch import Tensor

from deltarule.ops import checks
from deltarule.ops.context import Context, check_context
from deltarule.ops.context.exchange import starting_state
from deltarule.ops.dispatch import choose, why_no_triton, without_autocast
from deltarule.ops.few_tokens import decodes
from deltarule.ops.folding import MORE_HEADS
from deltarule.ops.operators import Backend, Recurrence
from deltarule.ops.plain import PlainImpl, count_sequences, forms
from deltarule.ops.selective_scan import definition as reference
from deltarule.ops.selective_scan import torch as plain
from deltarule.ops.selective_scan.inputs import ScanInputs
from deltarule.shapes import Offsets, Outputs, RecurrentOutput, State, Values

# Key channels of the widest tile that a program of the Triton kernels holds.
MAX_KEY_CHANNELS = 4096


def why_not_triton(inputs: ScanInputs) -> str | None:
    if reason := why_no_triton("v", inputs.v):
        return reason
    for name, x in zip(inputs._fields[:9], inputs[:9], strict=True):
        if isinstance(x, Tensor) and x.dtype == torch.float64:
            return f"the Triton kernels compute in float32, and {name} is float64"
    if inputs.q.shape[-1] > MAX_KEY_CHANNELS:
        return f"the Triton kernels take K up to {MAX_KEY_CHANNELS}, got K = {inputs.q.shape[-1]}"
    return None


def backend_of(name: str) -> Backend:
    if name == "torch":
        chunked = plain.chunked
        return Backend(chunked.run, chunked.gradients, chunked.saved_shape)
    from deltarule.ops.selective_scan.triton import passes

    return Backend(passes.forward, passes.backward, passes.saved_shape)


# Under vmap the mapped axis becomes heads, which are independent, and which every argument has.
scan_operator = Recurrence("selective_scan", ScanInputs, backend_of, 9, MORE_HEADS)


def run(inputs: ScanInputs, backend: str) -> RecurrentOutput:
    return scan_operator.run(inputs, backend if inputs.v.numel() else "torch")


def run_reference(inputs: ScanInputs) -> RecurrentOutput:
    with without_autocast(inputs.v.device):
        return reference.selective_scan(inputs)


IMPLEMENTATIONS = forms(why_not_triton, run, run_reference)


def selective_scan(
    q: Tensor,
    k: Tensor,
    v: Values,
    *,
    delta: Outputs | None = None,
    A: Tensor | None = None,
    value_log_decay: Outputs | None = None,
    log_decay: Tensor | None = None,
    beta: Outputs | None = None,
    signed: bool = False,
    scale: float | None = None,
    initial_state: State | None = None,
    cu_seqlens: Offsets | None = None,
    return_state: bool = True,
    context: Context | None = None,
    impl: PlainImpl = "auto",
) -> RecurrentOutput:
    r"""Decay each entry of a matrix state on its own, write a value there, and read.

    .. math::
        S &\leftarrow S \odot \exp(\mathrm{delta}_t 1^\top \odot A
            + \mathrm{value\_log\_decay}_t 1^\top + 1 \, \mathrm{log\_decay}_t^\top) \\
        S &\leftarrow S + v_t k_t^\top \qquad \text{or with beta} \qquad
        S \leftarrow S + \mathrm{Diag}(\beta_t)
            \big(v_t k_t^\top - S \odot 1 (k_t \odot k_t)^\top\big) \\
        o_t &= \mathrm{scale} \cdot S q_t

    Where a decay has a value for each key channel only, or for each head, `delta_rule` computes the
    same by matrix products, and much faster.

    Args:
        q: Queries [B, T, H, K] in v's dtype, or [HV, V, K] in any dtype, constant over time and
            different for each entry of the state (S4's C): o_t = scale * (S * q) 1.
        k: Keys, in the same two forms (S4's B).
        v: Values [B, T, HV, V] in float64, float32, bfloat16 or float16; HV is a multiple of H.
        delta: Step sizes [B, T, HV, V], >= 0, together with A. None means no such decay.
        A: Minus the rate of each entry's decay [HV, V, K], <= 0, float32.
        value_log_decay: Natural log of the decay of each value channel [B, T, HV, V], <= 0,
            float32; -inf is a reset. None means none.
        log_decay: Natural log of the decay of each key channel [B, T, HV, K], likewise.
        beta: Write strength [B, T, HV, V], beta |k|^2 in [0, 2] in each entry. Each entry then
            erases what it alone holds under the key: the diagonal of the delta rule's transition.
            None means no erase.
        signed: Whether the factor of an entry is 2 exp(..) - 1 in (-1, 1] in place of exp(..): a
            state that changes its sign with every token counts them.
        scale: Factor of the read-out. None means K ** -0.5.
        initial_state: [N, HV, V, K], float32 (float64 with float64 v). None means zeros.
        cu_seqlens: Offsets [N + 1] of sequences packed into one row (B = 1). None means that each
            batch row is a sequence.
        return_state: False gives None in place of the final state.
        context: The processes that hold the other tokens of the rows; see `delta_rule`. None: all
            tokens are here.
        impl: "auto", "triton", "torch" or "reference"; a named one runs or raises with the reason.

    Returns:
        o [B, T, HV, V] in v's dtype, and final_state [N, HV, V, K], always a new tensor.

    Raises:
        ValueError: An argument has the wrong shape, dtype or device; the message names it.

    Examples:
        >>> import torch
        >>> q, k = torch.randn(2, 1, 10, 1, 4).unbind()
        >>> v, delta = torch.randn(1, 10, 1, 6), torch.rand(1, 10, 1, 6)
        >>> out = selective_scan(q, k, delta * v, delta=delta, A=-torch.ones(1, 6, 4))
        >>> out.o.shape, out.final_state.shape
        (torch.Size([1, 10, 1, 6]), torch.Size([1, 1, 6, 4]))

    Source: Mamba, arXiv 2312.00752, algorithm 2; DFW, arXiv 2210.04243; Longhorn, arXiv 2407.14207,
    section 3.2; table 4 of arXiv 2406.06484.
    """
    checks.check_flags({"signed": signed, "return_state": return_state})
    checks.check_axes("v", v, "[B, T, HV, V]", 4)
    if v.dtype not in checks.FLOATS:
        raise ValueError(f"v must be float64, float32, bfloat16 or float16, got {v.dtype}")
    if v.shape[2] == 0 or v.shape[3] == 0:
        raise ValueError(f"v needs at least one head and one channel, got {checks.shape(v)}")
    decays = {"delta": delta, "A": A, "value_log_decay": value_log_decay, "log_decay": log_decay}
    if context is not None:
        check_context(context, v.shape[1], "v", cu_seqlens)
        cu_seqlens = context.cu_seqlens(v.device)
    heads, value_size = v.shape[2:]
    for name, x in (("q", q), ("k", k)):
        check_channels(name, x, v, q)
    each_value = {"[B, T, HV, V]": tuple(v.shape)}
    each_key = {"[B, T, HV, K]": (*v.shape[:3], q.shape[-1])}
    checks.check_gate("delta", delta, v, each_value)
    checks.check_gate("A", A, v, {"[HV, V, K]": (heads, value_size, q.shape[-1])})
    if (delta is None) != (A is None):
        raise ValueError(f"delta and A go together, got only {'A' if delta is None else 'delta'}")
    checks.check_gate("value_log_decay", value_log_decay, v, each_value)
    checks.check_gate("log_decay", log_decay, v, each_key)
    checks.check_gate("beta", beta, v, each_value)
    for name, gate in decays.items():
        checks.check_exact(name, gate)
    sequences = count_sequences(v, None, cu_seqlens)
    size = sequences, heads, value_size, q.shape[-1]
    checks.check_state("initial_state", initial_state, v, size)
    scale = q.shape[-1] ** -0.5 if scale is None else checks.check_scale(scale)
    gates = delta, A, value_log_decay, log_decay, beta
    inputs = ScanInputs(q, k, v, *gates, initial_state, cu_seqlens, scale, signed)
    if context is not None:
        inputs = inputs._replace(initial_state=started(context, inputs, impl))
    output = dispatch_scan(inputs, impl)
    return output if return_state else output._replace(final_state=None)


def dispatch_scan(inputs: ScanInputs, impl: str) -> RecurrentOutput:
    """Run the chosen implementation; a few tokens without a GPU's kernels need no chunks."""
    stepwise = impl == "auto" and inputs.v.device.type == "cpu"
    if stepwise and decodes(inputs.v, inputs.cu_seqlens, (*inputs[:2], *inputs[3:9])):
        return plain.step(inputs)
    return choose(IMPLEMENTATIONS, inputs, impl, inputs.v.device).run(inputs)


def started(context: Context, inputs: ScanInputs, impl: str) -> Tensor:
    """The state before each sequence here, after the tokens of the processes before this one.

    Each entry of a state is multiplied by a number of its own, so that no read-out of a start can
    be taken out of the sum: there are three passes. U is the end of one from what is given, M that
    of one from ones in which nothing is written.
    """
    first, start = len(inputs.v), inputs.initial_state
    if start is None:
        start = inputs.v.new_zeros(inputs.state_shape, dtype=inputs.dtype)
    ones = torch.zeros_like(start)
    # Only what goes on from the process before keeps anything of it.
    ones[:first] = float(context.goes_on)
    nothing = torch.zeros_like(inputs.v)
    end = dispatch_scan(inputs._replace(initial_state=start), impl).final_state
    kept = dispatch_scan(inputs._replace(v=nothing, initial_state=ones), impl).final_state
    assert end is not None
    assert kept is not None
    before = starting_state(context, end[-first:], kept[-first:])
    return torch.cat([start[:first] + before, start[first:]])


def check_channels(name: str, x: Tensor, v: Tensor, q: Tensor) -> None:
    batch, tokens, heads, value_size = v.shape
    checks.check_axes(name, x, "[B, T, H, K] or constant [HV, V, K]", 4, 3)
    if x.shape[-1] == 0:
        raise ValueError(f"{name} must have at least one channel, got {checks.shape(x)}")
    key_size = q.shape[-1]
    if x.ndim == 3:
        checks.check_gate(name, x, v, {"[HV, V, K]": (heads, value_size, key_size)})
        return
    checks.check_gate(name, x, v, {"[B, T, H, K]": (batch, tokens, x.shape[2], key_size)})
    if x.shape[2] == 0 or heads % x.shape[2]:
        raise ValueError(
            f"v must have a multiple of the {x.shape[2]} heads of {name}, got {heads}: "
            "value head h reads key head h * H // HV"
        )
    if x.dtype != v.dtype:
        raise ValueError(f"{name} is {x.dtype}, but v is {v.dtype}: q, k and v share one dtype")
