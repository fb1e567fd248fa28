"""The operators beside transformers' PyTorch fallbacks: same inputs, same process, no GPU.

S_t = S_{t-1} Diag(alpha_t) (I - beta_t k_t k_t^T) + beta_t v_t k_t^T      o_t = K^-1/2 S_t q_t

with unit q and k, normalised inside the operator on both sides, and alpha_t for each head (gated
delta rule) or each key channel (KDA).
"""

import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from bench import measure, peers, results
from bench.markdown import markdown
from bench.measure import Operator
from deltarule.doctor.bars import relative_rms
from deltarule.ops import delta_rule
from deltarule.ops.dispatch import Impl


class Shape(NamedTuple):
    """Sizes of a comparison."""

    batch: int
    tokens: int
    heads: int
    channels: int


class Case(NamedTuple):
    """A peer, the decay it takes, and what is asked of us beside it."""

    title: str
    peer: Operator
    decay_per_channel: bool
    least_speedup: float
    most_saved: float


CASES = {
    "gated_delta_rule": Case("gated delta rule", peers.gated_delta_rule, False, 2.0, 0.5),
    "kda": Case("KDA", peers.kda, True, 3.0, 0.1),
}
TIMED = Shape(batch=2, tokens=2048, heads=4, channels=64)
# The float64 loop that errors are measured against keeps a state for every token.
CHECKED = Shape(batch=1, tokens=256, heads=2, channels=64)


def main(
    output: Path | None = None,
    repeats: int = 5,
    *,
    timed: Shape = TIMED,
    checked: Shape = CHECKED,
    impl: Impl = "auto",
) -> dict[str, Any]:
    """Print the table of both comparisons, and return the raw figures; `output` keeps them as JSON.

    Each side runs `repeats` times, in turns, after a run that is not counted.
    """
    if repeats < 1:
        raise ValueError(f"repeats must be 1 or more, got {repeats}")
    report = conditions(repeats) | {
        "timed_shape": timed._asdict(),
        "checked_shape": checked._asdict(),
        "comparisons": [
            compare(name, repeats, timed=timed, checked=checked, impl=impl) for name in CASES
        ],
    }
    print(table(report))
    if output is not None:
        results.save(report, output)
    return report


def compare(name: str, repeats: int, *, timed: Shape, checked: Shape, impl: Impl) -> dict[str, Any]:
    case = CASES[name]
    sides = {"deltarule": ours(impl), "transformers": case.peer}
    inputs, grad_output = draw(timed, case.decay_per_channel)
    runs = {
        side: partial(measure.forward_backward, operator, inputs, grad_output)
        for side, operator in sides.items()
    }
    seconds = measure.interleaved_seconds(runs, repeats)
    errors = error_of_each(sides, checked, case.decay_per_channel)
    tokens_and_heads = timed.batch * timed.tokens * timed.heads
    figures = {}
    for side, operator in sides.items():
        saved = measure.saved_bytes(operator, inputs)
        figures[side] = {
            "seconds": seconds[side],
            **measure.spread(seconds[side]),
            "saved_bytes": saved,
            "saved_bytes_per_token_and_head": saved / tokens_and_heads,
            "relative_errors": errors[side],
        }
    return {"name": name, "impl": impl} | figures | verdict(case, **figures)


def verdict(
    case: Case, *, deltarule: Mapping[str, Any], transformers: Mapping[str, Any]
) -> dict[str, Any]:
    """The two ratios, and whether they meet what the case asks."""
    speedup = transformers["median"] / deltarule["median"]
    saved = deltarule["saved_bytes"] / transformers["saved_bytes"]
    return {
        "speedup": speedup,
        "least_speedup": case.least_speedup,
        "saved_ratio": saved,
        "most_saved_ratio": case.most_saved,
        "met": speedup >= case.least_speedup and saved <= case.most_saved,
    }


