"""The pages of the rules say what the table says."""

from pathlib import Path

import pytest

from deltarule.rules import RULES

PAGES = Path(__file__).parents[2] / "docs" / "rules"
SECTIONS = ["## Letters", "## Where the print is wrong", "## Example"]


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_page(rule):
    page = (PAGES / f"{rule.name}.md").read_text()
    assert page.startswith(f"# {rule.title}\n")
    assert f"    {rule.recurrence}" in page
    assert f"    {rule.read_out}\n" in page
    assert page.endswith(f"Source: {rule.source}\n")
    assert [line for line in page.splitlines() if line.startswith("## ")] == SECTIONS
    assert "```python" in page


def test_index_has_every_row():
    index = (PAGES / "README.md").read_text()
    for name, rule in RULES.items():
        assert f"| [{rule.title}]({name}.md) | `{name}` | `{rule.recurrence}` |" in index
        assert f"| {rule.decay} | {rule.erase} | `{rule.operator}` |" in index


def test_every_page_belongs_to_a_rule():
    assert {page.stem for page in PAGES.glob("*.md")} == {*RULES, "README"}
