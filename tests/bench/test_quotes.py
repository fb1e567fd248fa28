"""README and pages quote the raw figures that they link to; dated notes stay as they are."""

import json
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
        ("docs/transformers/patch.md", patched), ("docs/operators/selective_scan.md", scans),
    ],
)  # fmt: skip
def test_a_page_quotes_its_figures(page, quotes):
    text = " ".join((ROOT / page).read_text().split())
    told = [*quotes()]
    assert told
    assert [quote for quote in told if quote not in text] == []
