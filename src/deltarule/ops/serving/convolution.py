"""The short convolution of many requests' tokens, their earlier inputs in slots of a pool."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deltarule.ops.checks import check_axes, check_dense, readable, shape
from deltarule.ops.dispatch import choose
from deltarule.ops.few_tokens import check_no_gradient
from deltarule.ops.fused import short_conv as fused
from deltarule.ops.fused_kernels import why_not_fused
from deltarule.ops.history import offsets_of, sequence_of, token_rows, with_history
from deltarule.ops.pack import check_cu_seqlens
from deltarule.ops.plain import PlainImpl, forms
from deltarule.ops.pools import check_pool, check_room, check_slots
from deltarule.ops.serving import definition
from deltarule.ops.serving.pool import read, write
from deltarule.shapes import Hidden, Offsets

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Convolution(NamedTuple):
    """One call."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    activated: bool
    state: Tensor
    reads: Tensor
    writes: Tensor
    accepted: Tensor | None
    null_index: int
    cu_seqlens: Tensor | None

    @property
    def offsets(self) -> Tensor:
        """[N + 1], of the rows of a batch too."""
        return offsets_of(self.cu_seqlens, self.x)

    @property
    def reach(self) -> int:
        """W - 1: the earlier inputs that a token sees."""
        return self.weight.shape[1] - 1


def pool_convolution(
    x: Hidden,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activated: bool = True,
    state: Tensor,
    state_indices: Tensor,
    write_indices: Tensor | None = None,
    accepted: Tensor | None = None,
    null_index: int = -1,
    cu_seqlens: Offsets | None = None,
    out: Tensor | None = None,
    impl: PlainImpl = "auto",
) -> Hidden:
    r"""Convolve each channel over time, after the earlier inputs that a pool holds.

    .. math::
        y_t = \mathrm{SiLU}\Big(\sum_{j=0}^{W-1} w_j \, x_{t-W+1+j} + \mathrm{bias}\Big)

    A slot begins with the last W - 1 inputs of its request. With `accepted` it holds those of
    drafted tokens too: the next call begins at the last that was accepted. An index at or below
    `null_index` reads zeros and writes nothing. There is no gradient.

    Args:
        x: Inputs [B, T, D], prompts or a few tokens.
        weight: Taps [D, W]; the last weighs the token itself.
        bias: [D]. None means zero.
        activated: Whether SiLU follows.
        state: Pool [slots, R, D], any strides (`.mT` of [slots, D, R]), R at least W - 1, with
            `accepted` at least W - 2 + the tokens of the longest row. Overwritten where named.
        state_indices: Slot that each row starts from [N], int32 or int64.
        write_indices: Slot that each row's inputs go to [N], none twice (checked on the CPU). None
            means state_indices.
        accepted: [N] tokens of the row's last call that were accepted, from 1; 1 after a prompt.
            None: all were, and all of these will be.
        null_index: The last index that names no slot.
        cu_seqlens: Offsets [N + 1] of rows of any lengths, packed into one. None: rows of a batch.
        out: Where the outputs go, contiguous [B, T, D] in x's dtype. None: a new tensor.
        impl: "auto", or a named implementation, which runs or raises with the reason.

    Returns:
        y [B, T, D] in x's dtype.

    Raises:
        ValueError: An argument has the wrong shape, dtype or device, or needs a gradient.

    Examples:
        >>> import torch
        >>> x, pool, slots = torch.randn(2, 1, 6), torch.zeros(5, 3, 6), torch.tensor([3, 1])
        >>> y = pool_convolution(x, torch.randn(6, 4), state=pool, state_indices=slots)
        >>> y.shape, torch.equal(pool[3, -1], x[0, 0])
        (torch.Size([2, 1, 6]), True)
    """
    writes = state_indices if write_indices is None else write_indices
    call = Convolution(
        x, weight, bias, activated, state, state_indices, writes, accepted, null_index, cu_seqlens
    )
    check(call, out)
    with torch.no_grad():
        y = choose(CONVOLUTIONS, call, impl, x.device).run(call)
    return y if out is None else out.copy_(y)


