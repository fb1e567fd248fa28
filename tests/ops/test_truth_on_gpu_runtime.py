"""Streams, graphs, compilers and several GPUs around `delta_rule` and `dplr`; no waiting."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import truth
from deltarule import RecurrentOutput, pack
from opchecked import opcheck_all
from oracle import Case
from truth import (
    FORMS,
    Drawn,
    Kind,
    Tensors,
    assert_alike,
    assert_same,
    call,
    captured,
    draw,
    held,
    late,
    offsets_of,
    placed,
    results,
    waits_for_nothing,
)

pytestmark = pytest.mark.gpu

KINDS = [
    Kind("none", "none", 1, torch.bfloat16), Kind("head", "tied", 1, torch.bfloat16),
    Kind("channel", "tied", 1, torch.bfloat16), Kind("channel", "free", 1, torch.bfloat16),
    Kind("constant", "tied", 1, torch.bfloat16), Kind("head", "tied", 2, torch.float32),
]  # fmt: skip
# Split into segments where a plan may: few heads and many tokens.
LONG = {"tokens": 1100, "batch": 1, "heads": 1, "value_heads": 1}
# Not the one that compares numbers: what is saved holds NaN where nothing is kept.
CONTRACTS = ("test_schema", "test_autograd_registration", "test_faketensor")
every_form = pytest.mark.parametrize("form", [*FORMS, "long"])


@pytest.fixture(scope="module", params=KINDS, ids=str)
def kind(request) -> Kind:
    return request.param


def drawn_call(kind: Kind, form: str) -> Drawn:
    return draw(kind.case(**(LONG if form == "long" else FORMS[form])))


def runs_with(offsets: Tensor | None) -> Callable[[Case, Tensors], RecurrentOutput]:
    """Calls whose offsets lie on the GPU already."""
    return lambda case, x: call(case, x, cu_seqlens=offsets)


@every_form
def test_no_call_waits_for_the_gpu(kind: Kind, form: str) -> None:
    drawn = drawn_call(kind, form)
    run = runs_with(offsets_of(drawn.case, truth.DEVICE))
    expected = results(drawn, run)
    with waits_for_nothing():
        found = results(drawn, run)
        with torch.no_grad():
            o, _ = run(drawn.case, drawn.case.tensors)
    assert_same(found, expected)
    assert torch.equal(o, expected["o"])


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "both"])
@every_form
def test_a_graph_replays_with_new_inputs(kind: Kind, form: str, backward: bool) -> None:
    drawn, other = drawn_call(kind, form), drawn_call(kind, form)
    offsets = offsets_of(drawn.case, truth.DEVICE)
    run = runs_with(offsets)

    def both() -> dict[str, Tensor]:
        if backward:
            return results(drawn, run)
        with torch.no_grad():
            return run(drawn.case, drawn.case.tensors)._asdict()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        both()
    torch.cuda.current_stream().wait_stream(side)
    graph, found = captured(both)
    for given, new in zip(held(drawn), held(other), strict=True):
        given.copy_(new)
    if offsets is not None:
        # As many sequences and tokens in all, of other lengths.
        offsets.copy_(pack((1, 69, 3, 64)))
    for _ in range(2):
        for x in found.values():
            x.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert_same(found, both())


@every_form
def test_another_stream_gives_the_same_numbers(kind: Kind, form: str) -> None:
    drawn = drawn_call(kind, form)
    expected = results(drawn)
    empty = Drawn(
        drawn.case.changed(
            **{x: torch.full_like(drawn.case.tensors[x], torch.nan) for x in drawn.case.present()}
        ),
        tuple(torch.full_like(x, torch.nan) for x in drawn.weights),
    )
    run = runs_with(offsets_of(drawn.case, truth.DEVICE))
    # A kernel on any other stream would read NaN meanwhile.
    with late():
        for given, new in zip(held(empty), held(drawn), strict=True):
            given.copy_(new)
        found = results(empty, run)
    assert_same(found, expected)


def test_a_gpu_that_is_not_the_current_one(kind: Kind) -> None:
    second, drawn = truth.second_gpu(), drawn_call(kind, "ragged")
    there = Drawn(placed(drawn.case, second), tuple(x.to(second) for x in drawn.weights))
    expected = results(drawn)
    assert torch.cuda.current_device() == 0
    found = results(there)
    assert torch.cuda.current_device() == 0
    assert all(x.device == second for x in found.values())
    assert_same({name: x.to(truth.DEVICE) for name, x in found.items()}, expected)


def test_addresses_may_lie_off_the_grid_of_16_bytes(kind: Kind) -> None:
    drawn = drawn_call(kind, "whole")
    shifted = [torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape) for x in held(drawn)]
    names = drawn.case.present()
    case = drawn.case.changed(**dict(zip(names, shifted[: len(names)], strict=True)))
    assert case.tensors["q"].data_ptr() % 16 != 0
    assert_alike(results(Drawn(case, tuple(shifted[-2:]))), results(drawn), kind.dtype)


@every_form
def test_compiled_code_equals_eager_code(kind: Kind, form: str) -> None:
    torch._dynamo.reset()
    drawn = drawn_call(kind, form)
    run = runs_with(offsets_of(drawn.case, truth.DEVICE))
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert_same(results(drawn, compiled), results(drawn, run))


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("form", ["whole", "packed"])
def test_the_default_compiler_fuses_around_it(form: str) -> None:
    torch._dynamo.reset()
    drawn = drawn_call(KINDS[1], form)
    inner = runs_with(offsets_of(drawn.case, truth.DEVICE))

    def run(case: Case, x: Tensors) -> RecurrentOutput:
        out = inner(case, x | {"q": 2 * x["q"]})
        return RecurrentOutput(out.o * 0.5, out.final_state)

    assert_same(results(drawn, torch.compile(run, fullgraph=True)), results(drawn, run))


@pytest.mark.parametrize("lengths", [None, (30, 0, 70)])
def test_opcheck(kind: Kind, lengths: tuple[int, ...] | None) -> None:
    drawn = draw(kind.case(tokens=100, lengths=lengths, batch=1))
    run = runs_with(offsets_of(drawn.case, truth.DEVICE))
    names = opcheck_all(lambda: results(drawn, run), CONTRACTS)
    assert names == ["recurrence", "recurrence_backward"]
