"""Calls of `ttt` and `titans` with every tensor drawn."""

import torch
import torch.nn.functional as F

from deltarule import TitansState, TTTState, titans, ttt

H, HV = 2, 4
DOUBLE = torch.float64
KINDS = [("ttt", 1), ("ttt", 2), ("titans", 1), ("titans", 2)]
PARTS = ("weights", "summed", "anchor")
CALLS, STATES = {"ttt": ttt, "titans": titans}, {"ttt": TTTState, "titans": TitansState}


def arguments(operator, tensors, size=5):
    """All that the operator is given for tensors by name, in mini-batches of so many tokens."""
    maps = [tuple(tensors[f"{p}_{i}"] for i in (1, 2) if f"{p}_{i}" in tensors) for p in PARTS]
    given = {name: x for name, x in tensors.items() if name != "position" and name[-2:-1] != "_"}
    given["initial_state"] = STATES[operator](*filter(None, maps), tensors["position"])
    return given | ({"mini_batch": size} if operator == "titans" else {})


def run(operator, tensors, size=5, **options):
    """Outputs, every part of the state, and how many tokens open mini-batches have."""
    o, *_, state = CALLS[operator](**arguments(operator, tensors, size), **options)
    return (o, *(x for maps in state[:-1] for x in maps), state.position)


def draw(*sizes):
    return torch.randn(*sizes, dtype=DOUBLE)


def make(operator, maps, batch=3, tokens=37, sequences=3, *, size=5, channels=4, inner=7):
    """Draw a call; the sequences have begun with open mini-batches of 0, 1, .. tokens.

    `inner` channels stand between two maps.
    """
    bias = int(operator == "ttt")
    sizes = [(channels, channels + bias)]
    if maps == 2:
        sizes = [(inner, channels + bias), (channels, inner + bias)]
    tensors = {
        "q": F.normalize(draw(batch, tokens, H, channels), dim=-1),
        "k": F.normalize(draw(batch, tokens, H, channels), dim=-1),
        "v": draw(batch, tokens, HV, channels),
        "beta": 0.3 * torch.rand(batch, tokens, HV, dtype=DOUBLE),
    }
    if operator == "ttt":
        tensors["step_scale"] = torch.rand(size, dtype=DOUBLE)
        tensors |= {"norm_weight": 1 + 0.2 * draw(HV, channels), "norm_bias": draw(HV, channels)}
    else:
        tensors["momentum"] = torch.rand(batch, tokens, HV, dtype=DOUBLE)
        tensors["log_decay"] = -torch.rand(batch, tokens, HV, dtype=DOUBLE)
        if tokens > 8:
            tensors["momentum"][:, 7], tensors["log_decay"][:, 8] = 0, -torch.inf
    for index, map_size in enumerate(sizes):
        for part in PARTS[: 2 if operator == "ttt" else 3]:
            # Outputs of a map stay near one in size whatever its width.
            maps_drawn = draw(sequences, HV, *map_size) / map_size[-1] ** 0.5
            tensors[f"{part}_{index + 1}"] = maps_drawn
    return tensors | {"position": torch.arange(sequences) % size}
