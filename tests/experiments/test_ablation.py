import pytest
import torch

from deltarule.models import CausalLM, count_parameters
from experiments.table import load_experiment

EXPERIMENT = load_experiment("ablation")


@pytest.mark.parametrize("scale", ["laptop", "gpu"])
def test_variants_have_equal_parameters(scale):
    sizes = [count_parameters(cell.model) for cell in EXPERIMENT.cells(scale)]
    assert max(sizes) < 1.01 * min(sizes)


def test_each_variant_is_another_layer():
    models = {cell.name: cell.model for cell in EXPERIMENT.cells("gpu") if cell.loop.seed == 0}
    assert len({model.to_json() for model in models.values()}) == len(
        EXPERIMENT.forms["gpu"]["variants"]
    )
    head = models["gated-head-256-seed0"]
    assert (head.num_heads, head.head_k_dim, head.head_v_dim) == (1, 256, 256)
    with torch.device("meta"):
        mixer = CausalLM(models["gated-no-gate-seed0"]).blocks[0].mixer
        assert mixer.g_proj is None
        assert CausalLM(models["gated-no-conv-seed0"]).blocks[0].mixer.conv_size == 0
