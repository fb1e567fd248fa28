"""Where tokens go, and what padding is turned into."""

import torch

import deltarule
from deltarule.nn.layout import make_layout, per_step, silence_padding


def test_real_tokens_move_to_the_front_and_back():
    x = torch.arange(1.0, 6).view(1, 5, 1)
    mask = torch.tensor([[False, True, False, True, True]])
    layout = make_layout(x, None, mask)
    assert layout.to_front(x).flatten().tolist() == [2, 4, 5, 0, 0]
    assert layout.real.tolist() == [[True, True, True, False, False]]
    assert (layout.to_place(layout.to_front(x)) * mask[..., None]).flatten().tolist() == [
        0,
        2,
        0,
        4,
        5,
    ]
    assert layout.counts.tolist() == [3]


def test_packed_positions_and_history():
    x = torch.arange(1.0, 4).view(1, 3, 1)
    layout = make_layout(x, deltarule.pack([0, 2, 0, 1]), None)
    assert layout.positions(torch.tensor([7, 10, 20, 30])).tolist() == [[10, 11, 30]]
    history = -torch.arange(1.0, 9).view(4, 2, 1)
    extended = layout.with_history(x, history)
    assert extended.flatten().tolist() == [-1, -2, -3, -4, 1, 2, -5, -6, -7, -8, 3]
    after = layout.next_history(extended, 2)
    assert after.squeeze(-1).tolist() == [[-1, -2], [1, 2], [-5, -6], [-8, 3]]


def test_silenced_arguments_are_zero_at_padding_only():
    n_steps, real = 3, torch.tensor([[True, False], [True, True]])
    given = {
        "q": torch.ones(2, 2, 1, 4), "k": torch.ones(2, 6, 1, 4), "v": torch.ones(2, 6, 1, 4),
        "beta": torch.ones(2, 6, 1), "log_decay": torch.ones(1), "a": torch.ones(2, 2, 1, 4),
        "b": torch.ones(2, 2, 1, 4), "scale": 1.0,
    }  # fmt: skip
    silent = silence_padding(given, real, n_steps=n_steps)
    for name in ("k", "v", "beta", "log_decay", "a", "b"):
        x = silent[name]
        rows = real if x.shape[1] == 2 else real.repeat_interleave(n_steps, dim=1)
        assert x.ndim == max(3, given[name].ndim), name
        assert (x[rows] == 1).all(), name
        assert (x[~rows] == 0).all(), name
    assert silent["q"] is given["q"]
    assert silence_padding(given, None, n_steps=n_steps) is given


def test_step_j_of_token_t_is_row_t_n_plus_j():
    x = torch.arange(2 * 3 * 4).view(1, 2, 12)
    rows = per_step(x, 3, 2, 2)
    assert rows.shape == (1, 6, 2, 2)
    assert rows[0, 1 * 3 + 2].flatten().tolist() == x[0, 1, 8:].tolist()
    assert per_step(x[..., :3], 3).tolist() == [[[0], [1], [2], [12], [13], [14]]]
