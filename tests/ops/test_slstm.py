"""`slstm` against its definition and against the cell of the paper, transcribed."""

import pytest
import torch

from deltarule import pack, slstm
from deltarule.ops.slstm.registered import operator
from oracles import slstm as oracle
from tolerance import assert_close, relative_rms

DOUBLE = torch.float64
LENGTHS = [1, 0, 5, 2, 9, 0]
NAMES = "gates", "recurrent", "initial_state"


def make(batch=2, tokens=17, heads=2, size=5, dtype=DOUBLE, carried=True, sequences=None):
    """A call whose input gates rise far above and fall far below those before."""
    torch.manual_seed(0)
    gates = torch.randn(batch, tokens, heads, 4, size, dtype=DOUBLE)
    gates[:, :, :, 0] *= 8
    given = {"gates": gates, "recurrent": 0.5 * torch.randn(heads, 4, size, size, dtype=DOUBLE)}
    if carried:
        first = torch.randn(sequences or batch, 3, heads, 4, size, dtype=DOUBLE)
        given["initial_state"] = slstm(first, given["recurrent"], impl="torch").final_state
    return {name: x.to(torch.float32 if dtype != DOUBLE else dtype) for name, x in given.items()}


def gradients(given, **options):
    leaves = {name: x.detach().clone().requires_grad_() for name, x in given.items()}
    o, state = slstm(**leaves, **options)
    weight = torch.linspace(-1, 1, o.numel(), dtype=o.dtype, device=o.device).view_as(o)
    loss = (o * weight).sum() + state[:, :, :3].sin().sum()
    return [o, state, *torch.autograd.grad(loss, list(leaves.values()))]


def assert_equal_parts(found, exact, names=NAMES):
    for name, x, y in zip(("o", "state", *names), found, exact, strict=False):
        assert_close(x, y, gradient=name in NAMES, name=name)


@pytest.mark.parametrize("carried", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_by_its_definition(packed, carried):
    tokens = sum(LENGTHS) if packed else 17
    given = make(1 if packed else 2, tokens, carried=carried, sequences=6 if packed else None)
    options = {"cu_seqlens": pack(LENGTHS)} if packed else {}
    exact = gradients(given, impl="reference", **options)
    assert_equal_parts(gradients(given, **options), exact)


def test_as_the_paper_has_it():
    given = make(1, 12, carried=False)
    gates, recurrent = given["gates"], given["recurrent"]
    weights = dict(zip("ifzo", recurrent.unbind(1), strict=True))
    h, last = oracle.recurrence(*gates[0].unbind(2), weights)
    for impl in ("torch", "reference"):
        o, state = slstm(gates, recurrent, impl=impl)
        assert relative_rms(o[0], h) <= 1e-12
        assert relative_rms(state[0], torch.stack(last, 1)) <= 1e-12


def test_padding_steps_and_float32():
    given = make(2, 17)
    counts = torch.tensor([6, 17])
    found = gradients(given, lengths=counts)
    front = {**given, "gates": given["gates"][:1, :6], "initial_state": given["initial_state"][:1]}
    alone = slstm(**front)
    assert_close(found[0][:1, :6], alone.o)
    assert_close(found[1][:1], alone.final_state)
    assert (found[2][0, 6:] == 0).all()
    state, steps = given["initial_state"], []
    for x in given["gates"].split(1, dim=1):
        o, state = slstm(x, given["recurrent"], initial_state=state)
        steps.append(o)
    whole = slstm(**given)
    assert_close(torch.cat(steps, 1), whole.o)
    assert_close(state, whole.final_state)
    narrow = {name: x.float() for name, x in given.items()}
    exact = gradients({name: x.double() for name, x in narrow.items()}, impl="reference")
    assert_equal_parts(gradients(narrow), exact)


def test_gates_of_any_size_stay_finite_and_causal():
    given = make(1, 9, dtype=torch.float32, carried=False)
    gates = 1e4 * given["gates"]
    assert slstm(gates, given["recurrent"]).o.isfinite().all()
    changed = gates.clone()
    changed[:, 6:] = torch.nan
    o, expected = slstm(changed, given["recurrent"]).o, slstm(gates, given["recurrent"]).o
    assert torch.equal(o[:, :6], expected[:, :6])


def test_registered():
    leaves = [x.requires_grad_() for x in make(2, 3, size=3, dtype=torch.float32).values()]
    torch.library.opcheck(operator.operator, (*leaves, None, None, True, "torch"))


def test_wrong_arguments_are_named():
    given = make(2, 3)
    for name, changed, message in (
        ("gates", given["gates"][0], r"gates must be a floating-point tensor \[B, T, H, 4, D\]"),
        ("recurrent", given["recurrent"][:1], r"recurrent must be \[H, 4, D, D\]"),
        ("recurrent", None, r"recurrent must be a tensor"),
        ("initial_state", given["initial_state"].float(), "initial_state must be torch.float64"),
        ("lengths", torch.tensor([1, 4]), "lengths must be from 0 to 3"),
        ("impl", "triton", "impl='triton' cannot run this: Triton needs a CUDA device"),
    ):
        with pytest.raises(ValueError, match=message):
            slstm(**{**given, name: changed})
