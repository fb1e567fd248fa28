import dataclasses

import pytest
import torch

from deltarule.models import CausalLM, ModelConfig
from deltarule.tasks import load_task
from experiments.autoencoder import Autoencoder, positions
from experiments.experiment import Result
from experiments.mad import EXPERIMENT, PUBLISHED, SETTINGS, make_cell
from experiments.records import plain
from experiments.table import load_experiment
from text_results import failed

CONFIG = ModelConfig(
    vocab_size=16, hidden_size=32, num_layers=2, num_heads=2, layer_types="deltanet"
)


def mad_result(cell, accuracy):
    figures = {
        "evaluations": {
            one.label: {"accuracy": accuracy, "share_right": 0.9} for one in cell.evaluations
        },
        "curve": [[100, 2.0, 0.1], [200, 1.0, accuracy]],
        "steps": 200,
    }
    return Result(cell.name, plain(cell), figures, None, 60.0)


@pytest.mark.parametrize("scale", ["laptop", "gpu"])
def test_every_cell_can_be_built_and_told_apart(scale):
    cells = EXPERIMENT.cells(scale)
    assert len({cell.name for cell in cells}) == len(cells) == {"laptop": 6, "gpu": 30}[scale]
    for cell in cells:
        with torch.device("meta"):
            model = cell.build()
        assert isinstance(model, Autoencoder) == (cell.task == "mad_compression")
        assert cell.model.vocab_size == cell.training.vocab_size
        assert load_task(cell.task).Config is type(cell.training)


def test_settings_are_the_benchmarks_baselines():
    gpu = SETTINGS["gpu"]
    assert list(gpu) == ["compression", "fuzzy", "recall", "memorization", "noisy", "copying"]
    config = {name: setting.config for name, setting in gpu.items()}
    assert {n: (c.vocab_size, c.length) for n, c in config.items()} == {
        "compression": (16, 32), "fuzzy": (16, 128), "recall": (16, 128),
        "memorization": (256, 32), "noisy": (32, 128), "copying": (16, 256),
    }  # fmt: skip
    assert (config["noisy"].noise_vocab_size, config["noisy"].noise) == (16, 0.2)
    assert config["copying"].copied == 16
    assert {setting.rows for setting in gpu.values()} == {128}
    # Recall tasks learn every next token, and are tested on answers alone.
    for name in ("recall", "noisy", "fuzzy"):
        assert gpu[name].training.training
        assert not gpu[name].config.training
    # The mean of DeltaNet's row, as the paper prints it.
    assert round(sum(PUBLISHED["deltanet"].values()) / 6, 1) == 71.8
    assert round(sum(PUBLISHED["gla"].values()) / 6, 1) == 60.0
    assert round(sum(PUBLISHED["attention"].values()) / 6, 1) == 74.5


@pytest.mark.parametrize("scale", ["laptop", "gpu"])
def test_table_and_figure(scale, tmp_path):
    cells = EXPERIMENT.cells(scale)
    results = [mad_result(cell, 0.875) for cell in cells[:-1]]
    results.append(failed(cells[-1], "DivergedError: the loss is not finite"))
    path = tmp_path / "figure.png"
    EXPERIMENT.draw(scale, results, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    table = EXPERIMENT.table(scale, results)
    assert "| In-context recall | DeltaNet | 87.5% | 90.00% | 200 | 100.0 % |" in table
    assert "| In-context recall | Linear attention | 87.5% | 90.00% | 200 | - |" in table
    assert "failed: `copying-deltanet`" in table
    assert "Copying | DeltaNet" not in table
    # Before anything has finished there is nothing to draw, but no crash.
    assert "task" in EXPERIMENT.table(scale, [])


def test_it_is_in_the_table_of_experiments():
    assert load_experiment("mad") is EXPERIMENT
    assert EXPERIMENT.deviations.keys() == EXPERIMENT.needs.keys()


def test_a_short_run_learns_to_copy(tmp_path):
    cell = make_cell("laptop", "copying", "deltanet")
    config = dataclasses.replace(cell.training, length=16, copied=4)
    figures = dataclasses.replace(
        cell, training=config, evaluations=(dataclasses.replace(cell.evaluations[0], config=config,
                                                                rows=64),), watched_rows=64,
        loop=dataclasses.replace(cell.loop, steps=60, evaluate_every=30),
    ).run(tmp_path, torch.device("cpu"))  # fmt: skip
    score = figures["evaluations"]["new rows"]
    assert score["accuracy"] > 1.5 * config.chance
    assert score.keys() >= {"accuracy", "share_right", "sequence_accuracy"}


def test_an_autoencoder_reads_one_vector_at_each_position():
    torch.manual_seed(0)
    model = Autoencoder(CONFIG)
    tokens = torch.randint(16, (3, 7))
    x, _ = model.hidden(tokens)
    last = CausalLM.hidden(model, tokens)[0][:, -1]
    for t in range(7):
        place = positions(7, 32, torch.device("cpu"))[t]
        assert torch.allclose(x[:, t], model.decoder(last + place), atol=1e-6)
    # Every token changes what is said at every position, the first one too.
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 16
    assert (model.hidden(changed)[0][:, 0] != x[:, 0]).any()


def test_positions_are_sines_and_cosines_of_growing_wavelengths():
    table = positions(20, 8, torch.device("cpu"))
    places = torch.arange(20.0)
    assert torch.allclose(table[:, 0], places.sin())
    assert torch.allclose(table[:, 4], places.cos())
    assert torch.allclose(table[:, 3], (places / 10_000).sin(), atol=1e-6)


@pytest.mark.parametrize("size", [2, 33])
def test_an_autoencoder_needs_room_for_positions(size):
    config = dataclasses.replace(CONFIG, hidden_size=size, num_heads=1, head_k_dim=2, head_v_dim=2)
    with pytest.raises(ValueError, match=f"hidden_size must be even and 4 or more.*got {size}"):
        Autoencoder(config)


def test_an_autoencoder_learns(tmp_path):
    cell = make_cell("gpu", "compression", "deltanet")
    config = dataclasses.replace(cell.training, length=4, vocab_size=5)
    evaluation = dataclasses.replace(cell.evaluations[0], config=config, rows=64)
    figures = dataclasses.replace(
        cell, training=config, evaluations=(evaluation,), watched_rows=64, rows=64, examples=256,
        model=dataclasses.replace(CONFIG, vocab_size=5, tie_embeddings=False),
        optimizer=dataclasses.replace(cell.optimizer, lr=5e-3),
        loop=dataclasses.replace(cell.loop, steps=80, evaluate_every=40, dtype="float32"),
    ).run(tmp_path, torch.device("cpu"))  # fmt: skip
    assert figures["evaluations"]["new rows"]["accuracy"] > 0.7
