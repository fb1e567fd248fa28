"""The operators beside transformers' PyTorch fallbacks: same inputs, same process, no GPU.

S_t = S_{t-1} Diag(alpha_t) (I - beta_t k_t k_t^T) + beta_t v_t k_t^T      o_t = K^-1/2 S_t q_t

with unit q and k, normalised inside the operator on both sides, and alpha_t for each head (gated
delta rule) or each key channel (KDA).
"""

import inspect
import platform
import statistics
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from bench import results
from bench.markdown import markdown_table
from bench.timing import Operator, interleaved_seconds, outputs
from deltarule.doctor.bars import relative_rms
from deltarule.ops import delta_rule
from deltarule.ops.dispatch import Impl
from deltarule.train.extra import require


class Shape(NamedTuple):
    """Sizes of a comparison."""

    batch: int
    tokens: int
    heads: int
    channels: int


class Case(NamedTuple):
    """A peer, and the decay it takes."""

    title: str
    module: str
    function: str
    decay_per_channel: bool

    def theirs(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """By transformers' own fallback without a kernel package, as its model calls it."""
        found = getattr(require(f"transformers.models.{self.module}", "hf"), self.function)
        q, k, v, g, beta = (inputs[name] for name in ("q", "k", "v", "log_decay", "beta"))
        # Unwrapped: the decorator would prefer a kernel package, were one installed.
        o: Tensor = inspect.unwrap(found)(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0]
        return o


QWEN = "qwen3_next.modeling_qwen3_next", "torch_chunk_gated_delta_rule"
KIMI = "kimi_linear.modeling_kimi_linear", "chunk_kimi_delta_attention"
CASES = {
    "gated_delta_rule": Case("gated delta rule", *QWEN, False),
    "kda": Case("KDA", *KIMI, True),
}
TIMED = Shape(batch=2, tokens=2048, heads=4, channels=64)
# The float64 loop that errors are measured against keeps a state for every token.
CHECKED = Shape(batch=1, tokens=256, heads=2, channels=64)


def transformers_version() -> dict[str, str]:
    """The version of transformers, or the error that names the missing extra."""
    return {"transformers": require("transformers", "hf").__version__}


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
    report = {
        "date": datetime.now(UTC).date().isoformat(),
        "versions": results.versions() | transformers_version(), "architecture": platform.machine(),
        "threads": torch.get_num_threads(), "dtype": "float32", "repeats": repeats,
        "timed_shape": timed._asdict(), "checked_shape": checked._asdict(),
        "comparisons": [compare(name, repeats, timed, checked, impl) for name in CASES],
    }  # fmt: skip
    print(table(report))
    if output is not None:
        results.save(report, output)
    return report


def compare(name: str, repeats: int, timed: Shape, checked: Shape, impl: Impl) -> dict[str, Any]:
    """Seconds, bytes saved and relative RMS errors of o and every gradient, of each side."""
    case = CASES[name]
    sides: dict[str, Operator] = {
        "deltarule": partial(ours, impl=impl),
        "transformers": case.theirs,
    }
    inputs, grad = draw(timed, case.decay_per_channel)
    runs = {side: partial(outputs, operator, inputs, grad) for side, operator in sides.items()}
    seconds = interleaved_seconds(runs, repeats)
    few, grad = draw(checked, case.decay_per_channel)
    wide = {x: y.double() for x, y in few.items()}
    exact = outputs(partial(ours, impl="reference"), wide, grad)
    figures = {}
    for side, operator in sides.items():
        saved, found = saved_bytes(operator, inputs), outputs(operator, few, grad)
        figures[side] = {
            "seconds": seconds[side], "median": statistics.median(seconds[side]),
            "saved_bytes": saved,
            "saved_bytes_per_token_and_head": saved / (timed.batch * timed.tokens * timed.heads),
            "relative_errors": {x: relative_rms(y, exact[x]) for x, y in found.items()},
        }  # fmt: skip
    return {"name": name, "impl": impl} | figures


def ours(inputs: Mapping[str, Any], impl: Impl) -> Tensor:
    return delta_rule(**inputs, normalize_qk=True, return_state=False, impl=impl).o


def draw(shape: Shape, decay_per_channel: bool) -> tuple[dict[str, Tensor], Tensor]:
    """Inputs as a freshly initialised layer makes them, the same on every call, and d loss/d o."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = torch.randn(4, *shape, generator=generator).unbind()
    gates = shape if decay_per_channel else shape[:3]
    # Half-lives from some tens to some thousands of tokens.
    log_decay = -0.02 * F.softplus(torch.randn(gates, generator=generator))
    beta = torch.rand(shape[:3], generator=generator)
    return {"q": q, "k": k, "v": v, "beta": beta, "log_decay": log_decay}, grad


def saved_bytes(operator: Operator, inputs: Mapping[str, Tensor]) -> int:
    """Bytes that autograd holds between forward and backward, each storage counted once."""
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(x: Tensor) -> Tensor:
        # Held until the end: a freed address could be given to another storage.
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        operator(leaves)
    return sum(storage.nbytes() for storage in storages.values())


def table(report: Mapping[str, Any]) -> str:
    shape, versions = Shape(**report["timed_shape"]), report["versions"]
    rows, ratios = [], []
    for one in report["comparisons"]:
        ours, theirs, title = one["deltarule"], one["transformers"], CASES[one["name"]].title
        ratios.append(
            f"{title}: {theirs['median'] / ours['median']:.2f} x faster, "
            f"{ours['saved_bytes'] / theirs['saved_bytes']:.3f} of the saved bytes"
        )
        for side in ("deltarule", "transformers"):
            figures = one[side]
            errors = dict(figures["relative_errors"])
            lower, upper = np.percentile(figures["seconds"], [25, 75])
            rows.append([
                title, side, f"{figures['median']:.3f}",
                f"{lower:.3f} to {upper:.3f}", f"{figures['saved_bytes'] / 2**20:.1f}",
                f"{figures['saved_bytes_per_token_and_head'] / 2**10:.2f}",
                f"{errors.pop('o'):.1e}", f"{max(errors.values()):.1e}",
            ])  # fmt: skip
    about = (
        f"float32, forward and backward, [{shape.batch}, {shape.tokens}, {shape.heads} heads, "
        f"K = V = {shape.channels}], CPU threads: {report['threads']}, torch {versions['torch']}, "
        f"transformers {versions['transformers']}"
    )
    heads = ["operator", "side", "median s", "middle half", "saved MiB", "KiB/token-head"]
    whole = markdown_table([*heads, "error o", "worst grad"], rows)
    return "\n".join([about, "", whole, "", *ratios])
