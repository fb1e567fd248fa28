"""Operators over a context beside one process, and what they send."""

import itertools
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from whole_models import relative

import deltarule
from deltarule.ops.context import make_context
from oracle import make_case

TOKENS = 53
# With 4 processes (13 or 14 tokens each): one whose first document ends and whose last goes on,
# one that begins where a document does, documents of one and of no token.
OFFSETS = [0, 0, 3, 11, 20, 20, 33, 39, 47, 53]
# One value head for each key head, and steps, are the same code.
SIZES = {"heads": 2, "value_heads": 4, "key_size": 5, "value_size": 7}


def grid() -> list[dict[str, Any]]:
    """Every decay and erase, packed or not, and several steps where there are steps."""
    decays, erases = ("none", "constant", "head", "channel"), ("none", "tied", "free")
    return [
        {"decay": decay, "erase": erase, "n_steps": steps, "packed": packed}
        for decay, erase, steps, packed in itertools.product(decays, erases, (1, 3), (False, True))
        if erase != "free" or steps == 1
    ]


def arguments(decay: str, erase: str, n_steps: int, packed: bool) -> dict[str, Any]:
    torch.manual_seed(1)
    sizes = SIZES | {"batch": 1 if packed else 2, "tokens": TOKENS, "n_steps": n_steps}
    x = make_case(decay, erase, **sizes).tensors | {"initial_state": None}
    if decay != "none":
        # Weak, so that the first process counts in the last.
        x["log_decay"] /= 10
    if decay in ("head", "channel"):
        x["log_decay"][:, TOKENS // 3] = -torch.inf
    absent = {"beta"} if erase == "free" else {"a", "b"}
    given = {name: y for name, y in x.items() if name not in absent | {"initial_state"}}
    return given if erase == "free" else given | {"n_steps": n_steps}


def operator_case(exchange: str, bounds: list[int] | None = None, **case: Any) -> dict[str, float]:
    """Errors of outputs, states and gradients over a context."""
    given = arguments(**case)
    operator = deltarule.dplr if case["erase"] == "free" else deltarule.delta_rule
    offsets = OFFSETS if case["packed"] else None
    names = [name for name, x in given.items() if isinstance(x, Tensor)]
    leaves = {name: given[name].requires_grad_() for name in names}
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    start = draw(len(OFFSETS) - 1 if case["packed"] else 2, 4, 7, 5)
    if case["packed"]:
        # The first two documents begin at token 0; one starts with a state of its own.
        start[2:] = 0
    weights = draw(2, 2, TOKENS, 4, 7)
    weight, last_weight = weights[0, : len(given["q"])], weights[1, 0, 0, 0, 0]
    cu_seqlens = None if offsets is None else torch.tensor(offsets)
    alone = operator(**given, initial_state=start, cu_seqlens=cu_seqlens, impl="reference")
    loss = (alone.o * weight).sum() + last_weight * alone.final_state[-1].sum()
    expected = dict(zip(names, torch.autograd.grad(loss, list(leaves.values())), strict=True))

    context = make_context(TOKENS, cu_seqlens=offsets, bounds=bounds, exchange=exchange)
    steps = case["n_steps"]

    def here(name: str, x: Tensor) -> Tensor:
        rows = steps if name in ("k", "v", "beta") else 1
        return x if x.ndim == 1 else x[:, context.first * rows : context.last * rows]

    mine = {name: here(name, x).detach().requires_grad_() for name, x in leaves.items()}
    # Documents without a token are not among those of a process.
    own = start[offsets is not None :][: context.sequences or 2] if context.rank == 0 else None
    out = operator(**given | mine, initial_state=own, context=context)
    loss, errors = (out.o * context.part(weight)).sum(), {}
    if context.rank == context.size - 1:
        loss = loss + last_weight * out.final_state[-1].sum()
        errors["final_state"] = relative(out.final_state[-1], alone.final_state[-1])
    loss.backward()
    errors["o"] = relative(out.o, context.part(alone.o))
    for name, want in expected.items():
        gradient, want = mine[name].grad, here(name, want)
        if want.ndim == 1:
            dist.all_reduce(gradient)
        errors[f"d_{name}"] = relative(gradient.nan_to_num(0), want.nan_to_num(0))
    return errors


def operator_cases(exchange: str, bounds: list[int] | None = None) -> list[tuple[Any, float]]:
    """The whole grid, and the worst error of each case."""
    return [(case, max(operator_case(exchange, bounds, **case).values())) for case in grid()]
