"""Which implementation would run for these arguments, and why not the others."""

from typing import NamedTuple

from torch import Tensor

from deltarule.ops.delta_rule.implementations import IMPLEMENTATIONS, Request
from deltarule.ops.delta_rule.inputs import Inputs, check_arguments
from deltarule.ops.dispatch import first_that_runs
from deltarule.shapes import Beta, Decay, Erase, Keys, Queries, Values


class Explanation(NamedTuple):
    """One row: an implementation, whether impl="auto" would choose it, and the reason."""

    impl: str
    runs: bool
    reason: str


def explain(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    beta: Beta | None,
    log_decay: Decay | None = None,
    a: Erase | None = None,
    b: Erase | None = None,
    n_steps: int = 1,
    scale: float | None = None,
    normalize_qk: bool = False,
    cu_seqlens: Tensor | None = None,
    batch_invariant: bool = False,
) -> list[Explanation]:
    """Say for each implementation whether impl="auto" would choose it for these arguments.

    This is for `delta_rule` and `dplr`. Of `selective_scan`, `mesa`, `ttt` and `titans` a call with
    impl="triton" raises with the reason. Leave out the arguments that decide nothing:
    initial_state, return_state, save_states, context and return_transition.

    Args:
        q: Queries [B, T, H, K]; `torch.empty(..., device="meta")` will do, only shapes are read.
        k: Keys `[B, T*n, H, K]`.
        v: Values `[B, T*n, HV, V]`.
        beta: As for `delta_rule`.
        log_decay: As for `delta_rule`.
        a: As for `dplr`.
        b: As for `dplr`.
        n_steps: As for `delta_rule`.
        scale: As for `delta_rule`.
        normalize_qk: As for `delta_rule`.
        cu_seqlens: As for `delta_rule`.
        batch_invariant: As for `delta_rule`.

    Returns:
        One row for each implementation, in the order of preference.

    Raises:
        ValueError: An argument has the wrong shape, dtype or device; the message names it.

    Examples:
        >>> import torch
        >>> q = k = v = torch.zeros(1, 64, 2, 16)
        >>> [row.impl for row in explain(q, k, v, beta=None) if row.runs]
        ['torch']
    """
    options = n_steps, 1.0, normalize_qk, batch_invariant
    inputs = Inputs(q, k, v, beta, a, b, log_decay, None, cu_seqlens, *options)
    inputs = check_arguments(inputs, scale)
    call = Request(inputs)
    chosen = first_that_runs(IMPLEMENTATIONS, call)
    rows = []
    for name, implementation in IMPLEMENTATIONS.items():
        reason = implementation.why_not(call)
        if reason is None:
            reason = "first that can run" if name == chosen else f"can run; {chosen} comes first"
            if name == "gluon":
                # Where it takes over as a stage of "triton".
                from deltarule.ops.delta_rule.gluon.stage import place_in_order

                reason = place_in_order(inputs)
        rows.append(Explanation(name, name == chosen, reason))
    return rows
