"""Each stage in Gluon that has a part of the backward, on an H100 or H200: all hold the same."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import NamedTuple

import pytest
import torch

from deltarule.ops.delta_rule.gluon import gradient_stage, stage, wide_scan_stage
from deltarule.ops.dispatch import forget_calls
from oracle import check_fused, check_fused_gradients
from truth import (
    FORMS,
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

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

Patch = pytest.MonkeyPatch


@contextmanager
def by_head(patch: Patch, whole: bool) -> Iterator[None]:
    """The gradients alone, or with the scan back in one kernel."""
    least = 0.0 if whole else float("inf")
    patch.setattr(gradient_stage, "FILLED", dict.fromkeys(gradient_stage.FILLED, least))
    patch.setattr(gradient_stage, "FILLED_WITH_NORMS", least)
    patch.setattr(gradient_stage, "MOST_WAVES", 0)
    patch.setattr(stage, "fills", lambda inputs, processors: True)
    patch.setattr(gradient_stage, "LEAST_PAIRS", 0)
    yield


@contextmanager
def by_channel(patch: Patch, fused: bool) -> Iterator[None]:
    """The gradients behind either forward that saves for them."""
    patch.setattr(gradient_stage, "LEAST_PAIRS", 0)
    patch.setattr(stage, "fills", lambda inputs, processors: fused)
    yield


@contextmanager
def wide(patch: Patch) -> Iterator[None]:
    """The scans of heads with 256 keys, of which every test takes both."""
    directions, scans = set(), wide_scan_stage.scans

    def counted(call, own, back) -> bool:
        directions.add(back)
        return scans(call, own, back)

    patch.setattr(wide_scan_stage, "scans", counted)
    yield
    assert directions == {False, True}


class Stage(NamedTuple):
    """What computes gradients, how small calls come to take it, and the calls that try it."""

    taken: Callable[[Patch], AbstractContextManager[None]]
    kinds: list[Kind]
    sizes: dict[str, int]
    # Which are held to float64, and whether the outputs are, too.
    calls: list[dict[str, object]]
    outputs: bool = False
    within_nan: tuple[dict[str, object], ...] = ({},)
    under_load: tuple[dict[str, int], ...] = ({"batch": 9, "tokens": 1024},)


NORMALIZED = [{"normalize_qk": False}, {"normalize_qk": True}]
PACKED = FORMS["packed"]
SEGMENTS = {"heads": 4, "value_heads": 4, "tokens": 1024}
BY_HEAD = [
    {"key_size": size, "value_size": size, **norms} for size in (64, 128) for norms in NORMALIZED
]
BY_HEAD += [FORMS["ragged"], PACKED, SEGMENTS]
BY_CHANNEL = [{"heads": heads, **norms} for heads in (16, 8) for norms in NORMALIZED]
BY_CHANNEL += [FORMS["ragged"], PACKED, {"tokens": 1}, SEGMENTS]
WIDE = [form | norms for form in FORMS.values() for norms in NORMALIZED]
WIDE += [
    FORMS["ragged"] | other
    for other in ({"value_size": 512}, {"value_heads": 4}, {"value_size": 128})
]
CHANNELS = [Kind("channel", erase, 1, torch.bfloat16) for erase in ("none", "tied")]
SIZES = {"key_size": 128, "value_size": 128, "tokens": 256, "heads": 16, "value_heads": 16}
# One kernel has the whole backward where each value head has its own keys.
SHARED = SIZES | {"heads": 8}
HALF = {"key_size": 256, "value_size": 256, "heads": 2, "value_heads": 2}
STAGES = {
    "gradients": Stage(partial(by_head, whole=False), PER_HEAD, SHARED, BY_HEAD),
    "backward": Stage(partial(by_head, whole=True), PER_HEAD, SIZES, BY_HEAD),
    "channels": Stage(partial(by_channel, fused=False), CHANNELS, SIZES, BY_CHANNEL),
    "fused channels": Stage(partial(by_channel, fused=True), CHANNELS, SIZES, BY_CHANNEL),
    "wide": Stage(
        wide, PER_HEAD, HALF, WIDE, outputs=True, within_nan=tuple(FORMS.values()),
        under_load=({"batch": 9, "tokens": 512, "heads": 8, "value_heads": 8},),
    ),
}  # fmt: skip


class Tried(NamedTuple):
    """A stage, and what is compiled together."""

    stage: str
    kind: Kind

    def __str__(self) -> str:
        return f"{self.stage}-{self.kind}"

    def drawn(self, **options: object) -> Drawn:
        return draw(self.kind.case(**(STAGES[self.stage].sizes | options)))

    def check(self, drawn: Drawn) -> None:
        """Hold a call to float64, as its types allow."""
        found = results(drawn)
        case, (d_o, d_final) = placed(drawn.case, torch.device("cpu")), drawn.weights
        if STAGES[self.stage].outputs:
            check_fused((found["o"], found["final_state"]), case)
        by_name = {name: found["d " + name] for name in case.present()}
        # Of few heads the largest of a gradient by beta or decay decide: a ratio that spreads.
        check_fused_gradients(by_name, case, (d_o.cpu(), d_final.cpu()), stress=True)


EVERY = [Tried(name, kind) for name, stage in STAGES.items() for kind in stage.kinds]
BY_HEADS = [x for x in EVERY if x.stage in ("gradients", "backward")]
OF_HEADS_TIED = [x for x in EVERY if x.kind == Kind("head", "tied", 1, torch.bfloat16)]
BY_CHANNELS = [x for x in EVERY if x.kind in CHANNELS]


@pytest.fixture(params=EVERY, ids=str)
def tried(request, monkeypatch) -> Iterator[Tried]:
    """Small calls take the stage, too, on new plans."""
    with STAGES[request.param.stage].taken(monkeypatch):
        forget_calls()
        yield request.param
    forget_calls()


def of(tried: list[Tried]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("tried", tried, indirect=True, ids=str)


def each(calls: str, tried: list[Tried] = EVERY) -> pytest.MarkDecorator:
    """Of every stage the calls that it has for this."""
    pairs = [(x, options) for x in tried for options in getattr(STAGES[x.stage], calls)]
    return pytest.mark.parametrize(("tried", "options"), pairs, indirect=["tried"], ids=str)


@each("calls")
def test_gradients_are_as_near_to_float64_as_their_types_allow(tried: Tried, options: dict) -> None:
    tried.check(tried.drawn(**options))


@pytest.mark.parametrize("size", [64, 128])
@of(BY_HEADS)
def test_so_are_those_of_heads_in_parts(tried, size, monkeypatch) -> None:
    monkeypatch.setattr(stage, "LEAST_KEYS", size)
    sizes = {"key_size": size, "value_size": 2 * size}
    drawn = tried.drawn(**sizes)
    tried.check(drawn)
    assert_same(results(drawn), results(drawn))
    tried.check(tried.drawn(**sizes, tokens=150, normalize_qk=True))
    tried.check(tried.drawn(**sizes, lengths=(3, 0, 70, 64)))


@pytest.mark.parametrize(("key_size", "value_size"), [(96, 96), (96, 192), (112, 128)])
@of(BY_HEADS)
def test_so_are_those_of_heads_that_do_not_fill_tiles(
    tried, key_size, value_size, monkeypatch
) -> None:
    # So that rows of few tokens are taken in parts, too.
    monkeypatch.setattr(stage, "LEAST_PACKED", 0)
    sizes = {"key_size": key_size, "value_size": value_size}
    drawn = tried.drawn(**sizes)
    tried.check(drawn)
    assert_same(results(drawn), results(drawn))
    assert_same(results(within_nan(drawn)), results(drawn))
    tried.check(tried.drawn(**sizes, tokens=150, normalize_qk=True))
    tried.check(tried.drawn(**sizes, lengths=(3, 0, 70, 64)))


@pytest.mark.parametrize("reset", [-torch.inf, -1e4])
@of(OF_HEADS_TIED)
def test_hard_resets(tried: Tried, reset: float) -> None:
    drawn = tried.drawn()
    decay = drawn.case.tensors["log_decay"] * 0.05
    decay = decay.masked_fill(torch.rand_like(decay) < 0.05, reset)
    tried.check(drawn._replace(case=drawn.case.changed(log_decay=decay)))


@pytest.mark.parametrize("strong", [-3.0, -12.0, -1e4, -torch.inf])
@of(BY_CHANNELS)
def test_chunks_that_decay_too_far_are_written_again(tried: Tried, strong: float) -> None:
    drawn = tried.drawn()
    decay = drawn.case.tensors["log_decay"] * 0.05
    decay[:, 40:150, :, ::3] = strong
    tried.check(drawn._replace(case=drawn.case.changed(log_decay=decay)))


def test_repeats_and_a_row_alone_have_the_same_bits(tried: Tried) -> None:
    assert_same_again_and_alone(tried.drawn(batch=3))


@each("within_nan")
def test_nan_around_a_tensor_is_never_read(tried: Tried, options: dict) -> None:
    drawn = tried.drawn(**options)
    assert_same(results(within_nan(drawn)), results(drawn))


@each("under_load", OF_HEADS_TIED + BY_CHANNELS)
def test_many_runs_under_load_have_the_same_bits(tried: Tried, options: dict) -> None:
    assert_same_under_load(tried.drawn(**options))


@of(BY_HEADS)
def test_gradients_lie_where_states_were_unless_a_graph_is_kept(tried) -> None:
    drawn = tried.drawn(batch=2, normalize_qk=True)
    case, names = drawn.case, drawn.case.present()
    leaves = {name: case.tensors[name].detach().requires_grad_() for name in names}
    lent = tried.stage == "backward" and tried.kind != PER_HEAD[0]
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


@of(BY_HEADS)
def test_gradients_in_one_place_are_added_to_and_clipped_one_by_one(tried) -> None:
    case = tried.drawn(batch=2).case
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
@of(BY_HEADS)
def test_graphs_of_one_pass_are_replayed_alone(tried) -> None:
    drawn = tried.drawn(batch=2, normalize_qk=True)
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


@of(BY_HEADS)
def test_windows_have_the_bits_of_the_whole(tried: Tried, monkeypatch) -> None:
    from deltarule.ops.delta_rule.triton import windows

    # As few tokens as are not cut into segments, whose windows are Triton's.
    drawn = tried.drawn(batch=2)
    monkeypatch.setattr(stage, "MOST_AGAIN", 0)
    expected = results(drawn, save_states=False)
    monkeypatch.setattr(windows, "LEAST_BYTES", 1)
    monkeypatch.setattr(windows, "LEAST_PROGRAMS", 1)
    forget_calls()
    assert_same(results(drawn, save_states=False), expected)
