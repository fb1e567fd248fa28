"""Compile and load the kernels of a call before the first step needs them."""

import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from deltarule.ops.delta_rule.api import delta_rule
from deltarule.ops.delta_rule.dplr import dplr
from deltarule.ops.pack import pack
from deltarule.shapes import RecurrentOutput

if TYPE_CHECKING:
    from deltarule.ops.runtime.compilations import Compiled

NO_GPU = (
    "warmup compiles kernels for the GPU that runs them, but PyTorch sees no CUDA device here: "
    "run it on a machine with a GPU"
)


class Warmed(NamedTuple):
    """The kernels that a call needs, as each was ready, and the seconds until all were."""

    compiled: "tuple[Compiled, ...]"
    seconds: float


# Its own backward runs wherever it is called from.
@torch.inference_mode(False)
def warmup(
    *,
    heads: int,
    v_heads: int | None = None,
    head_k_dim: int = 128,
    head_v_dim: int = 128,
    erase: Literal["none", "tied", "free"] = "tied",
    decay: Literal["none", "head", "channel"] = "head",
    n_steps: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    normalize_qk: bool = False,
    packed: bool = False,
    backward: bool = True,
    batch: int = 1,
    tokens: int = 2048,
) -> Warmed:
    """Compile and load the GPU kernels of `delta_rule` or `dplr` for such calls.

    It runs one call on zeros, so that whatever the call would launch is ready, on disk (in
    Triton's cache) and in this process.

    Args:
        heads: Query and key heads H, from 1.
        v_heads: Value heads HV, a multiple of heads. None: as many as heads.
        head_k_dim: Channels K of a query or key, 1 to 256.
        head_v_dim: Channels V of a value, 1 to 512.
        erase: "none" (linear attention), "tied" to the key with beta, or "free" (`dplr`).
        decay: None at all, one for each head, or one for each key channel.
        n_steps: Writes for each token, 1 to 4; 1 with a free erase.
        dtype: Of q, k, v and beta: bfloat16, float16 or float32.
        normalize_qk: As for `delta_rule`; False with a free erase.
        packed: Whether calls come with cu_seqlens.
        backward: Whether a backward follows.
        batch: Rows B of a call; with `packed` the sequences.
        tokens: Tokens T of a row. Calls that fill whole chunks, calls with few heads and many
            tokens, and calls of few heads and rows run kernels of their own: give the numbers of
            your calls.

    Returns:
        The kernels with their seconds, and the seconds in all.

    Raises:
        RuntimeError: There is no CUDA device, or no Triton.
        ValueError: An argument is refused by the operator; the message names it.

    Examples:
        >>> import deltarule
        >>> if torch.cuda.is_available():
        ...     deltarule.warmup(heads=16, head_k_dim=128, head_v_dim=128)
    """
    require_gpu()
    rows, value_heads = tokens * n_steps, heads if v_heads is None else v_heads
    size = (1, batch * tokens) if packed else (batch, tokens)
    many = (1, batch * rows) if packed else (batch, rows)

    def zeros(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.zeros(shape, dtype=kind, device="cuda", requires_grad=backward)

    q, k = zeros(*size, heads, head_k_dim), zeros(*many, heads, head_k_dim)
    v, free = zeros(*many, value_heads, head_v_dim), erase == "free"
    decays = {"none": (), "head": (*size, value_heads), "channel": (*size, value_heads, head_k_dim)}
    log_decay = zeros(*decays[decay], kind=torch.float32) if decays[decay] else None
    offsets = pack([tokens] * batch).to("cuda") if packed else None
    erasing = [zeros(*size, value_heads, head_k_dim) for _ in range(2 if free else 0)]
    beta = zeros(*many, value_heads) if erase == "tied" else None

    given: dict[str, Any] = {"log_decay": log_decay, "cu_seqlens": offsets}

    def call() -> RecurrentOutput:
        if free:
            a, b = erasing
            return dplr(q, k, v, a=a, b=b, **given)
        return delta_rule(q, k, v, beta=beta, n_steps=n_steps, normalize_qk=normalize_qk, **given)

    def run() -> None:
        out = call()
        if backward:
            assert out.final_state is not None
            (out.o.float().sum() + out.final_state.sum()).backward()

    return warmed(run)


def require_gpu() -> None:
    """Say plainly why there is nothing to compile for."""
    if not torch.cuda.is_available():
        raise RuntimeError(NO_GPU)
    if find_spec("triton") is None:
        raise RuntimeError("warmup needs Triton: pip install 'deltarule[gpu]'")


def warmed(run: Callable[[], object]) -> Warmed:
    """Run a call to its end; what it launched and how long that took."""
    from deltarule.ops.runtime.compilations import compilations

    start = time.perf_counter()
    with compilations() as found:
        run()
        torch.cuda.synchronize()
    return Warmed(tuple(found), time.perf_counter() - start)
