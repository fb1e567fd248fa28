"""Every page of docs/experiments says what its JSON holds, and its prose what its tables hold."""

import itertools
import json
import math
import re
import shutil
import statistics
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path

import pytest

from experiments import pages

DOCS = Path(__file__).parents[2] / "docs" / "experiments"
PAGES = sorted(DOCS.glob("*.md"))
Numbers = list[float]
# What a page says, with the numbers that its tables hold; or its words, and whether they hold.
Claims = Iterator[str | tuple[str, bool]]


def numbers(cell: str) -> Numbers:
    """Every number of a cell, without thousands' commas.

    Examples:
        >>> numbers("84.7% (74.0%) in 2,158 steps")
        [84.7, 74.0, 2158.0]
    """
    return [
        float(x) for x in re.findall(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e-?\d+)?", cell.replace(",", ""))
    ]


class Tables:
    """The tables of a page by form, rows by their leading cells."""

    def __init__(self, name: str) -> None:
        text = (DOCS / f"{name}.md").read_text()
        self.rows: dict[str, list[dict[str, str]]] = {}
        form, head = "", list[str]()
        for line in text.splitlines():
            if heading := re.match(r"## The (\w+) form", line):
                form, head = heading[1], []
            elif not line.startswith("|"):
                head = []
            elif not line.startswith("|---"):
                cells = [cell.strip() for cell in line.strip("|").split(" | ")]
                if head:
                    self.rows.setdefault(form, []).append(dict(zip(head, cells, strict=True)))
                else:
                    head = cells

    def __call__(self, form: str, column: str, *row: str) -> Numbers:
        """The numbers of the cell of the one row that has these cells."""
        found = [r for r in self.rows[form] if column in r and set(row) <= set(r.values())]
        assert len(found) == 1, (form, column, row)
        return numbers(found[0][column])

    def at(self, form: str, column: str, place: int = 0) -> Callable[..., float]:
        """One number of the cell of this column in a row."""
        return lambda *row: self(form, column, *row)[place]

    def column(self, form: str, column: str, *row: str) -> list[Numbers]:
        """The numbers of a column in all rows that have these cells."""
        rows = [r for r in self.rows[form] if column in r and set(row) <= set(r.values())]
        return [numbers(r[column]) for r in rows]


@cache
def raw(name: str) -> dict[str, dict]:
    """The cells of a JSON file by their names."""
    cells = json.loads((DOCS / f"{name}.json").read_text())["cells"]
    return {cell["cell"]["name"]: cell for cell in cells}


def figures(name: str, pattern: str = "") -> list[dict]:
    """Those of the cells whose names begin so."""
    return [cell["figures"] for key, cell in raw(name).items() if re.match(pattern, key)]


def of(runs: list[dict], label: str = "", figure: str = "accuracy") -> Numbers:
    """A figure of an evaluation of each run, or of its first one."""
    return [x["evaluations"][label or next(iter(x["evaluations"]))][figure] for x in runs]


def scaled(shares: Numbers) -> Numbers:
    """From 0 for a guess of one of five numbers to 1."""
    return [(x - 0.2) / 0.8 for x in shares]


def cell_of(name: str) -> dict:
    """The settings of the first cell."""
    return next(iter(raw(name).values()))["cell"]


def seeds_of(name: str) -> int:
    return len({key.partition("seed")[2] for key in raw(name)})


def test_pages_are_what_the_json_files_give(tmp_path) -> None:
    shutil.copytree(DOCS, tmp_path / "docs")
    pages.write_pages(tmp_path / "docs")
    for page in PAGES:
        assert (tmp_path / "docs" / page.name).read_text() == page.read_text(), page.name


@pytest.mark.parametrize(
    ("more", "told", "left"),
    [
        ([], "30 cells", []),
        (["x-0", "y-0", "z-9"], "30 of 33 cells", ["- Still to run: `*-0`, `z-9`."]),
    ],
)
def test_a_page_says_which_cells_ran(more, told, left):
    report = json.loads((DOCS / "language-gpu.json").read_text())
    names = [cell["cell"]["name"] for cell in report["cells"]]
    lines = pages.conditions(report, "raw.json", [*names, *more])
    assert lines[1].startswith(f"- {told}, ")
    assert lines[5:] == left
    # Where fewer packages are installed, a form has fewer cells than its report.
    assert pages.conditions(report, "raw.json", names[:3])[1].startswith("- 30 cells, ")


