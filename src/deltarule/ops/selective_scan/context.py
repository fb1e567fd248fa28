"""`selective_scan` over a context, by three passes: what is written, what is kept, and the scan.

Each entry of a state is multiplied by a number of its own, so that no read-out of a start can be
taken out of the sum. With U the end of a pass from nothing, and M that of a pass from ones in
which nothing is written,

    S = starting_state(U, M)        o, S_end = scan from S
"""

from collections.abc import Callable
from typing import Any

import torch

from deltarule.ops.context import Context, check_context
from deltarule.ops.context.exchange import starting_state
from deltarule.shapes import RecurrentOutput


def over_context(
    operator: Callable[..., RecurrentOutput], context: Context, given: dict[str, Any]
) -> RecurrentOutput:
    """Run the scan on the tokens of this process, after those of the processes before it."""
    q, v = given["q"], given["v"]
    check_context(context, v.shape[1], "v", given["cu_seqlens"])
    first, sequences = len(v), context.sequences or len(v)
    given = given | {"cu_seqlens": context.cu_seqlens(v.device), "return_state": True}
    size = sequences, *v.shape[2:], q.shape[-1]
    nothing = v.new_zeros(size, dtype=torch.promote_types(v.dtype, torch.float32))
    start = nothing if given["initial_state"] is None else given["initial_state"]
    ones = nothing.clone()
    # Only what goes on from the process before keeps anything of it.
    ones[:first] = float(context.goes_on)
    end = operator(**given | {"initial_state": start}).final_state
    kept = operator(**given | {"v": torch.zeros_like(v), "initial_state": ones}).final_state
    assert end is not None
    assert kept is not None
    before = starting_state(context, end[-first:], kept[-first:])
    start = torch.cat([start[:first] + before, start[first:]])
    return operator(**given | {"initial_state": start})