def error_of_each(
    sides: Mapping[str, Operator], shape: Shape, decay_per_channel: bool
) -> dict[str, dict[str, float]]:
    """Relative RMS error of the output and every gradient against the float64 definition."""
    inputs, grad_output = draw(shape, decay_per_channel)
    exact = {name: x.double() for name, x in inputs.items()}
    reference = _named(*measure.forward_backward(ours("reference"), exact, grad_output.double()))
    errors = {}
    for side, operator in sides.items():
        results = _named(*measure.forward_backward(operator, inputs, grad_output))
        errors[side] = {name: relative_rms(x, reference[name]) for name, x in results.items()}
    return errors


def _named(output: Tensor, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"o": output} | {f"grad {name}": x for name, x in gradients.items()}


def ours(impl: Impl) -> Operator:
    """`delta_rule` in the form in which the peers are called."""

    def operator(inputs: Mapping[str, Any]) -> Tensor:
        return delta_rule(**inputs, normalize_qk=True, return_state=False, impl=impl).o

    return operator


def draw(shape: Shape, decay_per_channel: bool) -> tuple[dict[str, Tensor], Tensor]:
    """Inputs as a freshly initialised layer makes them, the same on every call, and d loss/d o."""
    generator = torch.Generator().manual_seed(0)
    batch, tokens, heads, channels = shape
    q, k, v, grad_output = torch.randn(
        4, batch, tokens, heads, channels, generator=generator
    ).unbind()
    gates = (batch, tokens, heads, channels) if decay_per_channel else (batch, tokens, heads)
    # Half-lives from some tens to some thousands of tokens.
    log_decay = -0.02 * F.softplus(torch.randn(gates, generator=generator))
    beta = torch.rand(batch, tokens, heads, generator=generator)
    return {"q": q, "k": k, "v": v, "beta": beta, "log_decay": log_decay}, grad_output


def conditions(repeats: int) -> dict[str, Any]:
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "versions": results.versions() | peers.versions(), "architecture": platform.machine(),
        "threads": torch.get_num_threads(), "dtype": "float32", "repeats": repeats,
    }  # fmt: skip


def table(report: Mapping[str, Any]) -> str:
    """The report for a reader."""
    shape, versions = Shape(**report["timed_shape"]), report["versions"]
    lines = [
        f"float32, forward and backward, [{shape.batch}, {shape.tokens}, {shape.heads} heads, "
        f"K = V = {shape.channels}], CPU threads: {report['threads']}, torch {versions['torch']}, "
        f"transformers {versions['transformers']}",
        "",
    ]
    heads = ["operator", "side", "median s", "middle half", "saved MiB", "KiB/token-head"]
    rows = [
        cells_of(CASES[comparison["name"]].title, side, comparison[side])
        for comparison in report["comparisons"]
        for side in ("deltarule", "transformers")
    ]
    lines += [*markdown([*heads, "error o", "worst grad"], rows), ""]
    lines += [
        f"{CASES[one['name']].title}: {one['speedup']:.2f} x faster (asked: "
        f"{one['least_speedup']:g}), {one['saved_ratio']:.3f} of the saved bytes (asked: "
        f"{one['most_saved_ratio']:g}): {'met' if one['met'] else 'NOT met'}"
        for one in report["comparisons"]
    ]
    return "\n".join(lines)


def cells_of(title: str, side: str, figures: Mapping[str, Any]) -> list[str]:
    errors = dict(figures["relative_errors"])
    middle = f"{figures['lower_quartile']:.3f} to {figures['upper_quartile']:.3f}"
    saved = f"{figures['saved_bytes'] / 2**20:.1f}"
    each = f"{figures['saved_bytes_per_token_and_head'] / 2**10:.2f}"
    worst = [f"{errors.pop('o'):.1e}", f"{max(errors.values()):.1e}"]
    return [title, side, f"{figures['median']:.3f}", middle, saved, each, *worst]