def mqar(t: Tables) -> Claims:
    recurrent = ("Gated DeltaNet", "Mamba-2", "GLA", "RetNet", "Linear attention")
    gpu, narrow = (t.at("gpu", f"ours, width {width}") for width in (128, 64))

    def laptop(*systems: str) -> Numbers:
        return [t("laptop", f"ours, width {w}", s)[0] for s in systems for w in (32, 64)]

    yield "DeltaNet solves the task at both widths", min(laptop("DeltaNet")) > 99
    yield "ends at 41 % or below, where chance is 12.5 %", 40 < max(laptop(*recurrent)) <= 41
    off = [abs(x - 12.5) for x in laptop("Gated DeltaNet")]
    yield "Gated DeltaNet ends at chance", max(off) < 0.5
    yield f"softmax attention at {laptop('Softmax attention')[1]:.0f} % with width 64"
    yield "There is one seed and one learning rate", seeds_of("mqar-laptop") == 1
    share = 100 * of(figures("causes-laptop", "recall-convolution-mamba2"))[0]
    yield f"with a convolution of 4 Mamba-2 ends at {share:.1f} %"
    task = cell_of("mqar-gpu")["training"]
    yield "{length} tokens, {pairs} pairs, {vocab_size:,} words".format(**task)
    published = [t("gpu", "published, width 128", s)[0] for s in ("GLA", "RetNet", "Mamba")]
    yield "GLA at {:.0f} %, RetNet at {:.0f} % and Mamba at {:.0f} %".format(*published)
    yield "Ours had 6 epochs", max(x["steps"] for x in figures("mqar-gpu")) == 6 * 781
    low = gpu("GLA"), gpu("RetNet"), gpu("Mamba-2")
    yield "ended at {:.1f} %, {:.1f} % and, for Mamba-2, {:.1f} %".format(*low)
    losses = [x["curve"][-1][1] for x in figures("mqar-gpu", "retnet|gla")]
    stuck = sum(abs(loss - math.log(4096)) < 0.01 for loss in losses)
    yield "Three of the eight runs", (stuck, len(losses)) == (3, 8)
    learned = [x > 0.9 for x in of(figures("mqar-gpu", "attention"))]
    yield "at one of its two learning rates only", sorted(learned) == [False, False, True, True]
    yield f"reach {gpu('DeltaNet')} % at width 128", gpu("DeltaNet") == gpu("Gated DeltaNet")
    reached = narrow("DeltaNet"), narrow("Gated DeltaNet")
    yield "DeltaNet reaches {:.0f} % and Gated DeltaNet {:.0f} %".format(*reached)
    cells = raw("mqar-published")
    yield "Thirteen of its 96 cells", len(cells) == 13

    def ended(name: str) -> list[tuple[float, int]]:
        found = [x["figures"] for cell, x in cells.items() if cell.startswith(name)]
        return sorted((100 * of([x])[0], x["steps"]) for x in found)

    delta, (softmax,), (mamba,) = map(ended, ("deltanet-d128", "attention-d128", "mamba2-d128"))
    words = "{:.1f} to {:.1f} % in {:,} to {:,} steps at three learning rates"
    accuracies, steps = zip(*delta, strict=True)
    shown = min(accuracies), max(accuracies), min(steps), max(steps)
    yield words.format(*shown), len(delta) == 3
    yield "attention {:.1f} % in {:,}.".format(*softmax)
    (least, first), (most, second) = ended("gated_deltanet-d128")
    words = "Gated DeltaNet reaches {:.1f} % at two rates, in {:,} and {:,} steps"
    yield words.format(least, first, second), most - least < 0.05
    yield "Mamba-2 reaches {:.1f} % in {:,} steps".format(*mamba)
    wide = [
        x for name in ("deltanet", "gated_deltanet", "attention") for x in ended(f"{name}-d256")
    ]
    yield "99.7 % or more within 1,562 steps", min(wide)[0] >= 99.65 and len(wide) == 6
    yield "within 1,562 steps", max(steps for _, steps in wide) == 1562
    unknown = "-d64-", "mamba1", "gla", "retnet", "mamba2-no-conv"
    yield "the other 83 cells", len(cells) == 96 - 83
    yield "among them all of Mamba", not any(x in cell for cell in cells for x in unknown)


def mad(t: Tables) -> Claims:
    ours, laptop = t.at("gpu", "accuracy"), t.at("laptop", "accuracy")
    published = t.at("gpu", "published mean of all settings")
    recall, copying = ("In-context recall", "Noisy recall"), "Selective copying, 128 tokens"
    solved = t.column("laptop", "accuracy", recall[0])
    yield "all three layers solve in-context recall", solved == [[100.0]] * 3
    yield f"linear attention ends at {laptop(copying, 'Linear attention'):.0f} %"
    rest = [laptop(copying, x) for x in ("Softmax attention", "DeltaNet")]
    yield "softmax attention and DeltaNet at 99 % or above", round(min(rest)) >= 99
    right = [x[0] for task in recall for x in t.column("gpu", "answers right", task)]
    yield "at least 99.8 %", min(right) >= 99.8
    low = [ours(task, x) for task in recall for x in ("Gated DeltaNet", "Linear attention")]
    yield f"({min(low):.0f} to {max(low):.0f} %)"
    fuzzy = [ours("Fuzzy recall", x) for x in ("Linear attention", "GLA", "DeltaNet")]
    yield "attention {:.0f} % and GLA {:.0f} % are ahead of DeltaNet at {:.0f} %".format(*fuzzy)
    theirs = published("Fuzzy recall", "DeltaNet"), published("Fuzzy recall", "GLA")
    yield "published {} % for DeltaNet and {} % for GLA".format(*theirs)
    fuzzy = raw("mad-gpu")["fuzzy-gla"]["cell"]
    epochs = fuzzy["loop"]["steps"] * fuzzy["rows"] / fuzzy["examples"]
    yield f"see {fuzzy['examples']:,} examples for {epochs:.0f} epochs"
    yield "one seed each", {cell["cell"]["loop"]["seed"] for cell in raw("mad-gpu").values()} == {0}
    gla = ours("Selective copying", "GLA"), published("Selective copying", "GLA")
    yield "GLA ends at {} %, published {} %".format(*gla)
    above = [
        ours(task, layer) > published(task, layer)
        for task in ("Compression", "Memorization")
        for layer in ("GLA", "Softmax attention", "DeltaNet")
    ]
    yield "are above the published means", all(above)


def regbench(t: Tables) -> Claims:
    counts = ("2,500", "5,000")

    def pair(system: str, count: str) -> Numbers:
        """Ours and the published share; one alone where the paper has none."""
        ours = t("gpu", f"ours, {count} examples", system)[:1]
        return ours + t("gpu", f"published, {count} examples", system)

    pairs = {(r["system"], n): pair(r["system"], n) for r in t.rows["gpu"] for n in counts}
    apart = {key: two[0] - two[1] for key, two in pairs.items() if len(two) == 2}
    far = [
        ("softmax attention\nwith 2,500 examples", "Softmax attention", "2,500"),
        ("DeltaNet without its convolution with 2,500", "DeltaNet, no convolution", "2,500"),
        ("GLA without its convolution\nwith 5,000", "GLA, no convolution", "5,000"),
    ]
    yield "Of the ten cells", len(apart) == 10
    named = {(*key,) for _, *key in far} | {("GLA", "2,500")}
    great = {key for key, value in apart.items() if abs(value) >= 24}
    yield "four differ from it by 24 points or more", great == named
    for words, *key in far:
        yield "{} ({} %, published {} %)".format(words, *pairs[*key,])
    yield f"{apart['GLA', '2,500']:.1f} points *above*"
    yield "within\nfour points", all(abs(apart["DeltaNet", n]) < 4 for n in counts)
    last = {s: t.column("gpu", f"ours, {s} examples") for s in counts}
    order = [r["system"] for r in t.rows["gpu"]]
    ends = [dict(zip(order, (x[1] for x in last[n]), strict=True)) for n in counts]
    ahead = all(x["Gated DeltaNet"] > max(x["DeltaNet"], x["GLA"]) for x in ends)
    yield "ends ahead of DeltaNet and of GLA at both sizes", ahead


