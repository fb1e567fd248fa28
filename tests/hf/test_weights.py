"""Checkpoints of transformers' own classes: read, written, and equal to the classes' logits."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from deltarule.models import CausalLM
from hf.families import tiny, tokens
from models.checkpoints import check_round_trip, check_ways_of_reading, close

# By a title, the family and its options.
CONFIGS = {
    "mamba2": ("mamba2", {}),
    "mamba2, tied, without bias": (
        "mamba2",
        {"tie_word_embeddings": True, "use_conv_bias": False, "n_groups": 1},
    ),
}


@pytest.fixture(params=CONFIGS)
def case(request, tmp_path):
    """A model of transformers, the folder that it has saved itself to, and its model_type."""
    name, options = CONFIGS[request.param]
    model = tiny(name, **options)
    model.save_pretrained(tmp_path / "theirs")
    return model, tmp_path / "theirs", model.config.model_type


def test_logits_are_those_of_the_familys_class(case):
    theirs, folder, _ = case
    x = tokens(2, 70)
    with torch.no_grad():
        close(CausalLM.load(folder)(x)[0], theirs(x, use_cache=False).logits)


def test_ways_of_reading(case):
    with torch.no_grad():
        check_ways_of_reading(CausalLM.load(case[1]), tokens(2, 40))


def test_the_round_trip_is_bit_equal_and_transformers_reads_it(case, tmp_path):
    theirs, folder, model_type = case
    check_round_trip(folder, model_type, tmp_path / "ours")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    x = tokens(2, 40)
    with torch.no_grad():
        expected = theirs(x, use_cache=False).logits
        # Its chunks may have another size.
        close(again(x, use_cache=False).logits, expected)


def test_gradients_reach_every_parameter(case):
    model = CausalLM.load(case[1])
    model(tokens(1, 20))[0].square().mean().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []
