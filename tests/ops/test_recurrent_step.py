"""Steps with a state in place equal the operators, wherever they run."""

from itertools import pairwise

import pytest
import torch

from deltarule import recurrent_step
from ops.places import Place
from oracle import DECAYS, Case, make_case, on
from promised import promised
from tolerance import assert_close, relative_rms
from truth import TIMED, part

promised("triton")

from deltarule.ops.delta_rule.triton import step as triton_step

KINDS = [(decay, *erase) for decay in DECAYS for erase in (("none", 1), ("tied", 3), ("free", 1))]
FEW = [("none", "tied", 1), ("head", "tied", 2), ("channel", "tied", 1), ("channel", "free", 1)]
# Channels of keys and values, on a CPU and on a GPU.
SIZES = {
    "small": ((8, 6), (8, 6)), "one": ((1, 1), (1, 1)), "odd": ((5, 17), (100, 72)),
    "wide": ((40, 3), (256, 512)),
}  # fmt: skip


def drawn(place: Place, kind: tuple[str, str, int], **sizes: object) -> tuple[Case, Case]:
    """A call there, and the same in float64 for the definition."""
    decay, erase, n_steps = kind
    # On a GPU products are fused, and what grows takes their difference along.
    sizes = {"beta_max": 1.0 if place.device == "cuda" else 2.0} | sizes
    case = make_case(decay, erase, n_steps=n_steps, normalize_qk=erase != "free", **sizes)
    case = place.put(case)
    return case, on("cpu", case).to(torch.float64)


def step(case: Case, place: Place, state: torch.Tensor, first=0, last=None, **options):
    """Some tokens of a call."""
    last = case.tensors["q"].shape[1] if last is None else last
    x = part(case, case.tensors, slice(first, last))
    return recurrent_step(
        **{name: x[name] for name in TIMED}, n_steps=case.n_steps, normalize_qk=case.normalize_qk,
        state=state, impl=place.impl, **options,
    )  # fmt: skip


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_steps_equal_the_operator(place, kind, sizes) -> None:
    key_size, value_size = sizes[place.device == "cuda"]
    bounds = [0, 1, 3] if place.dtype == torch.float32 else [0, 1, 2, 5, 20]
    sizes = {"key_size": key_size, "value_size": value_size, "tokens": bounds[-1]}
    case, exact = drawn(place, kind, **sizes)
    expected, state = exact.run("reference"), case.tensors["initial_state"].clone()
    parts = [step(case, place, state, first, last) for first, last in pairwise(bounds)]
    assert_close(torch.cat(parts, 1), expected.o, dtype=place.dtype)
    assert_close(state, expected.final_state, dtype=place.dtype)


@pytest.mark.parametrize("key_size", [8, 40, 128])
@pytest.mark.parametrize("kind", FEW)
def test_tiles_of_more_rows_change_no_bits(place, kind, key_size, monkeypatch) -> None:
    case, _ = drawn(place, kind, key_size=key_size, value_size=11, tokens=3)
    states = []
    for held in (2**30, 0):
        monkeypatch.setattr(triton_step, "HELD", held)
        state = case.tensors["initial_state"].clone()
        states.append((step(case, place, state), state))
    assert all(map(torch.equal, *states))


@pytest.mark.parametrize("null_index", [1, -1])
def test_only_indexed_slots_of_a_pool_are_touched(place, null_index) -> None:
    case, exact = drawn(place, ("channel", "tied", 1), batch=4, tokens=2)
    pool = torch.randn(7, 2, 4, 6, 8, dtype=place.dtype, device=place.device)[:, 1]
    before, slots = pool.clone().cpu().double(), [5, null_index, 0, null_index]
    indices = torch.tensor(slots, dtype=torch.int32, device=place.device)
    o = step(case, place, pool, state_indices=indices, null_index=null_index)
    assert (o[1::2] == 0).all()
    after, rows = pool.cpu(), [0, 2]
    assert torch.equal(after[[1, 2, 3, 4, 6]].double(), before[[1, 2, 3, 4, 6]])
    some = exact.changed(**{name: exact.tensors[name][rows] for name in exact.present()})
    expected = some.changed(initial_state=before[[5, 0]]).run("reference")
    assert_close(o[rows].cpu(), expected.o, dtype=place.dtype)
    assert_close(after[[5, 0]], expected.final_state, dtype=place.dtype)


