"""Recorded launches: the same kernels on the same numbers as without, whatever is new in a call."""

import ctypes
import os
import sys
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from promised import promised

promised("triton")

import triton.language as tl
from triton.compiler import CompiledKernel

import deltarule
from deltarule import delta_rule
from deltarule.models import CausalLM, ModelConfig
from deltarule.models.adjoined import adjoin_projections
from deltarule.ops import dispatch, fused_kernels, operators
from deltarule.ops.delta_rule import repeated
from deltarule.ops.delta_rule.gluon import stage
from deltarule.ops.delta_rule.implementations import IMPLEMENTATIONS
from deltarule.ops.delta_rule.inputs import Inputs
from deltarule.ops.delta_rule.triton import channel_stages, passes
from deltarule.ops.delta_rule.triton import plan as launch
from deltarule.ops.delta_rule.triton.plan import Call, Plan
from deltarule.ops.dispatch import always, forget_calls, recordings
from deltarule.ops.fused import norms_triton
from deltarule.ops.fused.norms import GatedNorm
from deltarule.ops.operators import Operator
from deltarule.ops.runtime import launch as direct
from deltarule.ops.runtime import named, replay, tensor_maps
from deltarule.ops.runtime.chained import CHAIN
from deltarule.ops.runtime.launch import Launch
from deltarule.ops.runtime.replay import Recorded
from neighbours import MAKERS, with_gradients

# Above any number that a launch is given besides addresses.
LEAST_ADDRESS = 2**33
GRID = (1, 1, 1)


def call(tokens: int = 128, **changes) -> Inputs:
    # Keys of about unit length: longer ones let the state grow beyond all numbers.
    q, k, v = (torch.randn(3, 1, tokens, 2, 16) / 4).unbind()
    beta, gate = torch.rand(1, tokens, 2), -torch.rand(1, tokens, 2)
    return Inputs(q, k, v, beta, log_decay=gate, scale=0.5)._replace(**changes)


def bfloat16(inputs: Inputs) -> Inputs:
    return inputs._replace(**{name: getattr(inputs, name).bfloat16() for name in "qkv"})


def channel() -> torch.Tensor:
    return -torch.rand(1, 128, 2, 16)


CALLS = {
    "no decay": lambda: call(log_decay=None),
    "no erase": lambda: call(beta=None),
    "head": call,
    "bfloat16": lambda: bfloat16(call()),
    "a gate in bfloat16": lambda: call(beta=torch.rand(1, 128, 2).bfloat16()),
    "unit norm": lambda: call(normalize_qk=True),
    "tokens left over": lambda: call(100),
    "channels": lambda: call(log_decay=channel()),
    "channels, bfloat16": lambda: bfloat16(call(log_decay=channel())),
    "free": lambda: call(beta=None, log_decay=channel(), a=channel() / 4, b=channel() / 4),
    "constant": lambda: call(log_decay=(-torch.rand(2)).expand(1, 128, 2)),
    "a state": lambda: call(initial_state=torch.randn(1, 2, 16, 16)),
    "packed": lambda: call(cu_seqlens=torch.tensor([0, 8, 128])),
    "one tensor thrice": lambda: call(**dict.fromkeys("qkv", torch.randn(1, 128, 2, 16) / 4)),
}


class Runs:
    """Launchers that note their launches and do `work` with the addresses."""

    def __init__(self, work=lambda kernel, *given: None) -> None:
        self.seen: list[tuple[object, ...]] = []
        self.work, self.binaries = work, 0

    def through_triton(self, kernel: Launch, grid, arguments) -> CompiledKernel:
        self.binaries += 1
        given = [tile for tile in kernel.tiles if arguments[tile[0]] is not None]
        found = CompiledKernel.__new__(CompiledKernel)
        found.module, found.function, found.packed_metadata = None, self.binaries, (4, 1, 0)
        found.metadata = SimpleNamespace(tensordesc_meta=[{"swizzle": 1}] * len(given))
        number = self.binaries

        def run(*values) -> None:
            self.seen.append((number, *values))
            self.work(kernel, *values[9:])

        found._run = run
        if (key := direct.signature(arguments)) is not None:
            self.work(kernel, *key[1], *kernel.rest)
        return found


