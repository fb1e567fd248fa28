"""The Triton kernels of `ttt` and `titans` that stream their maps, under the interpreter."""

import pytest
import torch

from deltarule.ops.memory.torch import triton_scan
from kernels.test_ttt import assert_near, every_length, make, on_the_cpu, parts
from ops import memories
from promised import promised
from tolerance import relative_rms

promised("triton")

from deltarule.ops.memory.triton import passes

pytestmark = [
    pytest.mark.usefixtures(on_the_cpu.__name__),
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="kernels are compiled here: see test_memories_on_gpu"
    ),
]

# Two maps, or one as if it were too wide for registers. In blocks of 16 columns each has several,
# the last of which is not whole.
STREAMED = [("ttt", 1), ("ttt", 2), ("titans", 1), ("titans", 2)]
every_streamed = pytest.mark.parametrize(("operator", "maps"), STREAMED)


@pytest.fixture
def streamed(monkeypatch):
    monkeypatch.setattr(triton_scan, "is_held", lambda maps, norm: False)
    monkeypatch.setattr(passes, "COLUMNS", 16)


@pytest.fixture
def wide(streamed, monkeypatch):
    monkeypatch.setattr(memories, "K", 20)
    monkeypatch.setattr(memories, "INNER", 40)


@every_streamed
@every_length
def test_streamed_maps(operator, maps, lengths, wide):
    case, exact = make(operator, lengths, maps=maps, batch=1)
    out, expected = case.run("triton"), exact.run("reference")
    assert_near(parts(out), parts(case.run("torch")), parts(expected), bar=1e-6)
    assert torch.equal(out.final_state.position, expected.final_state.position)
    found, own = case.gradients("triton"), case.gradients("torch")
    assert_near(found, own, exact.gradients("torch"))


@every_streamed
def test_streamed_maps_of_groups_of_mini_batches(operator, maps, streamed):
    """Mini-batches of 2 tokens, 6 of them, are cut into groups between which memories are kept."""
    case, exact = make(operator, maps=maps, tokens=12, size=2, batch=1)
    found, own = case.gradients("triton"), case.gradients("torch")
    assert_near(found, own, exact.gradients("reference"))


@every_streamed
def test_streamed_maps_and_padded_rows(operator, maps, streamed):
    case, exact = make(operator, maps=maps)
    lengths = torch.tensor([4, 13])
    mask = (torch.arange(13) < lengths[:, None])[:, :, None, None].float()
    poisoned = case.changed(v=case.tensors["v"].masked_fill(mask == 0, torch.nan))
    found, expected = poisoned.run("triton", lengths), exact.run("reference", lengths)
    memories.assert_same(found._replace(o=found.o.where(mask == 1, 0)), expected, 1e-5, mask)
    kept = {"mask": mask, "lengths": lengths}
    assert_near(
        case.gradients("triton", **kept), case.gradients("torch", **kept),
        exact.gradients("torch", mask.double(), lengths=lengths),
    )  # fmt: skip


@every_streamed
def test_streamed_steps_equal_the_whole(operator, maps, streamed):
    case, _ = make(operator, maps=maps, tokens=7)
    whole = case.run("triton")
    assert relative_rms(case.token_by_token("triton"), whole.o) < 1e-5


@every_streamed
def test_streamed_sequences_do_not_see_their_neighbours(operator, maps, streamed):
    """NaN in all of one packed sequence and its state reaches no number of another."""
    case, _ = make(operator, (3, 6, 4), maps=maps)
    tensors = dict(case.tensors)
    for name in memories.TIMED:
        if name in tensors:
            tensors[name] = tensors[name].clone()
            tensors[name][:, 3:9] = torch.nan
    for name in tensors:
        if name.startswith(("weights", "summed", "anchor")):
            tensors[name] = tensors[name].clone()
            tensors[name][1] = torch.nan
    clean, poisoned = case.run("triton"), case.changed(**tensors).run("triton")
    for x, y in zip(memories.tensors_of(clean)[1:], memories.tensors_of(poisoned)[1:], strict=True):
        assert torch.equal(x[[0, 2]], y[[0, 2]])
    others = [*range(3), *range(9, 13)]
    assert torch.equal(clean.o[:, others], poisoned.o[:, others])
    assert poisoned.o[:, 3:9].isnan().all()


def test_inner_channels_far_from_zero_have_finite_gradients(streamed):
    """Where the slope of GELU is 0 or 1, and that of tanh inside it some 1e8."""
    case, _ = make("titans", maps=2, tokens=5)
    large = case.changed(weights_1=case.tensors["weights_1"] * 1e4, beta=case.tensors["beta"] * 0)
    found = {name: x.isfinite().all() for name, x in large.gradients("triton").items()}
    assert all(found.values()), found
