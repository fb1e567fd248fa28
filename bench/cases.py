"""What is timed: operators, shapes, and the inputs of a case, the same in every process."""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from deltarule.nearest import check_known

Tensors = dict[str, Tensor]


class Shape(NamedTuple):
    """Sizes of a case, under the name by which `--shape` picks it."""

    name: str
    batch: int
    tokens: int
    heads: int
    value_heads: int
    key_size: int
    value_size: int

    @property
    def label(self) -> str:
        """For a reader: 8x4096, 16/16, 128."""
        sizes = str(self.key_size)
        if self.value_size != self.key_size:
            sizes += f"/{self.value_size}"
        return f"{self.batch}x{self.tokens}, {self.heads}/{self.value_heads}, {sizes}"


class Operation(NamedTuple):
    """An operator with its options, and the shapes at which it is timed."""

    title: str
    decay: Literal["none", "head", "channel"]
    erase: Literal["none", "tied", "free"]
    shapes: Sequence[str]
    # Those of `--quick`, a subset of `shapes`.
    quick: Sequence[str]
    n_steps: int = 1


TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
SHAPES = {name: Shape(name, *sizes) for name, sizes in TABLE["shapes"].items()}
OPERATIONS = {name: Operation(**row) for name, row in TABLE["operations"].items()}
# Of training, in the order of the picture; and one that is next to nothing, with as many heads as
# elsewhere: a peer that tunes itself for each number does not do it again.
TRAIN, LONG = "8x4096-h16", "2x16384-h16"
NARROW, WIDE = "8x4096-h32-d64", "8x4096-h8-d256"
TINY = "1x64-h16"

# The float64 loop that errors are measured against keeps states for every token.
CHECKED = Shape("checked", 1, 512, 16, 16, 128, 128)
CHECKED_STEP = Shape("checked", 4, 1, 16, 32, 128, 128)


def draw(operation: Operation, shape: Shape, *, device: str, seed: int = 0) -> Tensors:
    """Inputs of a case: unit q and k, decays of some 0.98 a token, everything exact in bfloat16.

    Gates are float32 tensors of bfloat16 numbers, so that a peer that takes bfloat16 gets the same.
    In bfloat16 q [B, T, H, K], k [B, T*n, H, K] and v [B, T*n, HV, V]; of beta [B, T*n, HV],
    log_decay [B, T, HV] or [B, T, HV, K], a and b [B, T, HV, K] those that the operation takes; for
    `decode` also state [B, HV, V, K] in float32. The numbers depend on the device.
    """
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, device=device)

    _, batch, tokens, heads, value_heads, key_size, value_size = shape
    rows = tokens * operation.n_steps
    inputs = {
        "q": F.normalize(normal(batch, tokens, heads, key_size), dim=-1).bfloat16(),
        "k": F.normalize(normal(batch, rows, heads, key_size), dim=-1).bfloat16(),
        "v": normal(batch, rows, value_heads, value_size).bfloat16(),
    }
    gates = (batch, tokens, value_heads)
    if operation.erase == "tied":
        inputs["beta"] = normal(batch, rows, value_heads).sigmoid()
    if operation.decay != "none":
        sizes = gates if operation.decay == "head" else (*gates, key_size)
        inputs["log_decay"] = F.logsigmoid(normal(*sizes) + 4)
    if operation.erase == "free":
        # As RWKV-7 makes them: a = -k', b = strength * k', with a unit k'.
        unit, strength = F.normalize(normal(*gates, key_size), dim=-1), normal(*gates, 1)
        inputs |= {"a": (-unit).bfloat16(), "b": (unit * strength.sigmoid()).bfloat16()}
    if operation is OPERATIONS["decode"]:
        inputs["state"] = normal(batch, value_heads, value_size, key_size)
    rounded = [name for name in ("beta", "log_decay") if name in inputs]
    return inputs | {name: inputs[name].bfloat16().float() for name in rounded}


def pick(given: tuple[str, ...], known: dict[str, Any], flag: str) -> list[str]:
    """The names asked for, or all; an unknown one is an error that lists what there is."""
    for name in given:
        check_known(flag, name, known)
    return list(given or known)
