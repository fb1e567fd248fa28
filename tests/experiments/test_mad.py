import dataclasses

import torch

from deltarule.models import CausalLM, ModelConfig
from experiments.experiment import load_experiment
from experiments.mad import Autoencoder, make_cell, positions

MAD = load_experiment("mad").forms
CONFIG = ModelConfig(
    vocab_size=16, hidden_size=32, num_layers=2, num_heads=2, layer_types="deltanet"
)


def test_published_means_are_those_that_the_paper_prints():
    published = MAD["gpu"]["published"]
    means = {"deltanet": 71.8, "gla": 60.0, "attention": 74.5}
    assert {name: round(sum(published[name].values()) / 6, 1) for name in means} == means


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


def test_an_autoencoder_learns(tmp_path):
    cell = make_cell(MAD["gpu"], "compression", "deltanet")
    config = dataclasses.replace(cell.training, length=4, vocab_size=5)
    evaluation = dataclasses.replace(cell.evaluations[0], config=config, rows=64)
    figures = dataclasses.replace(
        cell, training=config, evaluations=(evaluation,), watched_rows=64, rows=64, examples=256,
        model=dataclasses.replace(CONFIG, vocab_size=5, tie_embeddings=False),
        optimizer=dataclasses.replace(cell.optimizer, lr=5e-3),
        loop=dataclasses.replace(cell.loop, steps=80, evaluate_every=40, dtype="float32"),
    ).run(tmp_path, torch.device("cpu"))  # fmt: skip
    assert figures["evaluations"]["new rows"]["accuracy"] > 0.7
