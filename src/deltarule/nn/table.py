"""The table of published systems as text: what `deltarule rules` prints and docs/rules holds."""

import inspect

from deltarule.nn import SYSTEMS
from deltarule.nn.mixer import Mixer
from deltarule.nn.rule import Rule, System
from deltarule.ops.delta_rule.implementations import IMPLEMENTATIONS
from deltarule.ops.delta_rule.step import STEPS

# What a reader calls the entries of the operators' table of implementations.
FORMS = {
    "reference": "recurrent",
    "torch": "chunked",
    "triton": "GPU kernel",
    "gluon": "fused forward",
}

COLUMNS = ("system", "one token", "decay", "erase", "source")
# The `model_type` of checkpoints whose layers are a row's; docs/weights.md says more of each.
CHECKPOINTS = {
    "lightning": ("minimax",),
    "linear_attention": ("linear_attn",),
    "retnet": ("retnet",),
    "mamba2": ("mamba2", "nemotron_h", "granitemoehybrid", "falcon_h1", "bamba"),
    "gla": ("gla",),
    "hgrn2": ("hgrn2",),
    "xlstm_7b": ("xlstm",),
    "deltanet": ("delta_net",),
    "gated_deltanet": (
        "gated_deltanet", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text",
        "qwen3_next", "olmo_hybrid",
    ),
    "kda": ("kda", "kimi_linear"),
    "delta_product": ("gated_deltaproduct",),
    "gated_delta_product": ("gated_deltaproduct",),
    "rwkv7": ("rwkv7",),
    "mamba1": ("mamba", "falcon_mamba", "jamba"),
    "attention": (
        "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next", "olmo_hybrid",
        "kimi_linear", "nemotron_h", "granitemoehybrid", "falcon_h1", "bamba", "jamba",
        "minimax",
    ),
}  # fmt: skip


def forms(system: System) -> str:
    """The ways a system runs: its own, or those of `delta_rule` and `dplr`."""
    if system.forms:
        return system.forms
    fused = system.decay != "channel" and system.erase != "free"
    known = [name for name in IMPLEMENTATIONS if name != "gluon" or fused]
    words = [word for name, word in FORMS.items() if name in known]
    return ", ".join([*words, *(["GPU kernel for steps"] if "triton" in STEPS else [])])


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
    """One row as a few lines for a terminal."""
    lines = [
        f"{system.name:<22}{system.title}",
        f"{system.recurrence}        {system.read_out}",
        f"decay {system.decay}, erase {system.erase}, operator {system.operator}, "
        f"layer {layer.__name__}, state {system.state_size}",
        f"objective: {system.objective or 'none published'}",
        f"runs: {forms(system)}; source: {system.source}; test: tests/{backed_by(system)}",
    ]
    if names := CHECKPOINTS.get(system.name):
        lines.append(f"loads checkpoints of {', '.join(names)}")
    return "\n    ".join(lines)


def markdown() -> str:
    """The whole table, a line for each system in the order of `SYSTEMS`."""
    head = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    return "\n".join([*head, *map(_row, SYSTEMS.values())])


def _row(system: System) -> str:
    title = f"[{system.title}]({system.page or system.name}.md)"
    cells = title, _code(system.recurrence), system.decay, system.erase, system.source
    return f"| {' | '.join(cells)} |"


def facts(system: System, layer: type[Mixer]) -> str:
    """What a page says of a row beside its equation: a list that the code is the source of."""
    options = [name for name in inspect.signature(layer).parameters if name != "hidden_size"]
    rows = {
        "name": _code(system.name),
        "layer": f"`deltarule.nn.{layer.__name__}`, options {', '.join(map(_code, options))}",
        "operator": f"`{system.operator}`: {forms(system)}",
        "state": f"{system.state_size} numbers a sequence",
        "objective": f"`{system.objective}`" if system.objective else "none published",
        "checkpoints": ", ".join(map(_code, CHECKPOINTS.get(system.name, ()))),
        "test": f"`tests/{backed_by(system)}`",
    }
    return "\n".join(f"- {name}: {value}" for name, value in rows.items() if value)


def _code(text: str) -> str:
    # A bar would end the cell, in code too.
    escaped = text.replace("|", r"\|")
    return f"`{escaped}`" if text else "none published"