@pytest.fixture
def runs(monkeypatch):
    """No GPU: kernels that run nothing, and calls on the CPU taken for calls on a GPU."""
    runs = Runs()
    active = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: 7)
    for place in (direct, replay):
        monkeypatch.setattr(place, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(direct, "launcher_of_maps", lambda launcher: launcher)
    monkeypatch.setattr(
        tensor_maps.Fetched, "new_map", lambda self, x: ["map", self.place, x.data_ptr(), *x.shape]
    )
    monkeypatch.setattr(Launch, "through_triton", lambda *given: runs.through_triton(*given))
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(passes, "compiled_together", lambda run, kind: None)
    forget_calls()
    named.launches.clear()
    yield runs
    forget_calls()
    named.launches.clear()


def known() -> list[replay.Recording]:
    """Each once: calls have theirs by the arguments before their checks, too."""
    found = {id(x): x for x in recordings.values() if isinstance(x, replay.Recording)}
    return list(found.values())


def renamed(seen: list[tuple[object, ...]], given: list[torch.Tensor]) -> list[list[object]]:
    """Launches with each address as the number of an argument, or of its first appearance."""
    names: dict[int, str] = {}
    for i, x in enumerate(given):
        names.setdefault(x.data_ptr(), f"given {i}")

    def name(x: object) -> object:
        if type(x) is not int or x < LEAST_ADDRESS:
            return x
        return names.setdefault(x, f"made {len(names)}")

    return [[name(x) for x in values] for values in seen]


@pytest.fixture
def held(monkeypatch):
    """Nothing that is made is freed: its address would come again."""
    made = []
    for name in ("empty", "empty_like"):
        take = getattr(torch, name)
        keep = lambda *x, take=take, **y: made.append(take(*x, **y)) or made[-1]  # noqa: E731
        monkeypatch.setattr(torch, name, keep)


def alike(x: torch.Tensor | None) -> object:
    return x if x is None else (x.shape, x.stride(), x.dtype)


def assert_repeated(run: Recorded, first, second, given, runs: Runs) -> tuple:
    """The third call of a kind launches what its stages do, past Triton's search."""
    for before in (first, second):
        run(*before)
    assert len(known()) == 1
    tensors = [x for x in (*given[0], *given[1:]) if isinstance(x, torch.Tensor)]
    runs.seen.clear()
    expected, launches = run.run(*given), [*runs.seen]
    assert launches
    runs.seen.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Launch, "launch", None)
        found = run(*given)
    assert renamed(runs.seen, tensors) == renamed(launches, tensors)
    assert [*map(alike, found)] == [*map(alike, expected)]
    return found


@pytest.mark.usefixtures("held")
@pytest.mark.parametrize("save", [False, True])
@pytest.mark.parametrize("make", CALLS.values(), ids=CALLS)
def test_a_replay_launches_what_the_forward_does(make, save: bool, runs) -> None:
    assert_repeated(passes.forward_stages, *[(make(), save) for _ in range(3)], runs)


@pytest.mark.usefixtures("held")
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("make", CALLS.values(), ids=CALLS)
def test_a_replay_launches_what_the_backward_does(make, again: bool, runs) -> None:
    calls = []
    for _ in range(3):
        inputs = make()
        saved = torch.empty(passes.saved_shape(inputs))[: 0 if again else None]
        given = torch.randn(inputs.output_shape), torch.randn(inputs.state_shape)
        calls.append((inputs, *given, saved))
    found = assert_repeated(passes.gradient_stages, *calls, runs)
    # No input, no gradient.
    assert [x is None for x in found] == [x is None for x in inputs[:8]]


def test_what_was_one_tensor_may_be_several(runs) -> None:
    for _ in range(2):
        passes.forward(CALLS["one tensor thrice"](), False)
    runs.seen.clear()
    passes.forward(several := call(), False)
    assert {x.data_ptr() for x in several[:3]} <= {x for step in runs.seen for x in step}


def test_what_repeats_its_memory_has_no_more_than_that() -> None:
    memory = bytearray(64 * 4)
    # Two tensors side by side in memory, as an allocator gives it.
    gate, made = (
        torch.frombuffer(memory, dtype=torch.float32, count=2, offset=at) for at in (0, 8)
    )
    given = gate.expand(1, 128, 2)
    tape = replay.Tape([given])
    tape.made.append(made)
    assert tape.holder(made) is made
    assert tape.holder(gate) is given


