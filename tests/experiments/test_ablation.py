import pytest
import torch

from deltarule.models import CausalLM, count_parameters
from experiments.ablation import EXPERIMENT, ON_A_LAPTOP, VARIANTS
from experiments.table import load_experiment
from text_results import text_result


@pytest.mark.parametrize("scale", ["laptop", "gpu"])
def test_variants_have_equal_parameters(scale):
    sizes = [count_parameters(cell.model) for cell in EXPERIMENT.cells(scale)]
    assert max(sizes) < 1.01 * min(sizes)


def test_two_variants_run_on_a_laptop():
    assert [cell.name for cell in EXPERIMENT.cells("laptop")] == [f"{n}-seed0" for n in ON_A_LAPTOP]


def test_each_variant_is_another_layer():
    models = {cell.name: cell.model for cell in EXPERIMENT.cells("gpu") if cell.loop.seed == 0}
    assert len({model.to_json() for model in models.values()}) == len(VARIANTS)
    head = models["gated-head-256-seed0"]
    assert (head.num_heads, head.head_k_dim, head.head_v_dim) == (1, 256, 256)
    with torch.device("meta"):
        mixer = CausalLM(models["gated-no-gate-seed0"]).blocks[0].mixer
        assert mixer.g_proj is None
        assert CausalLM(models["gated-no-conv-seed0"]).blocks[0].mixer.conv_size == 0


@pytest.mark.parametrize("scale", ["laptop", "gpu"])
def test_table_and_figure(scale, tmp_path):
    results = [text_result(cell, 2.0) for cell in EXPERIMENT.cells(scale)]
    path = tmp_path / "figure.png"
    EXPERIMENT.draw(scale, results, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    table = EXPERIMENT.table(scale, results)
    assert "| DeltaNet | L1, 1+ELU |" in table
    assert "31.12" in table
    assert ("heads of 256" in table) == (scale == "gpu")


def test_it_is_in_the_table_of_experiments():
    assert load_experiment("ablation") is EXPERIMENT
    assert EXPERIMENT.deviations.keys() == EXPERIMENT.needs.keys()
