"""The plot of attention from a run's folder, and what it refuses."""

import pytest
import torch

from deltarule.cli import main
from deltarule.train.figures import new_grid
from deltarule.train.layer_view import LayerView, Reading, draw_layers, draw_matrix
from small import small_model

PNG = b"\x89PNG"


@pytest.fixture
def run(tmp_path):
    """A folder with a small model, as a finished run leaves it."""
    layers = ("deltanet", "titans_mlp", "attention", "delta_product")
    model = small_model(*layers, hidden_size=32, num_heads=2)
    folder = tmp_path / "small"
    model.save(folder)
    return folder


def test_draws_every_layer_that_has_a_matrix(run, capsys):
    assert main(["plot", "attention", str(run), "--text", "to be\nor é"]) == 0
    assert (run / "attention.png").read_bytes().startswith(PNG)
    said = capsys.readouterr().out
    assert "layer 1 (titans_mlp) is left out: its output is not linear in its values" in said
    assert f"drawn in {run / 'attention.png'}" in said


def test_layers_head_and_file_are_options(run, tmp_path, capsys):
    path = tmp_path / "one.png"
    words = ["--layers", "0", "3", "--head", "1", "--output", str(path), "--text", ""]
    assert main(["plot", "attention", str(run), *words]) == 0
    assert path.read_bytes().startswith(PNG)
    assert "left out" not in capsys.readouterr().out
    assert sorted(file.name for file in tmp_path.iterdir()) == ["one.png", "small"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--head", "-1"], "--head must be 0 or more, got -1"),
        (["--layers", "0", "4"], "--layers must be from 0 to 3, got 4"),
        (["--layers", "1"], "--layers names no layer that has a matrix"),
        (["--text", "a" * 600], "--text must be of at most 511 bytes, got 600"),
    ],
)
def test_what_cannot_be_drawn_says_so(run, words, message, capsys):
    assert main(["plot", "attention", str(run), *words]) == 1
    assert message in capsys.readouterr().err


def test_the_largest_is_black_and_nothing_is_white():
    _, [[axes]] = new_grid(1, 1, title="t")
    draw_matrix(axes, torch.tensor([[0.5, 0.0], [-2.0, 0.1]]), [1, 2], "m")
    image = axes.images[0]
    assert image.get_array().tolist() == [[0.5, 0.0], [1.0, pytest.approx(0.05**0.5)]]
    assert image.get_cmap()(1.0)[:3] == pytest.approx((0, 0, 0), abs=0.01)
    assert image.get_cmap()(0.0)[:3] == pytest.approx((1, 1, 1), abs=0.01)
    # Each negative entry has its dot: read by token 1, written by token 0.
    assert [axes.lines[0].get_xdata().tolist(), axes.lines[0].get_ydata().tolist()] == [[0], [1]]


def test_a_view_of_zeros_can_be_drawn(tmp_path):
    zeros = Reading(torch.zeros(3, 3), None, torch.zeros(3), torch.zeros(3))
    nothing = LayerView(0, "gla", zeros)
    draw_layers([nothing], [1, 2, 3], tmp_path / "x.png", title="")
    assert (tmp_path / "x.png").exists()
