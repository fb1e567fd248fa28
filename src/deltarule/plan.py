"""`deltarule plan`: seconds and memory of a training step on so many GPUs, and what binds it."""

from dataclasses import dataclass
from typing import Literal

from deltarule.nn.checks import check_least
from deltarule.parallel.estimate import Estimate, best
from deltarule.parallel.machine import MACHINES, size_of
from deltarule.train.progress import for_screen
from deltarule.train.runs import table


@dataclass(frozen=True)
class PlanRun:
    """Estimate a training step for every way to divide the GPUs, the fastest first.

    It uses kernel times measured on one H200 and the published bandwidths of the links.
    """

    parameters: float = 7e9
    """Parameters of the model, a Gated DeltaNet with heads of 128 x 128."""
    tokens_per_batch: float = 4e6
    """Tokens in each optimizer step."""
    gpus: int = 8
    """GPUs, a power of 2."""
    gpu: Literal["h200", "h100", "a100"] = "h200"
    """Kind of GPU, eight in a host."""
    length: int = 8192
    """Tokens of a row."""
    attention_every: int = 0
    """Every n-th layer is softmax attention; 0 for none."""
    vocabulary: int = 32_000
    """Tokens of the vocabulary."""
    top: int = 5
    """Divisions to show."""

    def __post_init__(self) -> None:
        check_least(self, 1, "tokens_per_batch", "length", "vocabulary", "top")
        check_least(self, 0, "attention_every")


def plan(run: PlanRun) -> list[Estimate]:
    size = size_of(run.parameters, run.vocabulary, run.attention_every)
    machine = MACHINES[run.gpu]
    found = best(size, machine, run.gpus, run.length, run.tokens_per_batch)
    if not found:
        raise ValueError(
            f"no division of {run.gpus} {machine.name}s holds {run.parameters:g} parameters with "
            f"rows of {run.length:,} tokens: give more --gpus or more --tokens-per-batch"
        )
    about = (
        f"{size.parameters / 1e9:.2f} B parameters: {size.layers} layers of {size.hidden} "
        f"channels, {size.attention} of them softmax attention\n{run.gpus} x {machine.name}, "
        f"{run.tokens_per_batch:,.0f} tokens a step in rows of {run.length:,}\n"
    )
    rows = [["division", "step s", "tokens/s", "of peak", "GiB", "binds"]]
    for one in found[: run.top]:
        share = one.parts[one.binds] / one.seconds
        rows.append([
            str(one.division), f"{one.seconds:.3g}", f"{one.tokens_per_second:,.0f}",
            f"{one.utilisation:.0%}", f"{one.memory / 2**30:.0f}", f"{one.binds} ({share:.0%})",
        ])  # fmt: skip
    parts = sorted(found[0].parts.items(), key=lambda item: -item[1])
    shares = ", ".join(f"{name} {seconds:.3g}" for name, seconds in parts if seconds)
    print(for_screen(f"{about}\n{table(rows)}\n\nthe fastest, seconds: {shares}"))
    return found