@pytest.mark.parametrize("kind", FEW)
@pytest.mark.parametrize(("slots", "nulls"), [(0, 0), (0, 2), (3, 2)])
def test_no_row_or_null_rows_alone_give_zeros(place, kind, slots, nulls) -> None:
    case, _ = drawn(place, kind, batch=2, tokens=3)
    case = case.changed(**{
        name: x[:nulls] if x.ndim > 1 else x
        for name, x in case.tensors.items() if name in case.present()
    })  # fmt: skip
    given = {"dtype": place.dtype, "device": place.device}
    pool = torch.randn(slots, *case.tensors["initial_state"].shape[1:], **given)
    before, states = pool.clone(), pool.new_zeros(nulls, 3, *pool.shape[1:])
    indices = torch.full((nulls,), -1, device=place.device)
    for options in ({}, {"states": states}):
        o = step(case, place, pool, state_indices=indices, **options)
        assert o.shape[:2] == (nulls, 3)
        assert (o == 0).all()
    assert torch.equal(pool, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_16_bit_state_rounds_once_a_call(place, dtype) -> None:
    case, _ = drawn(place._replace(dtype=torch.float32), ("head", "tied", 1), tokens=3)
    state = case.tensors["initial_state"].to(dtype)
    # The same call with room for float32: its own error, which where terms cancel is more than a
    # step of the 16 bits, is in both.
    carried = state.float()
    exact = on("cpu", case).changed(initial_state=carried.cpu()).run("reference")
    expected = step(case, place, carried)
    o = step(case, place, state)
    assert relative_rms(o, exact.o.double()) <= 1e-6
    assert relative_rms(carried, exact.final_state.double()) <= 1e-6
    if place.impl == "triton":
        # Kernels of other types, and the interpreter cuts where a GPU rounds.
        assert relative_rms(o, expected.double()) <= 1e-6
        assert relative_rms(state, carried.double()) < torch.finfo(dtype).eps
    else:
        assert torch.equal(o, expected)
        assert torch.equal(state, carried.to(dtype))


def test_inputs_of_16_bits_are_rounded_once(place) -> None:
    case, exact = drawn(place._replace(dtype=torch.float16), ("head", "tied", 1), tokens=2)
    expected, state = exact.run("reference"), case.tensors["initial_state"]
    assert relative_rms(step(case, place, state), expected.o) < 2**-10
    assert_close(state, expected.final_state, dtype=torch.float32)


def test_any_strides(place) -> None:
    case, exact = drawn(place, ("channel", "free", 1), tokens=3)
    turned = {
        name: case.tensors[name].transpose(1, -1).contiguous().transpose(1, -1)
        for name in case.present()
    }
    storage = torch.zeros(2, 3, 4, 6, 8, dtype=place.dtype, device=place.device)
    view, expected = storage[:, 1], exact.run("reference")
    view.copy_(case.tensors["initial_state"])
    assert_close(step(case.changed(**turned), place, view), expected.o, dtype=place.dtype)
    assert_close(view, expected.final_state, dtype=place.dtype)
    assert (storage[:, ::2] == 0).all()


@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("kind", FEW)
def test_drafted_tokens_are_taken_back(place, kind, indexed) -> None:
    case, _ = drawn(place, kind, batch=3, tokens=4)
    before = case.tensors["initial_state"]
    slots = torch.tensor([2, -1, 0], device=place.device)
    options = {"state_indices": slots} if indexed else {}
    state, states = before.clone(), before.new_zeros(3, 4, *before.shape[1:])
    o = step(case, place, state, states=states, **options)
    plain = before.clone()
    assert torch.equal(o, step(case, place, plain, **options))
    assert torch.equal(state, plain)
    for accepted in range(1, 5):
        again = before.clone()
        step(case, place, again, 0, accepted, **options)
        rows = [2, 0] if indexed else [0, 1, 2]
        kept = states[[0, 2]] if indexed else states
        assert torch.equal(kept[:, accepted - 1], again[rows])
    assert not indexed or (states[1] == 0).all()


def test_autograd_sees_that_a_step_writes(place) -> None:
    case, _ = drawn(place, ("head", "tied", 1), tokens=1)
    state = case.tensors["initial_state"].clone()
    loss = (torch.ones_like(state, requires_grad=True) * state).sum()
    step(case, place, state)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_step_compiles(device) -> None:
    torch._dynamo.reset()
    place = Place("auto", device, torch.float32)
    case, _ = drawn(place, ("head", "tied", 1), tokens=1)
    state, expected = (case.tensors["initial_state"].clone() for _ in range(2))
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(case, place, state), step(case, place, expected))
    assert torch.equal(state, expected)
