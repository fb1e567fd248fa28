"""What a layer or a model remembers between calls, as named tensors with the sequence first."""

import copy
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import torch
import torch.utils._pytree as pytree
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from deltarule.atomic_file import write_atomically
from deltarule.json_file import fitted, parse

Rows = Tensor | slice | Sequence[int]
# More than any model has: a file must not choose how much is allocated.
MOST_LAYERS = 10_000


class _Tensors(ABC):
    """What the state of a layer and that of a model have in common."""

    @abstractmethod
    def map(self, f: Callable[[Tensor], Tensor]) -> Self:
        """Return the state with f applied to every tensor."""

    def clone(self) -> Self:
        return self.map(torch.clone)

    def detach(self) -> Self:
        """Return the same numbers outside the gradient graph (truncated backpropagation)."""
        return self.map(torch.detach)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Share nothing, nor the gradient graph; `clone` stays in it."""
        return self.map(lambda x: copy.deepcopy(x if x.is_leaf else x.detach(), memo))

    def select(self, rows: Rows) -> Self:
        """Return the given sequences: a slice, indices (repeats allowed) or a bool [N] tensor."""
        if isinstance(rows, slice):
            return self.map(lambda tensor: tensor[rows].clone())
        try:
            index = torch.as_tensor(rows)
            # PyTorch makes floats of an empty list.
            index = index.long() if index.shape == (0,) and index.is_floating_point() else index
            if index.ndim != 1 or index.dtype not in (torch.int64, torch.int32, torch.bool):
                raise TypeError
        except (RuntimeError, TypeError, ValueError):
            said = "rows must be a slice, integers [M] or bools [N]"
            raise ValueError(f"{said}, got {rows!r:.80}") from None
        return self.map(lambda tensor: tensor[index.to(tensor.device)])

    def to(self, device: torch.device | str) -> Self:
        """Return the state on another device; dtypes stay."""
        return self.map(lambda tensor: tensor.to(device))

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in pytree.tree_leaves(self))


class State(dict[str, Tensor], _Tensors):
    """One layer's state: a dict of tensors, each with one row for each sequence.

    Layers never write into a state they are given, so an old one stays a valid prompt cache: read
    the prompt once, and continue from its state as often as you like. States are nodes of
    PyTorch's trees, so `torch.vmap` and `torch.func` go through them; `torch.load` reads them.

    Example, a prompt continued in three ways:
        >>> from deltarule.nn import GatedDeltaNet
        >>> layer = GatedDeltaNet(32, num_heads=2)
        >>> _, prompt = layer(torch.randn(1, 100, 32))
        >>> y, state = layer(torch.randn(3, 5, 32), prompt.select([0, 0, 0]))
        >>> state["recurrent"].shape
        torch.Size([3, 2, 24, 12])

    Example, truncated backpropagation: what was seen is carried on, its gradient is not:
        >>> state = None
        >>> for segment in torch.randn(2, 300, 32).split(100, dim=1):
        ...     y, state = layer(segment, state)
        ...     y.square().mean().backward()
        ...     state = state.detach()
    """

    def __reduce__(self) -> tuple[type["State"], tuple[dict[str, Tensor]]]:
        """Be one call of one dict: `torch.load` fills no other kind item by item."""
        return State, (dict(self),)

    def map(self, f: Callable[[Tensor], Tensor]) -> "State":
        return State({name: f(tensor) for name, tensor in self.items()})


class FirstState(State):
    """The state before the first token: its tensors are made once one is asked for by name."""

    def __init__(self, make: Callable[[], State]) -> None:
        super().__init__()
        self.make = make

    def __missing__(self, name: str) -> Tensor:
        self.update(self.make())
        return self[name]


class LentState(State):
    """A state whose tensors a layer may overwrite: the lender has no more use for the old ones.

    A layer that decodes then moves no state but to read it and to write it. What it returns holds
    the same tensors where it overwrote them, and new ones elsewhere.
    """


class DraftedState(LentState):
    """A lent state of which every token of the next call may be the last.

    Attributes:
        kept: What the layer leaves, by name: [B, T, ...] after each of the call's T tokens. Tensors
            by other names hold after any of them, as do rows of a cache that are not read.
    """

    def __init__(self, given: dict[str, Tensor]) -> None:
        super().__init__(given)
        self.kept: dict[str, Tensor] = {}

    def up_to(self, after: State, rows: Tensor, last: Tensor) -> State:
        """Return the state of rows 0, 1 .. [B] after token last [B], counted from 0, of each."""
        kept = {name: x[rows, last] for name, x in self.kept.items()}
        return State({name: kept.get(name, x) for name, x in after.items()})


class ModelState(tuple[State, ...], _Tensors):
    """A model's state: the states of its layers, from the first to the last; used like `State`."""

    def map(self, f: Callable[[Tensor], Tensor]) -> "ModelState":
        return ModelState(state.map(f) for state in self)


