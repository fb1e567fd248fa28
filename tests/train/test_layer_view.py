"""The matrix of a layer times its values is what its operator puts out; states change so; plots."""

from dataclasses import replace

import pytest
import torch

from deltarule import ops
from deltarule.cli import main
from deltarule.nn.delta_mixer import OPERATORS
from deltarule.train import layer_view
from deltarule.train.figures import new_grid
from deltarule.train.layer_view import layer_views, of_rule, of_scan, of_slots, state_strengths
from nn.layers import LINEAR, call_of, inputs, make
from small import small_model
from tolerance import relative_rms

DOUBLE = torch.float64
T = 11


@torch.no_grad()
@pytest.mark.parametrize("head", [0, 1])
@pytest.mark.parametrize("name", LINEAR)
def test_matrix_of_a_rule_times_its_values_is_the_read_out(name, head):
    layer = make(name, DOUBLE)
    projections = layer.project(call_of(layer, inputs(1, T, DOUBLE)))
    own = projections.v.shape[2] // layer.num_v_heads
    if own > 1:
        # Slots with values of their own: the matrix is that of a value that all are given.
        same = projections.v[:, :, ::own].repeat_interleave(own, dim=2)
        projections = replace(projections, v=same)
    arguments = layer.rule.arguments(projections)
    o = OPERATORS[layer.rule.operator](**arguments).o
    o = layer.rule.read_out_function(o, projections)
    matrix = of_rule(layer, call_of(layer, inputs(1, T, DOUBLE)), head)[0]
    head = min(head, o.shape[2] - 1)
    # Gated DeltaNet-2 has a write strength for each value channel, which the matrix leaves out.
    v = projections.v if projections.write_logits is None else arguments["v"]
    assert matrix.shape == (T, T * layer.n_steps)
    assert relative_rms(matrix @ v[0, :, min(head * own, v.shape[2] - 1)], o[0, :, head]) <= 1e-12
    assert (matrix.view(T, T, -1).permute(2, 0, 1).triu(1) == 0).all()


@torch.no_grad()
@pytest.mark.parametrize("name", ["abc", "gsa", "mamba1", "s4", "longhorn_released", "dfw"])
def test_matrix_of_slots_or_a_scan_times_the_values_is_what_they_read(name):
    """Of a scan where every channel has the same value: then the mean of the outputs is."""
    layer = make(name, DOUBLE)
    arguments = layer.arguments(call_of(layer, inputs(1, T, DOUBLE)))
    if name in ("abc", "gsa"):
        o = ops.two_memories(**arguments).o[0, :, 1]
        assert relative_rms(of_slots(arguments, 1) @ arguments["v"][0, :, 1], o) <= 1e-12
        return
    value = torch.randn(1, T, 1, 1, dtype=DOUBLE)
    size = arguments["delta"] if name == "mamba1" else torch.ones_like(arguments["v"])
    o = ops.selective_scan(**(arguments | {"v": value * size})).o[0, :, 1].mean(-1)
    assert relative_rms(of_scan(arguments, 1) @ value.flatten(), o) <= 1e-12


@torch.no_grad()
def test_strengths_by_hand():
    """RetNet loses at every token but the first the share that g of head 1, 1 - 2^-6, leaves;
    Gated DeltaNet the shares from the recurrence of one head.
    """
    layer = make("retnet", DOUBLE)
    _, _, write, erase = of_rule(layer, call_of(layer, inputs(1, T, DOUBLE)), 1)
    assert (write[0], erase[0]) == (1, 0)
    assert relative_rms(erase[1:], torch.full((T - 1,), 2.0**-6, dtype=DOUBLE)) <= 1e-12
    layer = make("gated_deltanet", DOUBLE)
    arguments = layer.rule.arguments(layer.project(call_of(layer, inputs(1, T, DOUBLE))))
    write, erase = state_strengths(arguments, "delta_rule", 1, 2)
    k = torch.nn.functional.normalize(arguments["k"][0, :, 1], dim=-1, eps=0)
    v, beta = arguments["v"][0, :, 2], arguments["beta"][0, :, 2]
    alpha, S = arguments["log_decay"][0, :, 2].exp(), torch.zeros(8, 8, dtype=DOUBLE)
    for t in range(T):
        kept = alpha[t] * (S - beta[t] * torch.outer(S @ k[t], k[t]))
        after = kept + beta[t] * torch.outer(v[t], k[t])
        assert write[t] == pytest.approx(((after - kept).norm() / after.norm()).item(), rel=1e-4)
        if t:
            assert erase[t] == pytest.approx(((S - kept).norm() / S.norm()).item(), rel=1e-4)
        S = after


