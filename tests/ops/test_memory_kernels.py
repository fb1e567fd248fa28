"""The Triton kernels of `ttt` and `titans`, in the interpreter and on a GPU, against float64."""

from importlib import import_module
from typing import NamedTuple

import pytest
import torch

from deltarule.ops.dispatch import always
from deltarule.ops.memory.torch import triton_scan
from opchecked import opcheck_all
from ops import memories
from promised import promised
from tolerance import relative_rms

promised("triton")

from deltarule.ops.memory.triton import passes


class Form(NamedTuple):
    """A memory by its sizes, and how its maps are held.

    `inner` channels stand between two maps. Streamed maps come in blocks of 16 columns, the last
    of which is not whole; `share` is how many value channels a program has of a wide map.
    """

    operator: str
    maps: int = 1
    channels: int = 4
    inner: int = 7
    streamed: bool = False
    share: int = 0
    device: str = "cpu"
    size: int = 5

    def make(self, dtype=torch.float32, **options):
        """A call in float32, q, k and v in `dtype`, and the same in float64."""
        options = {"size": self.size, "tokens": 13 if self.device == "cpu" else 150} | options
        case = memories.make(self.operator, self.maps, **options)
        rounded = {
            name: x.to(self.device)
            if name == "position"
            else x.to(self.device, dtype if name in "qkv" else torch.float32)
            for name, x in case.tensors.items()
        }
        exact = {n: x if n == "position" else x.double() for n, x in rounded.items()}
        return case.changed(**rounded), case.changed(**exact)


OPERATORS = ("ttt", "titans")
STREAMED = {
    f"{name}, {maps} streamed": Form(name, maps, streamed=True)
    for name in OPERATORS for maps in (1, 2)
}  # fmt: skip
FORMS = {name: Form(name) for name in OPERATORS} | STREAMED
# Three channels do not divide four.
NUMBERS = FORMS | {f"titans, {n} values each": Form("titans", share=n) for n in (2, 3)}
NUMBERS |= {f"{n}, wide": form._replace(channels=20, inner=40) for n, form in STREAMED.items()}
SIZES = [(1, 4, 0, 5), (1, 64, 0, 16), (1, 48, 0, 1), (1, 72, 0, 16), (1, 128, 0, 16)]
SIZES += [(2, 4, 7, 5), (2, 64, 256, 16), (2, 128, 130, 1)]
ON_GPU = {
    f"{name}, {maps} of {channels} ({inner}), {size} tokens, cuda":
    Form(name, maps, channels, inner, device="cuda", size=size)
    for name in OPERATORS for maps, channels, inner, size in SIZES
}  # fmt: skip


def each(forms, on_gpu=None):
    """Tests of these forms in the interpreter, and of those on a GPU."""
    gpu = pytest.mark.gpu
    many = [pytest.param(form, id=name) for name, form in forms.items()]
    many += [pytest.param(form, id=name, marks=gpu) for name, form in (on_gpu or {}).items()]
    return pytest.mark.parametrize("form", many, indirect=True)


@pytest.fixture
def form(request, monkeypatch):
    form = request.param
    monkeypatch.setattr(memories, "K", form.channels)
    monkeypatch.setattr(memories, "INNER", form.inner)
    if form.device == "cuda":
        return form
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled here")
    monkeypatch.setattr(memories, "H", 1)
    monkeypatch.setattr(memories, "HV", 2)
    # The function of this name hides its module.
    table = import_module(f"deltarule.ops.memory.{form.operator}").IMPLEMENTATIONS
    monkeypatch.setitem(table, "triton", table["triton"]._replace(why_not=always))
    if form.streamed:
        monkeypatch.setattr(triton_scan, "is_held", lambda maps, norm: False)
        monkeypatch.setattr(passes, "COLUMNS", 16)
    if form.share:
        monkeypatch.setattr(triton_scan, "values_of_program", lambda values, keys: form.share)
    return form


def assert_near(found, own, exact, bar, factor=2):
    """As near to float64 as PyTorch's form in float32 is, or within the bar."""
    for name, x in found.items():
        limit = max(factor * relative_rms(own[name], exact[name], floor=1e-9), bar)
        assert relative_rms(x, exact[name], floor=1e-9) <= limit, name


def parts(out):
    return dict(enumerate(memories.tensors_of(out)))


def assert_gradients_are_near(case, exact, bar=5e-6, factor=2, mask=None, **options):
    found, own = (case.gradients(impl, mask, **options) for impl in ("triton", "torch"))
    wide = None if mask is None else mask.double()
    assert_near(found, own, exact.gradients("torch", wide, **options), bar, factor)


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@each(NUMBERS, ON_GPU)
def test_outputs_states_and_gradients(form, packed):
    few = form.device == "cpu"
    lengths = ((3, 0, 12, 1) if few else (3, 0, 150, 1, 70)) if packed else None
    case, exact = form.make(lengths=lengths, batch=(1 if form.streamed else 2) if few else 3)
    out, own, expected = case.run("triton"), case.run("torch"), exact.run("torch")
    # Products on a GPU are sums of three in tf32, which keep 22 of float32's 24 bits: 4 times
    # PyTorch's roundings, beside those of the sums.
    bar, factor = (1e-6, 2) if few else (2e-6, 5)
    assert_near(parts(out), parts(own), parts(expected), bar, factor)
    assert torch.equal(out.final_state.position, expected.final_state.position)
    assert_gradients_are_near(case, exact, 5 * bar, factor)


