"""The Triton kernels of `ttt` and `titans` under the interpreter, against float64."""

from importlib import import_module

import pytest
import torch

from deltarule.ops.dispatch import Implementation, always
from deltarule.ops.memory.torch import triton_scan
from deltarule.ops.memory.torch.triton_scan import scan_operator
from ops import memories
from promised import promised
from tolerance import relative_rms

promised("triton")

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels are compiled here: see test_memories_on_gpu"
)
# The functions of these names hide their modules.
MODULES = [import_module(f"deltarule.ops.memory.{name}") for name in ("ttt", "titans")]
every_operator = pytest.mark.parametrize("operator", ["ttt", "titans"])
every_length = pytest.mark.parametrize("lengths", [None, (3, 0, 12, 1)])


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(memories, "H", 1)
    monkeypatch.setattr(memories, "HV", 2)
    for module in MODULES:
        runs = Implementation(always, module.run_triton)
        monkeypatch.setitem(module.IMPLEMENTATIONS, "triton", runs)


def make(operator, lengths=None, dtype=torch.float32, maps=1, **options):
    """A call in float32, q, k and v in `dtype`, and the same in float64."""
    options = {"batch": 2, "tokens": 13, "lengths": lengths} | options
    case = memories.make(operator, maps, **options)
    rounded = {
        name: x if name == "position" else x.to(dtype if name in "qkv" else torch.float32)
        for name, x in case.tensors.items()
    }
    exact = {n: x if n == "position" else x.double() for n, x in rounded.items()}
    return case.changed(**rounded), case.changed(**exact)


def assert_near(found, own, exact, factor=2, bar=5e-6):
    """As near to float64 as PyTorch's form in float32 is."""
    for name, x in found.items():
        limit = max(factor * relative_rms(own[name], exact[name]), bar)
        assert relative_rms(x, exact[name], floor=1e-9) <= limit, name


def parts(out):
    return dict(enumerate(memories.tensors_of(out)))


@every_operator
@every_length
def test_outputs_and_states(operator, lengths):
    case, exact = make(operator, lengths)
    out, expected = case.run("triton"), exact.run("torch")
    assert_near(parts(out), parts(case.run("torch")), parts(expected), bar=1e-6)
    assert torch.equal(out.final_state.position, expected.final_state.position)


@every_operator
@every_length
def test_gradients(operator, lengths):
    case, exact = make(operator, lengths)
    found, own = case.gradients("triton"), case.gradients("torch")
    assert_near(found, own, exact.gradients("torch"))


@every_operator
@pytest.mark.parametrize("size", [1, 16])
def test_mini_batches_of_one_token_and_of_more_than_there_are(operator, size):
    case, exact = make(operator, size=size, tokens=5)
    assert_near(
        case.gradients("triton"), case.gradients("torch"), exact.gradients("torch")
    )  # fmt: skip


@every_operator
def test_padded_rows(operator):
    case, exact = make(operator)
    lengths = torch.tensor([4, 13])
    mask = (torch.arange(13) < lengths[:, None])[:, :, None, None].float()
    found, expected = (x.run(impl, lengths) for x, impl in ((case, "triton"), (exact, "torch")))
    memories.assert_same(found, expected, 1e-5, mask)
    kept = {"mask": mask, "lengths": lengths}
    assert_near(
        case.gradients("triton", **kept), case.gradients("torch", **kept),
        exact.gradients("torch", mask.double(), lengths=lengths),
    )  # fmt: skip


@every_operator
def test_float16_inputs_are_rounded_once(operator):
    case, exact = make(operator, dtype=torch.float16)
    out = case.run("triton")
    assert out.o.dtype == torch.float16
    assert relative_rms(out.o, exact.run("torch").o) < 2**-10
    found, expected = case.gradients("triton"), exact.gradients("torch")
    for name, x in found.items():
        assert x.dtype == case.tensors[name].dtype
        # The weights of the loss are rounded to float16 too.
        assert relative_rms(x, expected[name]) < 2**-9, name


@every_operator
def test_steps_equal_the_whole_and_runs_are_equal(operator):
    case, _ = make(operator, tokens=7)
    whole = case.run("triton")
    assert torch.equal(case.run("triton").o, whole.o)
    assert relative_rms(case.token_by_token("triton"), whole.o) < 1e-5


def operator_arguments(norm, packed):
    steps, rows, heads, slots, channels = 2, 2, 1, 3, 4
    of = (steps, rows, heads)
    tensors = (torch.randn(*of, slots, channels) for _ in range(3))
    owner = torch.tensor([[0, 1], [2, 3]]) if packed else None
    weight, bias = (torch.rand(heads, channels), torch.rand(heads, channels))
    return (
        *tensors, torch.rand(*of, 4, slots), torch.rand(*of, 4), torch.rand(*of, slots, slots),
        torch.ones(steps, rows), owner,
        torch.randn(4 if packed else 2, heads, 3, channels, channels + norm),
        weight if norm else None, bias if norm else None, 1e-6, 0,
    )  # fmt: skip


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("norm", [False, True])
def test_the_registered_operators_keep_their_promises(norm, packed):
    arguments, tests = operator_arguments(norm, packed), ("test_schema", "test_faketensor")
    found = torch.library.opcheck(scan_operator.operator, arguments, test_utils=tests)
    assert set(found.values()) == {"SUCCESS"}
    z, memory = scan_operator(*arguments)
    backward = (torch.randn_like(z), torch.randn_like(memory), *arguments)
    there = [True] * 7 + [norm, norm]
    found = torch.library.opcheck(
        scan_operator.backward_operator, (*backward, there), test_utils=tests
    )
    assert set(found.values()) == {"SUCCESS"}


@every_length
@pytest.mark.parametrize("share", [2, 3])
def test_programs_share_the_values_of_a_wide_map(lengths, share, monkeypatch):
    """As maps of more than 64 x 64 numbers are; three channels do not divide four."""
    monkeypatch.setattr(triton_scan, "values_of_program", lambda values, keys: share)
    case, exact = make("titans", lengths)
    out, expected = case.run("triton"), exact.run("torch")
    assert_near(parts(out), parts(case.run("torch")), parts(expected), bar=1e-6)
    found, own = case.gradients("triton"), case.gradients("torch")
    assert_near(found, own, exact.gradients("torch"))


def test_how_many_values_a_program_has():
    sizes = (64, 64), (128, 128), (4, 128), (96, 96), (33, 128), (500, 16)
    assert [triton_scan.values_of_program(*size) for size in sizes] == [64, 32, 4, 32, 32, 64]