def state_tracking(t: Tables) -> Claims:
    seeds, name = "ours, each seed", "state-tracking-gpu"

    def parity(span: str, form: str = "gpu") -> Numbers:
        systems = (f"DeltaNet {span}", f"Mamba-2 {span}")
        return [x for system in systems for x in t(form, seeds, "Parity", system)]

    plain, brackets = (f"Modular arithmetic {x} brackets" for x in ("without", "with"))
    guessed = max(map(abs, parity("[0, 1]", "laptop"))) < 0.02
    yield "With eigenvalues in [0, 1] rows longer than those of training are guessed", guessed
    solved = parity("[-1, 1]", "laptop") == [1.0] * 6
    yield "with [-1, 1] they are\nsolved in the laptop form", solved
    apart = max(parity("[0, 1]")) < 0.10, min(parity("[-1, 1]")) >= 0.91
    yield "0.10 at most with [0, 1], 0.91 at least with [-1, 1]", all(apart)
    far = [2 * x - 1 for x in of(figures(name, "parity-(deltanet|mamba)11"), "length 256")]
    yield f"the six runs with [-1, 1] score {min(far):.2f} to {max(far):.2f}", len(far) == 6
    tested = cell_of(name)["evaluations"][0]["config"]
    yield "average lengths {shortest} to {longest}".format(**tested)
    low, middle, best = t("gpu", seeds, plain, "DeltaNet [-1, 1]")
    yield f"{best:.2f} as the best of three seeds ({low:.2f} and {middle:.2f} for the others)"
    theirs = t("gpu", "published, best of 3", plain, "DeltaNet [-1, 1]")[0]
    yield f"published {theirs:.2f}"
    runs = "modular_arithmetic-deltanet11"
    yield "in place of 6,000 of 256", {x["steps"] for x in figures(name, runs)} == {6000}
    later = json.loads((DOCS / "causes-arithmetic.json").read_text())["later"]["runs"]
    (long_run,) = (run for run in later if run["name"].startswith("ours-gpu-100000-seed0"))
    (score,) = scaled(of([long_run], "lengths 40 to 256"))
    yield f"the first seed then scores {score:.2f}", long_run["steps"] == 100_000
    solved = figures(name, runs)
    yield "all three seeds answer 98 % or more", min(of(solved, "length 32")) >= 0.98
    long = [100 * x for x in of(solved, "length 256")]
    yield f"at 256 from {min(long):.0f} to {max(long):.0f} %"
    watched = [[right for *_, right in x["curve"]] for x in figures(name, runs)]
    gains = sorted(statistics.mean(x[-3:]) - statistics.mean(x[-6:-3]) for x in watched)
    yield f"one seed gains {gains[2]:.2f} on the three before, the others {gains[1]:.2f} at most"
    scores = [*t.column("gpu", seeds, brackets), *t.column("gpu", "published, best of 3", brackets)]
    yield "every score is 0.20 or below", max(x for row in scores for x in row) <= 0.20


def groups(t: Tables) -> Claims:
    trained, far, short = "rows right up to 128", "up to 512", "rows right up to 32"
    enough = {"S_3": (2,), "S_4": (2, 3), "A_5": (2, 3, 4), "S_5": (4,)}
    solved = [(group, f"n = {n}") for group, writes in enough.items() for n in writes]
    rows = {(r["group"], r["writes"]): r for r in t.rows["gpu"] if trained in r}
    rest = {key: r for key, r in rows.items() if key not in solved}
    last = t("laptop", "up to 128", "S_3", "n = 2")
    solved_far = t("laptop", short, "S_3", "n = 2") == [1.0] * 3 and min(last) > 0.99
    yield "S_3 is solved with two writes a token and eigenvalues down to -1, on all", solved_far
    none = [r for r in t.rows["laptop"] if re.fullmatch(r"n = 1|.*\[0, 1\]", r.get("writes", ""))]
    zero = {r[short] for r in none} == {"0.000, 0.000, 0.000"}
    yield "write, or without negative eigenvalues, on none", zero
    yield "on two of three seeds", sorted(t("laptop", short, "S_4", "n = 3")) == [0, 1, 1]
    yield "training does not find them", t("laptop", short, "S_4", "n = 2") == [0.0] * 3
    whole = {rows[key][trained] for key in solved} == {"1.000, 1.000"}
    yield "every group is solved at that length", whole
    positive = {group for group, writes in rest if "[0, 1]" in writes}
    zero = {r[trained] for r in rest.values()} == {"0.000, 0.000"} and positive == {"S_3", "S_5"}
    yield "with one write none is, nor S_3 and S_5 with eigenvalues in [0, 1]", zero
    missing = {(g, w) for g in ("S_4", "A_5") for w in ("n = 1, [0, 1]", "n = 2, [0, 1]")}
    missing |= {("S_3", "n = 4"), ("S_4", "n = 4")}
    yield "eigenvalues in [0, 1] on S_4 and A_5; four writes on S_3 and S_4", not missing & {*rows}
    kept = sorted(x for key in solved for x in t("gpu", far, *key))
    two = kept[1] < 0.88 <= kept[2]
    yield "at least 88 % of the rows are still right on all seeds but two", two
    low = [min(t("gpu", far, "A_5", f"n = {n}")) for n in (2, 4)]
    yield "falls to {:.2f} on one seed with two writes and to {:.2f} on one with four".format(*low)


