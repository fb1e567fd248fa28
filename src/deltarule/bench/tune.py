"""`deltarule tune`: time the candidates of every kernel on this GPU and keep the fastest.

The candidates differ in tiles, warps and stages alone. One that does not compile is passed over;
the fastest are held to the definition by the doctor's check before they are kept.
"""

import statistics
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import torch

from deltarule.bench.timing import event_times
from deltarule.doctor.examine import Configuration, draw, examine
from deltarule.kernels.inputs import Inputs
from deltarule.kernels.machine import identity, keep, kept, kept_file

NO_GPU = (
    "tune times kernels on a GPU, and PyTorch sees no CUDA device here: "
    "`deltarule tune --show` prints the table that the kernels would use"
)
NO_TRITON = "tune times Triton kernels, and Triton is not installed: pip install deltarule[gpu]"
REPEATS = 20
# Less than that is no reason to leave the package's table.
WORTHWHILE = 0.98


@dataclass(frozen=True)
class TuneRun:
    """Time configurations of the kernels on this GPU and keep the fastest in the user's cache."""

    erase: Literal["none", "tied", "free"] = "tied"
    """Erase nothing, along the key, or along free vectors."""
    decay: Literal["none", "head", "channel"] = "head"
    """No decay, one for each head, or one for each key channel."""
    n_steps: int = 1
    """Writes for each token."""
    tokens: int = 8192
    """Tokens of the one row that is timed."""
    heads: int = 32
    """Value heads; half as many query and key heads."""
    head_k_dim: int = 128
    """Channels of a query or key."""
    head_v_dim: int = 128
    """Channels of a value."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Precision of queries, keys and values."""
    kernel: str | None = None
    """Only this kernel, as the printed lines name it; None times them all, for some minutes."""
    show: bool = False
    """Print the table that is kept for this GPU, and time nothing."""


def candidates(kernel: str, shipped: dict[str, int]) -> list[dict[str, int]]:
    """The package's configuration first, then its neighbours in tile, warps and stages."""
    found = [shipped]
    stages = "STAGES" if "STAGES" in shipped else "num_stages"
    blocks = (128, 64, 32, 16) if "BV" in shipped else (None,)
    for block in blocks:
        for warps in (4, 8):
            for depth in (1, 2, 3) if "BV" in shipped else (1,):
                changed = {**shipped, "num_warps": warps, stages: depth}
                found.append(changed if block is None else {**changed, "BV": block})
    return [x for i, x in enumerate(found) if x not in found[:i]]


def tune(run: TuneRun) -> None:
    """Time, check, keep and print.

    Raises:
        ValueError: There is no GPU or no Triton, the call has no such kernel, or what is fastest
            is wrong.
    """
    if run.show:
        show()
        return
    if not torch.cuda.is_available():
        raise ValueError(NO_GPU)
    if find_spec("triton") is None:
        raise ValueError(NO_TRITON)
    from deltarule.kernels.triton import configurations

    of = Configuration(run.erase, run.decay, run.n_steps, run.dtype, run.head_k_dim, run.head_v_dim)
    inputs = timed_inputs(of, run.tokens, run.heads)
    call = configurations.call_of(inputs)
    kernels = list(kernels_of(call))
    if run.kernel is not None and run.kernel not in kernels:
        raise ValueError(f"--kernel must be one of {', '.join(kernels)}, got {run.kernel}")
    for kernel in kernels if run.kernel is None else [run.kernel]:
        config = fastest(kernel, configurations.shipped(kernel, call), inputs)
        if config is None:
            print(f"  {kernel}: the package's own configuration stays")
            continue
        if (error := wrong(of, {kernel: config})) is not None:
            raise ValueError(f"{kernel} is fastest with {config}, and not right, not kept: {error}")
        # At once: the next kernel takes long, and may be stopped.
        print(f"  {kernel}: kept in {keep_configuration(kernel, config, call)}")
    print("new processes use what is kept")


def keep_configuration(kernel: str, config: dict[str, int], call: object) -> Path:
    """Add one to the table of this GPU, from which this process's further calls take it, too."""
    from deltarule.kernels.triton import configurations

    assert isinstance(call, configurations.Call)
    size = configurations.power_of_two(call.key_size)
    table = kept(configurations.KIND)
    table.setdefault(kernel, {})[f"{call.element_bytes} bytes, K to {size}"] = config
    path = keep(configurations.KIND, table)
    configurations.tuned_tables.cache_clear()
    configurations.forget()
    return path


def kernels_of(call: object) -> Iterator[str]:
    """The names in the table that a call looks up."""
    from deltarule.kernels.triton import configurations

    assert isinstance(call, configurations.Call)
    own = ("channel_scores", "pair_gradients", "channel_gradients")
    for kernel in ("next_state", "next_state_backward", *own) if call.copies else (
        "pair_scores", "next_state", "next_state_backward", "gradients",
    ):  # fmt: skip
        yield configurations.variant(kernel, call)


def timed_inputs(of: Configuration, tokens: int, heads: int) -> Inputs:
    """Random inputs, heads repeated to the number wanted."""
    drawn = draw(of, (tokens,), torch.device("cuda"), False)
    wide = {
        name: x.repeat_interleave(heads // 2, dim=1 if name == "initial_state" else 2)
        for name in ("q", "k", "v", "beta", "a", "b", "log_decay", "initial_state")
        if (x := getattr(drawn, name)) is not None
    }
    return drawn._replace(**wide, cu_seqlens=None)


def fastest(kernel: str, shipped: dict[str, int], inputs: Inputs) -> dict[str, int] | None:
    """The configuration with which the whole call is fastest; None: the package's own."""
    times = []
    for config in candidates(kernel, shipped):
        times.append((milliseconds(kernel, config, inputs), config))
        print(f"  {kernel:<28} {times[-1][0]:8.3f} ms  {config}", flush=True)
    least, config = min(times, key=lambda pair: pair[0])
    return config if least < WORTHWHILE * times[0][0] else None


def milliseconds(kernel: str, config: dict[str, int], inputs: Inputs) -> float:
    """Median of a forward and a backward; infinite where the kernel does not fit the GPU."""
    from deltarule.kernels.triton import configurations, recurrence

    def both() -> None:
        o, final, saved = recurrence.forward(inputs, True)
        recurrence.backward(o, final, inputs, saved)

    with configurations.overridden(kernel, config):
        try:
            event_times([both], 3)
        except Exception as error:  # Triton has an error of its own for each resource.
            print(f"  {kernel}: {type(error).__name__}: {str(error).splitlines()[0]}")
            return float("inf")
        return statistics.median(event_times([both], REPEATS))


def wrong(of: Configuration, best: dict[str, dict[str, int]]) -> str | None:
    """What the doctor finds wrong with the fastest configurations together."""
    from deltarule.kernels.triton import configurations

    with ExitStack() as stack:
        for kernel, config in best.items():
            stack.enter_context(configurations.overridden(kernel, config))
        return examine(of, torch.device("cuda")).error


def show() -> None:
    """Print the table of this GPU, or say that there is none."""
    from deltarule.kernels.triton.configurations import KIND

    print(", ".join(f"{name} {value}" for name, value in identity().items()))
    table = kept(KIND)
    if not table:
        print(f"no table in {kept_file(KIND)}: the package's own is used")
        return
    print(f"{kept_file(KIND)}:")
    for kernel, found in table.items():
        for kind, config in found.items():
            print(f"  {kernel:<28} {kind:<22} {config}")