def test_rows_that_lie_apart_hold_what_begins_in_any_of_them() -> None:
    whole = torch.zeros(6, 8)
    columns, others = whole[:, :4], whole[:, 4:]
    assert replay.Tape([columns]).holder(columns[5:]) is columns
    # It may be a part of either, which lie elsewhere in the next call.
    assert replay.Tape([columns, others]).holder(columns[3:]) is None


def test_split_sequences_are_replayed_too(runs, monkeypatch) -> None:
    plan = launch.new_plan(call())
    split = Plan(plan.tile_key, plan.chunks, plan.sizes, 1)
    for module in (passes.plan, stage):
        monkeypatch.setattr(module, "make_plan", lambda inputs: split)
    for _ in range(2):
        passes.forward(call(), False)
    assert [len(x.steps) for x in known()] == [5]


@pytest.fixture
def trains(monkeypatch):
    """Calls of the operator take the kernels."""
    runs = IMPLEMENTATIONS["triton"]._replace(why_not=always)
    monkeypatch.setitem(IMPLEMENTATIONS, "triton", runs)


@pytest.mark.usefixtures("trains")
@pytest.mark.parametrize("decay", [None, "head", "channel"])
def test_a_training_call_is_its_launches_alone(decay, runs, monkeypatch) -> None:
    size = {None: None, "head": (1, 128, 2), "channel": (1, 128, 2, 16)}[decay]

    def train(d_o: torch.Tensor, state: torch.Tensor | None = None) -> list[torch.Tensor]:
        q, k, v = torch.randn(3, 1, 128, 2, 16).bfloat16().unbind()
        gates = {"beta": torch.rand(1, 128, 2).bfloat16()}
        gates |= {} if size is None else {"log_decay": -torch.rand(size)}
        given = [x.detach().requires_grad_() for x in (q, k, v, *gates.values())]
        gates = dict(zip(gates, given[3:], strict=True))
        o = delta_rule(*given[:3], **gates, initial_state=state).o
        found = torch.autograd.grad(o, given, d_o)
        assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in given]
        return found

    one = torch.ones(1, 128, 2, 16).bfloat16()
    for _ in range(3):
        train(one)
    launches = len(runs.seen)
    train(one)
    assert len(runs.seen) - launches == sum(len(x.steps) for x in known())
    with monkeypatch.context() as patch:
        for name in ("derivatives", "keep", "run_forward"):
            patch.setattr(Operator, name, None)
        train(one)
        # Gradients of another kind take the way through all checks.
        for other in (one.new_ones(()).expand(one.shape), one.mT.contiguous().mT):
            with pytest.raises(TypeError, match="not callable"):
                train(other)
    train(one.new_ones(()).expand(one.shape))


@pytest.mark.usefixtures("runs", "trains")
@pytest.mark.parametrize(
    ("captured", "keeps"),
    [("", (False,)), ("", (True, True, False)), ("forward", (False,)), ("backward", (False,))],
)
@pytest.mark.parametrize("known", [True, False])
def test_what_was_saved_is_spent_in_a_last_backward(captured, keeps, known, monkeypatch) -> None:
    is_spent, found = operators.is_spent, set()

    def spent(ctx) -> bool:
        found.add(is_spent(ctx))
        return is_spent(ctx)

    for module in (operators, repeated):
        monkeypatch.setattr(module, "is_spent", spent)
    # Without that function, autograd may keep its graph or not.
    if not known:
        monkeypatch.delattr(torch._C._autograd, "_get_current_graph_task_keep_graph")
    inside, taken = "", ""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: inside == taken != "")
    # Of the first calls some plan, some record, and some repeat.
    for taken in (captured, "", "", "", captured):
        leaves = [x.requires_grad_() for x in torch.randn(3, 1, 128, 2, 16).bfloat16().unbind()]
        inside = "forward"
        o = delta_rule(*leaves, beta=torch.rand(1, 128, 2).bfloat16()).o
        inside = "backward"
        for keep in keeps:
            found.clear()
            torch.autograd.grad(o, leaves, torch.ones_like(o), retain_graph=keep)
            # A replay of a CUDA graph reads once more what was saved, or writes it.
            assert found == {known and not keep and not taken}


