"""Who is timed: for each peer and operation the function to call and how our inputs become its.

An entry is data, so that a peer's own call, and nothing of ours, stands between two clock readings.
What an entry changes (dtypes, layouts, decays instead of their logarithms) is done before.
"""

import importlib
import importlib.util
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.cases import OPERATIONS, Tensors

# What a peer returns: o, or o and the final state.
Result = Tensor | tuple[Tensor, ...]


class Entry(NamedTuple):
    """One function of a peer, in terms of our inputs.

    names: What it calls our inputs, where that differs.
    options: Further arguments.
    none: Those that are None.
    half: Inputs that it takes in bfloat16.
    linear: Logarithms that it takes as the decay itself.
    state_key_first: Its states are [N, HV, K, V], ours [N, HV, V, K].
    heads_first: Its queries, keys, values and outputs are [B, H, T, K].
    packed: Its rows are packed into one, without a batch axis.
    longest: The argument that says how many tokens the longest packed row has. None: it has none.
    steps: It takes decays as steps dt of rate A = -1, which multiply what is written, and queries
        that are scaled: values divided by dt, and those, are rounded once more.
    no_backward: Why there is no backward pass. None: there is one.
    """

    module: str
    function: str
    names: Mapping[str, str] = {"log_decay": "g"}
    options: Mapping[str, Any] = {"output_final_state": True}
    none: Sequence[str] = ()
    half: Sequence[str] = ()
    linear: Sequence[str] = ()
    state_key_first: bool = True
    heads_first: bool = False
    packed: bool = False
    longest: str | None = None
    steps: bool = False
    no_backward: str | None = None


class Peer(NamedTuple):
    """A package: how it is imported, its operations, and variables its process is started with.

    parts: Whether modules are imported without their package, which needs what is not there.
    """

    package: str
    entries: Mapping[str, Entry]
    environment: Mapping[str, str] = {}
    parts: bool = False


class Side(NamedTuple):
    """An entry, and the function that it names."""

    entry: Entry
    function: Callable[..., Result]

    def call(self, arguments: Tensors) -> Result:
        further = {**self.entry.options, **dict.fromkeys(self.entry.none)}
        if self.entry.longest is not None:
            # All rows are as long.
            rows = len(arguments["cu_seqlens"]) - 1
            further[self.entry.longest] = len(arguments["q"]) // rows
        return self.function(**arguments, **further)

    def prepare(self, inputs: Tensors) -> Tensors:
        """Our inputs as the arguments of the function; gradients pass through."""
        entry, arguments = self.entry, {}
        if entry.steps:
            dt, q, v = -inputs["log_decay"], inputs["q"], inputs["v"]
            v = (v / dt.unsqueeze(-1)).to(v.dtype)
            inputs = {**inputs, "q": q * q.shape[-1] ** -0.5, "v": v, "log_decay": dt}
            arguments["A"] = -torch.ones(v.shape[2], device=v.device)
        for name, x in inputs.items():
            if name in entry.linear:
                x = x.exp()
            if name in entry.half:
                x = x.bfloat16()
            if name == "state":
                # A step overwrites what it is given.
                x = x.mT if entry.state_key_first else x
                x = x.clone(memory_format=torch.contiguous_format)
            elif entry.packed:
                x = x.flatten(0, 1)
            elif entry.heads_first:
                x = x.transpose(1, 2)
            arguments[entry.names.get(name, name)] = x
        if entry.packed:
            batch, tokens = inputs["q"].shape[:2]
            device = inputs["q"].device
            arguments["cu_seqlens"] = torch.arange(batch + 1, device=device) * tokens
        return arguments

    def through(self, inputs: Tensors) -> tuple[Tensor, Tensor | None]:
        """From our inputs to o as [B, T, HV, V] and the state as [N, HV, V, K]."""
        arguments = self.prepare(inputs)
        result = self.call(arguments)
        o, state = output(result), arguments.get("state")
        if self.entry.heads_first:
            o = o.transpose(1, 2)
        if not isinstance(result, Tensor):
            state = result[1]
        if state is not None and self.entry.state_key_first:
            state = state.mT
        return o.reshape(*inputs["q"].shape[:2], *inputs["v"].shape[2:]), state


def output(result: Result) -> Tensor:
    """What a gradient is taken of: o, as the peer lays it out."""
    return result if isinstance(result, Tensor) else result[0]


def read_peers() -> dict[str, Peer]:
    """Peers of adapters.toml; one without entries uses those of its package's name."""
    text = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    rows: dict[str, dict[str, Any]] = tomllib.loads(text)
    peers = {}
    for name, row in rows.items():
        given = row.get("entries") or rows[row["package"]]["entries"]
        entries = {operation: Entry(**words) for operation, words in given.items()}
        peers[name] = Peer(row["package"], entries, row.get("environment", {}), "parts" in row)
    return peers


PEERS = read_peers()
OURS = "deltarule"
# FLA once, as it runs with what is installed.
COMPARED = ("fla", "flash_qla", "flashinfer", "mamba_ssm", "torch")


def installed(name: str) -> bool:
    """Whether the peer can be imported; nothing is."""
    return name == OURS or importlib.util.find_spec(PEERS[name].package) is not None


def operations_of(name: str) -> list[str]:
    """The operations that a peer has; ours are all but softmax attention, which is PyTorch's."""
    has = set(OPERATIONS) - {"softmax"} if name == OURS else set(PEERS[name].entries)
    return [operation for operation in OPERATIONS if operation in has]


def side(peer: str, name: str, impl: str) -> Side:
    operation = OPERATIONS[name]
    if name not in operations_of(peer):
        raise ValueError(f"{peer} has no {operation.title}")
    if peer == OURS:
        options: dict[str, Any] = {"impl": impl}
        if operation.n_steps > 1:
            options["n_steps"] = operation.n_steps
        if operation.erase == "none":
            options["beta"] = None
        function = {"dplr": "dplr", "decode": "recurrent_step"}.get(name, "delta_rule")
        entry = Entry("deltarule.ops", function, {}, options, state_key_first=False)
    else:
        entry, package = PEERS[peer].entries[name], PEERS[peer].package
        spec = importlib.util.find_spec(package)
        if PEERS[peer].parts and package not in sys.modules and spec is not None:
            # Its modules are found, and the package itself is empty.
            sys.modules[package] = importlib.util.module_from_spec(spec)
    return Side(entry, getattr(importlib.import_module(entry.module), entry.function))


def exact_side(name: str) -> Side:
    """What errors are measured against, given inputs in float64."""
    return side("torch" if name == "softmax" else OURS, name, "reference")
