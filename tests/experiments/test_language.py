import pytest

from experiments.experiment import Result, load_experiment
from experiments.records import plain
from experiments.seeds import Runs, noise
from experiments.text_cell import equal_size, text_model

EXPERIMENT = load_experiment("language")


def test_an_mlp_cannot_make_a_model_smaller():
    with pytest.raises(ValueError, match="parameters must be at least"):
        equal_size(text_model("gated_deltanet", "laptop"), 1000)


@pytest.fixture
def results():
    """Linear attention clearly worse, two systems level."""
    chosen = {"linear_attention": 2.5, "deltanet": 2.0, "gated_deltanet": 1.99}
    data = {"source": "a text", "bytes": 1000}
    found = []
    for cell in EXPERIMENT.cells("gpu"):
        name = cell.name.partition("-seed")[0]
        if name in chosen and cell.loop.seed < 2:
            score = {"512": {"bits_per_byte": chosen[name] + 0.02 * cell.loop.seed}}
            figures = {"evaluations": score, "parameters": 450_000, "data": data}
            found.append(Result(cell.name, plain(cell), figures))
    return found


def test_the_table_claims_no_order_inside_the_noise(results):
    table = EXPERIMENT.table("gpu", results)
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")][1:]
    names = [row[0].removeprefix("| ") for row in rows]
    assert names == ["Gated DeltaNet", "DeltaNet", "Linear attention"]
    assert rows[0][3] == "2.000 ± 0.014"
    assert "16.42" in rows[0][6]
    assert "Differences below 0.042 bits" in table
    assert "Text: a text, 1,000 bytes" in table
    first = [run for run in results if run.name.endswith("seed0")]
    assert "One seed each" in EXPERIMENT.table("laptop", first)


def test_noise_comes_from_the_seeds():
    level = {"a": Runs([1.0, 1.1]), "b": Runs([1.05, 1.15])}
    assert noise(level) == pytest.approx(3 * (2 * 0.005 / 2) ** 0.5)
    assert noise({"a": Runs([1.0, 1.1]), "b": Runs([2.0])}) is None
