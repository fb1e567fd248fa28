"""Kimi Delta Attention against arXiv 2510.26692, eq. 1, in its transposed letters."""

import pytest
import torch

from deltarule.nn import KDA


def test_steps_of_a_bounded_decay_are_the_whole():
    torch.manual_seed(0)
    layer = KDA(32, num_heads=2, gate_lower_bound=-5.0)
    assert layer.A_log.tolist() == [0.0, 0.0]
    x, state, steps = torch.randn(1, 20, 32), None, []
    with torch.no_grad():
        whole = layer(x)[0]
        for t in range(20):
            y, state = layer(x[:, t : t + 1], state)
            steps.append(y)
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gate_lower_bound": 0.0}, "gate_lower_bound must be None or a finite number < 0"),
        ({"gate_lower_bound": -5.0, "longest_horizon": 64.0}, "longest_horizon must be None with"),
    ],
)
def test_bounds_that_mean_nothing(options, message):
    with pytest.raises(ValueError, match=message):
        KDA(32, num_heads=2, **options)
