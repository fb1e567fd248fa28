"""What the layers of a model do with a text: which tokens each reads, and how its state changes."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltarule import ops
from deltarule.models import CausalLM
from deltarule.nn import Attention, DecayingFastWeights, DeltaMixer, Mixer, ScanMixer, State
from deltarule.nn.call import LayerCall
from deltarule.nn.delta_mixer import OPERATORS
from deltarule.nn.layout import make_layout
from deltarule.nn.rule import Arguments
from deltarule.nn.two_memories import SlotMixer

# Arguments with a row for each write, where a token makes several.
EACH_WRITE = ("k", "v", "beta")


class Reading(NamedTuple):
    """What one head of one layer does with a text of T tokens.

    Args:
        matrix: [T, T * n] how much of what was written at j the token i reads, before any norm.
        softmax: The same for the softmax of the layer's own q and k. None: they are constants (S4).
        write: [T] the share of the new state that the token wrote, |S - S' A| / |S|. None: the
            layer has no state of this form.
        erase: [T] the share of the old state that it decayed or erased, |S' - S' A| / |S'|.
    """

    matrix: Tensor
    softmax: Tensor | None
    write: Tensor | None = None
    erase: Tensor | None = None


@dataclass(frozen=True)
class LayerView:
    """A layer's place from 0, the name of its mixer, and what it does."""

    index: int
    name: str
    reading: Reading


@torch.no_grad()
def layer_views(model: CausalLM, tokens: list[int], head: int = 0) -> list[LayerView]:
    """Look at a head of every layer whose output is linear in its values.

    Args:
        model: Any model.
        tokens: A text that starts a document; memory grows with the square of its length.
        head: Which value head, from 0; a layer with fewer shows its last.

    Returns:
        A view of each layer that has a matrix; TTT, Titans and sLSTM, whose read-out is not linear
        in their values, have none, and Hyena shows none.
    """
    inputs: dict[int, Tensor] = {}
    places = [
        (index, module) for index, block in enumerate(model.blocks)
        for module in block.modules() if isinstance(module, Mixer)
    ]  # fmt: skip
    hooks = [
        mixer.register_forward_pre_hook(lambda _, given, i=i: inputs.update({i: given[0]}))
        for i, (_, mixer) in enumerate(places)
    ]
    try:
        model(torch.tensor([tokens], device=model.embedding.weight.device))
    finally:
        for hook in hooks:
            hook.remove()
    shared: dict[str, Tensor] = {}
    views = []
    for i, (index, mixer) in enumerate(places):
        if (reading := reading_of(mixer, inputs[i], shared, head)) is not None:
            views.append(LayerView(index, mixer.rule.name, reading))
    return views


def reading_of(mixer: Mixer, x: Tensor, shared: dict[str, Tensor], head: int) -> Reading | None:
    """What the layer does with x [1, T, hidden_size]; None for a layer without a matrix."""
    if isinstance(mixer, Attention):
        weights = one_head(mixer.weights(x), head)
        return Reading(weights, weights)
    call = LayerCall(x, make_layout(x, None, None), mixer.init_state(1), State(), shared)
    if isinstance(mixer, DeltaMixer):
        return of_rule(mixer, call, head)
    if isinstance(mixer, SlotMixer):
        arguments = mixer.arguments(call)
        return Reading(of_slots(arguments, head), softmax_of(arguments, 1, head))
    if isinstance(mixer, ScanMixer | DecayingFastWeights):
        arguments = mixer.arguments(call)
        return Reading(of_scan(arguments, head), softmax_of(arguments, 1, head))
    return None


def of_rule(mixer: DeltaMixer, call: LayerCall, head: int) -> Reading:
    """Matrix, softmax, write and erase of a linear rule."""
    projections = mixer.project(call)
    arguments = mixer.rule.arguments(projections)
    # Values that are unit vectors come out as the columns of the matrix.
    columns = replace(projections, v=unit_values(projections.v))
    if projections.write_logits is None:
        unit = mixer.rule.arguments(columns)
    else:
        # A write strength for each value channel has no place in one matrix: it stays with v.
        unit = arguments | {"v": unit_values(arguments["v"])}
    output = OPERATORS[mixer.rule.operator](**unit)
    matrix = one_head(mixer.rule.read_out_function(output.o, columns).transpose(1, 2), head)
    head = min(head, arguments["v"].shape[2] - 1)
    strengths = state_strengths(arguments, mixer.rule.operator, mixer.n_steps, head)
    return Reading(matrix, softmax_of(arguments, mixer.n_steps, head), *strengths)


