"""Loss by position far past the length of training: recurrent models beside rotary attention."""

import dataclasses
import statistics
from pathlib import Path

from experiments.experiment import Experiment, Result, Scale, finished
from experiments.figures import Curve, Panel, draw_curves, title_of
from experiments.markdown import markdown_table
from experiments.seeds import by_setting, setting
from experiments.text_cell import TextCell
from experiments.text_setting import Size, text_cell, text_model, text_of

COMPARED: dict[Scale, tuple[str, ...]] = {
    "laptop": ("deltanet", "gated_deltanet", "mamba2", "attention"),
    "gpu": ("linear_attention", "deltanet", "gated_deltanet", "mamba2", "delta_product",
            "attention"),
}  # fmt: skip
SEEDS: dict[Scale, tuple[int, ...]] = {"laptop": (0,), "gpu": (0, 1)}
SIZES: dict[Scale, Size] = {"laptop": "laptop", "gpu": "small"}
# Tokens of a row in training, and in the measurement.
TRAINED: dict[Scale, int] = {"laptop": 128, "gpu": 1024}
READ: dict[Scale, int] = {"laptop": 2048, "gpu": 32_768}

# Nats a token of code, read off the figure in the README of DeltaProduct's release: models trained
# on 4,096 tokens, at that length (all of them) and at 32,768.
PUBLISHED_AT_ONCE = 3.03
PUBLISHED_FAR = {"deltanet": 3.37, "delta_product": 3.05}


def cells(scale: Scale) -> list[TextCell]:
    """A model for each mixer and seed, trained on short rows and measured on long ones."""
    length, size = TRAINED[scale], SIZES[scale]
    made = [
        text_cell(name, text_model(name, size), size, seed)
        for seed in SEEDS[scale]
        for name in COMPARED[scale]
    ]
    return [
        dataclasses.replace(
            cell, length=length, rows=cell.rows * cell.length // length,
            lengths=(length, READ[scale]),
        )
        for cell in made
    ]  # fmt: skip


def by_position(results: list[Result]) -> dict[str, list[list[list[float]]]]:
    """For each system and seed the bins [first, last, bits per byte] of its long rows."""
    found: dict[str, list[list[list[float]]]] = {}
    for result in finished(results):
        _, far = result.figures["evaluations"].values()
        found.setdefault(setting(result), []).append(far["positions"])
    return found


def curve_of(name: str, seeds: list[list[list[float]]]) -> Curve:
    """Bits per byte in the middle of each bin, and the range over the seeds."""
    bins = [[value for *_, value in same] for same in zip(*seeds, strict=True)]
    return Curve(
        name, [(first * last) ** 0.5 for first, last, _ in seeds[0]],
        [statistics.fmean(values) for values in bins],
        low=[min(values) for values in bins], high=[max(values) for values in bins],
    )  # fmt: skip


def draw(scale: Scale, results: list[Result], path: Path) -> None:
    """Ours by position, and the two published losses."""
    ours = Panel(
        [curve_of(name, seeds) for name, seeds in by_position(results).items()],
        x="position in the row, bytes", y="bits per byte, held out", log_x=True,
        marks={f"trained to {TRAINED[scale]:,}": TRAINED[scale]},
    )  # fmt: skip
    published = Panel(
        [Curve(name, [32_768], [nats], published=True) for name, nats in PUBLISHED_FAR.items()],
        x="position in the row, tokens of code", y="nats per token", log_x=True,
        title="published, trained to 4,096", levels={"at 4,096": PUBLISHED_AT_ONCE},
        limits=(PUBLISHED_AT_ONCE - 0.08, max(PUBLISHED_FAR.values()) + 0.05),
    )  # fmt: skip
    draw_curves([ours, published], path, title="Loss past the length of training")


def table(scale: Scale, results: list[Result]) -> str:
    """Bits per byte in the last half of rows of several lengths, and what the longest costs."""
    lengths = [TRAINED[scale] * factor for factor in (1, 4, 16, 32)]
    lengths = [length for length in lengths if length <= READ[scale]]

    def at(result: Result, length: int) -> float:
        _, far = result.figures["evaluations"].values()
        value: float = next(bits for _, last, bits in far["positions"] if last == length)
        return value

    columns = [by_setting(results, lambda run, n=length: at(run, n)) for length in lengths]  # type: ignore[misc]
    head = ["system", *(f"at {length:,}" for length in lengths), "change", "published change, nats"]
    rows = []
    for name in columns[0]:
        far = PUBLISHED_FAR.get(name)
        change = columns[-1][name].mean - columns[0][name].mean
        rows.append(
            [title_of(name), *(str(column[name]) for column in columns), f"{change:+.3f}",
             "-" if far is None else f"{far - PUBLISHED_AT_ONCE:+.2f} (8 x the length)"]
        )  # fmt: skip
    note = (
        f"Bits per byte at positions from half of each length to it, in rows of {READ[scale]:,} "
        f"bytes within one document; trained on rows of {TRAINED[scale]:,}. {text_of(results)}"
    )
    return "\n\n".join([markdown_table(head, rows, results), note])


SHORTER = (
    "Bytes of text in place of tokens of six long benchmarks, which are not redistributable; one "
    "text, not six."
)
EXPERIMENT = Experiment(
    name="extrapolation", title="Loss past the length of training",
    shows="The loss at positions far past the length of training, of recurrent models and of "
    "attention with rotary positions.",
    source="Gated DeltaNet (arXiv 2412.06464), figure on length extrapolation; DeltaProduct "
    "(arXiv 2502.10297), README of its release",
    needs={
        "laptop": "4 curves of 3 minutes on 2 cores",
        "gpu": "12 models of 3.3 M parameters, 4 minutes on two H200 with --workers 12",
    },
    cells=cells, draw=draw, table=table,
    deviations={
        "laptop": [
            "Models of 0.45 M parameters, 2 layers, trained on 1.5 million bytes in rows of 128, "
            "in place of 1.3 B parameters, 100 B tokens and rows of 4,096.",
            "Measured to 2,048 bytes, 16 times the length of training, in place of 20,000 tokens.",
            SHORTER,
            "One seed.",
        ],
        "gpu": [
            "Models of 3.3 M parameters, 4 layers, trained on 8.2 million bytes in rows of 1,024, "
            "in place of 1.3 B parameters, 100 B tokens and rows of 4,096.",
            "Measured to 32,768 bytes, 32 times the length of training.",
            SHORTER,
            "Mamba-1, Samba and the hybrids of the figure are left out; two seeds each.",
        ],
    },
)  # fmt: skip