# What `torch.load` makes again of a file that holds no code.
torch.serialization.add_safe_globals([State, ModelState])
# By name, because two states are one kind of tree whatever the order they were filled in.
pytree.register_pytree_node(
    State,
    lambda state: ([state[name] for name in sorted(state)], sorted(state)),
    lambda tensors, names: State(zip(names, tensors, strict=True)),
)
pytree.register_pytree_node(
    ModelState, lambda state: (list(state), None), lambda states, _: ModelState(states)
)


@dataclass(frozen=True)
class _Described:
    kind: Literal["State", "ModelState"]
    layers: int


def save_state(state: State | ModelState, path: str | Path) -> None:
    """Write a state as one safetensors file, such as the cache of a long prompt.

    Args:
        state: A layer's or a model's state.
        path: Where to write; a file that is there is replaced once the new one is on disk,
            so that a kill or a second writer never leaves a mixture.

    Examples:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "prompt.safetensors"
        >>> save_state(State(recurrent=torch.zeros(1, 2, 4, 4)), path)
        >>> load_state(path)["recurrent"].shape
        torch.Size([1, 2, 4, 4])
    """
    if not isinstance(state, State | ModelState):
        raise ValueError(f"state must be a State or a ModelState, got {type(state).__name__}")
    layers = state if isinstance(state, ModelState) else ModelState((state,))
    tensors = {
        f"{index}.{name}": tensor.detach().contiguous().clone()
        for index, layer in enumerate(layers)
        for name, tensor in layer.items()
    }
    described = {"kind": type(state).__name__, "layers": len(layers)}
    metadata = {"deltarule_state": json.dumps(described)}
    write_atomically(Path(path), lambda aside: save_file(tensors, aside, metadata))


def load_state(path: str | Path) -> State | ModelState:
    """Read what `save_state` wrote, onto the CPU; nothing is ever unpickled.

    Args:
        path: The file.

    Returns:
        A `State` or a `ModelState`, whichever was saved.

    Raises:
        ValueError: The file is missing, damaged, or not a saved state.
    """
    try:
        with safe_open(path, framework="pt") as file:
            if not (written := (file.metadata() or {}).get("deltarule_state")):
                raise ValueError("it holds other tensors")
            described = fitted(_Described, parse(written))
            if not 0 <= described.layers <= MOST_LAYERS:
                raise ValueError(f"it says that it has {described.layers} layers")
            layers = [State() for _ in range(described.layers)]
            for key in file.keys():  # noqa: SIM118  (safe_open is not a mapping)
                index, _, name = key.partition(".")
                layers[int(index)][name] = file.get_tensor(key)
    except (OSError, SafetensorError, TypeError, ValueError, IndexError) as error:
        raise ValueError(
            f"path must be a state written by save_state, got {path}: {error}"
        ) from None
    return layers[0] if described.kind == "State" else ModelState(layers)