def test_strengths_of_several_writes_a_token():
    layer = make("delta_product", DOUBLE)
    with torch.no_grad():
        _, softmax, write, erase = of_rule(layer, call_of(layer, inputs(1, T, DOUBLE)), 0)
    assert softmax.shape == (T, 3 * T)
    assert torch.allclose(softmax.sum(-1), torch.ones(T, dtype=softmax.dtype))
    assert (softmax.view(T, T, 3).permute(2, 0, 1).triu(1) == 0).all()
    assert write.shape == erase.shape == (T,)
    assert write[0] == 1


def test_views_of_a_mixed_model_but_for_layers_that_are_not_linear_in_their_values():
    names = ["deltanet", "attention", "mamba1", "sliding_window", "gsa", "s4", "rwkv7"]
    model = small_model("ttt_mlp", *names, hidden_size=32, num_heads=2, window=3)
    found = layer_views(model, [256, 104, 101, 108, 108, 111], 9)
    assert [(view.index, view.name) for view in found] == list(enumerate(names, 1))
    by_name = {view.name: view for view in found}
    for view in found:
        assert view.reading.matrix.shape == (6, 6)
        assert (view.reading.matrix.triu(1) == 0).all()
    assert by_name["s4"].reading.softmax is None
    assert by_name["mamba1"].reading.write is None
    assert by_name["attention"].reading.matrix.sum(-1) == pytest.approx([1.0] * 6)
    window = by_name["sliding_window"].reading.matrix
    assert (window.tril(-3) == 0).all()
    assert (window.tril(-2).diagonal(-2) > 0).all()


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
        (["--layers", "1"], "--layers must name a layer that is linear in its values"),
        (["--text", "a" * 600], "--text must be of at most 511 bytes, got 600"),
    ],
)
def test_what_cannot_be_drawn_says_so(run, words, message, capsys):
    assert main(["plot", "attention", str(run), *words]) == 1
    assert message in capsys.readouterr().err


def test_tokens_that_are_no_bytes_are_not_drawn_as_bytes(tmp_path, capsys):
    small_model("deltanet", vocab_size=64).save(tmp_path)
    assert main(["plot", "attention", str(tmp_path)]) == 1
    assert "64 tokens and no tokenizer.json to read text with: copy" in (capsys.readouterr().err)


def test_the_largest_is_black_and_nothing_is_white():
    _, [[axes]] = new_grid(1, 1, title="t")
    layer_view.draw_matrix(axes, torch.tensor([[0.5, 0.0], [-2.0, 0.1]]), [1, 2], "m")
    image = axes.images[0]
    assert image.get_array().tolist() == [[0.5, 0.0], [1.0, pytest.approx(0.05**0.5)]]
    assert image.get_cmap()(1.0)[:3] == pytest.approx((0, 0, 0), abs=0.01)
    assert image.get_cmap()(0.0)[:3] == pytest.approx((1, 1, 1), abs=0.01)
    # Each negative entry has its dot: read by token 1, written by token 0.
    assert [axes.lines[0].get_xdata().tolist(), axes.lines[0].get_ydata().tolist()] == [[0], [1]]


def test_a_view_of_zeros_can_be_drawn(tmp_path):
    zeros = layer_view.Reading(torch.zeros(3, 3), None, torch.zeros(3), torch.zeros(3))
    layer_view.draw_layers(
        [layer_view.LayerView(0, "gla", zeros)], [1, 2, 3], tmp_path / "x.png", title=""
    )
    assert (tmp_path / "x.png").exists()