# Of two tokens there are six, cut into groups between which memories are kept.
@pytest.mark.parametrize(("size", "tokens"), [(1, 5), (2, 12), (16, 5)])
@each(FORMS)
def test_mini_batches_of_one_token_and_of_more_than_there_are(form, size, tokens):
    assert_gradients_are_near(*form.make(size=size, tokens=tokens, batch=1))


@each(FORMS)
def test_padded_rows(form):
    case, exact = form.make(batch=2)
    lengths = torch.tensor([4, 13])
    mask = (torch.arange(13) < lengths[:, None])[:, :, None, None].float()
    poisoned = case.changed(v=case.tensors["v"].masked_fill(mask == 0, torch.nan))
    found, expected = poisoned.run("triton", lengths), exact.run("torch", lengths)
    memories.assert_same(found._replace(o=found.o.where(mask == 1, 0)), expected, 1e-5, mask)
    assert_gradients_are_near(case, exact, mask=mask, lengths=lengths)


@each(FORMS)
def test_float16_inputs_are_rounded_once(form):
    case, exact = form.make(torch.float16, batch=2)
    out = case.run("triton")
    assert out.o.dtype == torch.float16
    assert relative_rms(out.o, exact.run("torch").o) < 2**-10
    found, expected = case.gradients("triton"), exact.gradients("torch")
    for name, x in found.items():
        assert x.dtype == case.tensors[name].dtype
        # The weights of the loss are rounded to float16 too.
        assert relative_rms(x, expected[name]) < 2**-9, name


@each(FORMS)
def test_steps_equal_the_whole_and_runs_are_equal(form):
    case, _ = form.make(tokens=7, batch=2)
    whole = case.run("triton")
    assert torch.equal(case.run("triton").o, whole.o)
    assert relative_rms(case.token_by_token("triton"), whole.o) < 1e-5


@each(FORMS)
def test_sequences_do_not_see_their_neighbours(form):
    """NaN in all of one packed sequence and its state reaches no number of another."""
    case, _ = form.make(lengths=(3, 6, 4))
    tensors = {name: x.clone() for name, x in case.tensors.items()}
    for name, x in tensors.items():
        if name in memories.TIMED:
            x[:, 3:9] = torch.nan
        elif name.startswith(("weights", "summed", "anchor")):
            x[1] = torch.nan
    clean, poisoned = case.run("triton"), case.changed(**tensors).run("triton")
    for x, y in zip(memories.tensors_of(clean)[1:], memories.tensors_of(poisoned)[1:], strict=True):
        assert torch.equal(x[[0, 2]], y[[0, 2]])
    others = [*range(3), *range(9, 13)]
    assert torch.equal(clean.o[:, others], poisoned.o[:, others])
    assert poisoned.o[:, 3:9].isnan().all()


@each({"titans, 2 streamed": STREAMED["titans, 2 streamed"]})
def test_inner_channels_far_from_zero_have_finite_gradients(form):
    """Where the slope of GELU is 0 or 1, and that of tanh inside it some 1e8."""
    case, _ = form.make(tokens=5)
    large = case.changed(weights_1=case.tensors["weights_1"] * 1e4, beta=case.tensors["beta"] * 0)
    found = {name: x.isfinite().all() for name, x in large.gradients("triton").items()}
    assert all(found.values()), found


@pytest.mark.parametrize("packed", [False, True])
@each(FORMS)
def test_the_registered_operators_keep_their_promises(form, packed):
    case, _ = form.make(tokens=6, batch=1, size=3, lengths=(2, 0, 4) if packed else None)
    names = opcheck_all(lambda: case.gradients("triton"), ("test_schema", "test_faketensor"))
    assert len(set(names)) >= 2


def test_how_many_values_a_program_has():
    sizes = (64, 64), (128, 128), (4, 128), (96, 96), (33, 128), (500, 16)
    assert [triton_scan.values_of_program(*size) for size in sizes] == [64, 32, 4, 32, 32, 64]


@each({}, {n: f for n, f in ON_GPU.items() if f.channels == 4})
def test_memories_are_chosen_in_16_bits_and_repeatable(form):
    case, exact = form.make(torch.bfloat16, size=16)
    out = case.run()
    assert torch.equal(out.o, case.run("triton").o)
    assert relative_rms(out.o, exact.run("torch").o) < 2**-7
    first, second = case.gradients("auto"), case.gradients("auto")
    assert all(torch.equal(first[name], second[name]) for name in first)
