"""When the fused forward runs, and its launch.

It can run where `why_not` finds nothing against it; impl="gluon" asks no more. As a stage of
impl="triton" it is taken where it is faster, too: where its programs, one a value head of a
sequence, fill the GPU.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltarule.ops.delta_rule.gluon.forward import channel_forward_kernel, forward_kernel
from deltarule.ops.delta_rule.gluon.memory import CHUNK, VALUES, Form, straight
from deltarule.ops.delta_rule.inputs import Inputs
from deltarule.ops.delta_rule.triton.passes import (
    compiled_first,
    contiguous,
    keep,
    kept_layout,
    piece,
)
from deltarule.ops.delta_rule.triton.plan import Call, Plan, Shapes, blocks, make_plan
from deltarule.ops.delta_rule.triton.tile_sizes import architecture, power_of_two
from deltarule.ops.delta_rule.triton.tiles import inverse_norm
from deltarule.ops.dispatch import constant_when_compiled
from deltarule.ops.runtime.gluon_tiles import FusedLaunch
from deltarule.ops.runtime.launch import Launch, multiprocessors
from deltarule.ops.runtime.replay import Outputs, Recorded
from deltarule.ops.runtime.tensor_maps import Width

HOPPER = 90
# Nobody has run them there: only impl="gluon" asks for them.
BLACKWELL = 100


class Registers(NamedTuple):
    """Registers of a thread, by role: the first state role has what the others leave."""

    # Of the second state role.
    state: int
    score: int
    # Of the roles that load, store and sum.
    others: int


class Configuration(NamedTuple):
    """Slots, registers, and when the kernel pays."""

    # Chunks in shared memory, by erase: where there is none a chunk is soon done with.
    slots: dict[str, int]
    registers: Registers
    # With an erase, where nothing is saved. Other registers, of those that were tried, put every
    # product of the kernel in series.
    alone: Registers
    # The part of the multiprocessors' time that programs must fill: with less of it, kernels that
    # cut states or sequences into more programs are done first.
    filled: float


# Registers of a thread, over all roles.
AVERAGE = 128
SMALL, CHANNEL = Registers(0, 96, 32), Registers(192, 104, 24)
# By keys and values of tiles, and of decays per channel.
CONFIGURATIONS = {
    (128, 128): Configuration(
        {"tied": 3, "none": 3}, Registers(200, 88, 24), Registers(192, 96, 32), filled=0.6
    ),
    (64, 64): Configuration({"tied": 2, "none": 3}, SMALL, SMALL, filled=0.75),
    "channel": Configuration({"tied": 2, "none": 2}, CHANNEL, CHANNEL, filled=0.6),
}
CHANNEL_SIZES = 128, 128
# Beside the tiles of S and E that are on their way out.
SLOTS_THAT_SAVE = 2
# Writes of a token, at most; and that many where it is taken unasked.
MOST_STEPS, STEPS_TIMED = 2, 2
# Channels of a head come in steps of so many: rows of 32 bytes.
STEP = 16
# Keys of a head from which on its parts are taken unasked. With fewer, a program of Triton's has
# more values than a part, and is as fast.
LEAST_KEYS = 96
# Tokens of a packed sequence, on average, from which on parts that fill no tiles are taken.
LEAST_PACKED = 512
# Rows of q and of k that a program sums the squares of.
NORM_ROWS = 32


def why_not(inputs: Inputs) -> str | None:
    device = inputs.q.device
    if device.type != "cuda":
        return f"the fused kernel needs CUDA tensors, and q is on {device}"
    if (found := architecture_at(device.index or 0)) not in (HOPPER, BLACKWELL):
        return f"the fused kernel is written for sm_90 and sm_100, this is sm_{found}"
    if inputs.by_channel and found != HOPPER:
        return f"the fused kernel of decays per channel is written for sm_90, this is sm_{found}"
    return why_not_form(in_parts(inputs))


@constant_when_compiled
def architecture_at(index: int) -> int:
    """Ten times the compute capability of a CUDA device."""
    return architecture(torch.device("cuda", index))


def has_tensor_memory(device: torch.device) -> bool:
    """Whether its products leave their sums there."""
    return architecture(device) == BLACKWELL


def why_not_form(inputs: Inputs) -> str | None:
    """What the fused kernel cannot do on any GPU."""
    q, sizes = inputs.q, (inputs.q.shape[3], inputs.v.shape[3])
    if inputs.n_steps > (most := 1 if inputs.by_channel else MOST_STEPS):
        return f"the fused kernel takes n_steps up to {most}, got {inputs.n_steps}"
    if inputs.erase == "free":
        return "the fused kernel takes no free erase (dplr)"
    if inputs.by_channel and sizes != CHANNEL_SIZES:
        return f"the fused kernel of decays per channel has (K, V) = {CHANNEL_SIZES}, got {sizes}"
    if not inputs.by_channel and padded(inputs) not in CONFIGURATIONS:
        return (
            "the fused kernel takes (K, V) = (64, 64), or K and equal parts of V from 80 to 128 in "
            f"steps of {STEP}, got {sizes}"
        )
    if inputs.by_channel and q.dtype != torch.bfloat16:
        return f"the fused kernel of decays per channel takes bfloat16, got {q.dtype}"
    if q.dtype != torch.bfloat16 and (q.dtype != torch.float16 or inputs.beta is not None):
        return (
            "the fused kernel takes bfloat16, or float16 with beta=None (in float16 it rounds too "
            f"much for an erase), got {q.dtype}"
        )
    if inputs.scale <= 0:
        return f"the fused kernel takes a scale above 0, got {inputs.scale}"
    if inputs.batch_invariant:
        return "batch_invariant=True needs the kernels that run for any number of rows"
    return None


def padded(inputs: Inputs) -> tuple[int, int]:
    """Keys and values of a head's tiles: of more than 64 channels, in steps, the power of two."""
    sizes = inputs.q.shape[3], inputs.v.shape[3]
    if min(sizes) <= VALUES.value or any(size % STEP for size in sizes):
        return sizes
    return power_of_two(sizes[0]), power_of_two(sizes[1])


