"""Models and checkpoints made on the spot, and the checks that every one of them goes through."""

import json

import pytest
import torch
from safetensors.torch import load_file

from deltarule.models import CausalLM, CheckpointError, ModelConfig
from deltarule.models.files import CONFIG, WEIGHTS
from tolerance import relative_rms

# Of logits, in float32.
CLOSE = 5e-6
MIXED = ("gated_deltanet", "sliding_window", "attention", "rwkv7")


def small_config(**changes):
    fields = {
        "vocab_size": 257, "hidden_size": 32, "num_layers": 4, "num_heads": 2,
        "layer_types": MIXED,
    }  # fmt: skip
    fields |= changes
    windowed = "sliding_window" in fields["layer_types"]
    return ModelConfig(**({"window": 5} if windowed else {}) | fields)


def check_graphs(model, prompts, **options):
    """The tokens of separate calls, which a call that captures and those that replay give, too."""
    expected = model.generate(prompts, cuda_graphs=False, **options)
    for _ in range(3):
        assert model.generate(prompts, **options) == expected
    return expected


def same_states(found, expected):
    """Bit for bit."""
    for layer, other in zip(found, expected, strict=True):
        assert all(torch.equal(layer[name], other[name]) for name in other)


def drawn(name, shape):
    """Of a size that keeps the stream and the gates in their usual range."""
    if name.endswith("A_log"):
        return torch.rand(shape) * 2 - 1
    if name.endswith("dt_bias"):
        return torch.rand(shape) * 2 - 3
    if len(shape) == 1:
        return 1 + 0.1 * torch.randn(shape)
    return torch.randn(shape) * (0.5 if "conv" in name else shape[-1] ** -0.5)


def redraw(model):
    """Draw every parameter, so that no zero and no one hides an error."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(drawn(name, parameter.shape))
    return model


def refuses(folder, *messages):
    """Loading says all of this, in one line."""
    with pytest.raises(CheckpointError) as caught:
        CausalLM.load(folder)
    for message in messages:
        assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def same_tensors(found, expected):
    """By name, bit for bit."""
    assert {*found} == {*expected}
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def close(found, expected):
    assert relative_rms(found.double(), expected.double()) < CLOSE


def check_ways_of_reading(model, tokens):
    """Parts, steps, padding on both sides and packed rows give what whole rows give."""
    whole, last = model(tokens)
    (first, state), rest = model(tokens[:, :13], model.init_state(len(tokens))), []
    for part in tokens[:, 13:].split([7, 0, *[1] * (tokens.shape[1] - 20)], 1):
        y, state = model(part, state)
        rest.append(y)
    close(torch.cat([first, *rest], 1), whole)
    assert [layer.keys() for layer in state] == [layer.keys() for layer in last]

    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[0, :5], mask[1, 30:] = False, False
    padded, after = model(tokens, mask=mask)
    for row, part in ((0, slice(5, None)), (1, slice(0, 30))):
        alone, state = model(tokens[row : row + 1, part])
        close(padded[row, part], alone[0])
        # What is read next goes on from the last token that counts.
        more = tokens[row : row + 1, :6]
        close(model(more, after.select([row]))[0], model(more, state)[0])

    lengths = [9, 1, 0, tokens.shape[1] - 10]
    packed, _ = model(tokens[:1], cu_seqlens=torch.tensor([0, *lengths]).cumsum(0))
    alone = [model(document)[0] for document in tokens[:1].split(lengths, 1)]
    close(packed, torch.cat(alone, 1))


def check_round_trip(folder, family, again, aliases=None):
    """What was read is written as it was, bit for bit, and its config.json says the same.

    `aliases` are names that change on the way.
    """
    model = CausalLM.load(folder)
    model.save(again, family)
    before, after = (load_file(path / WEIGHTS) for path in (folder, again))
    before = {(aliases or {}).get(name, name): tensor for name, tensor in before.items()}
    assert {*before} == {*after}
    for name, tensor in before.items():
        # Gates of 16 bits are widened, which loses nothing.
        assert after[name].dtype in (tensor.dtype, torch.float32), name
        assert torch.equal(after[name].to(tensor.dtype), tensor), name
    assert json.loads((again / CONFIG).read_text())["model_type"] == family
    assert CausalLM.load(again).config == model.config
