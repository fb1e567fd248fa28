"""Where tokens go, and what padding is turned into."""

import pytest
import torch

import deltarule
from deltarule.nn import layout
from deltarule.nn.layout import front_mask, make_layout, shared_layout
from small import small_model


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("given", ["cu_seqlens", "mask"])
def test_the_layers_of_a_model_work_out_once_where_tokens_lie(given, checkpointing, monkeypatch):
    made = []
    plain = layout.make_layout
    monkeypatch.setattr(layout, "make_layout", lambda *args: made.append(1) or plain(*args))
    model = small_model(*["gated_deltanet"] * 3)
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
