"""README and pages quote the raw figures that they link to; dated notes stay as they are."""

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import report, results
from bench.cases import TRAIN

ROOT = Path(__file__).parents[2]
FIGURES = ROOT / "docs/figures"
Quotes = Iterator[str]


def read(name: str) -> dict:
    return json.loads((FIGURES / f"{name}.json").read_text())


def patched() -> Quotes:
    ms = {(row["work"], row["peer"]): row["ms"] for row in read("patched_h200")["rows"]}
    for work in ("prefill", "training step", "generate"):
        sides = ("transformers", "transformers, FLA's convolution", "deltarule")
        yield "| {:.1f} | {:.1f} | {:.1f} |".format(*(ms[work, side] for side in sides))


def scans() -> Quotes:
    ms = {(row["layer"], row["peer"]): row["both_ms"] for row in read("scans_h200")["rows"]}
    told = {
        "rg_lru": "{:.2f} ms for RG-LRU ({:.2f} ms in",
        "mamba1": "{:.2f} ms for Mamba ({:.2f})",
    }
    for layer, words in told.items():
        yield words.format(ms[layer, "deltarule"], ms[layer, "PyTorch"])


def patched_on_a_cpu() -> Quotes:
    cells = defaultdict(dict)
    for row in read("patched_cpu")["rows"]:
        cells[row["model"], row["work"]][row["peer"]] = row["processor_ms"] / 1e3
    for model in ("kimi_linear", "mamba2", "qwen3_5"):
        told = [model]
        for work in ("prefill", "training step"):
            theirs, ours = (cells[model, work][side] for side in ("transformers", "deltarule"))
            ratio = theirs / ours
            told.append(f"{theirs:.2f} s to {ours:.2f} s ({ratio:.{1 if ratio > 2 else 2}f} x)")
        yield f"| {' | '.join(told)} |"


def repeats() -> Quotes:
    """By how much times of the same kernels on the same kind of GPU differ between runs."""
    found = defaultdict(list)
    for report_of_run in (results.load(path) for path in FIGURES.glob("bench_*.json")):
        for x in report.timings([report_of_run]) if "kernels" in report_of_run else ():
            device = report_of_run["device"][:11]
            found[device, x.passed, x.kernels, x.operation, x.shape.name].append(x.ours_ms)
    apart = defaultdict(list)
    for (device, passed, *_), times in found.items():
        if len(times) > 1:
            apart[device, passed].append(100 * (max(times) / min(times) - 1))
    h200, h100 = (apart[f"NVIDIA {name}", "forward"] for name in ("H200", "H100"))
    few = sum(x < 2 for x in h200 + h100)
    yield f"by up to {max(h200):.1f} % on an H200 and {max(h100):.1f} % on an H100"
    yield f"({few} of {len(h200 + h100)} by less than 2 %)"
    yield f"both passes together by up to {max(apart['NVIDIA H200', 'forward_backward']):.1f} %"


def on_a_gpu() -> Quotes:
    reports = [results.load(path) for path in FIGURES.glob("bench_*.json")]
    passes = report.by_device(reports)["NVIDIA H200"]
    by_case = {(x.operation, x.shape.name, x.passed): x for x in passes}
    both = [by_case[name, TRAIN, "forward_backward"] for name in ("delta", "gdn", "kda")]
    delta, gated, kda = (x.ours_ms for x in both)
    yield f"{delta:.2f} ms for the delta rule, {gated:.2f} ms for the gated"
    yield f"and {kda:.1f} ms for KDA; flash-linear"
    theirs = (x.peers["fla"][0] for x in both)
    yield "flash-linear-attention takes {:.1f}, {:.1f} and {:.1f} ms".format(*theirs)


def on_a_cpu() -> Quotes:
    head, channel = (
        [one["transformers"][x] / one["deltarule"][x] for x in ("median", "saved_bytes")]
        for one in read("cpu_benchmark")["comparisons"]
    )
    yield f"is {head[0]:.1f} times as fast"
    yield f"needs {head[1]:.1f} times less memory"
    yield "for KDA the factors are {:.0f} and {:.0f}".format(*channel)


@pytest.mark.parametrize(
    ("page", "quotes"),
    [
        ("README.md", on_a_gpu), ("docs/index.md", on_a_gpu), ("README.md", on_a_cpu),
        ("docs/transformers/patch.md", patched), ("docs/transformers/patch.md", patched_on_a_cpu),
        ("docs/performance.md", repeats), ("docs/operators/selective_scan.md", scans),
    ],
)  # fmt: skip
def test_a_page_quotes_its_figures(page, quotes):
    text = " ".join((ROOT / page).read_text().split())
    told = [*quotes()]
    assert told
    assert [quote for quote in told if quote not in text] == []