def extrapolation(t: Tables) -> Claims:
    ends = ("1,024", "32,768")
    laptop, change = t.at("laptop", "change"), t.at("gpu", "change")

    def at(system: str, position: str) -> float:
        return t("gpu", f"at {position}", system)[0]

    def gap(system: str, position: str) -> float:
        return at(system, position) - at("Gated DeltaNet", position)

    def by_length(name: str) -> Numbers:
        far = [*raw("extrapolation-gpu")[name]["figures"]["evaluations"].values()][1]
        return [bits for _, last, bits in far["positions"] if last >= 1024]

    for form, count in (("laptop", "one seed"), ("gpu", "two seeds")):
        cell = cell_of(f"extrapolation-{form}")
        read = f"{cell['length']:,} bytes and read {'on rows of' if form == 'laptop' else 'to'}"
        held = count.startswith(("one", "two")[seeds_of(f"extrapolation-{form}") - 1])
        yield f"rows of {read} {cell['lengths'][1]:,}, {count}", held
    yield f"Softmax attention loses {laptop('Softmax attention'):.1f} bits"
    yield f"DeltaNet loses {laptop('DeltaNet'):.2f} bits"
    decayed = [laptop(x) for x in ("Gated DeltaNet", "Mamba-2")]
    yield f"rises by {min(decayed):.2f} to {max(decayed) + 1e-9:.2f}"
    yield f"Softmax attention loses {change('Softmax attention'):.1f} bits"
    others = ("Linear attention", "DeltaNet", "Gated DeltaNet", "Mamba-2", "DeltaProduct")
    yield "change by less than 0.1 bits", max(abs(change(x)) for x in others) < 0.1
    yield "grows from {:.3f} bits at 1,024 to {:.3f} at 32,768".format(
        *(gap("DeltaNet", x) for x in ends)
    )
    names = [(f"deltanet-seed{seed}", f"gated_deltanet-seed{seed}") for seed in (0, 1)]
    both = [
        [a - b for a, b in zip(by_length(plain), by_length(gated), strict=True)]
        for plain, gated in names
    ]
    grow = all(x[0] < y for x in both for y in x[1:])
    yield "and on both seeds at every length between", grow
    kept = [abs(gap(s, ends[1]) - gap(s, ends[0])) for s in ("Mamba-2", "DeltaProduct")]
    yield "keep their distance to Gated DeltaNet within 0.01 bits", max(kept) < 0.01
    yield "stays at 3.1 bits or more", min(at("Linear attention", x) for x in ends) > 3.1


def language(t: Tables) -> Claims:
    def seeds(system: str) -> Numbers:
        return of(figures("language-gpu", f"{system}-seed"), "512", "bits_per_byte")

    def ahead(system: str) -> float:
        """Of DeltaNet, in standard errors of the two means."""
        one, other = seeds(system), seeds("deltanet")
        error = math.sqrt((statistics.variance(one) + statistics.variance(other)) / 3)
        return (statistics.mean(other) - statistics.mean(one)) / error

    bits = {r["system"]: numbers(r["bits per byte"]) for r in t.rows["gpu"]}
    means = {system: values[0] for system, values in bits.items()}
    order = sorted(means, key=means.__getitem__)
    first = ["Gated DeltaNet", "Gated DeltaNet-H1", "KDA"]
    lowest = "Gated DeltaNet ({}), its hybrid H1 ({}) and KDA ({}) have the lowest means"
    yield lowest.format(*(means[s] for s in first)), order[:3] == first
    yield f"ahead of DeltaNet by {ahead('gated_deltanet_h1'):.0f} standard errors"
    spread = round(bits["Gated DeltaNet"][1] / bits["DeltaNet"][1])
    wide = f"by {ahead('gated_deltanet'):.1f}, because its seeds spread three times as wide"
    yield wide, spread == 3
    last = [sorted(x[0] for x in t.column(form, "bits per byte")) for form in ("laptop", "gpu")]
    behind = min(x[-1] - x[-2] for x in last)
    yield "is\nlast by more than a bit", behind > 1 and order[-1] == "Linear attention"
    near = [means[b] - means[a] < bits[a][1] + bits[b][1] for a, b in itertools.pairwise(order)]
    yield "From DeltaNet to RetNet neighbours overlap", all(near[3:-1])
    before = all(means[a] < means[b] for a in first[:2] for b in ("DeltaNet", "Softmax attention"))
    yield "the means of Gated DeltaNet and H1 stand before", before
    yield "RetNet's is last of the gated and decayed layers", order[-2] == "RetNet"
    two = [t("gpu", "published, 1.3 B", s)[0] for s in ("Mamba-2", "Gated DeltaNet")]
    yield f"within {two[0] - two[1]:.2f} points of perplexity"
    yield f"is {means['Mamba-2'] - means['Gated DeltaNet']:.2f} bits behind it"


