"""Who is timed: for each peer and operation the function to call and how our inputs become its.

An entry is data, so that a peer's own call, and nothing of ours, stands between two clock readings.
What an entry changes (dtypes, layouts, decays instead of their logarithms) is done before.
"""

import importlib
import importlib.util
import sys
import tomllib
from collections.abc import Callable, Mapping
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
    half: tuple[str, ...] = ()
    linear: tuple[str, ...] = ()
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
    """An entry ready to be called: arguments from our inputs, the call, o and state from it."""

    prepare: Callable[[Tensors], Tensors]
    call: Callable[[Tensors], Result]
    entry: Entry


def read_peers() -> dict[str, Peer]:
    """Peers of adapters.toml; one without entries uses those of its package's name."""
    text = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    rows: dict[str, dict[str, Any]] = tomllib.loads(text)
    peers = {}
    for name, row in rows.items():
        given = row.get("entries") or rows[row["package"]]["entries"]
        entries = {operation: entry_of(entry) for operation, entry in given.items()}
        rest = row.get("environment", {}), row.get("parts", False)
        peers[name] = Peer(row["package"], entries, *rest)
    return peers


def entry_of(row: Mapping[str, Any]) -> Entry:
    """The entry of a row, whose lists are tuples and whose `none` are arguments that are None."""
    given: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in row.items()}
    none = dict.fromkeys(given.pop("none", ()))
    entry = Entry(**given)
    return entry._replace(options={**entry.options, **none})


PEERS = read_peers()
OURS = "deltarule"
# FLA once, as it runs with what is installed.
COMPARED = ("fla", "flash_qla", "flashinfer", "mamba_ssm", "torch")


def installed(name: str) -> bool:
    """Whether the peer can be imported; nothing is."""
    return name == OURS or importlib.util.find_spec(PEERS[name].package) is not None


def operations_of(name: str) -> list[str]:
    """The operations that a peer has; ours are all but softmax attention, which is PyTorch's."""
    if name == OURS:
        return [operation for operation in OPERATIONS if operation != "softmax"]
    return [operation for operation in OPERATIONS if operation in PEERS[name].entries]


def own_entry(name: str, impl: str) -> Entry:
    operation = OPERATIONS[name]
    options: dict[str, Any] = {"impl": impl}
    if operation.n_steps > 1:
        options["n_steps"] = operation.n_steps
    if operation.erase == "none":
        options["beta"] = None
    function = {"dplr": "dplr", "decode": "recurrent_step"}.get(name, "delta_rule")
    return Entry("deltarule.ops", function, names={}, options=options, state_key_first=False)


def side(peer: str, operation: str, impl: str) -> Side:
    """Import a peer's function, or ours, and make it ready for our inputs."""
    if operation not in operations_of(peer):
        raise ValueError(f"{peer} has no {OPERATIONS[operation].title}")
    entry = own_entry(operation, impl) if peer == OURS else PEERS[peer].entries[operation]
    if peer != OURS and PEERS[peer].parts:
        without_its_own_imports(PEERS[peer].package)
    function = getattr(importlib.import_module(entry.module), entry.function)
    options = dict(entry.options)

    def call(arguments: Tensors) -> Result:
        if entry.longest is None:
            return function(**arguments, **options)
        # All rows are as long.
        rows = len(arguments["cu_seqlens"]) - 1
        longest = {entry.longest: len(arguments["q"]) // rows}
        return function(**arguments, **options, **longest)

    return Side(prepare=lambda inputs: prepare(entry, inputs), call=call, entry=entry)


def without_its_own_imports(package: str) -> None:
    """Have modules of a package found, and the package itself be empty."""
    spec = importlib.util.find_spec(package)
    if package not in sys.modules and spec is not None:
        sys.modules[package] = importlib.util.module_from_spec(spec)


def prepare(entry: Entry, inputs: Tensors) -> Tensors:
    """Our inputs as the arguments of a peer's function; gradients pass through."""
    arguments = {}
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
            x = (x.mT if entry.state_key_first else x).clone(memory_format=torch.contiguous_format)
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


def output(entry: Entry, result: Result) -> Tensor:
    """What a gradient is taken of: o, as the peer lays it out."""
    return result if isinstance(result, Tensor) else result[0]


def in_our_layout(
    entry: Entry, result: Result, arguments: Tensors, shape: tuple[int, ...]
) -> tuple[Tensor, Tensor | None]:
    """The o of a result as [B, T, HV, V], which is `shape`, and its state as [N, HV, V, K]."""
    o = output(entry, result)
    if entry.heads_first:
        o = o.transpose(1, 2)
    state = arguments.get("state") if isinstance(result, Tensor) else result[1]
    if state is not None and entry.state_key_first:
        state = state.mT
    return o.reshape(shape), state
