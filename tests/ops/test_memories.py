"""What `ttt` and `titans` share: the dual form is the primal one, however the tokens come."""

import weakref
from importlib import import_module

import pytest
import torch

from deltarule import TitansState, TTTState, pack, titans, ttt
from deltarule.ops import mini_batches
from deltarule.ops.memory import inputs
from deltarule.ops.memory.torch import memory
from ops.memories import DOUBLE, HV, KINDS, TIMED, H, K, assert_same, draw, make, tensors_of
from tolerance import relative_rms

every_kind = pytest.mark.parametrize(("operator", "maps"), KINDS)
LENGTHS = (3, 0, 21, 1, 0, 1)
# The dual form reorders the sums.
REORDERED = 1e-10


@every_kind
@pytest.mark.parametrize("size", [1, 5, 16])
def test_dual_form_equals_primal_form(operator, maps, size):
    case = make(operator, maps, size=size)
    assert_same(case.run("torch"), case.run("reference"), REORDERED)


@every_kind
@pytest.mark.parametrize("size", [1, 5])
@pytest.mark.parametrize("read", [True, False])
def test_packed_dual_form_equals_primal_form(operator, maps, size, read, monkeypatch):
    if not read:
        monkeypatch.setattr(mini_batches, "readable", lambda _: False)
    case = make(operator, maps, size=size, lengths=LENGTHS)
    assert_same(case.run("torch"), case.run("reference"), REORDERED)


@every_kind
@pytest.mark.parametrize(("length", "position"), [(2, 4), (6, 4), (1, 0), (5, 0), (6, 0)])
@pytest.mark.parametrize("read", [True, False])
def test_packed_sequences_may_all_need_one_mini_batch_more(
    operator, maps, length, position, read, monkeypatch
):
    if not read:
        monkeypatch.setattr(mini_batches, "readable", lambda _: False)
    case = make(operator, maps, size=5, lengths=(length,) * 7)
    case = case.changed(position=torch.full((7,), position))
    assert_same(case.run("torch"), case.run("reference"), REORDERED)


@every_kind
@pytest.mark.parametrize("lengths", [None, LENGTHS])
def test_gradients_equal_those_of_the_primal_form(operator, maps, lengths):
    case = make(operator, maps, lengths=lengths)
    found, expected = case.gradients("torch"), case.gradients("reference")
    for name, gradient in found.items():
        assert relative_rms(gradient, expected[name]) <= REORDERED, name


@every_kind
def test_gradcheck(operator, maps):
    case = make(operator, maps, batch=1, tokens=5, size=3)
    names = [name for name in case.tensors if name != "position"]
    start = case.tensors["position"] + 1

    def call(*tensors):
        changed = case.changed(position=start, **dict(zip(names, tensors, strict=True)))
        return tuple(tensors_of(changed.run("torch")))

    leaves = tuple(case.tensors[name].clone().requires_grad_() for name in names)
    if operator == "titans":
        # exp(-inf) has no slope to compare with.
        assert all(leaf.isfinite().all() for leaf in leaves)
    assert torch.autograd.gradcheck(call, leaves, fast_mode=True)


@every_kind
@pytest.mark.parametrize("impl", ["torch", "reference"])
def test_steps_equal_the_whole(operator, maps, impl):
    case = make(operator, maps, tokens=17)
    whole, rest, outputs = case.run(impl), case, []
    for t in range(17):
        out = rest.run(impl) if t < 0 else rest.part(slice(t, t + 1), state_of(rest)).run(impl)
        rest = case.part(slice(None), out.final_state)
        outputs.append(out.o)
    assert_same(out._replace(o=torch.cat(outputs, 1)), whole, REORDERED)


def state_of(case):
    """The state that a case begins with."""
    x = case.tensors
    parts = ("weights", "summed", "anchor")[: 2 if case.operator == "ttt" else 3]
    maps = [tuple(x[f"{p}_{i}"] for i in (1, 2) if f"{p}_{i}" in x) for p in parts]
    return (TTTState if case.operator == "ttt" else TitansState)(*maps, x["position"])


