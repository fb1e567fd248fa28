"""Equations of docstrings as MathML, which browsers draw by themselves: a Markdown extension."""

import re
from typing import Any

from latex2mathml.converter import convert
from markdown import Extension, Markdown
from markdown.preprocessors import Preprocessor

# The directive and all that stands deeper than it.
DIRECTIVE = re.compile(r"^\.\. math::\n((?:[ ]+\S.*\n|\n(?=[ ]))+)", re.MULTILINE)


class Equations(Preprocessor):
    """Replaces each `.. math::` block."""

    def run(self, lines: list[str]) -> list[str]:
        """The page's lines, before Markdown reads them."""
        return DIRECTIVE.sub(self.drawn, "\n".join(lines) + "\n").split("\n")

    def drawn(self, found: re.Match[str]) -> str:
        """One block; several lines are aligned at their `&`."""
        latex = " ".join(found[1].split())
        if "&" in latex or r"\\" in latex:
            latex = rf"\begin{{align*}} {latex} \end{{align*}}"
        return f"\n{self.md.htmlStash.store(convert(latex, display='block'))}\n\n"


class EquationExtension(Extension):
    """What Markdown loads."""

    def extendMarkdown(self, md: Markdown) -> None:
        """Before fenced code is taken out, so that its text is not mistaken for a directive."""
        md.preprocessors.register(Equations(md), "equations", 24)


def makeExtension(**options: Any) -> EquationExtension:
    """The name that Markdown asks a module for."""
    return EquationExtension(**options)