def check(call: Convolution, out: Tensor | None) -> None:
    x, weight, bias, _, state, reads, writes, accepted, null_index, cu_seqlens = call
    check_axes("x", x, "[B, T, D]", 3)
    check_axes("weight", weight, "[D, W]", 2)
    channels, least = x.shape[2], call.reach
    if weight.shape[0] != channels or weight.shape[1] < 1:
        raise ValueError(f"weight must be [D, W] = [{channels}, >= 1], got {shape(weight)}")
    if bias is not None and bias.shape != (channels,):
        raise ValueError(f"bias must be [D] = [{channels}] or None, got {shape(bias)}")
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, x)
    rows = len(call.offsets) - 1
    check_axes("state", state, "[slots, R, D]", 3)
    check_pool(state, "[slots, R, D]", (state.shape[1], channels), DTYPES, x)
    check_slots(reads, writes, rows, state, null_index)
    check_room("out", out, "[B, T, D]", x.shape, x)
    check_no_gradient("pool_convolution", (x, weight, bias, state, out))
    if accepted is not None:
        check_dense("accepted", accepted, " [N]")
        if accepted.shape != (rows,):
            raise ValueError(f"accepted must be [N] = [{rows}] or None, got {shape(accepted)}")
        if readable(x):
            kept = accepted.tolist()
            if min(kept, default=1) < 1:
                raise ValueError(f"accepted must be 1 or more, got {kept}")
            least += max(1, *kept, *call.offsets.diff().tolist()) - 1
    if state.shape[1] < least:
        raise ValueError(f"state [slots, R, D] must have R >= {least}, got R = {state.shape[1]}")


class Rows(NamedTuple):
    """Rows with what came before them, end to end [T + N * reach, D], and where things lie."""

    extended: Tensor
    window: Tensor
    tokens: Tensor
    sequence: Tensor
    begins: Tensor


def rows_of(call: Convolution) -> Rows:
    """Earlier inputs out of their slots, and in front of their rows."""
    x, reach, offsets = call.x.flatten(0, 1), call.reach, call.offsets
    held = read(call.state, call.reads, call.null_index, x.dtype)
    window = held[:, :reach]
    if call.accepted is not None:
        index = call.accepted.long()[:, None] - 1 + torch.arange(reach, device=x.device)
        window = held.gather(1, index.unsqueeze(-1).expand(-1, -1, x.shape[1]))
    sequence = sequence_of(offsets, len(x))
    tokens = token_rows(sequence, reach)
    begins = offsets[:-1] + reach * torch.arange(len(offsets) - 1, device=x.device)
    extended = with_history(x[None], window, offsets, sequence)[0]
    return Rows(extended, window, tokens, sequence, begins)


def keep(call: Convolution, rows: Rows) -> None:
    """What a later call may begin from, back into the slots."""
    count = call.offsets.diff()[:, None]
    drafted = call.accepted is not None
    span = call.state.shape[1] if drafted else call.reach
    place = torch.arange(span, device=count.device)
    kept = (count > 0) & (place < (call.reach - 1 + count if drafted else call.reach))
    index = rows.begins[:, None] + place + (1 if drafted else count)
    left = rows.extended[index.clamp(max=len(rows.extended) - 1)]
    after = read(call.state, call.writes, call.null_index, call.state.dtype)
    after[:, :span] = torch.where(kept.unsqueeze(-1), left.to(after.dtype), after[:, :span])
    write(call.state, call.writes, call.null_index, after)


def run(call: Convolution, backend: str) -> Tensor:
    """Outputs by taps, or by the kernel of the layers; inputs are moved by index."""
    x, weight, rows = call.x, call.weight, rows_of(call)
    if call.state.numel() and len(rows.extended):
        keep(call, rows)
    if backend == "torch":
        dtype = torch.promote_types(x.dtype, torch.float32)
        y = x.new_zeros(len(rows.tokens), x.shape[2], dtype=dtype)
        for back, tap in enumerate(reversed(weight.to(dtype).unbind(1))):
            y = torch.addcmul(y, rows.extended[rows.tokens - back].to(dtype), tap)
        y, within = y.view(x.shape), False
    else:
        packed, within = call.cu_seqlens is not None, call.activated and call.bias is None
        bounds = (call.offsets, rows.sequence) if packed else (None, None)
        y, _ = fused.short_conv(x, weight, rows.window.contiguous(), *bounds, None, within)
    y = y if call.bias is None else y + call.bias.to(y.dtype)
    return (F.silu(y) if call.activated and not within else y).to(x.dtype)


def why_not_triton(call: Convolution) -> str | None:
    if (taps := call.weight.shape[1]) > fused.MAX_TAPS:
        return f"the Triton kernel takes up to {fused.MAX_TAPS} taps, got {taps}"
    return "x has no numbers" if call.x.numel() == 0 else why_not_fused(call.x)


def run_reference(call: Convolution) -> Tensor:
    y = definition.convolution(call)
    return (F.silu(y) if call.activated else y).view(call.x.shape)


CONVOLUTIONS = forms(why_not_triton, run, run_reference)
