"""What is timed: operators, shapes, and the inputs of a case, the same in every process."""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

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
    shapes: tuple[str, ...]
    # Those of `--quick`, a subset of `shapes`.
    quick: tuple[str, ...]
    n_steps: int = 1


# Shapes of training, and of serving one model over 1 and 8 GPUs.
TRAIN, LONG, LONGEST = "8x4096-h16", "2x16384-h16", "1x32768-h16"
SHORT, PRODUCT = "1x2048-h16", "4x4096-h16"
NARROW, WIDE = "8x4096-h32-d64", "8x4096-h8-d256"
SERVING = (
    "1x8192-h16/64", "1x32768-h16/64", "8x4096-h16/64", "1x8192-h16/32", "1x32768-h2/8",
)  # fmt: skip
DECODE = ("decode-1", "decode-8", "decode-32", "decode-128", "decode-256")
TINY = "1x64-h16"

SHAPES = {
    shape.name: shape
    for shape in (
        Shape(TRAIN, 8, 4096, 16, 16, 128, 128),
        Shape(LONG, 2, 16384, 16, 16, 128, 128),
        Shape(LONGEST, 1, 32768, 16, 16, 128, 128),
        Shape("1x8192-h16/64", 1, 8192, 16, 64, 128, 128),
        Shape("1x32768-h16/64", 1, 32768, 16, 64, 128, 128),
        Shape("8x4096-h16/64", 8, 4096, 16, 64, 128, 128),
        Shape("1x8192-h16/32", 1, 8192, 16, 32, 128, 128),
        Shape("1x32768-h2/8", 1, 32768, 2, 8, 128, 128),
        Shape(SHORT, 1, 2048, 16, 16, 128, 128),
        Shape(NARROW, 8, 4096, 32, 32, 64, 64),
        Shape(WIDE, 8, 4096, 8, 8, 256, 256),
        Shape(PRODUCT, 4, 4096, 16, 16, 128, 128),
        *(Shape(name, int(name.partition("-")[2]), 1, 16, 32, 128, 128) for name in DECODE),
        # As many heads as elsewhere: a peer that tunes itself for each number does not do it again.
        Shape(TINY, 1, 64, 16, 16, 128, 128),
    )
}

# The float64 loop that errors are measured against keeps states for every token.
CHECKED = Shape("checked", 1, 512, 16, 16, 128, 128)
CHECKED_STEP = Shape("checked", 4, 1, 16, 32, 128, 128)

EQUAL_HEADS = (TRAIN, LONG, LONGEST, SHORT, NARROW, WIDE)
OPERATIONS = {
    "delta": Operation("delta rule", "none", "tied", EQUAL_HEADS, (TRAIN,)),
    "gdn": Operation(
        "gated delta rule", "head", "tied", (*EQUAL_HEADS, *SERVING), (TRAIN, LONG)
    ),
    "kda": Operation("KDA", "channel", "tied", (TRAIN, LONG, SHORT), (TRAIN,)),
    "simple_gla": Operation(
        "scalar-decay linear attention", "head", "none", (TRAIN, LONG, SHORT), (TRAIN,)
    ),
    "gla": Operation("GLA", "channel", "none", (TRAIN,), (TRAIN,)),
    "product2": Operation(
        "DeltaProduct, 2 steps", "none", "tied", (PRODUCT,), (PRODUCT,), n_steps=2
    ),
    "gated_product2": Operation(
        "gated DeltaProduct, 2 steps", "head", "tied", (PRODUCT,), (PRODUCT,), n_steps=2
    ),
    "dplr": Operation("diagonal plus low rank", "channel", "free", (TRAIN,), (TRAIN,)),
    "softmax": Operation("softmax attention", "none", "none", (TRAIN, LONGEST), (TRAIN,)),
    "decode": Operation(
        "decode, one token", "head", "tied", DECODE, ("decode-1", "decode-128")
    ),
}  # fmt: skip

# What the names of inputs stand for; a missing one is no argument of the operator.
ROUNDED = ("beta", "log_decay")


def draw(operation: Operation, shape: Shape, *, device: str, seed: int = 0) -> Tensors:
    """Inputs of a case: unit q and k, decays of some 0.98 a token, everything exact in bfloat16.

    Gates are float32 tensors of bfloat16 numbers, so that a peer that takes bfloat16 gets the same.

    Args:
        operation: Which gates there are.
        shape: Their sizes.
        device: Where the tensors live; the numbers depend on it.
        seed: Of the generator.

    Returns:
        q [B, T, H, K], k [B, T*n, H, K] and v [B, T*n, HV, V] in bfloat16; of beta [B, T*n, HV],
        log_decay [B, T, HV] or [B, T, HV, K], a and b [B, T, HV, K] those that the operation takes;
        for `decode` also state [B, HV, V, K] in float32.
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
        inputs |= free_erase(normal(*gates, key_size), normal(*gates, 1))
    if operation is OPERATIONS["decode"]:
        inputs["state"] = normal(batch, value_heads, value_size, key_size)
    return inputs | {name: inputs[name].bfloat16().float() for name in ROUNDED if name in inputs}


def free_erase(direction: Tensor, strength: Tensor) -> Tensors:
    """Erase vectors as RWKV-7 makes them: a = -k', b = strength * k', with a unit k'."""
    unit = F.normalize(direction, dim=-1)
    return {"a": (-unit).bfloat16(), "b": (unit * strength.sigmoid()).bfloat16()}


def pick(given: tuple[str, ...], known: dict[str, Any], flag: str) -> list[str]:
    """The names asked for, or all; an unknown one is an error that lists what there is."""
    for name in given:
        if name not in known:
            raise ValueError(f"{flag} {name}: there is none; known: {', '.join(known)}")
    return list(given or known)
