"""The definition in float64 and the yardstick, on the inputs that the doctor draws."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deltarule.doctor import chunked
from deltarule.ops.delta_rule import definition
from deltarule.ops.delta_rule.inputs import Inputs
from deltarule.shapes import RecurrentOutput

NAMES = ("q", "k", "v", "beta", "a", "b", "log_decay", "initial_state")
# Heads times entries of their states, of which the loop over tokens keeps all: 1.2 GiB in float64.
STATES_AT_ONCE = 32 * 128 * 128

Run = Callable[[Inputs], RecurrentOutput]


def plain_run(module: Any, inputs: Inputs, options: dict[str, Any]) -> RecurrentOutput:
    """One of the two reference modules."""
    x = inputs
    names = "log_decay", "scale", "initial_state", "cu_seqlens"
    shared = options | {name: getattr(x, name) for name in names}
    if x.a is not None:
        return module.dplr(x.q, x.k, x.v, a=x.a, b=x.b, **shared)
    return module.delta_rule(
        x.q, x.k, x.v, beta=x.beta, n_steps=x.n_steps, normalize_qk=x.normalize_qk, **shared
    )


def exact_run(inputs: Inputs) -> RecurrentOutput:
    return plain_run(definition, inputs, {})


def yardstick_run(inputs: Inputs) -> RecurrentOutput:
    """The chunked algorithm in PyTorch, its operands rounded to the inputs' dtype."""
    return plain_run(chunked, inputs, {"chunk_size": 64, "matmul_dtype": inputs.q.dtype})


def results(run: Run, inputs: Inputs, weights: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Outputs, the final state and the gradients of a random sum of both."""
    leaves = {
        name: x.detach().clone().requires_grad_()
        for name in NAMES
        if (x := getattr(inputs, name)) is not None
    }
    o, state = run(inputs._replace(**leaves))
    assert state is not None
    d_o, d_state = weights[0].to(o.dtype), weights[1].to(state.dtype)
    loss = (o * d_o).sum() + (state * d_state).sum()
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    named = dict(zip((f"d{name}" for name in leaves), gradients, strict=True))
    return {"o": o, "final_state": state, **named}


def in_parts(run: Run, inputs: Inputs, weights: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """`results` of so many heads at a time as memory is meant for, which know nothing of others."""
    heads, each = inputs.q.shape[2], inputs.v.shape[2] // inputs.q.shape[2]
    size = each * inputs.n_steps * math.prod(inputs.state_shape[2:])
    at_once = max(STATES_AT_ONCE // size, 1)
    parts = []
    for first in range(0, heads, at_once):
        of_keys = slice(first, first + at_once)
        of_values = slice(first * each, (first + at_once) * each)
        cut = {
            name: x[:, of_values] if name == "initial_state" else x[:, :, place]
            for name in NAMES
            for place in (of_keys if name in ("q", "k") else of_values,)
            if (x := getattr(inputs, name)) is not None
        }
        part = weights[0][:, :, of_values], weights[1][:, of_values]
        parts.append(results(run, inputs._replace(**cut), part))
    return {
        name: torch.cat([part[name] for part in parts], 1 if name.endswith("state") else 2)
        for name in parts[0]
    }


def in_float64(inputs: Inputs) -> Inputs:
    return inputs._replace(
        **{name: x.double() for name in NAMES if (x := getattr(inputs, name)) is not None}
    )