def niah(t: Tables) -> Claims:
    def laptop(needle: str, system: str, size: str = "4,096") -> float:
        return t("laptop", f"{size} bytes", needle, system)[0]

    def gpu(needle: str, system: str, size: str = "8,192") -> Numbers:
        return t("gpu", f"{size} bytes", needle, system)

    def published(system: str) -> Numbers:
        return [t("gpu", f"published, {x}", "S-NIAH-2", system)[0] for x in ("2K", "4K", "8K")]

    one, two = "S-NIAH-1", "S-NIAH-2"
    none = laptop(one, "Mamba-2") == 0
    yield f"keeps {laptop(one, 'DeltaNet'):.0f} % of the values to sixteen times the trained", none
    eight = [t("laptop", "published, 8K", one, x)[0] for x in ("DeltaNet", "Mamba-2")]
    yield "have the same order at 8K, with {} and {} %".format(*eight), eight[0] > eight[1]
    falls = laptop(two, "DeltaNet", "256"), laptop(two, "DeltaNet")
    yield "DeltaNet falls from {:.0f} to {:.0f} %".format(*falls)
    yield f"Gated DeltaNet falls further, to {laptop(two, 'Gated DeltaNet'):.0f} %"
    pairs = zip(published("Gated DeltaNet"), published("DeltaNet"), strict=True)
    yield "The paper has the opposite order", all(gated > plain for gated, plain in pairs)
    systems = ("Mamba-2", "Gated DeltaNet")
    eps = {cell["cell"]["model"]["norm_eps"] for cell in raw("niah-gpu").values()}
    yield "five seeds, with `norm_eps` at 1e-5", (seeds_of("niah-gpu"), eps) == (5, {1e-5})
    gated = [x for s in systems for n in (one, two) for x in gpu(n, s, "1,024")]
    yield (
        "all ten of their runs find at least 94 % of the numbers",
        min(gated) >= 94 and len(gated) == 20,
    )
    drawn = [(system, "the papers' draw", seed) for system in systems for seed in "012"]
    longest = [max(t("gpu", "horizons in tokens, layer by layer", *row)) for row in drawn]
    words = (
        "is {:.0f}, {:.0f} and {:.0f} tokens in a run of Mamba-2 and {:.0f}, {:.0f} and {:.0f} in"
    )
    yield words.format(*longest)
    ended = [t("gpu", "S-NIAH-1, 1,024 bytes", *row)[0] for row in drawn]
    words = "all three runs of Mamba-2 and two of\nGated DeltaNet stay at chance"
    yield words, ended[:5] == [0] * 5 and ended[5] > 98
    yield f"the one of {longest[5]:.0f} learns, the one of {longest[3]:.0f} does not"
    kept = {s: gpu(two, s) for s in ("DeltaNet", "Gated DeltaNet", "Mamba-2")}
    best, worst = max(kept["Gated DeltaNet"]), min(kept["Gated DeltaNet"])
    yield f"8,192 bytes of prose Gated DeltaNet keeps {worst:.0f} to {best:.0f} % of the numbers"
    for words, system in (("DeltaNet", "DeltaNet"), ("Mamba-2", "Mamba-2")):
        yield f"{words} {min(kept[system]):.0f} to {max(kept[system]):.0f} %"
    apart = [statistics.mean(x) for x in kept.values()]
    widest = min(max(x) - min(x) for x in kept.values())
    yield "seeds differ more than systems", widest > max(apart) - min(apart)
    long = sorted(share for s in (*kept, "Linear attention") for share in gpu("S-NIAH-3", s))
    first = max(gpu("S-NIAH-3", "DeltaNet"))
    words = (
        f"One seed of DeltaNet keeps {first:.0f} % of the long values at 8,192 bytes; no other run"
    )
    yield words, long[-1] == first and long[-2] < 1


def throughput(t: Tables) -> Claims:
    lengths = ("2,048 x 16", "4,096 x 8", "8,192 x 4", "16,384 x 2")
    speed = {r["system"]: [numbers(r[x]) for x in lengths] for r in t.rows["gpu"]}
    ran = {s: [x[0] for x in row] for s, row in speed.items() if row[0][1:]}
    counted = (len(speed), len(ran)) == (7, 6)
    yield "All seven models of ours were timed; six ran", counted
    mamba = raw("throughput-gpu")["deltarule-mamba2"]["cell"]
    model, chunks = mamba["model"], mamba["tokens"] // 64
    yield f"Mamba-2 of {model['num_layers']} layers"
    states, scores = (model["num_heads"] * chunks * 64 * n * 2 / 2**20 for n in (128, 64))
    yield f"states of {states:.0f} MiB and scores of {scores:.0f} MiB of its {model['num_heads']}"
    slower = zip(ran["Softmax attention"], ran["Gated DeltaNet"], strict=True)
    yield "faster than Gated DeltaNet at no length", all(x < y for x, y in slower)
    falls = sorted(ran["Softmax attention"], reverse=True) == ran["Softmax attention"]
    yield "loses speed with every doubling", falls
    steady = [ran[s] for s in ("DeltaNet", "Gated DeltaNet", "GLA")]
    yield "the recurrent layers keep theirs", all(min(x) > 0.97 * x[0] for x in steady)
    h1, h2 = speed["Gated DeltaNet-H1"], speed["Gated DeltaNet-H2"]
    ends = h1[0][0], h1[-1][0], h2[0][0], h2[-1][0]
    yield (
        "H1 falls from {} to {} thousand tokens a second between 2,048 and 16,384 and H2 from "
        "{} to {}"
    ).format(*ends)
    yield f"{h1[-1][1]:.0f} and {h2[-1][1]:.0f} at 16,384"


def speedup(t: Tables) -> Claims:
    def ratios(form: str, column: str) -> dict[tuple[int, int], float]:
        rows = t.rows[form]
        keys = [(int(r["head"]), int(numbers(r["tokens in a row"])[0])) for r in rows]
        return dict(zip(keys, (numbers(r[column])[0] for r in rows), strict=True))

    def span(form: str, column: str) -> tuple[float, float]:
        found = ratios(form, column).values()
        return min(found), max(found)

    yield "{:.0f} to {:.0f} times as fast as the definition".format(*span("laptop", "times faster"))
    yield "({:.1f} to {:.0f} times in the".format(*span("laptop", "forward alone"))
    before = json.loads((DOCS.parent / "figures/speedup_c_loop_cpu.json").read_text())["cells"]
    rows = [row for cell in before for row in cell["figures"]["lengths"].values()]
    compiled = [row["chunks_both"] / row["loop_both"] for row in rows]
    yield f"that was {min(compiled):.1f} to {max(compiled):.1f} times as fast as the chunks"
    yield "Rows of 2,048 and more are left out", max(n for _, n in ratios("laptop", "head")) == 1024
    both = ratios("gpu", "times faster")
    forward = ratios("gpu", "forward alone").values()
    yield f"{min(both.values()):.1f} to {max(both.values()):.0f} times as fast"
    yield f"({min(forward):.1f} to {max(forward):.0f} times in the"
    rising = [[both[key] for key in sorted(both) if key[0] == head] for head in (64, 128, 256)]
    yield "the longer the row the more", all(x == sorted(x) for x in rising)
    given = ratios("gpu", "published")
    below = {key for key in both if both[key] < given[key]}
    yield "below at 8,192 and 16,384", below == {(256, 8192), (256, 16384)}


