"""Calls of `ttt` and `titans` with every tensor drawn, and what both are tested for."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deltarule import TitansState, TTTState, pack, titans, ttt
from tolerance import relative_rms

H, HV, K = 2, 4, 4
DOUBLE = torch.float64
KINDS = [("ttt", 1), ("ttt", 2), ("titans", 1), ("titans", 2)]
INNER = 7
PARTS = ("weights", "summed", "anchor")
CALLS, STATES = {"ttt": ttt, "titans": titans}, {"ttt": TTTState, "titans": TitansState}
NORM = ("step_scale", "norm_weight", "norm_bias")
TIMED = ("q", "k", "v", "beta", "momentum", "log_decay")


class Case(NamedTuple):
    """One call: its tensors by name, and the mini-batch size C."""

    operator: str
    tensors: dict[str, Tensor]
    size: int
    lengths: tuple[int, ...] | None = None

    @property
    def state(self):
        """The memory that the call begins with."""
        x = self.tensors
        maps = [tuple(x[f"{p}_{i}"] for i in (1, 2) if f"{p}_{i}" in x) for p in PARTS]
        return STATES[self.operator](*filter(None, maps), x["position"])

    @property
    def arguments(self):
        """All that the operator is given."""
        given = {name: x for name, x in self.tensors.items() if name in (*TIMED, *NORM)}
        if self.operator == "titans":
            given["mini_batch"] = self.size
        offsets = None if self.lengths is None else pack(self.lengths)
        return given | {"initial_state": self.state, "cu_seqlens": offsets}

    def run(self, impl="auto", lengths=None, **options):
        """Call the operator."""
        return CALLS[self.operator](**self.arguments | {"lengths": lengths, "impl": impl} | options)

    def changed(self, **tensors):
        """The same call with some tensors replaced."""
        return self._replace(tensors=self.tensors | tensors)

    def gradients(self, impl, **options):
        """Of a random sum of outputs and state, by every tensor."""
        names = [name for name in self.tensors if name != "position"]
        leaves = {name: self.tensors[name].clone().requires_grad_() for name in names}
        out = self.changed(**leaves).run(impl, **options)
        torch.manual_seed(1)
        # Drawn in one precision and on one device for all.
        weights = [torch.randn(x.shape, dtype=DOUBLE).to(x) for x in tensors_of(out)]
        products = zip(tensors_of(out), weights, strict=True)
        loss = torch.stack(
            [(x * weight).sum(dtype=x.dtype).double() for x, weight in products]
        ).sum()
        found = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
        return dict(zip(names, found, strict=True))


def tensors_of(out):
    """Outputs and every part of the state but the position."""
    return [out.o, *(x for maps in out.final_state[:-1] for x in maps)]


def draw(*sizes):
    return torch.randn(*sizes, dtype=DOUBLE)


def make(
    operator, maps, *, batch=3, tokens=37, size=5, lengths=None, begun=True, channels=K, inner=INNER
):
    """Draw a call; the sequences have begun with open mini-batches of 0, 1, .. tokens.

    `inner` channels stand between two maps.
    """
    if lengths is not None:
        batch, tokens = 1, sum(lengths)
    sequences = batch if lengths is None else len(lengths)
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
    position = torch.arange(sequences) % size
    tensors["position"] = position if begun else torch.zeros_like(position)
    if not begun:
        for index in range(maps):
            tensors[f"summed_{index + 1}"].zero_()
            if operator == "titans":
                tensors[f"anchor_{index + 1}"].copy_(tensors[f"weights_{index + 1}"])
    return Case(operator, tensors, size, lengths)


def assert_same(out, expected, bar=1e-12):
    """Outputs and states within the bar, positions equal."""
    for x, wanted in zip(tensors_of(out), tensors_of(expected), strict=True):
        assert relative_rms(x, wanted) <= bar
    assert torch.equal(out.final_state.position, expected.final_state.position)
