"""When both scans of heads with 256 keys are kernels in Gluon, and their launch."""

from collections.abc import Mapping

import torch
from torch import Tensor

from deltarule.ops.delta_rule.gluon.memory import CHUNK
from deltarule.ops.delta_rule.gluon.stage import ForwardLaunch, ends, up_to_ends
from deltarule.ops.delta_rule.gluon.wide_scan import ROWS, Form, K, V, wide_scan_kernel
from deltarule.ops.delta_rule.inputs import Inputs
from deltarule.ops.delta_rule.triton.plan import Call
from deltarule.ops.runtime.launch import Launch

# Registers of a thread: on average, and of the role of one warp; the other has the rest.
AVERAGE, OTHERS = 168, 24


def can(inputs: Inputs) -> bool:
    """Whether it can on any GPU of Hopper."""
    return (
        inputs.q.dtype == torch.bfloat16 and inputs.q.shape[3] == K.value
        and inputs.v.shape[3] % V.value == 0 and not inputs.by_channel
        and inputs.n_steps == inputs.per_gate == 1 and not inputs.batch_invariant
    )  # fmt: skip


def takes(call: Call) -> bool:
    """Whether it takes these scans, however few programs there are: nobody found a slower call.

    It is asked on Hopper. Where sequences are cut into segments, those fill the GPU.
    """
    return call.inputs.q.is_cuda and not call.plan.per_segment and can(call.inputs)


def scans(call: Call, own: Mapping[str, Tensor | None], back: bool) -> bool:
    """Launch the scan if it takes this call, with tensors of its `own` as triton/scan.py has them.

    What is computed again never comes here, so that a cut into windows changes no bits.
    """
    if not call.once(takes):
        return False
    names = ("d_v", "d_states", "d_errors", "d_final", "d_initial", "d_o")
    if not back:
        names = ("o", "states", "errors", "initial_state", "final_state", "v")
    tensors = [own[x] if x in own else call[x] for x in names]
    programs = call.inputs.v.shape[2:].numel() // V.value
    given = dict(zip(("values", "states", "errors", "first", "last", "v"), tensors, strict=True))
    launch = call.once(scan_launch, back, *[x is not None for x in tensors[:4]])
    grid = call.inputs.sequences * programs, 1, 1
    call.run(launch, grid, given | {"programs": programs})
    return True


def scan_launch(
    call: Call, back: bool, values: bool, states: bool, errors: bool, given: bool
) -> Launch:
    """That of a scan which leaves what is said, from given states or from zeros."""
    inputs, rows = call.inputs, CHUNK.value
    heads, (value_heads, value_size) = inputs.q.shape[2], inputs.v.shape[2:]
    keys, of_values = (heads * K.value, [rows, K.value]), [rows, V.value]
    width, pairs = value_heads * value_size, (rows, [rows, rows])
    tiles = up_to_ends(
        {"q": keys, "k": keys, "v": (width, of_values), "values": (width, of_values)},
        call.once(ends),
    ) | {
        "states": (K.value, [V.value, K.value]), "errors": (value_size, of_values),
        "scores": pairs, "corrections": pairs, "scalings": (rows, [ROWS.value, rows]),
    }  # fmt: skip
    parts = value_size // V.value
    form = Form(
        BACK=back, TIED=inputs.beta is not None, DECAY=inputs.log_decay is not None,
        SCALED=inputs.log_decay is not None or inputs.normalize_qk, ENDS=call.once(ends),
        PARTS=parts, GROUP=parts * value_heads // heads, GIVEN=given, STATES=int(states),
        ERRORS=int(errors), OUT=int(values), CUT=False,
    )  # fmt: skip
    constants = {"FORM": form, "REGISTERS": OTHERS, "num_warps": 8, "maxnreg": AVERAGE}
    return ForwardLaunch(wide_scan_kernel, constants, tiles)
