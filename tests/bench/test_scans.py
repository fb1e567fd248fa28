"""The benchmark of the layers over `selective_scan`, on a CPU, and the pages that quote figures."""

import json
from pathlib import Path

import pytest

from bench import scans, sides

ROOT = Path(__file__).parents[2]
LAYERS = ROOT / "docs/notes/2026-11-23-memories.md"
PATCHED = ROOT / "docs/transformers/patch.md"


@pytest.mark.parametrize("name", scans.LAYERS)
def test_every_layer_gives_the_operator_its_inputs(name: str, monkeypatch) -> None:
    monkeypatch.setattr(sides, "REPEATS", 1)
    rows = list(sides.figures(scans.scan_case(name, "cpu", (1, 20, 64)), 1e12, 1e14))
    assert all("CUDA" in row["error"] for side, _, row in rows if side == "deltarule")
    assert all(row["ms"] > 0 for side, _, row in rows if side == "PyTorch")


def table_rows(page: Path) -> list[list[str]]:
    lines = page.read_text().splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "|" in line]


def milliseconds(name: str, key: str, *facts: str) -> dict[tuple[str, ...], float]:
    rows = json.loads((ROOT / f"docs/figures/{name}.json").read_text())["rows"]
    return {tuple(row[fact] for fact in facts): row[key] for row in rows}


def test_the_note_quotes_the_figures() -> None:
    found = milliseconds("scans_h200", "both_ms", "layer", "peer")
    quoted = table_rows(LAYERS)[-len(scans.LAYERS) :]
    for layer, (_, ours, plain, times) in zip(scans.LAYERS, quoted, strict=True):
        kernels, operations = found[layer, "deltarule"], found[layer, "PyTorch"]
        assert (ours, plain) == (f"{kernels:.3g}", f"{operations:.4g}"), layer
        assert times == f"{operations / kernels:.0f}", layer


def test_the_note_on_memories_quotes_the_figures() -> None:
    found = milliseconds("neighbours_h200", "ms", "case", "pass", "peer")
    note = (ROOT / "docs/notes/2026-11-23-memories.md").read_text()
    passes = "forward", "forward+backward"
    for case in dict.fromkeys(case for case, *_ in found):
        ours, theirs = ([found[case, x, y] for x in passes] for y in ("deltarule", "PyTorch"))
        assert "{:.3g} / {:.3g}".format(*ours) in note, case
        if "attention" in case:
            assert "{:.3g} / {:.1f}".format(*theirs) in note, case


def test_the_page_quotes_what_the_patch_takes_on_a_gpu() -> None:
    found = milliseconds("patched_h200", "ms", "work", "peer")
    works = {"prompt": "prefill", "training step": "training step", "32 tokens": "generate"}
    sides = ("transformers", "transformers, FLA's convolution", "deltarule")
    quoted = {row[0]: row[1:] for row in table_rows(PATCHED)}
    for words, work in works.items():
        (cells,) = (
            cells for name, cells in quoted.items() if name.startswith(words) and len(cells) == 3
        )
        assert cells == [f"{found[work, side]:.1f}" for side in sides], work
