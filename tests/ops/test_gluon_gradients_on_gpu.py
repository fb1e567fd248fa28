"""The gradients through the fused forward and the kernel in Gluon, on an H100 or H200."""

from collections.abc import Iterator

import pytest
import torch

from deltarule.ops.delta_rule.gluon import gradient_stage, stage
from deltarule.ops.dispatch import forget_calls
from oracle import check_fused_gradients
from truth import (
    PER_HEAD,
    Drawn,
    Kind,
    assert_same,
    assert_same_again_and_alone,
    assert_same_under_load,
    call,
    draw,
    placed,
    results,
    within_nan,
)

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the fused kernels are written for sm_90")


@pytest.fixture(params=["gradients", "backward"], autouse=True)
def always(request, monkeypatch) -> Iterator[None]:
    """Small calls take them, too: the gradients alone, or with the scan back in one kernel."""
    whole = request.param == "backward"
    least = 0.0 if whole else float("inf")
    monkeypatch.setattr(gradient_stage, "FILLED", dict.fromkeys(gradient_stage.FILLED, least))
    monkeypatch.setattr(gradient_stage, "FILLED_WITH_NORMS", least)
    monkeypatch.setattr(gradient_stage, "MOST_WAVES", 0)
    monkeypatch.setitem(SIZES, "heads", 16 if whole else 8)
    monkeypatch.setattr(stage, "fills", lambda inputs, processors: True)
    monkeypatch.setattr(gradient_stage, "LEAST_PAIRS", 0)
    monkeypatch.setattr(stage, "TRAINING", True)
    forget_calls()
    yield
    forget_calls()


@pytest.fixture(params=PER_HEAD, ids=str)
def kind(request) -> Kind:
    return request.param


# One kernel has the whole backward where each value head has its own keys.
SIZES = {"key_size": 128, "value_size": 128, "tokens": 256, "heads": 8, "value_heads": 16}


def drawn_of(kind: Kind, **options: object) -> Drawn:
    return draw(kind.case(**(SIZES | options)))


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("normalize", [False, True])
def test_gradients_are_as_near_to_float64_as_their_types_allow(kind, size, normalize) -> None:
    drawn = drawn_of(kind, key_size=size, value_size=size, normalize_qk=normalize)
    check(drawn)


def check(drawn: Drawn) -> None:
    found = results(drawn)
    case, (d_o, d_final) = placed(drawn.case, torch.device("cpu")), drawn.weights
    by_name = {name: found["d " + name] for name in case.present()}
    # Of few heads the largest of a gradient by beta or decay decide: a ratio that spreads.
    check_fused_gradients(by_name, case, (d_o.cpu(), d_final.cpu()), stress=True)


def test_gradients_lie_where_states_were_unless_a_graph_is_kept(kind) -> None:
    drawn = drawn_of(kind, batch=2, normalize_qk=True)
    case, names = drawn.case, drawn.case.present()
    leaves = {name: case.tensors[name].detach().requires_grad_() for name in names}
    lent = SIZES["heads"] == SIZES["value_heads"] and kind != PER_HEAD[0]
    expected = None
    # Of the first calls some plan, some record, and some repeat.
    for _ in range(4):
        out = tuple(call(case, case.tensors | leaves))
        for keep in (True, True, False):
            given = out, list(leaves.values()), drawn.weights
            found = torch.autograd.grad(*given, materialize_grads=True, retain_graph=keep)
            storages = {x.untyped_storage().data_ptr() for x in found[:2]}
            assert (len(storages) == 1) == (lent and not keep)
            expected = expected or found
            assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_gradients_in_one_place_are_added_to_and_clipped_one_by_one(kind) -> None:
    case = drawn_of(kind, batch=2).case
    names = case.present()
    leaves, others = (
        {name: case.tensors[name].detach().clone().requires_grad_() for name in names}
        for _ in range(2)
    )
    for _ in range(3):
        for x, keep in ((leaves, False), (others, True)):
            outputs = tuple(call(case, case.tensors | x))
            sum(y.float().square().sum() for y in outputs).backward(retain_graph=keep)
        for x in (leaves, others):
            torch.nn.utils.clip_grad_norm_(x.values(), 1.0, foreach=True)
            x["q"].grad.mul_(2)
    for name in names:
        assert torch.equal(leaves[name].grad, others[name].grad)