@pytest.mark.usefixtures("trains")
def test_what_lies_otherwise_than_in_the_forward_is_looked_at(runs) -> None:
    d_o, given = torch.ones(1, 128, 2, 16), torch.randn(3, 1, 128, 2, 16)

    def train(pack) -> list[torch.Tensor]:
        leaves = [x.clone().requires_grad_() for x in given]
        packed: list[torch.Tensor] = []
        keep = lambda x: packed.append(pack(x)) or packed[-1]  # noqa: E731
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            o = delta_rule(*leaves, beta=None).o
        runs.seen.clear()
        torch.autograd.grad(o, leaves, d_o)
        return packed

    def addresses() -> set[object]:
        return {x for step in runs.seen for x in step}

    for _ in range(4):
        found = train(lambda x: x)
    assert {x.data_ptr() for x in found[1:4]} <= addresses()
    moved = train(torch.clone)
    assert {x.data_ptr() for x in moved[1:4]} <= addresses()
    # Columns before rows: a copy is read in their place.
    turned = train(lambda x: x.mT.contiguous().mT if x.shape == d_o.shape else x)
    assert not {x.data_ptr() for x in turned[1:4]} & addresses()


@pytest.mark.usefixtures("runs", "trains")
def test_what_is_saved_is_asked_for_once_as_checkpoints_want_it() -> None:
    def layer(x: torch.Tensor) -> torch.Tensor:
        return delta_rule(x, x, x, beta=None).o

    for _ in range(2):
        x = torch.randn(1, 64, 2, 16).bfloat16().requires_grad_()
        y = x
        # The third layer repeats a forward whose backward nobody has seen yet.
        for _ in range(4):
            y = checkpoint(layer, y, use_reentrant=False)
        y.sum().backward()
        assert x.grad is not None


def addition(x, y, out, n, extra: tl.constexpr):
    """The parameters of a kernel."""


ADD = SimpleNamespace(arg_names=("x", "y", "out", "n", "extra"), fn=addition)


def add(kernel, x: int, y: int, out: int, n: int, extra: float, *_) -> None:
    """out = x + y + extra, of n float32 numbers."""
    a, b, c = ((ctypes.c_float * n).from_address(place) for place in (x, y, out))
    for i in range(n):
        c[i] = a[i] + b[i] + extra


def toy(inputs: Inputs) -> tuple[torch.Tensor, ...]:
    """o = q + k + 1 and twice that with v, by way of two buffers of odd sizes."""
    call, n = Call(inputs, launch.make_plan(inputs)), inputs.q.numel()
    q, k, v = inputs[:3]
    first, second = call.empty((n + 3,)), call.empty((n + 5,))
    out, o = (call.empty(q.shape) for _ in range(2))
    for x, y, to in ((q, k, first), (v, v, second[4:]), (first, second[4:], o), (first, o, out)):
        call.launch(ADD, GRID, {"x": x, "y": y, "out": to, "n": n, "extra": 1.0})
    return o, out


recorded_toy = Recorded(toy)


def assert_toy(outputs: tuple[torch.Tensor, ...], inputs: Inputs) -> None:
    first = inputs.q + inputs.k + 1
    o = first + (inputs.v + inputs.v + 1) + 1
    torch.testing.assert_close([*outputs], [o, first + o + 1])


def test_new_tensors_give_new_numbers(runs) -> None:
    runs.work = add
    before = []
    for _ in range(5):
        inputs = call(8)
        outputs = recorded_toy(inputs)
        assert_toy(outputs, inputs)
        before.append([(x, x.clone()) for x in outputs])
    assert len(known()) == 1
    # What was returned is the caller's.
    assert all(torch.equal(x, y) for outputs in before for x, y in outputs)
    assert len({x.data_ptr() for outputs in before for x, _ in outputs}) == 10


