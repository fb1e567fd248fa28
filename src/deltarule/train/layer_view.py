"""`deltarule plot attention`: what the layers of a model do with a text, seen and drawn.

Which tokens each layer reads, beside softmax of its own q and k, and how its state changes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from deltarule import ops
from deltarule.models import CausalLM
from deltarule.models.bytes import BEGIN, encode
from deltarule.nn import Attention, DecayingFastWeights, DeltaMixer, Mixer, ScanMixer, State
from deltarule.nn.checks import check_that
from deltarule.nn.delta_mixer import OPERATORS
from deltarule.nn.layout import make_layout
from deltarule.nn.rule import Arguments, LayerCall
from deltarule.nn.two_memories import SlotMixer
from deltarule.train.device import choose_device
from deltarule.train.figures import DARK, INK, MIDDLE, new_grid, save
from deltarule.train.runs import load_model, run_of
from deltarule.train.vocabulary import tokens_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Arguments with a row for each write, where a token makes several.
EACH_WRITE = ("k", "v", "beta")
# More tokens than this and their names would overlap.
MOST_NAMED = 64
MOST_TOKENS = 512
LEGEND = "the darker the more is read, and a dot where it is subtracted"
# Negative entries smaller than this share of the largest are not marked.
MARKED = 0.1


class Reading(NamedTuple):
    """What one head of one layer does with a text of T tokens; None is what it has not."""

    # [T, T * n] how much of what was written at j the token i reads, before any norm; and the same
    # for the softmax of the layer's own q and k, which in S4 are constants.
    matrix: Tensor
    softmax: Tensor | None
    # [T] the share of the new state that the token wrote, |S - S' A| / |S|, and of the old state
    # that it decayed or erased, |S' - S' A| / |S'|.
    write: Tensor | None = None
    erase: Tensor | None = None


@dataclass(frozen=True)
class LayerView:
    """A layer's place from 0, the name of its mixer, and what it does."""

    index: int
    name: str
    reading: Reading


@torch.no_grad()
def layer_views(model: CausalLM, tokens: list[int], head: int = 0) -> list[LayerView]:
    """Look at a head of every layer whose output is linear in its values.

    Args:
        model: Any model.
        tokens: A text that starts a document; memory grows with the square of its length.
        head: Which value head, from 0; a layer with fewer shows its last.

    Returns:
        A view of each layer that has a matrix; TTT, Titans and sLSTM, whose read-out is not linear
        in their values, have none, and Hyena shows none.
    """
    inputs: dict[int, Tensor] = {}
    places = [
        (index, module) for index, block in enumerate(model.blocks)
        for module in block.modules() if isinstance(module, Mixer)
    ]  # fmt: skip
    hooks = [
        mixer.register_forward_pre_hook(lambda _, given, i=i: inputs.update({i: given[0]}))
        for i, (_, mixer) in enumerate(places)
    ]
    try:
        model(torch.tensor([tokens], device=model.embedding.weight.device))
    finally:
        for hook in hooks:
            hook.remove()
    shared: dict[str, Tensor] = {}
    views = []
    for i, (index, mixer) in enumerate(places):
        if (reading := reading_of(mixer, inputs[i], shared, head)) is not None:
            views.append(LayerView(index, mixer.rule.name, reading))
    return views


def reading_of(mixer: Mixer, x: Tensor, shared: dict[str, Tensor], head: int) -> Reading | None:
    """What the layer does with x [1, T, hidden_size]; None for a layer without a matrix."""
    if isinstance(mixer, Attention):
        weights = one_head(mixer.weights(x), head)
        return Reading(weights, weights)
    call = LayerCall(x, make_layout(x, None, None), mixer.init_state(1), State(), shared)
    if isinstance(mixer, DeltaMixer):
        return of_rule(mixer, call, head)
    if isinstance(mixer, SlotMixer):
        arguments = mixer.arguments(call)
        return Reading(of_slots(arguments, head), softmax_of(arguments, 1, head))
    if isinstance(mixer, ScanMixer | DecayingFastWeights):
        arguments = mixer.arguments(call)
        return Reading(of_scan(arguments, head), softmax_of(arguments, 1, head))
    return None


def of_rule(mixer: DeltaMixer, call: LayerCall, head: int) -> Reading:
    projections = mixer.project(call)
    arguments = mixer.rule.arguments(projections)
    # Values that are unit vectors come out as the columns of the matrix.
    columns = replace(projections, v=unit_values(projections.v))
    if projections.write_logits is None:
        unit = mixer.rule.arguments(columns)
    else:
        # A write strength for each value channel has no place in one matrix: it stays with v.
        unit = arguments | {"v": unit_values(arguments["v"])}
    output = OPERATORS[mixer.rule.operator](**unit)
    matrix = one_head(mixer.rule.read_out_function(output.o, columns).transpose(1, 2), head)
    head = min(head, arguments["v"].shape[2] - 1)
    strengths = state_strengths(arguments, mixer.rule.operator, mixer.n_steps, head)
    return Reading(matrix, softmax_of(arguments, mixer.n_steps, head), *strengths)


def of_slots(arguments: Arguments, head: int) -> Tensor:
    """[T, T] what is read of each value, by way of the slots."""
    out = ops.two_memories(**(arguments | {"v": unit_values(arguments["v"])}))
    return one_head(out.o.transpose(1, 2), head)