# What PyTorch imports within the first call keeps its graph until garbage is collected.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
def test_graphs_of_one_pass_are_replayed_alone(kind) -> None:
    drawn = drawn_of(kind, batch=2, normalize_qk=True)
    case, names = drawn.case, drawn.case.present()
    leaves = {name: case.tensors[name].detach().requires_grad_() for name in names}

    def run(*given) -> tuple:
        return tuple(call(case, case.tensors | dict(zip(names, given, strict=True))))

    def gradients(outputs, keep: bool) -> list:
        given = outputs, list(leaves.values()), drawn.weights
        found = torch.autograd.grad(*given, materialize_grads=True, retain_graph=keep)
        return [x.clone() for x in found]

    expected = gradients(run(*leaves.values()), True)
    both = torch.cuda.make_graphed_callables(run, tuple(leaves.values()))
    outputs = both(*leaves.values())
    for keep in (True, False):
        assert all(map(torch.equal, gradients(outputs, keep), expected))
    forward = torch.cuda.CUDAGraph()
    with torch.cuda.graph(forward):
        outputs = run(*leaves.values())
    forward.replay()
    given = outputs, list(leaves.values()), drawn.weights
    found = torch.autograd.grad(*given, materialize_grads=True)
    forward.replay()
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("size", [64, 128])
def test_so_are_those_of_heads_in_parts(kind, size, monkeypatch) -> None:
    monkeypatch.setattr(stage, "LEAST_KEYS", size)
    sizes = {"key_size": size, "value_size": 2 * size}
    drawn = drawn_of(kind, **sizes)
    check(drawn)
    assert_same(results(drawn), results(drawn))
    check(drawn_of(kind, **sizes, tokens=150, normalize_qk=True))
    check(drawn_of(kind, **sizes, lengths=(3, 0, 70, 64)))


@pytest.mark.parametrize(("key_size", "value_size"), [(96, 96), (96, 192), (112, 128)])
def test_so_are_those_of_heads_that_do_not_fill_tiles(
    kind, key_size, value_size, monkeypatch
) -> None:
    # So that rows of few tokens are taken in parts, too.
    monkeypatch.setattr(stage, "LEAST_PACKED", 0)
    sizes = {"key_size": key_size, "value_size": value_size}
    drawn = drawn_of(kind, **sizes)
    check(drawn)
    assert_same(results(drawn), results(drawn))
    assert_same(results(within_nan(drawn)), results(drawn))
    check(drawn_of(kind, **sizes, tokens=150, normalize_qk=True))
    check(drawn_of(kind, **sizes, lengths=(3, 0, 70, 64)))


@pytest.mark.parametrize("reset", [-torch.inf, -1e4])
def test_hard_resets(reset: float) -> None:
    drawn = drawn_of(Kind("head", "tied", 1, torch.bfloat16))
    decay = drawn.case.tensors["log_decay"] * 0.05
    decay = decay.masked_fill(torch.rand_like(decay) < 0.05, reset)
    check(drawn._replace(case=drawn.case.changed(log_decay=decay)))


def test_calls_that_are_cut_into_segments_have_gradients(kind: Kind) -> None:
    check(drawn_of(kind, heads=4, value_heads=4, tokens=1024))


def test_ragged_and_packed_calls_have_gradients(kind: Kind) -> None:
    check(drawn_of(kind, tokens=150))
    check(drawn_of(kind, lengths=(3, 0, 70, 64)))


def test_repeats_and_a_row_alone_have_the_same_bits(kind: Kind) -> None:
    assert_same_again_and_alone(drawn_of(kind, batch=3))


def test_windows_have_the_bits_of_the_whole(kind: Kind, monkeypatch) -> None:
    from deltarule.ops.delta_rule.triton import windows

    # As few tokens as are not cut into segments, whose windows are Triton's.
    drawn = drawn_of(kind, batch=2)
    monkeypatch.setattr(stage, "MOST_AGAIN", 0)
    expected = results(drawn, save_states=False)
    monkeypatch.setattr(windows, "LEAST_BYTES", 1)
    monkeypatch.setattr(windows, "LEAST_PROGRAMS", 1)
    forget_calls()
    assert_same(results(drawn, save_states=False), expected)


def test_nan_around_a_tensor_is_never_read(kind: Kind) -> None:
    drawn = drawn_of(kind)
    expected = results(drawn)
    assert_same(results(within_nan(drawn)), expected)


def test_many_runs_under_load_have_the_same_bits() -> None:
    drawn = drawn_of(Kind("head", "tied", 1, torch.bfloat16), batch=9, tokens=1024)
    assert_same_under_load(drawn)