@every_kind
@pytest.mark.parametrize("split", [1, 4, 5, 13])
def test_a_carried_state_equals_one_pass(operator, maps, split):
    case = make(operator, maps, tokens=17)
    whole = case.run()
    first = case.part(slice(0, split), state_of(case)).run()
    second = case.part(slice(split, 17), first.final_state).run()
    assert_same(second._replace(o=torch.cat([first.o, second.o], 1)), whole, REORDERED)


@every_kind
def test_packed_equals_separate(operator, maps):
    case, start = make(operator, maps, lengths=LENGTHS), 0
    together = case.run()
    for n, length in enumerate(LENGTHS):
        held = {
            name: x if x.shape[0] != len(LENGTHS) else x[n : n + 1]
            for name, x in case.tensors.items()
            if name not in (*TIMED, "step_scale", "norm_weight", "norm_bias")
        }
        timed = {n: case.tensors[n][:, start : start + length] for n in TIMED if n in case.tensors}
        alone = case.changed(**timed, **held)._replace(lengths=None).run()
        own = together.final_state[:-1]
        rows = [tuple(x[n : n + 1] for x in maps_) for maps_ in own]
        state = type(together.final_state)(*rows, together.final_state.position[n : n + 1])
        part = together._replace(o=together.o[:, start : start + length], final_state=state)
        assert_same(part, alone, REORDERED)
        start += length


@every_kind
@pytest.mark.parametrize("impl", ["torch", "reference"])
def test_what_lies_beyond_the_lengths_changes_nothing(operator, maps, impl):
    case, lengths = make(operator, maps), torch.tensor([20, 3, 0])
    mask = (torch.arange(37) < lengths[:, None])[..., None, None].to(DOUBLE)
    spoilt = {
        name: case.tensors[name].clone().masked_fill_(mask[..., :1].view(3, 37, *[1] * d) == 0, 9e9)
        for name, d in (("q", 2), ("k", 2), ("v", 2), ("beta", 1))
    }
    out = case.changed(**spoilt).run(impl, lengths=lengths)
    assert_same(out, case.run("reference", lengths=lengths), REORDERED, mask)
    short = case.part(slice(0, 20), state_of(case)).run(impl)
    for x, wanted in zip(tensors_of(out)[1:], tensors_of(short)[1:], strict=True):
        assert relative_rms(x[:1], wanted[:1]) <= REORDERED
    found, expected = (case.gradients(i, mask, lengths=lengths) for i in (impl, "reference"))
    for name, gradient in found.items():
        assert relative_rms(gradient, expected[name]) <= REORDERED, name


@every_kind
def test_strictly_causal_bit_by_bit(operator, maps):
    case = make(operator, maps)
    before = case.run().o
    for name in TIMED:
        if name not in case.tensors:
            continue
        changed = case.tensors[name].clone()
        changed[:, 18:] = 0.5 * changed[:, 18:] - 0.1
        after = case.changed(**{name: changed}).run().o
        assert torch.equal(after[:, :18], before[:, :18]), name
        assert not torch.equal(after, before)


@every_kind
def test_nan_stays_in_its_row_and_head_and_repeated_runs_are_equal(operator, maps):
    # The whole mini-batch in which it stands may be lost, but nothing before.
    case = make(operator, maps, begun=False)
    expected, value = case.run(), case.tensors["v"].clone()
    assert all(map(torch.equal, tensors_of(case.run()), tensors_of(expected)))
    value[1, 22, 2] = torch.nan
    out = case.changed(v=value).run()
    clean = torch.ones(3, HV, dtype=torch.bool)
    clean[1, 2] = False
    got, wanted = (x.o.transpose(1, 2)[clean] for x in (out, expected))
    assert torch.equal(got, wanted)
    assert torch.equal(out.o[1, :20], expected.o[1, :20])
    assert out.o[1, 22:, 2].isnan().all()


