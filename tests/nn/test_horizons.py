"""Heads that start with horizons spread up to a stated one."""

import pytest
import torch

from deltarule.nn import MIXERS, GatedDeltaNet
from deltarule.nn.gates import starting_horizons

SPREAD = [name for name, mixer in MIXERS.items() if mixer.takes("longest_horizon")]


@pytest.mark.parametrize("name", SPREAD)
def test_the_last_head_starts_with_the_longest(name):
    sizes = {"hidden_size": 64, "num_heads": 4, "num_v_heads": 4}
    layer = MIXERS[name](**sizes, longest_horizon=2048.0)
    # 8 * 256^(1/4), ^(2/4), ^(3/4), ^1
    assert starting_horizons(layer) == [pytest.approx([32.0, 128.0, 512.0, 2048.0], abs=0.2)]


def test_a_token_that_asks_for_nothing_is_kept_that_long():
    layer = GatedDeltaNet(32, num_heads=2, longest_horizon=512.0)
    x = torch.zeros(1, 512, 32)
    with torch.no_grad():
        state = layer.init_state(1)
        state["recurrent"].fill_(1)
        kept = layer(x, state)[1]["recurrent"]
    share = kept[0].mean((-1, -2))
    assert share.tolist() == pytest.approx([2.718**-8, 2.718**-1], rel=0.01)


def test_none_is_the_papers_draw():
    torch.manual_seed(3)
    before = GatedDeltaNet(32, num_heads=2).A_log.detach()
    torch.manual_seed(3)
    after = GatedDeltaNet(32, num_heads=2, longest_horizon=None).A_log
    assert torch.equal(before, after)
    assert float(before.exp().min()) > 0
    assert float(before.exp().max()) < 16