def ablation(t: Tables) -> Claims:
    def loss(variant: str, form: str = "gpu") -> float:
        return t(form, "bits per byte", "DeltaNet", variant)[0]

    order = ("L2, 1+ELU", "L2, SiLU", "L2, ReLU", "L1, 1+ELU")
    ours = [loss(x) for x in order]
    published = [t("gpu", "published, DeltaNet 340 M", "DeltaNet", x)[0] for x in order]
    page = (DOCS / "ablation.md").read_text()
    noise = float(re.findall(r"Differences below ([\d.]+) bits", page)[0])
    yield f"differences below {noise} bits are noise"
    yield "have the published order", ours == sorted(ours) and published == sorted(published)
    apart = {(a, b) for a, b in itertools.combinations(order, 2) if loss(b) - loss(a) > noise}
    told = {(order[0], order[3]), (order[1], order[3]), (order[0], order[2])}
    words = "told apart from L2 with SiLU and with 1+ELU, and L2 with ReLU from L2 with 1+ELU"
    yield words, apart == told
    convolution = loss("no convolution") - loss("L2, SiLU")
    yield f"so is the convolution's {convolution:.2f} bits", convolution < noise
    gated = [x[0] for x in t.column("gpu", "bits per byte", "Gated DeltaNet")]
    yield "within 0.04 bits of each other", max(gated) - min(gated) <= 0.0401
    column = "published, Gated DeltaNet 400 M"
    rows = ("no convolution", "heads of 128")
    bare, whole = (t("gpu", column, "Gated DeltaNet", x)[0] for x in rows)
    yield f"{bare - whole:.1f} points of perplexity"
    yield "The laptop form has two rows", len(t.rows["laptop"]) == 2
    first = loss("L1, 1+ELU", "laptop") < loss("L2, SiLU", "laptop")
    yield "L1 with 1+ELU is ahead of L2 with SiLU", first


def memory(t: Tables) -> Claims:
    def error(rule: str, column: str, place: int = 0) -> float:
        return t("laptop", column, rule)[place]

    found = partial(error, place=3)
    ages = {name: cell["figures"]["by_age"] for name, cell in raw("memory-laptop").items()}
    old, total = ages["deltanet"], "Linear attention"
    sums = [error(total, f"random, {n}") * 64 / (n - 1) for n in (32, 64, 128)]
    yield "(N - 1) / 64", max(abs(x - 1) for x in sums) < 0.05
    ratio = error("DeltaNet", "correlated, 32") / error(total, "correlated, 32")
    yield "a tenth of what they cost a sum", 0.09 < ratio < 0.11
    yield "nearly exact up to 64 pairs", error("Mesa layer", "random, 64") < 0.02
    near = "still the nearest one when there are twice as many pairs as channels"
    yield near, found(total, "random, 128") >= 98
    yield "cannot tell a new value from the old one", found(total, "overwritten, 32") < 50
    yield "keys that resemble each other drown it", error(total, "correlated, 32") > 5
    yield "what is recent is read well", max(ages["retnet"][:8]) < 0.3
    yield "The last pair is exact", old[0] < 1e-20
    yield "a new value replaces the old one", found("DeltaNet", "overwritten, 32") == 100
    worn = min(old[55:]) > 1 > max(old[:45])
    yield "those more than about 50 writes old are read no better", worn
    mean = error("Mesa layer", "overwritten, 32") == 0.5
    yield "so gives the mean of a key's two values", mean


MAD = [f"mad-{x}" for x in ("compression", "copying", "fuzzy", "memorization", "noisy", "recall")]


