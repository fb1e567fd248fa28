"""Kernels that meet other processes half way: two halves of a row equal the definition of it.

The meetings are here: the first half goes first forwards, the second backwards.
"""

import pytest
import torch

from deltarule.ops.context import Context
from deltarule.ops.context.exchange import Met
from deltarule.ops.delta_rule import spanning as between
from deltarule.ops.delta_rule.inputs import Inputs
from deltarule.ops.delta_rule.spanning import Join
from deltarule.ops.delta_rule.triton import plan as launch
from deltarule.ops.delta_rule.triton import spanning
from kernels.interpreted import inputs_of, interpreted
from kernels.test_segments import CASES, weakly_decaying
from oracle import NAMES, weights, with_gradients
from tolerance import assert_close


@pytest.fixture
def met(monkeypatch):
    """What the two halves have left for each other."""
    left = {}

    def meet(context, end, transition, diagonal):
        if context.rank == 0:
            left["end"] = end
        reaches = context.rank == 1 and context.goes_on
        start = left["end"] if reaches else torch.zeros_like(end)
        return lambda: Met(start, transition)

    def meet_back(context, d_start, met, diagonal):
        if context.rank == 1:
            left["d_start"] = d_start if context.goes_on else torch.zeros_like(d_start)
            return lambda: torch.zeros_like(d_start)
        return lambda: left["d_start"]

    monkeypatch.setattr(between, "meet", meet)
    monkeypatch.setattr(between, "meet_back", meet_back)
    return left


def part_of(inputs: Inputs, context: Context, first_state: bool) -> Inputs:
    """The arguments of one half."""
    rows = {name: inputs.n_steps if name in ("k", "v", "beta") else 1 for name in NAMES[:7]}
    own = {
        name: None
        if (x := getattr(inputs, name)) is None
        else x[:, context.first * n : context.last * n].clone()
        for name, n in rows.items()
    }
    state = inputs.initial_state
    if context.offsets is not None:
        starts = [context.offsets.index(x) for x in context.starts]
        state = None if state is None else state[starts]
        if state is not None and context.goes_on:
            state = torch.cat([torch.zeros_like(inputs.initial_state[:1]), state])
    elif not first_state:
        state = None
    return inputs._replace(**own, initial_state=state, cu_seqlens=context.cu_seqlens())


ROW = {name: x for name, x in CASES.items() if "lengths" not in x}
PACKED = {
    "goes on": {"lengths": (40, 120, 40), "value_heads": 1},
    "begins": {"lengths": (100, 100), "value_heads": 1, "decay": "channel"},
    "one": {"lengths": (200,), "value_heads": 1, "erase": "none"},
    "free": {"lengths": (190, 10), "erase": "free", "decay": "channel", "value_heads": 1},
}


# Chunks in a segment: 0 leaves sequences whole, of one segment then.
OPTIONS = ROW | PACKED
KINDS = [("heads", 2), ("heads", 0), ("goes on", 2), ("channels", 0), *[(x, 1) for x in OPTIONS]]


@interpreted
@pytest.mark.parametrize(("name", "per_segment"), KINDS)
def test_two_halves_equal_the_definition_of_the_row(name, per_segment, met, monkeypatch):
    monkeypatch.setattr(launch, "chunks_per_segment", lambda *shapes: per_segment)
    case = weakly_decaying(**OPTIONS[name])
    inputs, (d_o, d_state) = inputs_of(case), [x.float() for x in weights(case)]
    exact, gradients = with_gradients(
        case.to(torch.float64), "reference", d_o.double(), d_state.double()
    )
    tokens, lengths = inputs.q.shape[1], case.lengths
    offsets = None if lengths is None else (0, *torch.tensor(lengths).cumsum(0).tolist())
    contexts = [Context(None, rank, (0, 100, tokens), offsets) for rank in (0, 1)]
    if tokens == 100:
        contexts = [Context(None, rank, (0, 37, tokens), offsets) for rank in (0, 1)]
    done = []
    for context in contexts:
        part = part_of(inputs, context, context.rank == 0)
        join = Join(context, inputs.erase == "none", len(inputs.q))
        save = per_segment != 2
        done.append((part, join, *spanning.forward(part, save, join, None)()))
        if per_segment == 0:
            assert spanning.split(part).per_segment > 0
    o = torch.cat([x[2] for x in done], 1)
    assert_close(o, exact.o, gradient=False, name="o")
    assert_close(done[1][3][-1:], exact.final_state[-1:], gradient=False, name="state")
    found = [None, None]
    # Only what all documents end with in the last process is asked for here.
    for rank in (1, 0):
        part, join, _, final, saved, start = done[rank]
        d_final = d_state_of(d_state, contexts[rank], final)
        found[rank] = spanning.backward(
            contexts[rank].part(d_o).contiguous(), d_final, part._replace(initial_state=start),
            saved, join,
        )()  # fmt: skip
    for place, name in enumerate(NAMES[:7]):
        if name not in gradients:
            continue
        x = torch.cat([found[0][place], found[1][place]], 1)
        if name == "log_decay" and case.tensors["log_decay"].ndim == 1:
            x = x.sum((0, 1))
        assert_close(x, gradients[name], gradient=True, name=name)


def d_state_of(d_state, context, final):
    """The gradients by the states of the sequences that end here."""
    out = torch.zeros_like(final)
    if context.offsets is None:
        return d_state if context.rank == 1 else out
    ending = [n for n, end in enumerate(context.offsets[1:]) if context.first < end <= context.last]
    out[: len(ending)] = d_state[ending]
    return out