@pytest.mark.gpu
@every_kind
@pytest.mark.parametrize("lengths", [None, LENGTHS])
def test_gpu_equals_cpu(operator, maps, lengths):
    case = make(operator, maps, lengths=lengths)
    moved = case.changed(**{name: x.cuda() for name, x in case.tensors.items()})
    out, expected = moved.run("torch"), case.run("torch")
    for x, wanted in zip(tensors_of(out), tensors_of(expected), strict=True):
        assert relative_rms(x, wanted) <= REORDERED
    found, wanted = (c.gradients("torch") for c in (moved, case))
    assert found.keys() == wanted.keys()
    assert all(gradient.isfinite().all() for gradient in found.values())


@every_kind
@pytest.mark.parametrize("recompute", [True, False])
def test_a_backward_pass_keeps_few_memories(operator, maps, recompute, monkeypatch):
    """Of 100 mini-batches 10, as those between them run once more."""
    case, seen = make(operator, maps, batch=1, tokens=400, size=4, begun=False), []
    leaves = {n: x.clone().requires_grad_() for n, x in case.tensors.items() if n != "position"}

    monkeypatch.setattr(memory, "mini_batch", noting(memory.mini_batch, seen))
    if not recompute:
        monkeypatch.setattr(memory, "_can_recompute", lambda: False)
    out = case.changed(**leaves).run()
    alive = sum(ref() is not None for ref in seen)
    assert len(seen) >= 100
    assert alive <= 11 if recompute else alive >= 100
    out.o.sum().backward()


def noting(mini_batch, seen):
    """The stage, which leaves a weak reference to every memory it makes."""

    def noted(*given):
        z, after = mini_batch(*given)
        seen.append(weakref.ref(after.weights[0]))
        return z, after

    return noted


@every_kind
def test_recomputed_gradients_equal_kept_ones(operator, maps, monkeypatch):
    case = make(operator, maps)
    found = case.gradients("torch")
    monkeypatch.setattr(memory, "_can_recompute", lambda: False)
    for name, gradient in case.gradients("torch").items():
        assert torch.equal(gradient, found[name]), name


@every_kind
def test_sixteen_bits_are_computed_in_float32(operator, maps):
    case = make(operator, maps)
    narrow = {
        n: x.bfloat16() if n in ("q", "k", "v") else x.float() if x.is_floating_point() else x
        for n, x in case.tensors.items()
    }
    out = case.changed(**narrow).run()
    wide = {n: x.double() if x.is_floating_point() else x for n, x in narrow.items()}
    exact = case.changed(**wide).run()
    assert out.o.dtype == torch.bfloat16
    assert relative_rms(out.o, exact.o) < 4e-3
    for x, wanted in zip(tensors_of(out)[1:], tensors_of(exact)[1:], strict=True):
        assert x.dtype == torch.float32
        assert relative_rms(x, wanted) < 3e-6


@every_kind
@pytest.mark.parametrize("shape", [(2, 0), (0, 3)])
def test_nothing_to_read_leaves_a_copy_of_the_state(operator, maps, shape):
    case = make(operator, maps, batch=shape[0], tokens=shape[1])
    out = case.run()
    assert out.o.shape == (*shape, HV, K)
    for x, given in zip(
        tensors_of(out)[1:], (y for m in state_of(case)[:-1] for y in m), strict=True
    ):
        assert torch.equal(x, given)
        assert x.numel() == 0 or x.data_ptr() != given.data_ptr()


def test_gelu_slope():
    x = torch.linspace(-5, 5, 101, dtype=DOUBLE, requires_grad=True)
    y = torch.nn.functional.gelu(x, approximate="tanh")
    (expected,) = torch.autograd.grad(y.sum(), x)
    assert (memory.gelu_slope(x) - expected).abs().max() <= 1e-14


BAD = {
    r"beta must be \[B, T, HV\]": {"beta": torch.ones(2)},
    "lengths must be an int64 tensor": {"lengths": torch.ones(3)},
    "lengths must be from 0 to 37, got": {"lengths": torch.tensor([1, 2, 38])},
    "impl='triton' cannot run this: Triton needs a CUDA device": {"impl": "triton"},
    "impl must be one of": {"impl": "gluon"},
}