def leaderboard(t: Tables) -> Claims:
    def seeds(*cells: str) -> Numbers:
        return [x for c in cells for x in raw("leaderboard-laptop")[c]["figures"]["scores"]]

    def of_task(task: str) -> dict[str, float]:
        cells = raw("leaderboard-gpu").items()
        found = {k: c["figures"]["scores"] for k, c in cells if k.endswith(f"-{task}")}
        return {k.removesuffix(f"-{task}"): scores[0] for k, scores in found.items()}

    def told(task: str, *systems: str) -> list[str]:
        scores = of_task(task)
        return [f"{scores[system]:.2f}" for system in systems]

    def below(task: str, limit: float) -> list[str]:
        """The systems that score less, the worst first."""
        scores = of_task(task)
        return sorted((x for x in scores if scores[x] < limit), key=scores.__getitem__)

    high = min(seeds("delta_product-parity", "slstm-parity")) > 0.9
    yield "DeltaProduct and sLSTM, which can do that, score above 0.9", high
    low = max(map(abs, seeds("deltanet-parity", "mamba2-parity"))) < 0.1
    yield "stay within 0.1 of a guess", low
    high = min(seeds("deltanet-mqar", "attention-mqar")) > 0.9
    yield "DeltaNet and softmax attention score above 0.9", high
    low = abs(seeds("linear_attention-mqar")[0]) < 0.1
    yield "linear attention without a convolution stays within 0.1", low
    recall, memorized = of_task("mad-recall"), of_task("mad-memorization")
    solved = [sum(x > 0.99 for x in column.values()) for column in (recall, memorized)]
    yield "tell few systems apart", min(solved) > 40
    low = ["linear_attention", "ttt_mlp", "lru", "titans_mac", "xlstm_7b"]
    words = (
        "linear attention {}, TTT-MLP {}, LRU {}, Titans with memory as context {} and xLSTM-7B {}"
    )
    yield words.format(*told("mad-recall", *low)), below("mad-recall", 0.7) == low
    low = ["linear_attention", "abc", "delta_product"]
    words = "linear attention {}, ABC {} and DeltaProduct {}"
    yield words.format(*told("mad-memorization", *low)), below("mad-memorization", 0.7) == low
    fuzzy = of_task("mad-fuzzy")
    guess = [name for name, x in fuzzy.items() if abs(x) < 0.1]
    most = len(guess) > len(fuzzy) / 2 and "attention" in guess
    yield "Most systems, softmax attention among them, are within 0.1 of a guess", most
    first = sorted(fuzzy, key=fuzzy.__getitem__)[:-4:-1]
    leads = first == ["titans_mag", "titans_mac", "multi_query_deltanet"]
    best, second, third = told("mad-fuzzy", *first)
    yield f"memory as a gate {best} leads", leads
    yield f"multi-query DeltaNet follow, both at {second}", second == third
    compressed = sorted(of_task("mad-compression"), key=of_task("mad-compression").__getitem__)
    ends = told("mad-compression", compressed[0], compressed[-1])
    names = (compressed[0], compressed[-1]) == ("hyena", "s4d")
    yield "from {} (Hyena) to {} (S4D)".format(*ends), names
    low = ["ttt_mlp", "linear_attention", "attention", "sliding_window"]
    words = "TTT-MLP {}, linear attention {}, softmax attention {} and sliding windows {}"
    held = {*below("mad-noisy", 0.5)} == {*low} and recall["attention"] > 0.99
    yield words.format(*told("mad-noisy", *low)), held
    copying = of_task("mad-copying")
    spread = {x: statistics.pstdev(of_task(x).values()) for x in MAD}
    yield "spreads the systems widest of MAD's tasks", max(spread, key=spread.get) == "mad-copying"
    high = min(copying[x] for x in ("deltanet", "kda", "mamba2")) > 0.99
    yield "DeltaNet, KDA and Mamba-2 score above 0.99", high
    low = told("mad-copying", "gla", "gated_rfa", "linear_attention")
    yield "GLA {}, Gated RFA {} and linear attention {}".format(*low)
    guess = {name for name, x in copying.items() if abs(x) < 0.1}
    yield "GateLoop and the Mesa layer stay within 0.1 of a guess", guess == {"gate_loop", "mesa"}
    wide = of_task("mqar")
    high = {name for name, x in wide.items() if x > 0.99}
    yield f"{len(high)} score above 0.99, DeltaNet among them", "deltanet" in high
    guess = {name for name, x in wide.items() if abs(x) < 0.1}
    some = guess >= {"linear_attention", "hgrn2", "mamba1", "s4d", "hyena"}
    yield f"{len(guess)} stay within 0.1 of a guess, such as linear attention, HGRN-2", some
    ran = not any("to run" in r.values() for r in t.rows["gpu"])
    yield "MAD and recall have run for every system", ran
    later = [x for x in raw("leaderboard-gpu") if not re.search(r"-(mad-\w+|mqar)$", x)]
    yield "the whole of parity, arithmetic, the group and text", not later


