"""Which tokens each layer of a trained model reads, beside softmax, and how its state changes."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from deltarule.models.bytes import BEGIN, encode
from deltarule.train.device import choose_device
from deltarule.train.figures import DARK, INK, MIDDLE, new_grid, save
from deltarule.train.layer_view import LayerView, layer_views
from deltarule.train.runs import load_model

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# More tokens than this and their names would overlap.
MOST_NAMED = 64
MOST_TOKENS = 512
LEGEND = "the darker the more is read, and a dot where it is subtracted"
# Negative entries smaller than this share of the largest are not marked.
MARKED = 0.1


@dataclass(frozen=True)
class AttentionPlotRun:
    """Draw the attention matrix of a trained run's layers, and how much each token writes."""

    folder: Path
    """Folder of a run, such as runs/text."""
    text: str = "To be, or not to be, that is the question."
    """What the model reads; it starts a document."""
    head: int = 0
    """Which head, from 0; a layer with fewer shows its last."""
    layers: tuple[int, ...] = ()
    """Which layers, from 0; none means all."""
    output: Path | None = None
    """Where the PNG goes; None is attention.png in the run's folder."""
    device: str = "auto"
    """"cpu", "cuda", "cuda:1", "mps"; "auto" takes a GPU if PyTorch sees one."""


def plot_attention(run: AttentionPlotRun) -> None:
    if run.head < 0:
        raise ValueError(f"--head must be 0 or more, got {run.head}")
    tokens = encode(run.text, begin=True)
    if len(tokens) > MOST_TOKENS:
        raise ValueError(
            f"--text must be of at most {MOST_TOKENS - 1} bytes, got {len(tokens) - 1}: "
            "its matrix has a row and a column for each"
        )
    model = load_model(run.folder, choose_device(run.device))
    kinds = model.config.layer_types
    chosen = run.layers or tuple(range(len(kinds)))
    if wrong := [layer for layer in chosen if not 0 <= layer < len(kinds)]:
        raise ValueError(f"--layers must be from 0 to {len(kinds) - 1}, got {wrong[0]}")
    views = [view for view in layer_views(model, tokens, run.head) if view.index in chosen]
    for layer in sorted(set(chosen) - {view.index for view in views}):
        print(f"layer {layer} ({kinds[layer]}) is left out: its output is not linear in its values")
    if not views:
        raise ValueError("--layers names no layer that has a matrix")
    path = run.folder / "attention.png" if run.output is None else run.output
    draw_layers(
        views, tokens, path, title=f"Layers of {run.folder.name}, head {run.head}; {LEGEND}"
    )
    print(f"drawn in {path}")


def draw_layers(
    views: Sequence[LayerView], tokens: Sequence[int], path: Path, *, title: str
) -> None:
    """A row for each layer: its matrix, the softmax of its q and k, its writes and erasures."""
    figure, rows = new_grid(len(views), 3, title=title)
    for view, (matrix, softmax, strengths) in zip(views, rows, strict=True):
        where = f"layer {view.index}, {view.name}"
        read = view.reading
        draw_matrix(matrix, read.matrix, tokens, where)
        if read.softmax is None or read.softmax is read.matrix:
            softmax.set_axis_off()
        else:
            draw_matrix(softmax, read.softmax, tokens, "softmax of its q and k")
        if read.write is None or read.erase is None:
            strengths.set_axis_off()
        else:
            draw_strengths(strengths, read.write, read.erase, tokens)
    save(figure, path)


def draw_matrix(axes: "Axes", matrix: Tensor, tokens: Sequence[int], title: str) -> None:
    """Square roots of sizes in grey, black for the largest; a dot on what is negative."""
    values = matrix.float().cpu().numpy()
    size = abs(values)
    largest = float(size.max()) or 1.0
    # Not in proportion: the few tokens of the first rows would leave all others white.
    shade = (size / largest) ** 0.5
    axes.imshow(shade, cmap="Greys", vmin=0.0, vmax=1.0, aspect="auto", interpolation="nearest")
    reads, writes = ((values < 0) & (size > MARKED * largest)).nonzero()
    axes.plot(
        writes, reads, "o", color=MIDDLE, markersize=max(0.5, min(2.2, 90 / len(tokens))),
        markeredgecolor="white", markeredgewidth=0.3, linewidth=0,
    )  # fmt: skip
    axes.set_title(f"{title}, up to {largest:.2g}", loc="left", color=INK, fontsize=9)
    name_tokens(axes, tokens, matrix.shape[1] // len(tokens))
    axes.set_ylabel("token that reads", color=INK, fontsize=8)


def draw_strengths(axes: "Axes", write: Tensor, erase: Tensor, tokens: Sequence[int]) -> None:
    """Shares of the state, from 0 to 1 but where an erasure turns it round."""
    axes.plot(
        write.float().cpu().numpy(), color=DARK, linewidth=1.4, label="written, of the new state"
    )
    axes.plot(
        erase.float().cpu().numpy(), color=MIDDLE, linewidth=1.4, linestyle="--",
        label="erased or decayed, of the old",
    )  # fmt: skip
    axes.set_xlim(-0.5, len(tokens) - 0.5)
    # Room for the legend above the lines.
    axes.set_ylim(0.0, 1.4 * max(1.0, write.max().item(), erase.max().item()))
    axes.set_title("share of the state", loc="left", color=INK, fontsize=9)
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.legend(frameon=False, fontsize=7, loc="upper right")
    name_tokens(axes, tokens, 1)


def name_tokens(axes: "Axes", tokens: Sequence[int], n_steps: int) -> None:
    """The bytes under the axis, where there is room for them."""
    axes.set_xlabel("token that wrote" if n_steps > 1 else "token", color=INK, fontsize=8)
    if len(tokens) <= MOST_NAMED:
        places = [n_steps * i + (n_steps - 1) / 2 for i in range(len(tokens))]
        axes.set_xticks(places, [byte_name(token) for token in tokens], fontsize=5)
        axes.tick_params(axis="x", length=0)


def byte_name(token: int) -> str:
    r"""What is printed for a byte: itself, or a mark for what cannot be seen.

    Examples:
        >>> [byte_name(token) for token in (256, 104, 32, 10, 233)]
        ['^', 'h', '_', '|', '?']
    """
    marks = {BEGIN: "^", ord(" "): "_", ord("\n"): "|"}
    return marks.get(token, chr(token) if 32 < token < 127 else "?")
