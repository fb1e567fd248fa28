"""Every Python block of the pages runs, so do the examples in docstrings, and links lead on."""

import doctest
import importlib
import importlib.util
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE

# What needs the extra `hf`, which a step of its own installs.
EXTRA = ("docs/transformers/", "deltarule.hf")


def needs_no_missing_extra(name: str) -> bool:
    return importlib.util.find_spec("transformers") is not None or not name.startswith(EXTRA)


def modules() -> list[str]:
    """Names of the modules that hold an example, of the library and beside it."""
    roots = {SOURCE: SOURCE, ROOT / "experiments": ROOT, ROOT / "bench": ROOT}
    files = [(file, above) for root, above in roots.items() for file in sorted(root.rglob("*.py"))]
    # Of most layers the example is made with the class.
    marks = ">>> ", "rule = System(", "rule = Rule(", "rule = replace("
    held = [(file, above) for file, above in files if any(m in file.read_text() for m in marks)]
    names = [".".join(file.relative_to(above).with_suffix("").parts) for file, above in held]
    names = [name.removesuffix(".__init__") for name in names]
    return list(filter(needs_no_missing_extra, names))


def page_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


RUN = [page for page in PAGES if needs_no_missing_extra(page_name(page))]


@pytest.mark.filterwarnings("ignore::FutureWarning:transformers")
@pytest.mark.parametrize("page", RUN, ids=page_name)
def test_blocks_run(page, tmp_path, monkeypatch):
    """In order and in one namespace, as a reader would type them."""
    text = page.read_text()
    # Examples may write files.
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    for block in BLOCK.finditer(text):
        # Blank lines in front keep the page's line numbers in a traceback.
        above = "\n" * (text[: block.start()].count("\n") + 1)
        exec(compile(above + block[1], str(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links_lead_to_files(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    targets = [target for target in LINK.findall(text) if "://" not in target]
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert not missing


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "rules").glob("*.md")), ids=page_name)
def test_sources_have_names_that_a_reader_knows(page):
    """Not the numbers that they have in a folder of somebody's."""
    assert not re.search(r"(?<![\d.,])00\d\b|\bseeds\b", page.read_text())


@pytest.mark.parametrize("module", modules())
def test_docstring_examples(module, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found, given = importlib.import_module(module), {"torch": torch}
    results = doctest.testmod(found, optionflags=OPTIONS, extraglobs=given)
    assert results.attempted > 0
    assert results.failed == 0


def test_every_page_is_in_the_navigation():
    config = (ROOT / "mkdocs.yml").read_text()
    pages = [page for page in PAGES if page.is_relative_to(ROOT / "docs")]
    missing = [page.name for page in pages if str(page.relative_to(ROOT / "docs")) not in config]
    assert not missing


@pytest.mark.parametrize("module", ["", ".nn", ".models", ".parallel", ".hf", ".serve"])
def test_every_public_name_has_its_reference(module):
    """`::: path` on a page stands for the docstring there, which the site draws."""
    if not needs_no_missing_extra(f"deltarule{module}"):
        pytest.skip("needs the extra hf")
    text = "\n".join(page.read_text() for page in PAGES)
    drawn = set(re.findall(r"^::: deltarule\S*\.(\w+)$", text, re.MULTILINE))
    package = importlib.import_module(f"deltarule{module}")
    values = {"MIXERS", "RULES", "SYSTEMS", "FAMILIES", "PATTERNS"}
    assert set(package.__all__) - drawn - values == set()