def causes(t: Tables) -> Claims:
    name = "causes-laptop"

    def share(pattern: str) -> Numbers:
        """Percent right of the first evaluation of each cell."""
        return [100 * x for x in of(figures(name, pattern))]

    def watched(pattern: str) -> list[tuple[int, float]]:
        return [(step, right) for step, _, right in figures(name, pattern)[0]["curve"]]

    def before(system: str) -> float:
        return 100 * of(figures("mqar-laptop", f"{system}-d64"))[0]

    def alone(system: str) -> float:
        return share(f"recall-epsilon-{system}-")[0]

    yield f"Mamba-2 has no convolution, and at width 64 ends at {before('mamba2'):.1f} %, chance"
    yield f"A convolution of 4 alone takes it to {share('recall-convolution')[0]:.1f} %"
    yield f"an epsilon of 1e-5 alone leaves it at {alone('mamba2'):.1f} %"
    learn = [f"recall-own-{system}-" for system in ("deltanet", "gated_deltanet", "mamba2")]
    steps = [figures(name, pattern)[0]["steps"] for pattern in learn]
    done = "DeltaNet, Gated DeltaNet and Mamba-2 are done after {:,}, {:,} and {:,} of 2,158 steps"
    yield done.format(*steps), min(x for pattern in learn for x in share(pattern)) > 99
    rest = [share(f"recall-own-{system}-")[0] for system in ("gla", "retnet")]
    yield "GLA ends at {:.1f} % and RetNet at {:.1f} %".format(*rest)
    yield f"DeltaNet ends at {alone('deltanet'):.1f} % in place of {before('deltanet'):.1f} %"
    others = ("gated_deltanet", "mamba2", "gla", "retnet", "linear_attention", "attention")
    moved = [abs(alone(system) - before(system)) for system in others]
    yield f"moves the others by {max(moved):.0f} points at most", max(moved) < 11
    horizons = figures(name, "needles-drawn")[0]["horizons"]
    yield "horizons of {:.0f}, {:.0f}, {:.0f} and {:.0f} tokens".format(*horizons[0], *horizons[1])
    slow, fast = watched("needles-drawn"), watched("needles-spread")
    chance = max(right for step, right in slow if step <= 300) < 0.13
    yield "reads needles at chance for 300 of 1,200 steps", chance
    needles = figures(name, "needles")
    right = [[of([x], n, "sequence_accuracy")[0] for n in x["evaluations"]] for x in needles]
    ends = [100 * min(run) for run in right]
    yield f"and ends at {ends[0]:.1f} %"
    yield f"reads {100 * dict(fast)[250]:.0f} % of the bytes by step 250"
    yield f"ends at {ends[1]:.1f} % or more"
    by_steps = [figures(name, f"arithmetic-steps{n}k") for n in (1, 16)]
    for words, label in (("at 10 places", "length 10"), ("at 10 to 64", "lengths 10 to 64")):
        told = ["{:.2f} and {:.2f}".format(*sorted(of(runs, label))) for runs in by_steps]
        yield f"{words} from {told[0]} to {told[1]}"
    longest = of(figures(name, "arithmetic-"), "length 64")
    near = max(abs(x - 0.2) for x in longest) <= 0.03
    yield "At 64 places alone no run is more than 0.03 from a guess, 0.20", near

    arithmetic = json.loads((DOCS / "causes-arithmetic.json").read_text())
    far = "lengths 40 to 256"

    def begins(start: str, part: list[dict] = arithmetic["runs"]) -> list[dict]:
        return [run for run in part if run["name"].startswith(start)]

    def scores(change: str, label: str = far) -> Numbers:
        """Of the runs that are whole."""
        return scaled(of(begins(f"{change}-gpu-6000-"), label))

    def row(change: str, *columns: Numbers) -> str:
        """Of the table: scores of the seeds by steps."""
        cells = [", ".join(f"{x:.2f}" for x in scores) or "-" for scores in columns]
        return f"{change} | {' | '.join(cells)} |"

    longer = [run for run in arithmetic["runs"] if "-24000-" in run["name"]]
    unchanged, later = begins("ours", longer), arithmetic["later"]["runs"]
    ours, changed = (begins(f"{x}-gpu-100000-", later) for x in ("ours", "init+opt+beta16"))
    steps = [run["steps"] for run in unchanged]
    yield f"| {min(steps):,} to {max(steps):,} of 24,000 | 100,000 steps |"
    yield row("| nothing", scores("ours"), scaled(of(unchanged, far)), scaled(of(ours, far)))
    yield row("as narrow", scores("init"), [], [])
    (score,) = scaled(of([run for run in longer if run not in unchanged], far))
    yield row("from decay", scores("opt"), [score], [])
    yield row("weights and optimizer", scores("init+opt"), [], [])
    rounded = scaled(of(begins("beta16-gpu-6000-", later), far))
    yield row("write strengths rounded to bfloat16", rounded, [], [])
    yield row("all three", [], [], scaled(of(changed, far)))
    whole = {run["steps"] for run in later if "-100000-" in run["name"]} == {100_000}
    yield f"nothing else changed scores {scaled(of(ours, far))[0]:.2f}, published 0.97", whole
    right = (100 * of(ours, label)[0] for label in ("length 64", "length 256"))
    yield "it answers {:.0f} % at 64 places and {:.0f} % at 256".format(*right)
    page = Tables("state-tracking")
    first = page("gpu", "ours, best", "Modular arithmetic without brackets", "DeltaNet [-1, 1]")
    yield f"from {first[0]:.2f}, on the page on state tracking, to the {scores('ours')[0]:.2f} of"
    swing = scaled([right for *_, right in unchanged[2]["curve"]])
    top = swing.index(max(swing))
    words = "reaches {:.2f} on 256 rows at four fifths of its 24,000 steps and {:.2f}"
    late = 0.75 < unchanged[2]["curve"][top][0] / steps[2] < 0.85
    yield words.format(swing[top], swing[top + 1]), late
    changes = ("ours", "opt", "init", "init+opt")
    least = min(x for change in changes for x in scores(change, "length 32")) * 0.8 + 0.2
    yield "answer 95 % or more at 32 places", least >= 0.95
    low = max(run["curve"][-1][1] for run in longer) < 0.002
    yield "with a training loss below 0.002 in the end", low
    near, beyond = ([100 * x for x in of(longer, f"length {n}")] for n in (64, 256))
    yield "answer 94 % or more at 64 places", min(near) >= 94
    yield f"and from {min(beyond):.0f} to {max(beyond):.0f} % at 256"
    at_64 = [100 * x for x in of(changed, "length 64")]
    yield "the last row's two answer {:.0f} % and {:.0f} % at 64".format(*at_64)
    drawn, spread = (figures(name, f"text-{x}") for x in ("drawn", "spread"))
    reach = [max(run["horizons"][0] + run["horizons"][1]) for run in drawn]
    drawn, spread = (of(runs, "128", "bits_per_byte") for runs in (drawn, spread))
    yield f"from {drawn[0]:.3f} and {drawn[1]:.3f} bits to {spread[0]:.3f} and {spread[1]:.3f}"
    yield f"own draw reaches {reach[0]:.0f} tokens, the second's {reach[1]:.0f}"
    yield "spread horizons do no harm there", all(a > b for a, b in zip(drawn, spread, strict=True))
    yield "which wait in the GPU form", "gpu" not in t.rows


CLAIMS = {
    "state-tracking" if claims is state_tracking else claims.__name__: claims
    for claims in (
        leaderboard, mqar, mad, regbench, state_tracking, groups, extrapolation, language, niah,
        throughput, speedup, ablation, memory, causes,
    )
}  # fmt: skip


@pytest.mark.parametrize("name", CLAIMS)
def test_the_prose_says_what_the_tables_say(name: str) -> None:
    prose = " ".join((DOCS / f"{name}.md").read_text().partition("<!-- results")[0].split())
    wrong = []
    for claim in CLAIMS[name](Tables(name)):
        words, holds = (claim, True) if isinstance(claim, str) else claim
        if " ".join(words.split()) not in prose:
            wrong.append(f"lacks: {words}")
        elif not holds:
            wrong.append(f"does not hold: {words}")
    assert not wrong, "\n".join([f"{name}.md", *wrong])


@pytest.mark.parametrize("name", sorted(CLAIMS))
def test_every_page_says_what_did_not_run_and_why(name: str) -> None:
    prose = (DOCS / f"{name}.md").read_text().partition("<!-- results")[0]
    assert len(re.findall(r"^Not run, (?:as|for) [^:\n]+: \S", prose, re.MULTILINE)) == 1


def test_every_page_with_results_has_its_claims_checked() -> None:
    assert {page.stem for page in PAGES} - {"README"} == set(CLAIMS)
