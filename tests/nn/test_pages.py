"""The pages of the rules say what the table says."""

import json
from pathlib import Path

import pytest

from deltarule.lookup import backed_by, facts, markdown
from deltarule.models import FAMILIES
from deltarule.nn import MIXERS, RULES, SYSTEMS

PAGES = Path(__file__).parents[2] / "docs" / "rules"
TESTS = Path(__file__).parents[1]
SECTIONS = ["## Letters", "## Errors in the sources", "## Example"]


def page_of(system):
    return (PAGES / f"{system.page or system.name}.md").read_text()


@pytest.mark.parametrize("system", SYSTEMS.values(), ids=SYSTEMS)
def test_page(system):
    page = page_of(system)
    assert page.startswith(f"# {system.title}\n") or system.page
    assert f"    {system.recurrence}" in page
    assert f"    {system.read_out}\n" in page
    assert f"Source: {system.source}\n" in page
    assert "```python" in page
    # Written by the code; after a change replace the list on the page.
    assert facts(system, MIXERS[system.name]) in page


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_sections(rule):
    assert [line for line in page_of(rule).splitlines() if line.startswith("## ")] == SECTIONS


def test_index_is_generated_from_the_table():
    index = (PAGES / "README.md").read_text()
    for row in markdown().splitlines():
        assert row in index, "replace the table in docs/rules/README.md: deltarule rules --markdown"


@pytest.mark.parametrize("system", SYSTEMS.values(), ids=SYSTEMS)
def test_every_row_names_the_test_that_backs_it(system):
    text = (TESTS / backed_by(system)).read_text()
    assert system.name in text or system.operator in text


def test_every_page_belongs_to_a_row():
    pages = {row.page or row.name for row in SYSTEMS.values()}
    assert {page.stem for page in PAGES.glob("*.md")} == {*pages, "README"}


def test_the_readme_counts_what_there_is():
    root = PAGES.parents[1]
    readme = " ".join((root / "README.md").read_text().split())
    assert f"layers of {len(SYSTEMS)} published systems" in readme
    assert f"checkpoints of {len(FAMILIES)} model types" in readme
    tokens, steps = figures("bench_h200_generate_peers"), figures("bench_h200_train_fla")
    ms, theirs = (tokens["1.5B", 1, peer]["ms_per_token"] for peer in ("deltarule", "fla"))
    assert f"generates a token in {ms:.2f} ms" in readme
    assert f"flash-linear-attention's model takes {theirs:.0f} ms" in readme
    ms, theirs = (steps["148M", None, peer]["graph_ms"] for peer in ("deltarule", "fla"))
    assert f"148 M parameters takes {ms:.1f} ms, {theirs:.0f} ms with their model" in readme
    llama = figures("bench_h200_train_compiled")["148M", None, "transformers-compiled"]
    ms, size = llama["graph_ms"], llama["parameters"] / 1e6
    assert f"{ms:.1f} ms with a compiled Llama of {size:.0f} M" in readme


def figures(report):
    """Rows of a report by model, batch and peer."""
    rows = json.loads((PAGES.parents[1] / f"docs/figures/{report}.json").read_text())["rows"]
    return {(row["model"], row.get("batch"), row["peer"]): row for row in rows}
