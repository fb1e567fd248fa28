"""What holds for every operator over sequences: the table is in contract.py."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from deltarule import two_memories
from nodes import nodes_of
from opchecked import Registered, opcheck_all
from ops.contract import OPERATORS, assert_alike, check, gradients, weighted
from oracle import make_case
from tolerance import assert_close, relative_rms

LENGTHS = (3, 0, 66, 1, 5)
every = pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)
RECURRENCES = ["no decay", "gated attention", "gated delta", "channels", "free erase"]
REGISTERED = [name for name in OPERATORS if not name.startswith(("ttt", "titans"))]
every_layout = pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["rows", "packed"])
every_impl = pytest.mark.parametrize("impl", ["torch", "reference"])


@every
@every_layout
def test_outputs_and_gradients_equal_the_definition(operator, lengths):
    check(operator, operator.draw(lengths=lengths))


@pytest.mark.gpu
@every
@every_layout
def test_a_gpu_equals_the_cpu(operator, lengths):
    x = operator.draw(lengths=lengths)
    moved = {name: y.cuda() for name, y in x.items()}
    (outputs, found), (expected, _) = (gradients(operator, y, impl="torch") for y in (moved, x))
    for y, wanted in zip(outputs, expected, strict=True):
        assert relative_rms(y.double(), wanted.double()) <= 1e-10
    assert all(gradient.isfinite().all() for gradient in found.values())


# No gradient goes through the stabilizer of `slstm`.
@pytest.mark.parametrize("name", [name for name in OPERATORS if name != "slstm"])
def test_gradcheck(name):
    operator = OPERATORS[name]
    x = operator.draw(1, 5)
    names = operator.leaves(x)

    def call(*tensors):
        outputs = operator.run(**(x | dict(zip(names, tensors, strict=True))), impl="torch")
        return outputs[0]

    leaves = tuple(x[name].clone().requires_grad_() for name in names)
    assert torch.autograd.gradcheck(call, leaves, fast_mode=True)


@every
@every_impl
@pytest.mark.parametrize("decoding", [False, True])
def test_a_carried_state_equals_one_pass(operator, impl, decoding):
    x = operator.draw()
    whole, state, outputs = operator.run(**x, impl=impl), (), []
    for first, last in ((0, 1), (1, 3), (3, 3), (3, 40), (40, 75)):
        part = operator.part(x, first, last, state)
        if not decoding:
            part[operator.written] = part[operator.written].clone().requires_grad_()
        o, *state = operator.run(**part, impl=impl)
        outputs.append(o)
    assert_alike((torch.cat(outputs, 1), *state), whole)


@every
@every_impl
def test_packed_equals_separate(operator, impl):
    x, start = operator.draw(lengths=LENGTHS), 0
    o, *states = operator.run(**x, impl=impl)
    for i, length in enumerate(LENGTHS):
        alone = operator.run(**operator.sequence(x, LENGTHS, i), impl=impl)
        own = o[:, start : start + length], *(y[i : i + 1] for y in states)
        assert_alike(own, alone)
        start += length


@every_impl
@pytest.mark.parametrize("name", RECURRENCES)
def test_empty_tokens_change_nothing(name, impl):
    operator = OPERATORS[name]
    x, padded = operator.draw(tokens=40), {}
    for timed in operator.timed(x):
        zeros = torch.zeros_like(x[timed][:, : 7 * operator.rows.get(timed, 1)])
        padded[timed] = torch.cat([zeros, x[timed], zeros], 1)
    o, state = operator.run(**(x | padded), impl=impl)
    assert_alike((o[:, 7:47], state), operator.run(**x, impl=impl))


@every_impl
@pytest.mark.parametrize("name", RECURRENCES)
@pytest.mark.parametrize("batch", [2, 9])
def test_a_row_alone_equals_the_row_in_a_batch(name, impl, batch):
    operator = OPERATORS[name]
    x = {n: y.float() for n, y in operator.draw(batch, 100).items()}
    weights = [torch.randn_like(y) for y in operator.run(**x, impl=impl)]

    def both(rows):
        leaves = {n: y[rows].clone().requires_grad_() for n, y in x.items()}
        outputs = operator.run(**leaves, impl=impl)
        given = list(leaves.values()), [weight[rows] for weight in weights]
        return [*outputs, *torch.autograd.grad(outputs, *given)]

    together = both(slice(None))
    for i in (0, batch - 1):
        row = slice(i, i + 1)
        assert all(torch.equal(y, of[row]) for y, of in zip(both(row), together, strict=True))


@every
def test_no_future_input_changes_the_past(operator):
    x = operator.draw(1)
    before = operator.run(**x, impl="torch")[0]
    for name in operator.timed(x):
        rows = operator.rows.get(name, 1)
        for t in (1, 37, 64, 74):
            changed = x[name].clone()
            changed[:, t * rows :] *= 0.5
            after = operator.run(**(x | {name: changed}), impl="torch")[0]
            assert torch.equal(after[:, :t], before[:, :t]), f"{name} from {t} on"
            assert not torch.equal(after, before), name


@every
@every_impl
def test_no_value_of_a_token_reaches_earlier_ones(operator, impl):
    """Not finite, or so large that products of it are not; decays that should be 0 or less too."""
    x = operator.draw(1, 150)
    before, t = operator.run(**x, impl=impl)[0], 140
    kept = t if impl == "reference" else t - t % operator.shared
    assert kept >= 128
    for name in operator.timed(x):
        for value in (torch.nan, torch.inf, -torch.inf, 1e200):
            changed = x[name].clone()
            changed[:, t * operator.rows.get(name, 1)] = value
            after = operator.run(**(x | {name: changed}), impl=impl)[0]
            assert_close(after[:, :kept], before[:, :kept], name=f"{name} of {value}")
            seen = torch.equal(after[:, t:].isfinite(), before[:, t:].isfinite())
            assert not (seen and value != value), f"{name} was not seen at all"


@every
def test_nan_stays_in_its_row_head_and_chunk(operator):
    x = operator.draw(3)
    expected, changed = operator.run(**x, impl="torch")[0], x[operator.written].clone()
    changed[1, 70 * operator.rows.get(operator.written, 1), 1] = torch.nan
    o = operator.run(**(x | {operator.written: changed}), impl="torch")[0]
    clean = torch.ones(3, o.shape[2], dtype=torch.bool)
    clean[1, 1] = False
    assert_close(o.transpose(1, 2)[clean], expected.transpose(1, 2)[clean])
    kept = 0 if operator.shared > 64 else 64
    assert_close(o[1, :kept], expected[1, :kept])
    assert o[1, 70, 1].isnan().all()


@every
def test_repeated_runs_are_equal_bit_by_bit(operator):
    x = {n: y.float() if y.is_floating_point() else y for n, y in operator.draw().items()}
    outputs, found = gradients(operator, x, impl="torch")
    again, same = gradients(operator, x, impl="torch")
    assert all(map(torch.equal, outputs, again))
    assert all(torch.equal(found[name], same[name]) for name in found)


LAYOUTS = {
    "strided": lambda x: torch.stack([x, x], -1)[..., 0],
    "expanded": lambda x: x[:1].expand_as(x),
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1) if x.ndim > 1 else x,
}


@every
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_memory_layout(operator, layout):
    x = {name: LAYOUTS[layout](y) for name, y in operator.draw(tokens=9).items()}
    dense = {name: y.contiguous() for name, y in x.items()}
    assert_alike(operator.run(**x, impl="torch"), operator.run(**dense, impl="torch"))


@every
@every_impl
def test_autocast_changes_nothing(operator, impl):
    x = operator.draw(tokens=9)
    x = {n: y.float() if y.is_floating_point() else y for n, y in x.items()}
    expected = operator.run(**x, impl=impl)
    with torch.autocast("cpu", torch.bfloat16):
        found = operator.run(**x, impl=impl)
    assert all(map(torch.equal, found, expected))


PADDED = ("long convolution", "hyena", "multi-head hyena", "slstm", "ttt", "titans of two maps")


@pytest.mark.parametrize("name", PADDED)
@every_impl
def test_what_lies_beyond_the_lengths_changes_nothing(name, impl):
    operator, counts = OPERATORS[name], torch.tensor([20, 3, 0])
    x = operator.draw(3, 37)
    there = torch.arange(37) < counts[:, None]
    for timed in operator.timed(x):
        outside = ~there.view(3, 37, *[1] * (x[timed].ndim - 2))
        large = 9e9 if timed in operator.narrow else 0.9
        x[timed] = x[timed].masked_fill(outside, large).requires_grad_()
    o, *states = operator.run(**x, impl=impl, lengths=counts)
    weighted((o * there.view(3, 37, *[1] * (o.ndim - 2)), *states)).backward()
    for row, length in enumerate(counts.tolist()):
        start = tuple(x[state][row : row + 1] for state in operator.states)
        cut = {timed: x[timed][row : row + 1] for timed in operator.timed(x)}
        alone = operator.run(**operator.part(x | cut, 0, length, start), impl=impl)
        assert_alike((o[row : row + 1, :length], *(y[row : row + 1] for y in states)), alone)
    assert all((x[timed].grad[~there] == 0).all() for timed in operator.timed(x))


def rounded(operator, x, dtype):
    """Inputs in 16 bits where they may be, and in float32 elsewhere."""
    kinds = {n: dtype if n in operator.narrow else torch.float32 for n in operator.leaves(x)}
    return x | {name: x[name].to(kind) for name, kind in kinds.items()}


@pytest.mark.parametrize("name", [n for n in REGISTERED if not n.startswith("mesa")])
def test_float32_is_within_its_bar(name):
    operator = OPERATORS[name]
    x = {n: y.float() if y.is_floating_point() else y for n, y in operator.draw().items()}
    wide = {n: y.double() if y.is_floating_point() else y for n, y in x.items()}
    outputs, exact = operator.run(**x, impl="torch"), operator.run(**wide, impl="reference")
    for y, expected in zip(outputs, exact, strict=True):
        assert_close(y, expected, dtype=torch.float32)


def test_a_long_sequence_does_not_drift():
    sizes = {"batch": 1, "tokens": 20_000, "heads": 1, "value_heads": 1}
    case = make_case("head", "tied", **sizes, dtype=torch.float32)
    exact = case.to(torch.float64).run("torch")
    assert relative_rms(case.run("torch").final_state, exact.final_state) <= 1e-6


@every
@every_impl
def test_16_bits_are_computed_in_float32(operator, impl):
    x = rounded(operator, operator.draw(), torch.bfloat16)
    wide = {n: y.double() if y.is_floating_point() else y for n, y in x.items()}
    (o, *states), exact = operator.run(**x, impl=impl), operator.run(**wide, impl="torch")
    assert o.dtype == (torch.bfloat16 if operator.narrow else torch.float32)
    assert relative_rms(o, exact[0]) < 4e-3
    for y, expected in zip(states, exact[1:], strict=True):
        assert y.dtype in (torch.float32, torch.int64)
        assert relative_rms(y.double(), expected.double()) < 3e-6


# What shares the dtype of the values, beside the states.
SHARED = "q", "k", "v", "slots", "gates"


@every
@every_impl
def test_gates_in_float64_are_computed_in_the_dtype_of_the_values(operator, impl):
    x = {n: y.float() if y.is_floating_point() else y for n, y in operator.draw(1, 9).items()}
    expected = operator.run(**x, impl=impl)
    for name in set(operator.leaves(x)).difference(SHARED, operator.states):
        found = operator.run(**(x | {name: x[name].double()}), impl=impl)
        assert [y.dtype for y in found] == [y.dtype for y in expected], name
        assert_alike(found, expected)


def test_memories_stay_in_float32_beside_a_softmax_of_bfloat16():
    x = {name: y.float() for name, y in OPERATORS["two memories"].draw().items()}
    x |= {name: x[name].bfloat16() for name in ("q", "k", "v", "slots")}
    out = two_memories(**x)
    assert (out.o.dtype, out.key_memory.dtype) == (torch.bfloat16, torch.float32)
    assert relative_rms(out.o, two_memories(**{n: y.double() for n, y in x.items()}).o) < 0.02


@every
@every_impl
@pytest.mark.parametrize("sizes", [(2, 0), (0, 3), (1, 0, (0, 0)), (1, 0, ())])
def test_nothing_to_read_leaves_a_copy_of_the_state(operator, impl, sizes):
    x = operator.draw(*sizes)
    # A gradient goes through it, as through any other row of a data set.
    x[operator.written].requires_grad_()
    o, *states = operator.run(**x, impl=impl)
    assert o.shape[:2] == sizes[:2]
    assert o.requires_grad
    for y, name in zip(states, operator.states, strict=True):
        assert torch.equal(y, x[name])
        assert y.numel() == 0 or y.data_ptr() != x[name].data_ptr()


def by(operator, x, impl, **options):
    """A number made of one of the tensors."""

    def loss(given):
        return operator.run(**(x | {operator.differentiated: given}), impl=impl)[0].sin().sum()

    return loss


@pytest.mark.parametrize("name", REGISTERED)
def test_other_derivatives_name_the_reference(name):
    operator = OPERATORS[name]
    x = operator.draw(1, 4)
    v = x[operator.differentiated]
    found, reference = by(operator, x, "torch"), by(operator, x, "reference")
    leaf = v.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(found(leaf), leaf, create_graph=True)
    with pytest.raises(NotImplementedError, match='impl="reference"'):
        gradient.sum().backward()
    with pytest.raises(NotImplementedError, match='impl="reference"'):
        torch.func.jvp(found, (v,), (v,))
    with pytest.raises(NotImplementedError, match='impl="reference"'):
        torch.func.jvp(torch.func.grad(found), (v,), (v,))
    _, tangent = torch.func.jvp(reference, (v,), (v,))
    assert_close(tangent, (torch.func.grad(reference)(v) * v).sum())


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@every
@every_layout
def test_function_transforms_agree_with_autograd(operator, lengths):
    if lengths is not None and operator.states != ("initial_state",):
        pytest.skip("what it keeps of packed mini-batches is written in place")
    x = operator.draw(1, 20, None if lengths is None else (3, 0, 17))
    v, loss = x[operator.differentiated], by(operator, x, "torch")
    stacked = torch.stack([v, v.flip(1) / 2])
    gradients = torch.vmap(torch.func.grad(loss))(stacked)
    for row, gradient in zip(stacked, gradients, strict=True):
        leaf = row.clone().requires_grad_()
        assert_close(gradient, torch.autograd.grad(loss(leaf), leaf)[0], gradient=True)
    # Of several gradients of one call, the backward alone is mapped.
    _, backward = torch.func.vjp(loss, row)
    (found,) = torch.vmap(backward)(torch.tensor([2.0, -1.0], dtype=v.dtype))
    assert_close(found, torch.stack([2 * gradient, -gradient]), gradient=True)


# As long as their siblings of one map together.
LONG = "ttt of two maps", "titans of two maps"


@pytest.mark.parametrize("name", OPERATORS)
def test_compiles_without_a_break(name):
    operator = OPERATORS[name]
    x = operator.draw(1, 12)
    v, loss = x[operator.differentiated].clone().requires_grad_(), by(operator, x, "torch")
    torch.compiler.reset()
    backend = "eager" if name in LONG else "aot_eager"
    compiled = torch.compile(loss, backend=backend, fullgraph=True)
    found, expected = (torch.autograd.grad(run(v), v)[0] for run in (compiled, loss))
    assert_close(found, expected, gradient=True)


@pytest.mark.parametrize("name", REGISTERED)
@every_layout
def test_opcheck_of_all_that_is_registered(name, lengths):
    operator = OPERATORS[name]
    x = operator.draw(1, 9, None if lengths is None else (4, 0, 5))
    if lengths is None and name in ("gated delta", "channels", "free erase"):
        x = {n: y.transpose(0, -1).contiguous().transpose(0, -1) for n, y in x.items()}
    opcheck_all(lambda: gradients(operator, x, impl="torch"))


@pytest.mark.parametrize("name", REGISTERED)
@every_layout
def test_a_mode_that_watches_changes_no_bit(name, lengths):
    """Nor the way through PyTorch's dispatcher, which a call that nothing watches leaves out."""
    operator = OPERATORS[name]
    x = operator.draw(1, 70, None if lengths is None else (4, 0, 66))
    outputs, expected = gradients(operator, x, impl="torch")
    assert any(name.startswith("Eager") for name in nodes_of(outputs[0]))
    with Registered() as seen:
        watched, found = gradients(operator, x, impl="torch")
    assert {"backward" in x._opname for x, _ in seen.calls} == {False, True}
    with torch.no_grad():
        unsaved = operator.run(**x, impl="torch")
    assert all(map(torch.equal, watched, outputs))
    assert all(map(torch.equal, unsaved, outputs))
    assert all(torch.equal(gradient, expected[n]) for n, gradient in found.items())


@every
def test_runs_without_numbers(operator):
    x = operator.draw()
    whole, found = gradients(operator, x, impl="torch")
    meta = {name: y.to("meta") for name, y in x.items()}
    with FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(y) for name, y in x.items()}
        of_fakes = gradients(operator, fake, impl="torch")
    for device, pair in (("cpu", of_fakes), ("meta", gradients(operator, meta, impl="torch"))):
        for y, expected in zip(
            (*pair[0], *pair[1].values()), (*whole, *found.values()), strict=True
        ):
            assert (y.shape, y.dtype, y.device.type) == (expected.shape, expected.dtype, device)
