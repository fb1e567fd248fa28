"""`deltarule rules` and `deltarule explain`: what there is, and which of it would run."""

from dataclasses import dataclass
from typing import Literal

import torch

from deltarule.nearest import nearest
from deltarule.nn import MIXERS, SYSTEMS
from deltarule.nn.checks import check_least
from deltarule.nn.feature_maps import FEATURE_MAPS, NORMS
from deltarule.nn.table import described, markdown
from deltarule.ops import explain
from deltarule.train.device import choose_device
from deltarule.train.progress import for_screen


@dataclass(frozen=True)
class ExplainRun:
    """Say which implementation of an operator would run for these arguments, and why not others."""

    operator: Literal["delta_rule", "dplr"] = "delta_rule"
    """delta_rule erases along the key or not at all, dplr along free vectors."""
    erase: bool = True
    """Of delta_rule: with a write strength beta, or without, as linear attention."""
    decay: Literal["none", "head", "channel"] = "head"
    """No decay, one for each head, or one for each key channel."""
    n_steps: int = 1
    """Of delta_rule: writes for each token."""
    batch: int = 1
    """Batch rows."""
    tokens: int = 2048
    """Tokens in each row."""
    heads: int = 4
    """Query and key heads."""
    v_heads: int | None = None
    """Value heads; None is as many as heads."""
    head_k_dim: int = 64
    """Channels of a query or key."""
    head_v_dim: int = 64
    """Channels of a value."""
    dtype: Literal["float64", "float32", "bfloat16", "float16"] = "float32"
    """Precision of queries, keys and values."""
    device: str = "auto"
    """"cpu", "cuda", "cuda:1", "mps"; "auto" takes a GPU if PyTorch sees one."""

    def __post_init__(self) -> None:
        sizes = ("n_steps", "batch", "tokens", "heads", "v_heads", "head_k_dim", "head_v_dim")
        check_least(self, 1, *sizes)


@dataclass(frozen=True)
class RulesRun:
    """Print the table of systems: what each paper decays, erases, writes, reads and minimises."""

    name: str | None = None
    """Only this system; None prints every one."""
    markdown: bool = False
    """Print the table of docs/rules/README.md instead."""


def explain_call(run: ExplainRun) -> None:
    """Make empty arguments of these shapes and print the table of `deltarule.explain`."""
    device = choose_device(run.device)
    value_heads = run.heads if run.v_heads is None else run.v_heads
    rows = run.tokens * run.n_steps

    def zeros(*shape: int, dtype: str = run.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=getattr(torch, dtype), device=device)

    erase = zeros(run.batch, run.tokens, value_heads, run.head_k_dim)
    shape = (run.batch, run.tokens, value_heads, run.head_k_dim)
    free, tied = run.operator == "dplr", run.operator == "delta_rule" and run.erase
    explanations = explain(
        zeros(run.batch, run.tokens, run.heads, run.head_k_dim),
        zeros(run.batch, rows, run.heads, run.head_k_dim),
        zeros(run.batch, rows, value_heads, run.head_v_dim),
        beta=zeros(run.batch, rows, value_heads) if tied else None,
        log_decay=None if run.decay == "none"
        else zeros(*shape[: 3 if run.decay == "head" else 4], dtype="float32"),
        a=erase if free else None, b=erase if free else None, n_steps=run.n_steps,
    )  # fmt: skip
    print(f"{run.operator} on {device}, {run.dtype}, decay {run.decay}:")
    for explanation in explanations:
        runs = "runs" if explanation.runs else ""
        print(for_screen(f"{runs:<6}{explanation.impl:<11}{explanation.reason}"))


def rules(run: RulesRun) -> None:
    if run.name is not None and run.name not in SYSTEMS:
        known = f"known are {', '.join(SYSTEMS)}"
        meant = nearest(run.name, SYSTEMS, otherwise=known)
        raise ValueError(f"there is no rule {run.name!r}; {meant}")
    if run.markdown:
        print(markdown())
        return
    for name in SYSTEMS if run.name is None else [run.name]:
        print(for_screen(described(SYSTEMS[name], MIXERS[name])))
    if run.name is None:
        taken = ", ".join(name for name in MIXERS if MIXERS[name].takes("feature_map"))
        print(for_screen(f"\nfeature_map of {taken}:"))
        print(for_screen(f"    {', '.join(FEATURE_MAPS)}; qk_norm: {', '.join(NORMS)}"))