def of_slots(arguments: Arguments, head: int) -> Tensor:
    """[T, T] what is read of each value, by way of the slots."""
    out = ops.two_memories(**(arguments | {"v": unit_values(arguments["v"])}))
    return one_head(out.o.transpose(1, 2), head)


def of_scan(arguments: Arguments, head: int) -> Tensor:
    """[T, T] what is read of each value, a mean over the value channels, each of which has its own.

    A row of the batch for each token that alone writes.
    """
    v = arguments["v"]
    tokens = v.shape[1]
    alone = torch.eye(tokens, dtype=v.dtype, device=v.device)[:, :, None, None]
    # Mamba's step size is in its v already; it belongs to the matrix and not to the value.
    stepped = "delta" in arguments and arguments["k"].ndim == 4
    size = arguments["delta"] if stepped else torch.ones_like(v)
    repeated: Arguments = {
        name: x.expand(tokens, *x.shape[1:]) if isinstance(x, Tensor) and x.ndim == 4 else x
        for name, x in arguments.items()
    }
    out = ops.selective_scan(**(repeated | {"v": (alone * size).to(v.dtype)}))
    return out.o[:, :, min(head, v.shape[2] - 1)].mean(-1).T


def unit_values(v: Tensor) -> Tensor:
    """[1, C, HV, C] the unit vector j at row j, for v [1, C, HV, V]."""
    rows, heads = v.shape[1:3]
    unit = torch.eye(rows, dtype=v.dtype, device=v.device)[None, :, None, :]
    return unit.expand(1, rows, heads, rows)


def softmax_of(arguments: Arguments, n_steps: int, head: int) -> Tensor | None:
    """[T, T * n] softmax of the same q and k, before any unit norm; each write is a column."""
    q, k = arguments["q"], arguments["k"]
    if q.ndim == 3:
        return None
    scale = arguments.get("scale") or q.shape[-1] ** -0.5
    q, k = (x[0, :, min(head * x.shape[2] // arguments["v"].shape[2], x.shape[2] - 1)].float()
            for x in (q, k))  # fmt: skip
    token = torch.arange(len(k), device=k.device) // n_steps
    later = token > torch.arange(len(q), device=q.device).unsqueeze(1)
    return (scale * q @ k.T).masked_fill(later, float("-inf")).softmax(-1)


def state_strengths(
    arguments: Arguments, operator: str, n_steps: int, head: int
) -> tuple[Tensor, Tensor]:
    """[T] the share of the new state that each token wrote, and of the old that it took away."""
    run = OPERATORS[operator]
    tokens = arguments["q"].shape[1]
    each = {name: by_token(name, x, tokens, n_steps) for name, x in arguments.items()}
    states: list[Any] = [None]
    for t in range(tokens):
        here = {name: x[t : t + 1] if is_by_token(x, tokens) else x for name, x in each.items()}
        states.append(run(**here, initial_state=states[-1]).final_state)
    states[0] = torch.zeros_like(states[1])
    all_states = torch.cat(states)
    before, after = all_states[:-1], all_states[1:]
    kept = run(**(each | {"v": torch.zeros_like(each["v"])}), initial_state=before).final_state
    assert kept is not None
    return share(after - kept, after, head), share(before - kept, before, head)


def by_token(name: str, x: Any, tokens: int, n_steps: int) -> Any:
    """[1, T * n, ...] -> [T, n, ...]; a constant decay and what is no tensor stay."""
    if not isinstance(x, Tensor) or x.ndim < 3:
        return x
    return x[0].unflatten(0, (tokens, n_steps if name in EACH_WRITE else 1))


def is_by_token(x: Any, tokens: int) -> bool:
    return isinstance(x, Tensor) and x.ndim >= 3 and len(x) == tokens


def share(part: Tensor, whole: Tensor, head: int) -> Tensor:
    """[T] the norm of a part of the state over that of the whole; 0 where there is nothing."""
    part, whole = (x[:, head].flatten(1).norm(dim=1) for x in (part, whole))
    return torch.where(whole > 0, part / whole.clamp(min=1e-30), torch.zeros_like(whole))


def one_head(matrices: Tensor, head: int) -> Tensor:
    return matrices[0, min(head, matrices.shape[1] - 1)]