def into_room(inputs: Inputs, room: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """o = q + k + 1 in a part of what is given."""
    new, n = Call(inputs, launch.make_plan(inputs)), inputs.q.numel()
    o = room.as_strided(inputs.q.shape, inputs.q.stride(), 64)
    new.launch(ADD, GRID, {"x": inputs.q, "y": inputs.k, "out": o, "n": n, "extra": 1.0})
    return o, None


def test_what_is_returned_may_lie_in_what_is_given(runs) -> None:
    runs.work = add
    run = Recorded(into_room)
    for _ in range(4):
        inputs = call(8)
        room = torch.zeros(inputs.q.numel() + 128)
        o, nothing = run(inputs, room)
        assert nothing is None
        torch.testing.assert_close(o, inputs.q + inputs.k + 1)
        assert o.data_ptr() == room.data_ptr() + 256
        assert room[:64].count_nonzero() == 0
    # The last call was repeated: its o is a tensor of its own, no view.
    version = room._version
    o.zero_()
    assert (room._version, o._is_view()) == (version, False)
    assert len(known()) == 1


def test_addresses_that_come_again_are_kept_up_to_a_bound(runs, monkeypatch) -> None:
    runs.work = add
    calls = [call(8) for _ in range(5)]
    monkeypatch.setattr(replay, "MOST_READY", 3)
    for again in range(3):
        for inputs in calls:
            # What is returned is held, so that addresses differ.
            held = recorded_toy(inputs)
            assert_toy(held, inputs)
            assert all(0 < len(x.ready) <= 3 for x in known()) or not again


@Recorded
def with_a_constant(inputs: Inputs) -> tuple[torch.Tensor, ...]:
    ones = channel_stages.constant(inputs.q, torch.ones, inputs.v.shape)
    return toy(inputs._replace(v=ones))


def test_a_constant_lies_where_graphs_know_it_though_its_calls_are_forgotten(runs) -> None:
    runs.work = add
    key = torch.ones, call(8).v.shape
    for _ in range(2):
        for _ in range(4):
            inputs = call(8)
            assert_toy(with_a_constant(inputs), inputs._replace(v=torch.ones_like(inputs.v)))
        assert len(known()) == 1
        ones = channel_stages.made_once[key]
        forget_calls()
        passes.plan.make_plan(inputs).made.clear()
        assert channel_stages.made_once[key] is ones


def test_what_a_graph_captures_makes_its_own_constants(monkeypatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    made = [channel_stages.constant(call().q, torch.ones, 3) for _ in range(2)]
    assert made[0] is not made[1]
    assert (torch.ones, 3) not in channel_stages.made_once


def on_changed(change):
    """Stages that compute something of what they are given first."""
    return lambda inputs: toy(change(inputs))


def viewed(inputs: Inputs) -> Inputs:
    return inputs._replace(k=inputs.k.view(-1)[:].view(inputs.k.shape))


# Whether a call is recorded whose stages do this.
OTHERS = {
    "a copy": (on_changed(lambda x: x._replace(k=x.k.clone())), False),
    "a write": (on_changed(lambda x: x._replace(k=x.k.mul_(1))), False),
    "zeros": (on_changed(lambda x: x._replace(v=torch.zeros(x.v.shape) + x.v)), False),
    "a result": (lambda inputs: tuple(x * 1 for x in toy(inputs)), False),
    "a view": (on_changed(viewed), True),
    "a view of one of two": (on_changed(viewed), False),
}


def test_only_launches_on_what_is_given_or_made_are_recorded(runs) -> None:
    runs.work = add
    for name, (stages, recorded) in OTHERS.items():
        forget_calls()
        run = Recorded(stages)
        for _ in range(4):
            inputs = call(8)
            inputs = inputs._replace(q=inputs.k) if name == "a view of one of two" else inputs
            assert_toy(run(inputs), inputs)
        assert [x is None for x in recordings.values()] == [not recorded], name


def test_nor_is_what_takes_much_room(runs, monkeypatch) -> None:
    runs.work = add
    monkeypatch.setattr(replay, "MOST_ROOM", 512)
    for _ in range(3):
        recorded_toy(call(8))
    assert known() == []


def calls_of(step) -> list[tuple[Recorded, tuple]]:
    """What is recorded of all that a step launches, and what each is given."""
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        call = lambda self, *given: seen.append((self, given)) or self.run(*given)  # noqa: E731
        patch.setattr(Recorded, "__call__", call)
        step()
    return seen


@pytest.fixture
def everywhere(monkeypatch, trains):
    """Models take every kernel that there is."""
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    monkeypatch.setattr(fused_kernels, "why_no_triton", lambda name, x: None)
    monkeypatch.setattr("deltarule.nn.embedding.is_hopper", lambda device: False)
    monkeypatch.setattr(torch, "mm", lambda x, y, out_dtype: (x @ y).to(out_dtype))
    # On autograd's own thread nobody counts.
    with torch.autograd.set_multithreading_enabled(False):
        yield


def operator(make) -> None:
    """An operator beside the recurrence, and its gradients."""
    case = make()
    weights = [torch.randn_like(x) for x in case.plain(case.tensors)]
    with_gradients(case.fused, case.tensors, weights)


def model_of(layer: str, layers: int = 1, dtype=torch.bfloat16) -> tuple[CausalLM, torch.Tensor]:
    config = {"vocab_size": 64, "hidden_size": 128, "num_layers": layers, "num_heads": 8}
    model = CausalLM(ModelConfig(layer_types=layer, **config)).to(dtype)
    adjoin_projections(model, tuple(model.parameters()))
    return model, torch.randint(64, (1, 64))


def block(layer: str, autocast: bool) -> None:
    """Norms, projections, gates and a network, whose gradients share memory."""
    model, tokens = model_of(layer, dtype=torch.float32 if autocast else torch.bfloat16)
    with torch.autocast("cpu", torch.float16, enabled=autocast):
        model.hidden(tokens)[0].float().square().sum().backward()


# Those whose tensors begin on the grid of 16 bytes.
MAPS = (
    "conv", "conv, packed", "conv, fresh", "three convs", "three convs in one launch", "norm",
    "norm without gate", "residual norm", "head decay", "head decay and step",
)  # fmt: skip
STEPS = {name: partial(operator, MAKERS[name]) for name in MAPS}
STEPS |= {
    f"{layer}, autocast {on}": partial(block, layer, on)
    for layer in ("gated_deltanet", "deltanet", "mamba2") for on in (False, True)
}  # fmt: skip


@pytest.mark.usefixtures("held", "everywhere")
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_a_step_is_repeated_as_it_launches(step, runs) -> None:
    calls = [calls_of(step) for _ in range(3)]
    assert calls[0]
    for (run, *first), (_, *second), (_, *last) in zip(*calls, strict=True):
        forget_calls()
        assert_repeated(run, *first, *second, *last, runs)


@pytest.mark.usefixtures("runs", "everywhere")
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_the_default_type_of_tensors_is_none_of_their_business(step) -> None:
    for run, given in calls_of(step):
        expected = run.run(*given)
        before = torch.get_default_dtype()
        try:
            torch.set_default_dtype(torch.bfloat16)
            found = run.run(*given)
        finally:
            torch.set_default_dtype(before)
        assert [*map(alike, found)] == [*map(alike, expected)]


def assert_another_kind(run, given, other, monkeypatch, around=nullcontext) -> None:
    """What was recorded of a call is not repeated for another one."""
    for _ in range(3):
        run(*given)
    assert len(known()) == 1
    monkeypatch.setattr(replay.Recording, "launched", None)
    with around():
        run(*other)
    with pytest.raises(TypeError):
        run(*given)


NORM = GatedNorm(*torch.randn(2, 1, 16, 2, 16), torch.randn(16), 1e-5, "silu", False)


@pytest.mark.parametrize(
    "change",
    [{"eps": 1e-6}, {"activation": "sigmoid"}, {"gate": None}, {"weight": torch.ones(16).double()}],
)  # fmt: skip
def test_another_number_or_type_is_another_kind(change, runs, monkeypatch) -> None:
    norm = NORM._replace(**change)
    assert_another_kind(norms_triton.gated_norm, [NORM], [norm], monkeypatch)


@contextmanager
def chained():
    token = CHAIN.set(True)
    yield
    CHAIN.reset(token)


@contextmanager
def hooked():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct.knobs.runtime, "launch_enter_hook", print)
        yield


@pytest.mark.parametrize("around", [chained, hooked])
def test_a_chain_of_launches_and_one_that_is_watched_are_others(around, runs, monkeypatch) -> None:
    assert_another_kind(norms_triton.gated_norm, [NORM], [NORM], monkeypatch, around)


class Other(torch.Tensor):
    """A tensor that may be more than memory."""


DIFFERENT = {
    "scale": lambda x: x._replace(scale=0.25),
    "strides": lambda x: x._replace(beta=torch.rand(1, 2, 128).mT),
    "strides of a decay": lambda x: x._replace(log_decay=torch.zeros(2).expand(1, 128, 2)),
    "type of a gate": lambda x: x._replace(beta=x.beta.half()),
    "no gate": lambda x: x._replace(beta=None),
    "a state": lambda x: x._replace(initial_state=torch.randn(1, 2, 16, 16)),
    "tokens": lambda x: call(64),
    "unit norm": lambda x: x._replace(normalize_qk=True),
    "batch invariant": lambda x: x._replace(batch_invariant=True),
    "not in one piece": lambda x: x._replace(q=torch.randn(1, 2, 128, 16).transpose(1, 2)),
    "off the grid": lambda x: x._replace(q=torch.randn(1 + 128 * 32)[1:].view(1, 128, 2, 16)),
    "a subclass": lambda x: x._replace(q=x.q.as_subclass(Other)),
}


@pytest.mark.parametrize("change", DIFFERENT.values(), ids=DIFFERENT)
def test_another_kind_is_not_replayed(change, runs, monkeypatch) -> None:
    given, other = (call(), False), (change(call()), False)
    assert_another_kind(passes.forward, given, other, monkeypatch)


def test_a_new_stream_is_looked_up(runs, monkeypatch) -> None:
    for _ in range(2):
        passes.forward(call(), False)
    runs.seen.clear()
    monkeypatch.setattr(replay.driver.active, "get_current_stream", lambda device: 11)
    passes.forward(call(), False)
    assert {step[4] for step in runs.seen} == {11}
    # What threads share is not written.
    assert all(step.values[3] is None for step in known()[0].steps)


def test_what_is_kept_has_a_bound(runs, monkeypatch) -> None:
    monkeypatch.setattr(dispatch, "MOST", 4)
    for i in range(20):
        passes.forward(call(scale=float(i)), False)
        assert len(recordings) <= 4


def on_gpu(make, dtype: torch.dtype) -> Inputs:
    inputs = make()
    moved = {
        name: (x.to(dtype) if name in "qkv" else x).cuda()
        for name, x in inputs._asdict().items()
        if isinstance(x, torch.Tensor)
    }
    return inputs._replace(**moved)


@pytest.mark.gpu
@pytest.mark.parametrize("save", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("make", CALLS.values(), ids=CALLS)
def test_replays_on_a_gpu_equal_the_launches_bitwise(make, dtype, save: bool, monkeypatch) -> None:
    forget_calls()
    for i in range(4):
        inputs = on_gpu(make, dtype)
        *found, saved = passes.forward(inputs, save)
        given = *map(torch.randn_like, found), inputs, saved
        found += passes.backward(*given)
        assert len(known()) == 2 * (i > 0)
        with monkeypatch.context() as patch:
            patch.setattr(direct, "watched", lambda *kernels: True)
            *expected, kept = passes.forward(inputs, save)
            expected += passes.backward(*given)
        assert kept.shape == saved.shape
        pairs = zip(found, expected, strict=True)
        assert all(x is y is None or torch.equal(x, y) for x, y in pairs)


@pytest.mark.gpu
def test_a_replay_may_be_captured_and_follows_the_stream() -> None:
    forget_calls()
    q, k, v = torch.randn(3, 1, 128, 2, 64, device="cuda").bfloat16().unbind()
    beta = torch.rand(1, 128, 2, device="cuda")
    run = lambda: delta_rule(q, k, v, beta=beta, normalize_qk=True, impl="triton").o  # noqa: E731
    for _ in range(4):
        expected = run()
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    captured.zero_()
    v.mul_(2)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, run())
    with torch.cuda.stream(side):
        side.wait_stream(torch.cuda.default_stream())
        # Launches on any other stream would read the old values.
        torch.cuda._sleep(40_000_000)
        v.div_(2)
        found = run()
    side.synchronize()
    assert torch.equal(found, expected)


@pytest.mark.gpu
def test_an_operator_is_replayed_and_still_checked() -> None:
    forget_calls()
    q, k, v = (torch.randn(3, 1, 128, 2, 64, device="cuda") / 8).bfloat16().unbind()
    beta = torch.rand(1, 128, 2, device="cuda")
    outputs = [delta_rule(q, k, v, beta=beta) for _ in range(4)]
    assert len(known()) == 1
    # The call's own key, and that of what its checks made of it.
    assert len(recordings) == 2
    assert all(torch.equal(x.o, outputs[0].o) for x in outputs)
    assert all(torch.equal(x.final_state, outputs[0].final_state) for x in outputs)
    with pytest.raises(ValueError, match="beta must be"):
        delta_rule(q, k, v, beta=beta[:, :2])
    with pytest.raises(ValueError, match="beta is on cpu"):
        delta_rule(q, k, v, beta=beta.cpu())
    leaf = beta.clone().requires_grad_()
    delta_rule(q, k, v, beta=leaf).o.sum().backward()
    assert leaf.grad is not None


def by_channel() -> list[torch.Tensor]:
    """What a call is given whose backward reads a constant."""
    q, k, v = (torch.randn(3, 1, 128, 2, 64, device="cuda") / 8).bfloat16().unbind()
    gates = torch.rand(1, 128, 2, device="cuda"), -torch.rand(1, 128, 2, 64, device="cuda")
    return [x.requires_grad_() for x in (q, k, v, *gates)]


def gradients(leaves: list[torch.Tensor], run=delta_rule) -> tuple[torch.Tensor, ...]:
    o = run(*leaves[:3], beta=leaves[3], log_decay=leaves[4]).o
    return torch.autograd.grad(o, leaves, torch.ones_like(o))


def same(found, expected) -> bool:
    return all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def no_ones_are_free() -> list[torch.Tensor]:
    """NaN in as much small memory as there may be."""
    return [torch.full((2048,), torch.nan, device="cuda") for _ in range(4096)]


@pytest.mark.gpu
def test_a_graph_reads_its_constants_after_all_calls_are_forgotten() -> None:
    forget_calls()
    leaves = by_channel()
    for _ in range(4):
        expected = gradients(leaves)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gradients(leaves)
    forget_calls()
    taken = no_ones_are_free()
    graph.replay()
    torch.cuda.synchronize()
    assert same(found, expected)
    del taken


@pytest.mark.gpu
def test_a_constant_is_there_for_a_stream_that_does_not_wait_for_its_first() -> None:
    forget_calls()
    leaves = by_channel()
    expected = gradients(leaves)
    forget_calls()
    channel_stages.made_once.clear()
    no_ones_are_free()
    one, other = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(one):
        torch.cuda._sleep(10_000_000_000)
        gradients(leaves)
    with torch.cuda.stream(other):
        found = gradients(leaves)
    other.synchronize()
    # What came first is still to be done.
    assert not one.query()
    with torch.cuda.stream(other):
        assert same(found, expected)
    torch.cuda.synchronize()


@pytest.mark.gpu
# PyTorch's own first capture, of nothing, which makes its pool of memory.
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_graphs_of_compiled_code_do_not_own_the_constants() -> None:
    forget_calls()
    leaves = by_channel()
    expected = gradients(leaves)
    forget_calls()
    channel_stages.made_once.clear()
    run = torch.compile(delta_rule, mode="reduce-overhead")
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        assert same(gradients(leaves, run), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("rule", ["gated_deltanet", "kda", "retnet"])
def test_a_model_that_computes_its_layers_again_repeats_its_launches(rule, monkeypatch) -> None:
    forget_calls()
    config = ModelConfig(
        vocab_size=64, hidden_size=128, num_layers=5, num_heads=2, layer_types=rule
    )
    model = CausalLM(config).cuda().bfloat16()
    model.activation_checkpointing = True
    tokens = torch.randint(64, (2, 128), device="cuda")

    def step() -> list[torch.Tensor]:
        model(tokens)[0].float().logsumexp(-1).mean().backward()
        found = [x.grad for x in model.blocks.parameters()]
        model.zero_grad(set_to_none=True)
        return found

    found = [step() for _ in range(4)]
    monkeypatch.setattr(direct, "watched", lambda *kernels: True)
    expected = step()
    assert all(same(row, expected) for row in found)


# A clone may lie in a folder of the package's name, the tests with it.
PACKAGE = os.path.join(os.path.dirname(deltarule.__file__), "")


def calls_of_ours(run) -> int:
    """Calls of the package's Python functions, but for those that depend on the allocator."""
    count = 0
    # Taken where a call's tensors lie at addresses that no call before had.
    new_addresses = replay.Recording.calls.__code__

    def note(frame, event: str, _: object) -> None:
        nonlocal count
        code = frame.f_code
        ours = event == "call" and code.co_filename.startswith(PACKAGE)
        count += ours and code is not new_addresses

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.usefixtures("runs", "everywhere")
@pytest.mark.parametrize(("training", "most"), [(True, 402), (False, 290)])
def test_a_block_takes_few_calls_of_python_functions(training, most) -> None:
    counts = []
    for layers in (2, 3):
        model, tokens = model_of("gated_deltanet", layers)

        def step(model=model, tokens=tokens) -> None:
            x = model.hidden(tokens)[0]
            if training:
                x.float().sum().backward()

        with torch.set_grad_enabled(training):
            for _ in range(4):
                step()
            counts.append(calls_of_ours(step))
    # What a launch does not need costs a small model its time.
    assert counts[1] - counts[0] <= most
