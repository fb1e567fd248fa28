"""The Triton kernels of `mesa`, `ttt` and `titans` on a CUDA device, against float64."""

import pytest
import torch

from ops import memories
from tolerance import relative_rms

pytestmark = pytest.mark.gpu
LENGTHS = (3, 0, 150, 1, 70)


def assert_near(found, own, exact, bar):
    """As near to float64 as PyTorch in float32 is, or within the bar: products are in tf32."""
    for name, x in found.items():
        error = relative_rms(x, exact[name], floor=1e-9)
        assert error <= max(4 * relative_rms(own[name], exact[name], floor=1e-9), bar), name


def on_gpu(operator, lengths, dtype=torch.float32, maps=1, **options):
    options = {"tokens": 150, "size": 16, "lengths": lengths} | options
    case = memories.make(operator, maps, **options)
    rounded = {
        name: x.cuda() if name == "position"
        else x.to("cuda", dtype if name in "qkv" else torch.float32)
        for name, x in case.tensors.items()
    }  # fmt: skip
    exact = {name: x if name == "position" else x.double() for name, x in rounded.items()}
    return case.changed(**rounded), case.changed(**exact)


@pytest.mark.parametrize("lengths", [None, LENGTHS])
@pytest.mark.parametrize(("channels", "size"), [(4, 5), (64, 16), (48, 1)])
@pytest.mark.parametrize("operator", ["ttt", "titans"])
def test_memories(operator, channels, size, lengths, monkeypatch):
    monkeypatch.setattr(memories, "K", channels)
    assert_as_near_as_pytorch(operator, lengths, size=size)


def assert_as_near_as_pytorch(operator, lengths, **options):
    case, exact = on_gpu(operator, lengths, **options)
    found, own, wanted = case.run("triton"), case.run("torch"), exact.run("torch")
    named = [dict(enumerate(memories.tensors_of(out))) for out in (found, own, wanted)]
    assert_near(*named, 2e-6)
    assert torch.equal(found.final_state.position, wanted.final_state.position)
    gradients = case.gradients("triton"), case.gradients("torch"), exact.gradients("torch")
    assert_near(*gradients, 1e-5)


@pytest.mark.parametrize("channels", [72, 128])
@pytest.mark.parametrize("operator", ["ttt", "titans"])
def test_a_wide_memory(operator, channels, monkeypatch):
    monkeypatch.setattr(memories, "K", channels)
    assert_as_near_as_pytorch(operator, LENGTHS)


@pytest.mark.parametrize("lengths", [None, LENGTHS])
@pytest.mark.parametrize(("channels", "inner", "size"), [(4, 7, 5), (64, 256, 16), (128, 130, 1)])
@pytest.mark.parametrize("operator", ["ttt", "titans"])
def test_memories_of_two_maps(operator, channels, inner, size, lengths, monkeypatch):
    monkeypatch.setattr(memories, "K", channels)
    monkeypatch.setattr(memories, "INNER", inner)
    assert_as_near_as_pytorch(operator, lengths, size=size, maps=2)


@pytest.mark.parametrize("maps", [1, 2])
@pytest.mark.parametrize("operator", ["ttt", "titans"])
def test_memories_are_chosen_in_16_bits_and_repeatable(operator, maps):
    case, exact = on_gpu(operator, None, torch.bfloat16, maps=maps)
    out = case.run()
    assert torch.equal(out.o, case.run("triton").o)
    assert relative_rms(out.o, exact.run("torch").o) < 2**-7
    first, second = case.gradients("auto"), case.gradients("auto")
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("operator", ["ttt", "titans"])
def test_what_the_kernels_do_not_take_is_named(operator):
    case, _ = on_gpu(operator, None, size=17)
    with pytest.raises(ValueError, match="mini-batches up to 16, got K = 4, V = 4 and 17"):
        case.run("triton")