@pytest.mark.parametrize("message", BAD)
@every_kind
def test_bad_arguments_are_named(operator, maps, message):
    with pytest.raises(ValueError, match=message):
        make(operator, maps).run(**BAD[message])


BAD_TENSORS = {
    "initial_state.position must be an int64 tensor": {"position": torch.zeros(3)},
    "initial_state.position must be from 0 to 4": {"position": torch.tensor([0, 5, 0])},
    r"initial_state.weights\[0\] must be \[N, HV, outputs, inputs": {
        "weights_1": torch.zeros(3, HV, K, K + 2).double()
    },
    r"initial_state.weights\[0\] must be torch.float64": {"weights_1": None},
}


@pytest.mark.parametrize("message", BAD_TENSORS)
@pytest.mark.parametrize("operator", ["ttt", "titans"])
def test_bad_states_are_named(operator, message):
    case = make(operator, 1)
    bad = {
        name: case.tensors[name].float() if x is None else x
        for name, x in BAD_TENSORS[message].items()
    }
    with pytest.raises(ValueError, match=message):
        case.changed(**bad).run()


def test_every_part_of_a_state_has_every_map():
    case = make("titans", 1)
    state = state_of(case)._replace(momentum=())
    x = case.tensors
    with pytest.raises(
        ValueError, match=r"initial_state\.momentum must be a tuple of tensors, one"
    ):
        titans(x["q"], x["k"], x["v"], beta=x["beta"], initial_state=state)


def test_what_only_one_of_them_has_is_checked():
    x, y = make("ttt", 1).tensors, make("titans", 1).tensors
    q, k, v = (x[name] for name in "qkv")
    with pytest.raises(ValueError, match="initial_state must be a TitansState, got tuple: begin"):
        titans(q, k, v, beta=x["beta"], initial_state=())
    with pytest.raises(ValueError, match="mini_batch must be an integer of 1 or more, got 0"):
        titans(q, k, v, beta=x["beta"], initial_state=state_of(make("titans", 1)), mini_batch=0)
    decay = torch.zeros(3, 37, HV, K)
    with pytest.raises(ValueError, match="a memory forgets as a whole"):
        titans(q, k, v, beta=x["beta"], initial_state=(), log_decay=decay)
    norm = {"norm_weight": x["norm_weight"], "norm_bias": x["norm_bias"]}
    given = {"beta": y["beta"], "initial_state": state_of(make("ttt", 1))} | norm
    with pytest.raises(ValueError, match="step_scale must be a tensor"):
        ttt(q, k, v, step_scale=16, **given)
    with pytest.raises(ValueError, match="v must have the K=4 channels of q and k"):
        ttt(q, k, draw(3, 37, HV, 5), step_scale=x["step_scale"], **given)
    with pytest.raises(ValueError, match="lengths must be None with cu_seqlens"):
        titans(
            q[:1], k[:1], v[:1], beta=x["beta"][:1], initial_state=(), lengths=torch.tensor([1]),
            cu_seqlens=pack([37]),
        )  # fmt: skip
    assert q.shape[2] == H


@every_kind
def test_auto_passes_over_kernels_that_no_gpu_has_timed(operator, maps, monkeypatch):
    monkeypatch.setattr(inputs, "why_not_fused", lambda _: None)
    monkeypatch.setattr(inputs, "capability", lambda _: 9)
    # The functions of these names hide their modules.
    table = import_module(f"deltarule.ops.memory.{operator}").IMPLEMENTATIONS
    kernels = table["triton"]._replace(run=lambda _: "kernels")
    monkeypatch.setitem(table, "triton", kernels)
    case = make(operator, maps)
    assert case.run("triton") == "kernels"
    assert (case.run() == "kernels") == (maps == 1)
    monkeypatch.setattr(inputs, "STREAMED_IS_CHOSEN", True)
    assert case.run() == "kernels"
    with pytest.raises(ValueError, match="mini-batches up to 16, got K = 4, V = 4 and 17"):
        make(operator, maps, size=17).run("triton")
