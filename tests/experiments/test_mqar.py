"""The cells are the paper's where they say so; the table shows the best rate and every gap."""

from deltarule.tasks.mqar import Config
from experiments import mqar
from experiments.experiment import Result
from experiments.mqar import best, entry
from experiments.table import load_experiment

MQAR = load_experiment("mqar")


def test_the_gpu_form_has_the_task_of_the_figure_and_6_of_its_64_epochs():
    cells = MQAR.cells("gpu")
    assert len(cells) == 7 * 2 * 2
    for cell in cells:
        assert cell.training == Config(length=512, pairs=64, vocab_size=8192)
        assert (cell.rows, cell.examples, cell.evaluations[0].rows) == (128, 100_000, 3000)
        assert (cell.model.num_layers, cell.model.mlp_size, cell.model.conv_size) == (2, 0, 0)
        assert cell.loop.steps == 6 * (100_000 // 128)


def test_states_are_of_one_size():
    sizes = {
        (cell.model.num_heads, cell.model.head_k_dim, cell.model.head_v_dim)
        for cell in MQAR.cells("gpu")
        if cell.model.hidden_size == 64 and cell.model.layer_types[0] != "attention"
    }
    assert sizes == {(2, 32, 32)}


def result(rate, seed, accuracy):
    figures = {"evaluations": {mqar.LABEL: {"accuracy": accuracy}}, "steps": 100}
    name = f"deltanet-d64-lr{rate:g}-seed{seed}"
    return Result(name, {"optimizer": {"lr": rate}}, figures)


def test_an_entry_is_of_the_rate_that_is_best_in_the_mean_over_seeds():
    lucky = [result(1e-2, 0, 0.99), result(1e-2, 1, 0.1)]
    steady = [result(1e-3, 0, 0.8), result(1e-3, 1, 0.7)]
    assert best([*lucky, *steady], "deltanet", 64) == steady
    assert best(lucky, "deltanet", 128) == best(lucky, "gla", 64) == []
    assert entry(steady) == "75.0% (70.0% to 80.0%) in 100 and 100 steps"
    assert entry(steady[:1]) == "80.0% in 100 steps"
    assert entry([]) == "-"
