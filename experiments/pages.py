"""`python -m experiments.pages`: pages and figures of docs/experiments, from their JSON.

A page keeps what stands outside the two marks; what is between them is written anew.
"""

import fnmatch
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.markdown import markdown_table, write_between
from experiments.experiment import EXPERIMENTS, SCALES, Experiment, Scale, finished, load_experiment
from experiments.records import Record, read_json, to_results

INDEX_PAGE = "README.md"


def write_pages(folder: Path) -> None:
    """Write the index and every page into the folder where NAME-SCALE.json and .png lie."""
    for name in EXPERIMENTS:
        write_page(load_experiment(name), folder)
    write_index(folder)


def draw_figures(folder: Path) -> None:
    for experiment in map(load_experiment, EXPERIMENTS):
        for scale in experiment.words.needs:
            report = read_report(experiment, scale, folder)
            if report and (results := finished(to_results(report["cells"]))):
                experiment.draw(scale, results, folder / f"{experiment.name}-{scale}.png")


def write_index(folder: Path) -> None:
    """Write the page that leads to all others: what each shows, and which of its forms were run."""
    rows = []
    for experiment in map(load_experiment, EXPERIMENTS):
        words, forms = experiment.words, []
        for scale in SCALES:
            needs, told = words.needs.get(scale), "not run yet"
            if report := read_report(experiment, scale, folder):
                ran = share(report, [cell.name for cell in experiment.cells(scale)])
                told = f"{f'{ran} ' if ' of ' in ran else ''}run on {report['date'][:10]}"
            forms.append(f"{needs}; {told}" if needs else "-")
        title = f"[{words.title}]({experiment.name}.md)<br>{words.shows}"
        rows.append([title, words.source, *forms])
    lines = [markdown_table(["experiment", "from", *SCALES], rows)]
    write_between(folder / INDEX_PAGE, "results", lines, new="# Experiments\n")


def write_page(experiment: Experiment, folder: Path) -> None:
    name, words = experiment.name, experiment.words
    lines = ["Source: " + words.source + "."]
    for scale, needs in words.needs.items():
        lines += ["", f"## The {scale} form", ""]
        report, stem = read_report(experiment, scale, folder), f"{name}-{scale}"
        if report is None:
            command = fenced(f"deltarule reproduce {name} --scale {scale}")
            lines += ["There are no results of this form yet. It is run by", "", *command, ""]
            lines += [f"and needs {needs}.", "", *differences(words.deviations.get(scale, []))]
        else:
            picture = f"{stem}.png" if (folder / f"{stem}.png").exists() else None
            lines += section(experiment, report, raw=f"{stem}.json", picture=picture)
    new = f"# {words.title}\n\n{words.shows}\n"
    write_between(folder / f"{name}.md", "results", lines, new=new)


def read_report(experiment: Experiment, scale: Scale, folder: Path) -> Record | None:
    path = folder / f"{experiment.name}-{scale}.json"
    return read_json(path) if path.exists() else None


def section(experiment: Experiment, report: Record, *, raw: str, picture: str | None) -> list[str]:
    """Lines of Markdown about one form that was run, from its results.json.

    `raw` and `picture` are links to the JSON and to the figure, if there is one.
    """
    scale, results, words = report["scale"], to_results(report["cells"]), experiment.words
    lines = [] if picture is None else [f"![{words.title}, {scale} form]({picture})", ""]
    if done := finished(results):
        lines += [experiment.table(scale, done), ""]
        lines += [words.remark, ""] if words.remark else []
    if failed := [one for one in results if one.error is not None]:
        lines += ["Failed:", "", *(f"- `{one.name}`: {one.error}" for one in failed), ""]
    lines += fenced(report["command"])
    names = [cell.name for cell in experiment.cells(scale)]
    told = conditions(report, raw, names)
    return [*lines, "", *told, "", *differences(report["deviations"])]


def conditions(report: Record, raw: str, names: Sequence[str]) -> list[str]:
    """Time, place and versions of the results, and which of the form's cells they lack."""
    cells = report["cells"]
    left = patterns(names, {cell["cell"]["name"] for cell in cells})
    machines = dict.fromkeys(cell["machine"] for cell in cells)
    # A cell that went on after a stop counts its whole training.
    seconds = [max(cell["seconds"], cell["figures"].get("training_seconds", 0.0)) for cell in cells]
    threads = " or ".join(str(n) for n in sorted({cell["threads"] for cell in cells}))
    versions = ", ".join(f"{name} {number}" for name, number in report["versions"].items())
    seeds = sorted({seed for cell in cells for seed in seeds_of(cell["cell"])})
    return [
        f"- Run on {report['date'][:10]}: {'; then on '.join(machines)}.",
        f"- {share(report, names)}, {report['workers']} at a time, CPU threads of each: {threads}; "
        f"the longest took {max(seconds):,.0f} s, all together {sum(seconds):,.0f} s.",
        f"- Seeds: {listed(seeds)}.",
        f"- Versions: {versions}.",
        f"- Raw results: [{raw}]({raw}).",
        *([f"- Still to run: {', '.join(f'`{one}`' for one in left)}."] if left else []),
    ]


def share(report: Record, names: Sequence[str]) -> str:
    count = len(report["cells"])
    return f"{count} of {len(names)} cells" if count < len(names) else f"{count} cells"


def patterns(names: Sequence[str], done: Collection[str]) -> list[str]:
    """What `--only` takes to run the cells that are not done, and no other."""
    left = dict.fromkeys(name for name in names if name not in done)
    wide = [pattern for name in left for pattern in wider(name)]
    meant = {pattern: set(fnmatch.filter(names, pattern)) for pattern in wide}
    told = []
    for pattern in sorted(meant, key=lambda pattern: -len(meant[pattern])):
        if meant[pattern] <= left.keys() and len(meant[pattern]) > 1:
            told.append(pattern)
            left = dict.fromkeys(name for name in left if name not in meant[pattern])
    return told + list(left)


def wider(name: str) -> Iterator[str]:
    """Patterns of all names that have a part in common with this one, or all but the last part.

    Examples:
        >>> list(wider("gla-d64-seed0"))
        ['gla-*', '*-d64-*', '*-seed0', 'gla-d64-*']
    """
    parts = name.split("-")
    for place, part in enumerate(parts):
        yield f"{'*-' if place else ''}{part}{'-*' if place < len(parts) - 1 else ''}"
    yield f"{name.rpartition('-')[0]}-*"


def listed(numbers: list[int]) -> str:
    """Numbers in ascending order, a run of them by its ends.

    Examples:
        >>> listed([0, 1, 2]), listed([1, 5, 9]), listed([])
        ('0 to 2', '1, 5, 9', 'none')
    """
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers)) or "none"


def seeds_of(value: Any) -> Iterator[int]:
    for name, inner in value.items() if isinstance(value, dict) else ():
        if name in ("seed", "seeds"):
            yield from inner if isinstance(inner, list) else [inner]
        else:
            yield from seeds_of(inner)


def differences(deviations: list[str]) -> list[str]:
    if not deviations:
        return ["The paper has no such experiment: there is nothing to deviate from."]
    return ["What differs from the paper:", "", *(f"- {line}" for line in deviations)]


def fenced(command: str) -> list[str]:
    return ["```bash", command, "```"]


if __name__ == "__main__":
    folder = Path("docs/experiments")
    draw_figures(folder)
    write_pages(folder)
    print(f"{len(EXPERIMENTS)} pages in {folder}")
