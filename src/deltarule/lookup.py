"""`deltarule rules`, `explain` and `warmup`: what there is, which of it would run, compiled ahead.

The table of published systems is here as text: what `deltarule rules` prints and docs/rules holds.
"""

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from deltarule.json_file import read_text
from deltarule.models import FAMILIES
from deltarule.models.compiled import warmup_model
from deltarule.models.config import ModelConfig
from deltarule.models.files import naming
from deltarule.nearest import nearest
from deltarule.nn import MIXERS, SYSTEMS
from deltarule.nn.checks import check_least
from deltarule.nn.feature_maps import FEATURE_MAPS, NORMS
from deltarule.nn.mixer import Mixer
from deltarule.nn.rule import Rule, System
from deltarule.ops import explain
from deltarule.ops.delta_rule.implementations import IMPLEMENTATIONS
from deltarule.ops.delta_rule.step import STEPS
from deltarule.ops.warmup import warmup
from deltarule.train.device import choose_device
from deltarule.train.progress import for_screen


@dataclass(frozen=True)
class CallRun:
    """Sizes of a call of an operator."""

    decay: Literal["none", "head", "channel"] = "head"
    """No decay, one for each head, or one for each key channel."""
    n_steps: int = 1
    """Writes for each token of a delta rule."""
    batch: int = 1
    """Batch rows, or packed sequences."""
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

    def __post_init__(self) -> None:
        sizes = ("n_steps", "batch", "tokens", "heads", "v_heads", "head_k_dim", "head_v_dim")
        check_least(self, 1, *sizes)


@dataclass(frozen=True)
class ExplainRun(CallRun):
    """Say which implementation of an operator would run for these arguments, and why not others."""

    operator: Literal["delta_rule", "dplr"] = "delta_rule"
    """delta_rule erases along the key or not at all, dplr along free vectors."""
    erase: bool = True
    """Of delta_rule: with a write strength beta, or without, as linear attention."""
    device: str = "auto"
    """"cpu", "cuda", "cuda:1", "mps"; "auto" takes a GPU if PyTorch sees one."""


@dataclass(frozen=True)
class WarmupRun(CallRun):
    """Compile the GPU kernels of a call, or of a model, ahead of the first step."""

    heads: int = 16
    head_k_dim: int = 128
    head_v_dim: int = 128
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    config: Path | None = None
    """JSON of a ModelConfig (config.json of a checkpoint); None takes the sizes above."""
    erase: Literal["none", "tied", "free"] = "tied"
    """Erase nothing, along the key, or along free vectors."""
    normalize_qk: bool = False
    """Whether q and k are divided by their norm in the kernels."""
    packed: bool = False
    """Whether calls come with cu_seqlens."""
    forward_only: bool = False
    """Leave out the kernels of the backward."""


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

    shape = run.batch, run.tokens, value_heads, run.head_k_dim
    erase = zeros(*shape)
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


def warm_up(run: WarmupRun) -> None:
    try:
        if run.config is not None:
            with naming(run.config):
                config = ModelConfig.from_json(read_text(run.config))
            found = warmup_model(
                config, batch=run.batch, tokens=run.tokens, backward=not run.forward_only
            )
        else:
            found = warmup(
                heads=run.heads, v_heads=run.v_heads, head_k_dim=run.head_k_dim,
                head_v_dim=run.head_v_dim, erase=run.erase, decay=run.decay, n_steps=run.n_steps,
                dtype=getattr(torch, run.dtype), normalize_qk=run.normalize_qk, packed=run.packed,
                backward=not run.forward_only, batch=run.batch, tokens=run.tokens,
            )  # fmt: skip
    except RuntimeError as error:
        raise ValueError(str(error)) from None
    for kernel, seconds, cached in found.compiled:
        print(f"{kernel:<32} {'in the cache' if cached else f'{seconds:.2f} s'}")
    print(f"{len(found.compiled)} kernels ready in {found.seconds:.1f} s")


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


# What a reader calls the entries of the operators' table of implementations.
FORMS = {
    "reference": "recurrent", "torch": "chunked", "triton": "GPU kernel", "gluon": "fused forward",
}  # fmt: skip


def forms(system: System) -> str:
    """The ways a system runs: its own, or those of `delta_rule` and `dplr`."""
    if system.forms:
        return system.forms
    fused = system.decay != "channel" and system.erase != "free"
    known = [name for name in IMPLEMENTATIONS if name != "gluon" or fused]
    words = [word for name, word in FORMS.items() if name in known]
    return ", ".join([*words, *(["GPU kernel for steps"] if "triton" in STEPS else [])])


def checkpoints(system: System) -> list[str]:
    """The `model_type` of checkpoints with such layers; docs/weights.md says more of each."""
    return [name for name, family in FAMILIES.items() if system.name in family.tensors.layer]


def backed_by(system: System) -> str:
    """The file in tests/ that holds a row against its source.

    Beside it every row goes through tests/nn/test_mixers.py (causality, packing, padding, carried
    state) and test_training.py, and every rule through tests/nn/test_objectives.py.
    """
    if system.operator == "softmax":
        return "nn/test_attention.py"
    if system.page in ("multi_head", "titans_blocks"):
        return f"nn/test_{system.page}.py"
    return "nn/test_recurrences.py" if isinstance(system, Rule) else "nn/test_by_hand.py"


def described(system: System, layer: type[Mixer]) -> str:
    """A row for the terminal, with the facts that its page has."""
    lines = [
        f"{system.name:<22}{system.title}",
        f"{system.recurrence}        {system.read_out}",
        f"decay {system.decay}, erase {system.erase}; source: {system.source}",
        *facts(system, layer).replace("`", "").splitlines(),
    ]
    return "\n    ".join(lines)


def markdown() -> str:
    """The whole table, a line for each system in the order of `SYSTEMS`."""
    lines = ["| system | one token | decay | erase | source |", "|---|---|---|---|---|"]
    for system in SYSTEMS.values():
        title = f"[{system.title}]({system.page or system.name}.md)"
        cells = title, _code(system.recurrence), system.decay, system.erase, system.source
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def facts(system: System, layer: type[Mixer]) -> str:
    options = [name for name in inspect.signature(layer).parameters if name != "hidden_size"]
    rows = {
        "name": _code(system.name),
        "layer": f"`deltarule.nn.{layer.__name__}`, options {', '.join(map(_code, options))}",
        "operator": f"`{system.operator}`: {forms(system)}",
        "state": f"{system.state_size} numbers a sequence",
        "objective": f"`{system.objective}`" if system.objective else "none published",
        "checkpoints": ", ".join(map(_code, checkpoints(system))),
        "test": f"`tests/{backed_by(system)}`",
    }
    return "\n".join(f"- {name}: {value}" for name, value in rows.items() if value)


def _code(text: str) -> str:
    # A bar would end the cell, in code too.
    escaped = text.replace("|", r"\|")
    return f"`{escaped}`" if text else "none published"
