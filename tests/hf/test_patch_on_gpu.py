"""Patched models of transformers on a GPU, beside the same models patched on the CPU."""

import pytest
import torch

from deltarule.hf import patch
from hf.families import error, tiny, tokens

pytestmark = pytest.mark.gpu
GENERATE = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}


@pytest.mark.parametrize("name", ["qwen3_5", "kimi_linear", "mamba2"])
def test_whole_packed_steps_and_beams(name):
    model, ids = tiny(name), tokens(2, 70)
    # FLA, where it is installed, takes no CPU tensors: the CPU's side is patched, too.
    with patch(model), torch.no_grad():
        before = model(ids, use_cache=False).logits
        expected = [model.generate(ids[:, :20], num_beams=n, **GENERATE) for n in (1, 3)]
    model, ids = model.cuda(), ids.cuda()
    with patch(model), torch.no_grad():
        assert error(model(ids, use_cache=False).logits.cpu(), before) < 1e-5
        places = torch.cat([torch.arange(30), torch.arange(40)]).cuda()[None]
        alone = torch.cat([model(part).logits for part in ids[:1].split([30, 40], 1)], 1)
        assert error(model(ids[:1], position_ids=places).logits, alone) < 5e-6
        found = [model.generate(ids[:, :20], num_beams=n, **GENERATE) for n in (1, 3)]
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.cpu(), other)


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_next", "olmo_hybrid", "kimi_linear", "mamba2"])
def test_gradients(name):
    """Of every parameter, with one node for several projections and for each MLP."""
    model, ids = tiny(name).train(), tokens(2, 70)

    def gradients():
        model.zero_grad()
        there, parameters = ids.to(model.device), model.named_parameters()
        model(there, labels=there, use_cache=False).loss.backward()
        return {k: p.grad.to("cpu", copy=True) for k, p in parameters if p.grad is not None}

    with patch(model):
        before = gradients()
        model.cuda()
        found = gradients()
    assert found.keys() == before.keys()
    for key, slope in before.items():
        # A bias that the loss does not see has a gradient of rounding errors.
        if slope.norm() > 1e-7:
            assert error(found[key], slope) < 1e-4, key
