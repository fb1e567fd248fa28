"""Heads, channels and vocabulary over processes: what one process computes."""

import pytest
from processes import Processes
from whole_models import config_of

from deltarule.models import CausalLM
from deltarule.nn import MIXERS
from deltarule.parallel.heads import local_block

# A layer of each kind: grouped heads, token shift, products and norms over heads, constants, steps.
KINDS = [
    "gated_deltanet", "rwkv7", "mamba1", "mamba2", "retnet", "gated_delta_product", "attention",
    "experts", "gsa", "lightning",
]  # fmt: skip
OF_ALL = [name for name in MIXERS if not MIXERS[name].heads_alone]


# By processes, mixer and how many of them its heads are split over.
SPLITS = [
    *(("two", mixer, 2) for mixer in KINDS), ("two", "gated_deltanet", 1), ("two", "rwkv7", 1),
    *(
        pytest.param("four", mixer, tensor, marks=pytest.mark.distributed)
        for mixer in (*MIXERS, "experts") for tensor in (1, 2, 4)
        if tensor == 1 or mixer not in OF_ALL
    ),
]  # fmt: skip


@pytest.mark.parametrize(("count", "mixer", "tensor"), SPLITS)
def test_heads_and_shards(
    request: pytest.FixtureRequest, count: str, mixer: str, tensor: int
) -> None:
    processes, given = request.getfixturevalue(count), {"mixer": mixer, "tensor": tensor}
    found = processes("whole_models.heads_and_shards", **given)
    if given == {"mixer": "gated_deltanet", "tensor": 2}:
        # What the backward computes again is split too.
        found += processes("whole_models.heads_recomputed", **given)
    for errors in found:
        assert max(errors.values()) < 1e-10, errors


def test_experts_are_sharded_and_what_chooses_them_is_exact(two: Processes) -> None:
    for names in two("whole_models.replicated", mixer="experts"):
        assert "mlp.router.weight" in names
        assert not {"mlp.up_proj", "mlp.down_proj", "mlp.shared.up_proj.weight"} & set(names)


def test_gradients_in_16_bits_are_summed_in_32(two: Processes) -> None:
    for same, sent, numbers in two("whole_models.widened_sums", mixer="gated_deltanet"):
        assert same
        # Half of the gradients leave each of two.
        assert sent == pytest.approx(2 * numbers / 2)


@pytest.mark.parametrize(
    ("name", "fields"),
    [("num_heads=3", {"num_heads": 3, "num_v_heads": 3}), ("mlp_size=33", {"mlp_size": 33})],
)
def test_sizes_that_do_not_divide_are_named(two: Processes, name: str, fields: dict) -> None:
    for message in two("whole_models.heads_refused", head_k_dim=16, **fields):
        assert message.startswith(f"{name} cannot be split over 2 processes")


@pytest.mark.parametrize("mixer", OF_ALL)
def test_layers_whose_heads_read_each_other_name_themselves(mixer: str) -> None:
    model = CausalLM(config_of(mixer))
    with pytest.raises(ValueError, match=f"{mixer} cannot be split over 2 processes, each of"):
        local_block(model.config, 0, model.blocks[0].mixer, 2)