def in_parts(inputs: Inputs) -> Inputs:
    """The call with no more values in a head than keys in a tile: where it has, parts are heads.

    Rows of S know nothing of each other. The parts of a head share its gates (`per_gate`).
    """
    value_size = inputs.v.shape[3]
    parts = -(-value_size // power_of_two(inputs.q.shape[3]))
    if inputs.by_channel or parts == 1 or value_size % (parts * STEP):
        return inputs
    v, state = inputs.v.unflatten(3, (parts, -1)).flatten(2, 3), inputs.initial_state
    if state is not None:
        state = state.unflatten(2, (parts, -1)).flatten(1, 2)
    return inputs._replace(v=v, initial_state=state)


def call_of(inputs: Inputs, save: bool) -> Call:
    """A call as kernels take it: where these do, parts of value heads are heads.

    With `save`, the backward, where it is one kernel (what is computed again takes the kernels of
    windows, so that a cut changes no bits), and whether S and E lie where gradients will.
    """
    from deltarule.ops.delta_rule.gluon import gradient_stage

    taken = taken_in_parts(inputs, save)
    call = Call(taken, make_plan(taken), inputs)
    if save:
        call.values["whole"] = call.once(gradient_stage.takes_whole) and gradient_stage.backward
        call.values["lends"] = call.once(gradient_stage.lends)
    return call


def lending(call: Call, shapes: Shapes) -> Shapes:
    """What is saved, with S as the chunk's tokens of q and of k lie, and E as those of v."""
    inputs, dtype = call.inputs, call.inputs.q.dtype
    lent = {"states": (inputs.q.shape, dtype), "lower_states": (inputs.k.shape, dtype)}
    if inputs.beta is not None:
        lent["errors"] = inputs.v.shape, dtype
    return shapes | lent


def taken_in_parts(inputs: Inputs, save: bool) -> Inputs:
    """The same where the kernels of parts are faster, forwards and backwards; else the call."""
    from deltarule.ops.delta_rule.gluon.gradient_stage import runs

    parts = in_parts(inputs)
    _, tokens, _, key_size = inputs.q.shape
    short = inputs.cu_seqlens is not None and tokens < LEAST_PACKED * inputs.sequences
    if parts is inputs or key_size < LEAST_KEYS or (short and key_size < padded(parts)[0]):
        return inputs
    plan = make_plan(parts)
    taken = pays(parts, plan, save) and (not save or runs(Call(parts, plan)))
    return parts if taken else inputs


def pays(inputs: Inputs, plan: Plan, save: bool = False) -> bool:
    """Whether it is faster than the stages that it replaces: a function of shapes and the GPU.

    With neither decays nor an erase, these are one kernel that saves as fast; in float16 nobody has
    timed it.
    """
    return (
        why_unasked_never(inputs) is None
        and not plan.per_segment
        and not (save and inputs.beta is None and inputs.log_decay is None)
        and not (save and (inputs.q.dtype != torch.bfloat16 or inputs.n_steps > 1))
        and why_not(inputs) is None
        and fills(inputs, multiprocessors(inputs.q.device))
    )


def why_unasked_never(inputs: Inputs) -> str | None:
    """Why only impl="gluon" takes it, whatever the number of programs, or None."""
    if has_tensor_memory(inputs.q.device) or inputs.n_steps > STEPS_TIMED:
        return "does not use it, because no GPU has timed such calls"
    return None


def configuration(inputs: Inputs) -> Configuration | None:
    return CONFIGURATIONS.get("channel" if inputs.by_channel else padded(inputs))


def fills(inputs: Inputs, processors: int) -> bool:
    """Whether enough of so many multiprocessors have a program in every round of them."""
    programs = inputs.sequences * inputs.v.shape[2]
    rounds = -(-programs // processors)
    config = configuration(inputs)
    return config is not None and programs >= config.filled * rounds * processors


def place_in_order(inputs: Inputs) -> str:
    """What `explain` says of a call that the kernel can run."""
    parts = taken_in_parts(inputs, save=False)
    if pays(parts, make_plan(parts)):
        return "can run; triton comes first, and uses this kernel here"
    if (reason := why_unasked_never(inputs)) is not None:
        return f"can run; triton comes first, and {reason}"
    return "can run; triton comes first, and its own kernels are faster for so few heads and rows"


class ForwardLaunch(FusedLaunch):
    """Rows of 32-bit numbers lie one after the other: no product reads them."""

    def layout(self, rank: int, bits: int) -> Any:
        return straight(rank, bits) if bits == 32 else super().layout(rank, bits)


def forward_launch(call: Call, save: bool, lends: bool, initial: bool) -> Launch:
    inputs, channels = call.inputs, call.inputs.by_channel
    heads, key_size = inputs.q.shape[2:]
    value_heads, value_size = inputs.v.shape[2:]
    (keys, values), config = padded(inputs), configuration(inputs)
    assert config is not None
    slots = config.slots[inputs.erase]
    tied, where = inputs.beta is not None, call.once(ends)
    rows, part = CHUNK.value, VALUES.value
    queries = rows // inputs.n_steps
    tiles = {
        "q": of_heads(heads, key_size, [queries, keys]),
        "k": of_heads(heads, key_size, [rows, keys]),
        "v": of_heads(value_heads, value_size, [rows, part]),
        "o": of_heads(value_heads, value_size, [queries, part]),
    }
    if channels:
        tiles["decays"] = of_heads(value_heads, key_size, [rows, keys])
    tiles = up_to_ends(tiles, where)
    # Where state roles make P, they leave their shares of its rows.
    share = rows // (values // part) if tied or channels else rows
    width = value_heads * value_size if lends else value_size
    tiles |= {
        "errors": (width, [rows, part]), "scores": (rows, [share, rows]),
        "corrections": (rows, [rows, rows]),
    }  # fmt: skip
    if not channels:
        half = (heads * keys, [part, keys]) if lends else of_states(inputs, [part, keys])
        tiles |= {"states": half, "lower_states": half}
    decays, unit = inputs.log_decay is not None, inputs.normalize_qk
    form = Form(
        TIED=tied, DECAY=decays and not channels, UNIT=unit and not channels,
        NORMS=unit and channels, ENDS=where, STEPS=inputs.n_steps, PER_GATE=inputs.per_gate,
        K=keys, V=values, KEYS=key_size, WIDTH=value_size, PARTS=values // part,
        SLOTS=min(slots, SLOTS_THAT_SAVE) if save else slots, INITIAL=initial, SAVE=save,
        SCORES=save and call["scores"] is not None, LENDS=save and lends,
        TENSOR=has_tensor_memory(inputs.q.device),
    )  # fmt: skip
    registers = config.alone if tied and not save else config.registers
    constants = {
        "FORM": form, "STATE_REGISTERS": registers.state, "SCORE_REGISTERS": registers.score,
        "REGISTERS": registers.others, "num_warps": 4, "maxnreg": AVERAGE,
    }  # fmt: skip
    kernel = channel_forward_kernel if channels else forward_kernel
    return ForwardLaunch(kernel, constants, tiles)


def ends(call: Call) -> str:
    """Of sequences: "whole" chunks, "ragged" ones, or those of "packed" sequences."""
    if call.inputs.cu_seqlens is not None:
        return "packed"
    return "ragged" if call.inputs.q.shape[1] * call.inputs.n_steps % CHUNK.value else "whole"


def up_to_ends(tiles: dict[str, Any], ends: str) -> dict[str, Any]:
    """Tiles of tokens by maps that end where a sequence does, if its last chunk may be ragged."""
    if ends == "whole":
        return tiles
    return {name: (width, [1, 1, *tile]) for name, (width, tile) in tiles.items()}


def of_heads(heads: int, size: int, tile: list[int]) -> tuple[Width, list[int]]:
    """A tile of rows of heads of so many channels, which ends at a head's last."""
    if size % tile[1] == 0:
        return heads * size, tile
    return (heads, size), [tile[0], 1, tile[1]]


def of_states(inputs: Inputs, tile: list[int]) -> tuple[Width, list[int]]:
    """A tile of rows of states [V, K], which ends at a state's last."""
    value_size, key_size = inputs.state_shape[2:]
    return (key_size, tile) if value_size % tile[0] == 0 else ((value_size, key_size), [1, *tile])


def norms_of(call: Call) -> Tensor | None:
    """1 / |q| and 1 / |k| [B, T, H, 1 + n_steps] with `normalize_qk`, by `inverse_norms_kernel`."""
    inputs, norms = call.inputs, call["norms"]
    # In the backward of what is kept they are there.
    if not inputs.normalize_qk or (norms is not None and call["again"] is False):
        return norms
    if norms is None:
        norms = call.empty(norms_shape(inputs))
    rows = len(norms)
    call.once(norms_launch)((blocks(rows, NORM_ROWS), 1, 1), inputs.q, inputs.k, norms, rows)
    return norms


def norms_shape(inputs: Inputs) -> tuple[int, ...]:
    return inputs.q.numel() // inputs.q.shape[3], 1 + inputs.n_steps


def kept_norms(inputs: Inputs, plan: Plan) -> Shapes:
    """Where the forward is this kernel, the backward needs not compute them again."""
    return {"norms": (norms_shape(inputs), torch.float32)} if pays(inputs, plan, True) else {}


@triton.jit(do_not_specialize=["rows"])
def inverse_norms_kernel(
    q, k, norms, rows, HEADS: tl.constexpr, STEPS: tl.constexpr, K: tl.constexpr, BK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """norms [B T H, 1 + n] of the rows of q [B, T, H, K] and of the n of k [B, T n, H, K]."""
    o_r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    o_k, m_r = tl.arange(0, BK)[None, :], o_r < rows
    o_x, m_x = o_r[:, None] * K + o_k, m_r[:, None]
    if BK > K:
        m_x &= o_k < K
    b_q = tl.load(q + o_x, mask=m_x, other=0.0)
    for step in tl.static_range(STEPS):
        if STEPS > 1:
            row = (o_r // HEADS * STEPS + step) * HEADS + o_r % HEADS
            o_x = row[:, None] * K + o_k
        b_k = tl.load(k + o_x, mask=m_x, other=0.0)
        if step == 0:
            tl.store(norms + o_r * (1 + STEPS), inverse_norm(b_q), mask=m_r)
        tl.store(norms + o_r * (1 + STEPS) + (1 + step), inverse_norm(b_k), mask=m_r)


def norms_launch(call: Call) -> Launch:
    sizes = {name: call.plan.sizes[name] for name in ("K", "BK")}
    sizes |= {"HEADS": call.plan.sizes["H"], "STEPS": call.inputs.n_steps, "ROWS": NORM_ROWS}
    return Launch(inverse_norms_kernel, {**sizes, "num_warps": 4, "num_stages": 1})


def forward(call: Call, save: bool = False) -> tuple[Tensor, Tensor]:
    """Outputs and the final state; every tensor but the gates lies in one piece.

    `save`: what the call has buffers for is left there for a backward.
    """
    inputs, norms = call.inputs, norms_of(call)
    o = call.empty(call.given.output_shape, inputs.v.dtype)
    final = call.empty(call.given.state_shape)
    own = {"o": o, "final_state": final, "norms": norms, "log_scale": math.log2(inputs.scale)}
    if inputs.by_channel and inputs.log_decay is not None:
        own |= dict.fromkeys(("decays", "log_decay"), piece(inputs.log_decay).float())
        own |= {"q_rows": inputs.q, "k_rows": inputs.k}
    initial = inputs.initial_state is not None
    launch = call.once(forward_launch, save, bool(call["lends"]), initial)
    call.run(launch, (inputs.sequences * inputs.v.shape[2], 1, 1), own)
    return o, final


# Bytes that a backward may compute again at once: those of one layer. For more it takes windows.
MOST_AGAIN = 2**30


def kept_again(call: Call, nothing: Tensor) -> Tensor:
    """What the forward would have kept, to the bit, where it pays."""
    size = 4 * call.once(kept_layout, True).elements
    if size > MOST_AGAIN or not pays(call.inputs, call.plan, True):
        return nothing
    kept = keep(call, True)
    forward(call, True)
    return kept


def forward_of(inputs: Inputs) -> Outputs:
    parts = in_parts(contiguous(inputs))
    return forward(Call(parts, make_plan(parts), inputs))


recorded_forward = Recorded(forward_of, compiled_first(forward_of))


def whole_forward(inputs: Inputs, save: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs and final state for impl="gluon"; nothing is saved for the backward, ever."""
    o, final = recorded_forward(inputs)
    return o, final, final.new_empty(0, *final.shape[1:])