def of_scan(arguments: Arguments, head: int) -> Tensor:
    """[T, T] what is read of each value, a mean over the value channels, each of which has its own.

    A row of the batch for each token that alone writes.
    """
    v = arguments["v"]
    tokens = v.shape[1]
    alone = torch.eye(tokens, dtype=v.dtype, device=v.device)[:, :, None, None]
    # Mamba's step size is in its v already; it belongs to the matrix and not to the value.
    stepped = "delta" in arguments and arguments["k"].ndim == 4
    size = arguments["delta"] if stepped else torch.ones_like(v)
    repeated: Arguments = {
        name: x.expand(tokens, *x.shape[1:]) if isinstance(x, Tensor) and x.ndim == 4 else x
        for name, x in arguments.items()
    }
    out = ops.selective_scan(**(repeated | {"v": (alone * size).to(v.dtype)}))
    return out.o[:, :, min(head, v.shape[2] - 1)].mean(-1).T


def unit_values(v: Tensor) -> Tensor:
    """[1, C, HV, C] the unit vector j at row j, for v [1, C, HV, V]."""
    rows, heads = v.shape[1:3]
    unit = torch.eye(rows, dtype=v.dtype, device=v.device)[None, :, None, :]
    return unit.expand(1, rows, heads, rows)


def softmax_of(arguments: Arguments, n_steps: int, head: int) -> Tensor | None:
    """[T, T * n] softmax of the same q and k, before any unit norm; each write is a column."""
    q, k = arguments["q"], arguments["k"]
    if q.ndim == 3:
        return None
    scale = arguments.get("scale") or q.shape[-1] ** -0.5
    q, k = (x[0, :, min(head * x.shape[2] // arguments["v"].shape[2], x.shape[2] - 1)].float()
            for x in (q, k))  # fmt: skip
    token = torch.arange(len(k), device=k.device) // n_steps
    later = token > torch.arange(len(q), device=q.device).unsqueeze(1)
    return (scale * q @ k.T).masked_fill(later, float("-inf")).softmax(-1)


def state_strengths(
    arguments: Arguments, operator: str, n_steps: int, head: int
) -> tuple[Tensor, Tensor]:
    """[T] the share of the new state that each token wrote, and of the old that it took away."""
    run, tokens = OPERATORS[operator], arguments["q"].shape[1]
    # [1, T * n, ...] -> [T, n, ...]; a constant decay and what is no tensor stay.
    each = {
        name: x[0].unflatten(0, (tokens, n_steps if name in EACH_WRITE else 1))
        for name, x in arguments.items() if isinstance(x, Tensor) and x.ndim >= 3
    }  # fmt: skip
    constant = {name: x for name, x in arguments.items() if name not in each}
    states: list[Any] = [None]
    for t in range(tokens):
        here = {name: x[t : t + 1] for name, x in each.items()}
        states.append(run(**constant, **here, initial_state=states[-1]).final_state)
    states[0] = torch.zeros_like(states[1])
    before, after = torch.cat(states[:-1]), torch.cat(states[1:])
    each["v"] = torch.zeros_like(each["v"])
    kept = run(**constant, **each, initial_state=before).final_state
    assert kept is not None
    return share(after - kept, after, head), share(before - kept, before, head)


def share(part: Tensor, whole: Tensor, head: int) -> Tensor:
    """[T] the norm of a part of the state over that of the whole; 0 where there is nothing."""
    part, whole = (x[:, head].flatten(1).norm(dim=1) for x in (part, whole))
    return torch.where(whole > 0, part / whole.clamp(min=1e-30), torch.zeros_like(whole))


def one_head(matrices: Tensor, head: int) -> Tensor:
    return matrices[0, min(head, matrices.shape[1] - 1)]


@dataclass(frozen=True)
class AttentionPlotRun:
    """Draw the attention matrices of a run's layers, and how much each token writes and erases."""

    folder: Path
    """Folder of a run, such as runs/text."""
    text: str = "To be, or not to be, that is the question."
    """Text that the model reads, as the start of a document."""
    head: int = 0
    """Which head, from 0; a layer with fewer shows its last."""
    layers: tuple[int, ...] = ()
    """Which layers, from 0; none means all."""
    output: Path | None = None
    """Where the PNG goes; None is attention.png in the run's folder."""
    device: str = "auto"
    """"cpu", "cuda", "cuda:1", "mps"; "auto" takes a GPU if PyTorch sees one."""


def plot_attention(run: AttentionPlotRun) -> None:
    check_that(run.head >= 0, "--head must be 0 or more", run.head)
    tokens = encode(run.text, begin=True)
    said, count = f"--text must be of at most {MOST_TOKENS - 1} bytes", len(tokens) - 1
    check_that(count < MOST_TOKENS, said, count, "its matrix has a row and a column for each")
    model = load_model(run.folder, choose_device(run.device))
    # A checkpoint's own folder takes no file: it is then damaged.
    folder = run_of(run.folder)
    of_bytes = tokens_of(folder, model.config.vocab_size).tool is None
    check_that(of_bytes, f"{folder} must hold a model of bytes", "one of a tokenizer's tokens")
    kinds = model.config.layer_types
    chosen = run.layers or tuple(range(len(kinds)))
    if wrong := [layer for layer in chosen if not 0 <= layer < len(kinds)]:
        raise ValueError(f"--layers must be from 0 to {len(kinds) - 1}, got {wrong[0]}")
    views = [view for view in layer_views(model, tokens, run.head) if view.index in chosen]
    for layer in sorted(set(chosen) - {view.index for view in views}):
        print(f"layer {layer} ({kinds[layer]}) is left out: its output is not linear in its values")
    if not views:
        raise ValueError("--layers must name a layer that is linear in its values")
    path = folder / "attention.png" if run.output is None else run.output
    draw_layers(views, tokens, path, title=f"Layers of {folder.name}, head {run.head}; {LEGEND}")
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
