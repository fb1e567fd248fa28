"""Where tokens go, and what padding is turned into."""

import pytest
import torch

import deltarule
from deltarule.models import CausalLM, ModelConfig
from deltarule.nn import layout
from deltarule.nn.layout import front_mask, make_layout, per_step, shared_layout, silence_padding


def test_real_tokens_move_to_the_front_and_back():
    x = torch.arange(1.0, 6).view(1, 5, 1)
    mask = torch.tensor([[False, True, False, True, True]])
    layout = make_layout(x, None, mask)
    assert layout.to_front(x).flatten().tolist() == [2, 4, 5, 0, 0]
    assert layout.real.tolist() == [[True, True, True, False, False]]
    placed = layout.to_place(layout.to_front(x)) * mask[..., None]
    assert placed.flatten().tolist() == [0, 2, 0, 4, 5]
    assert layout.counts.tolist() == [3]


def test_packed_positions_and_history():
    x = torch.arange(1.0, 4).view(1, 3, 1)
    layout = make_layout(x, deltarule.pack([0, 2, 0, 1]), None)
    assert layout.positions(torch.tensor([7, 10, 20, 30])).tolist() == [[10, 11, 30]]
    history = -torch.arange(1.0, 9).view(4, 2, 1)
    extended = layout.with_history(x, history)
    assert extended.flatten().tolist() == [-1, -2, -3, -4, 1, 2, -5, -6, -7, -8, 3]
    after = layout.next_history(x, history)
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


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("given", ["cu_seqlens", "mask"])
def test_the_layers_of_a_model_work_out_once_where_tokens_lie(given, checkpointing, monkeypatch):
    made = []
    plain = layout.make_layout
    monkeypatch.setattr(layout, "make_layout", lambda *args: made.append(1) or plain(*args))
    config = ModelConfig(
        vocab_size=17, hidden_size=16, num_layers=3, num_heads=2, layer_types="gated_deltanet"
    )
    model = CausalLM(config)
    model.activation_checkpointing = checkpointing
    tokens = torch.randint(17, (1, 9))
    options = {"cu_seqlens": deltarule.pack([4, 5]), "mask": torch.arange(9)[None] > 3}
    for passes in (1, 2):
        # Other tensors with the same numbers are worked out anew.
        model(tokens, **{given: options[given].clone()})[0].sum().backward()
        assert len(made) == passes


def test_a_layout_of_other_tokens_is_not_shared():
    shared, offsets = {}, deltarule.pack([2, 1])
    first = shared_layout(torch.zeros(1, 3, 1), offsets, None, None, shared)
    assert shared_layout(torch.ones(1, 3, 4), offsets, None, None, shared) is first
    assert shared_layout(torch.ones(1, 3, 4), offsets.clone(), None, None, shared) is not first
    mask = torch.ones(1, 3, dtype=torch.bool)
    assert shared_layout(torch.ones(1, 3, 4), None, mask, None, shared).cu_seqlens is None
    shared_layout(torch.ones(1, 3, 4), offsets, None, None, shared)
    with pytest.raises(ValueError, match="cu_seqlens"):
        shared_layout(torch.ones(1, 4, 1), offsets, None, None, shared)


def test_rows_that_are_known_to_begin_with_real_tokens_are_not_moved():
    x, lengths = torch.randn(2, 4, 3), torch.tensor([4, 1])
    mask = front_mask(lengths, 4)
    assert mask.tolist() == [[True] * 4, [True, False, False, False]]
    known, found = make_layout(x, None, mask), make_layout(x, None, mask.clone())
    assert known.order is None
    assert known.place is None
    assert torch.equal(known.real, found.real)
    assert torch.equal(known.counts, found.counts)
    assert torch.equal(known.to_front(x)[mask], found.to_front(x)[mask])
    assert known.to_place(x) is x
