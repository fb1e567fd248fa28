"""Every family on our operators against the same model on transformers' own functions."""

import pytest
import torch

from deltarule.hf import patch
from deltarule.hf.hooks import CACHE
from hf.families import (
    FAMILIES,
    FORMS,
    alone,
    cache_name,
    collated,
    error,
    logits,
    takes_positions,
    tiny,
    tokens,
)

LENGTHS = (13, 1, 40, 16)
RECURRENT = {"layer_types": ["linear_attention"] * 4}
# transformers' cache of MiniMax has no length in its first layer: attention sees padding.
PADDED_ON_THE_RIGHT = {"minimax": RECURRENT}
# Its attention pools keys over the borders of documents, and of padding.
PACKED = {"glm5_next": RECURRENT}


@pytest.fixture(params=FAMILIES)
def name(request) -> str:
    return request.param


@pytest.fixture
def model(name):
    return tiny(name)


def gradients(model, ids):
    model.zero_grad()
    model(ids, labels=ids, use_cache=False).loss.backward()
    return {
        key: parameter.grad.clone()
        for key, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def test_logits_and_gradients(model):
    ids = tokens(2, 70)
    model.train()
    before, slopes = logits(model, ids), gradients(model, ids)
    with patch(model):
        assert error(logits(model, ids), before) < 1e-5
        ours = gradients(model, ids)
    assert ours.keys() == slopes.keys()
    for key, slope in slopes.items():
        # A bias that the loss does not see has a gradient of rounding errors.
        if slope.norm() > 1e-7:
            assert error(ours[key], slope) < 1e-4, key
    assert torch.equal(logits(model, ids), before)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        *((name, 1) for name in FAMILIES),
        *((name, 10) for name in ("qwen3_5", "qwen3_next", "kimi_linear", "olmo_hybrid")),
    ],
)
def test_some_tokens_at_a_time_continue_the_prompt(name, count):
    model, ids = tiny(name), tokens(2, 40)
    key = cache_name(model)
    with patch(model), torch.no_grad():
        whole = logits(model, ids)
        out = model(ids[:, :30], use_cache=True)
        parts = [out.logits]
        for t in range(30, 40, count):
            row = torch.arange(t, t + count).expand(2, -1)
            places = {"position_ids": row} if takes_positions(model) else {}
            out = model(ids[:, t : t + count], use_cache=True, **{key: out[key]}, **places)
            parts.append(out.logits)
    assert error(torch.cat(parts, 1), whole) < 1e-5


def test_generate_gives_the_same_tokens(model):
    ids = tokens(2, 20)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    options = {"attention_mask": mask, "max_new_tokens": 8, "min_new_tokens": 8}
    plain = model.generate(ids, do_sample=False, **options)
    beams = model.generate(ids, do_sample=False, num_beams=3, **options)
    with patch(model):
        assert torch.equal(model.generate(ids, do_sample=False, **options), plain)
        assert torch.equal(model.generate(ids, do_sample=False, num_beams=3, **options), beams)


@pytest.mark.parametrize("form", FORMS)
def test_packed_documents_stay_apart(name, form):
    model = tiny(name, **PACKED.get(name, {}))
    documents = [tokens(length) for length in LENGTHS]
    packing = collated(documents, form)
    packing.pop("labels")
    row = packing.pop("input_ids")
    with patch(model):
        expected = alone(model, documents)
        assert error(logits(model, row, **packing), expected) < 5e-6
        # Positions that run on are as good, since attention sees their differences only.
        assert error(logits(model, row, **{form: packing[form]}), expected) < 5e-6
        model.train()
        assert error(logits(model, row, **packing), expected) < 5e-6


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - {"glm5_next"}))
def test_padding_on_the_right_is_not_in_the_state(name):
    model = tiny(name, **PADDED_ON_THE_RIGHT.get(name, {}))
    key, lengths = cache_name(model), torch.tensor([23, 40])
    ids, following = tokens(2, 40), tokens(2, 1)
    mask = (torch.arange(40) < lengths[:, None]).long()
    places = {} if not takes_positions(model) else {"position_ids": lengths[:, None]}
    with patch(model), torch.no_grad():
        out = model(ids, attention_mask=mask, use_cache=True)
        longer = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
        padded = model(following, attention_mask=longer, **{key: out[key]}, **places).logits
        for row, length in enumerate(lengths):
            history = torch.cat([ids[row, :length], following[row]])[None]
            out = model(history[:, :-1], use_cache=True)
            places = {} if not takes_positions(model) else {"position_ids": length.view(1, 1)}
            single = model(history[:, -1:], **{key: out[key]}, **places).logits
            assert error(padded[row], single[0]) < 1e-5


def test_states_after_padding_on_the_right():
    """Of the layers before the first attention."""
    model, ids = tiny("glm5_next"), tokens(2, 40)
    mask = (torch.arange(40) < torch.tensor([[23], [40]])).long()
    with patch(model), torch.no_grad():
        padded = model(ids, attention_mask=mask, use_cache=True)[CACHE]
        single = model(ids[:1, :23], use_cache=True)[CACHE]
    for ours, theirs in zip(padded.layers[:3], single.layers[:3], strict=True):
        assert error(ours.recurrent_states[0][0], theirs.recurrent_states[0][0]) < 1e-5
        assert error(ours.conv_states[0][0], theirs.conv_states[0][0]) < 1e-5
