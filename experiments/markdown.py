"""Tables of results in Markdown."""

from collections.abc import Iterable, Sequence

from bench.markdown import markdown
from experiments.experiment import Result


def markdown_table(
    head: Sequence[str], rows: Iterable[Sequence[str]], results: Sequence[Result] = ()
) -> str:
    """Lines of a table, and below it a line for each run that failed.

    Examples:
        >>> print(markdown_table(["system", "loss"], [["GLA", "1.5"]]))
        | system | loss |
        |---|---|
        | GLA | 1.5 |
    """
    lines = markdown(head, rows)
    failed = [f"- failed: `{run.name}`: {run.error}" for run in results if run.error is not None]
    return "\n".join([*lines, *([""] if failed else []), *failed])
