"""The gradients in Gluon, run on the CPU role by role, from states of float64.

Three kernels: of chunks; the scan back and the gradients as one; and of chunks with a decay per
channel.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from promised import promised

promised("triton")

from triton.experimental.gluon import language as gl

from deltarule.ops.delta_rule import definition
from deltarule.ops.delta_rule.gluon import channel_gradients, gradient_stage, stage
from deltarule.ops.delta_rule.inputs import Inputs
from deltarule.ops.delta_rule.triton import channel_stages, passes, plan
from deltarule.ops.delta_rule.triton import windows as triton_windows
from deltarule.ops.delta_rule.triton.passes import kept_shapes, new_gradients
from deltarule.ops.delta_rule.triton.plan import Call, Window, new_plan
from gluon_interpreter import interpret_launches
from kernels.interpreted import inputs_of as checked_inputs
from kernels.interpreted import interpreted as interpreted_by_triton
from oracle import Case, check_fused_gradients, make_case, run_module, weights
from tolerance import relative_rms

CHUNK = 64
PROGRAMS, SEED = 3, 0


@pytest.fixture(autouse=True)
def interpreted(monkeypatch) -> None:
    """Launches go through the interpreter, on a GPU of a few multiprocessors."""
    interpret_launches(monkeypatch, lambda: SEED)
    monkeypatch.setattr(gradient_stage, "multiprocessors", lambda device: PROGRAMS)


def case_of(decay: str, erase: str, **options: Any) -> Case:
    sizes = {"batch": 1, "heads": 2, "value_heads": 2, "beta_max": 1.0, "tokens": 192}
    sizes |= {"key_size": 64, "value_size": 64, "dtype": torch.bfloat16}
    return make_case(decay, erase, **(sizes | options))


def scale_of(case: Case) -> float:
    """What scores are multiplied by."""
    return case.tensors["q"].shape[-1] ** -0.5


def by_chunk(x: Tensor) -> Tensor:
    """[B, T, H, ...] as [chunks, H, 64, ...]."""
    return x.unflatten(1, (-1, CHUNK)).transpose(2, 3).flatten(0, 1)


def around(case: Case, given: tuple[Tensor, Tensor]) -> dict[str, Tensor | None]:
    """S, E, D and X of all chunks, and the scalings of rows, in float64."""
    case, scale = case.to(torch.float64), scale_of(case)
    x = case.tensors
    state, starts, out = x["initial_state"].requires_grad_(), [], []
    norms = [torch.ones(x[name].shape[:3], dtype=torch.float64) for name in ("q", "k")]
    if case.normalize_qk:
        norms = [1.0 / x[name].norm(dim=-1) for name in ("q", "k")]
    v = x["v"].detach().requires_grad_()
    for first in range(0, v.shape[1], CHUNK):
        part = {n: y[:, first : first + CHUNK] for n, y in (x | {"v": v}).items() if y is not None}
        starts.append(state)
        part = {**dict.fromkeys(x), **part, "initial_state": state}
        o, state = run_module(definition, case.changed(**part), scale=scale)
        out.append(o)
    loss = (torch.cat(out, 1) * given[0].double()).sum() + (state * given[1].double()).sum()
    *ends, d_v = torch.autograd.grad(loss, [*starts[1:], state, v])
    found = {
        "states": torch.stack(starts, 1).flatten(0, 1),
        "d_states": torch.stack(ends, 1).flatten(0, 1),
        "scalings": None, "chunk_decay": None,
    }  # fmt: skip
    group = x["v"].shape[2] // x["q"].shape[2]
    key = x["k"] * norms[1][..., None]
    sums = torch.zeros(v.shape[:3], dtype=torch.float64)
    beta = torch.ones_like(sums) if x["beta"] is None else x["beta"]
    # Decays per channel are in no scaling.
    if x["log_decay"] is not None and x["log_decay"].ndim == 3:
        sums = x["log_decay"].unflatten(1, (-1, CHUNK)).cumsum(2).flatten(1, 2)
    if x["beta"] is not None:
        found["d_errors"] = by_chunk(d_v / beta[..., None])
        found["errors"] = by_chunk(errors_of(case, key.repeat_interleave(group, 2)))
    b = by_chunk(sums)
    norm_q, norm_k = (by_chunk(y.repeat_interleave(group, 2)) for y in norms)
    rows = [
        scale * b.exp() * norm_q, b.exp() * norm_k, (b[..., -1:] - b).exp() * norm_k,
        by_chunk(beta), b / torch.tensor(2.0).log(), torch.zeros_like(b),
    ]  # fmt: skip
    found["scalings"] = torch.stack(rows, 2)
    ratio = (b[..., :, None] - b[..., None, :]).exp().tril()
    q, k = by_chunk(x["q"].repeat_interleave(group, 2)), by_chunk(key.repeat_interleave(group, 2))
    found["scores"] = scale * norm_q[..., None] * ratio * (q @ k.mT)
    m = ratio.tril(-1) * (k @ k.mT)
    eye = torch.eye(CHUNK, dtype=torch.float64)
    found["corrections"] = -torch.linalg.inv(eye + m * by_chunk(beta)[..., None, :]) @ m
    found["chunk_decay"] = b[..., -1].exp()
    return found


def errors_of(case: Case, key: Tensor) -> Tensor:
    """E [B, T, HV, V], token by token."""
    x, out = case.tensors, []
    state = x["initial_state"].detach()
    for t in range(key.shape[1]):
        if x["log_decay"] is not None:
            decay = x["log_decay"][:, t].exp()
            decay = decay[..., None] if decay.ndim == 2 else decay
            state = state * decay[..., None, :]
        error = x["v"][:, t] - (state @ key[:, t, :, :, None]).squeeze(-1)
        out.append(error)
        write = x["beta"][:, t, :, None] * error
        state = state + write[..., None] * key[:, t, :, None, :]
    return torch.stack(out, 1)


def inputs_of(case: Case) -> Inputs:
    return checked_inputs(case)._replace(scale=scale_of(case))


# What a token is that does nothing.
EMPTY = {"q": 1.0, "k": 1.0, "v": 0.0, "beta": 0.0, "log_decay": 0.0}


def sequences(case: Case, d_o: Tensor, d_final: Tensor) -> Iterator[tuple]:
    """Each alone, with empty tokens up to a whole chunk: its gradients, tokens, first chunk."""
    batch, tokens = case.tensors["q"].shape[:2]
    first, number = 0, 0
    for n, length in enumerate(case.lengths or [tokens] * batch):
        row, start = (0, first) if case.lengths else (n, 0)
        room = (0, 0, 0, -length % CHUNK)

        def alone(
            x: Tensor, value: float, row=row, start=start, length=length, room=room
        ) -> Tensor:
            x = x[row : row + 1, start : start + length]
            return torch.nn.functional.pad(x.flatten(2), room, value=value).unflatten(
                2, x.shape[2:]
            )

        part = {
            name: y if y is None else alone(y, EMPTY[name])
            for name, y in case.tensors.items() if name in EMPTY
        }  # fmt: skip
        own = case.changed(**part, initial_state=case.tensors["initial_state"][n : n + 1])
        own = own._replace(lengths=None)
        number = first // CHUNK + n if case.lengths else number
        if length:
            yield own, (alone(d_o, 0.0), d_final[n : n + 1]), length, number
        first, number = first + length, number - (-length // CHUNK)


def around_all(case: Case, given: tuple[Tensor, Tensor], chunks: int) -> dict[str, Any]:
    """`around` of every sequence, by numbers of chunks; NaN where there is none, or no token."""
    found: dict[str, Any] = {}
    for own, own_given, length, number in sequences(case, *given):
        for name, x in around(own, own_given).items():
            if x is None:
                found[name] = None
                continue
            x, left = x.detach().clone(), (length - 1) % CHUNK + 1
            if name in ("errors", "d_errors"):
                x[-1, :, left:] = torch.nan
            if name == "scalings":
                x[-1, ..., left:] = torch.nan
            room = found.setdefault(name, x.new_full((chunks, *x.shape[1:]), torch.nan))
            room[number : number + len(x)] = x
    return found


def windows(case: Case, chunks: int) -> list[Window]:
    """So many chunks of every sequence at once, from the last."""
    count = -(-case.tensors["q"].shape[1] // (CHUNK * chunks))
    return [Window("stretch", number, chunks) for number in reversed(range(count))]


def of_window(case: Case, own: dict[str, Tensor], window: Window) -> dict[str, Tensor]:
    """S, E, D and X of its chunks, and NaN in the room that the last leaves."""
    part = {}
    for name in ("states", "errors", "d_states", "d_errors"):
        if name in own:
            x = own[name].unflatten(0, (case.tensors["q"].shape[0], -1))
            x = x[:, window.number * window.chunks :][:, : window.chunks]
            room = x.new_full((x.shape[0], window.chunks, *x.shape[2:]), torch.nan)
            room[:, : x.shape[1]] = x
            part[name] = room.flatten(0, 1)
    return part


def lend(case: Case, own: dict[str, Tensor], call: Call) -> None:
    """What lies in the memory of gradients goes there: X to dv, rows of D to dq and dk."""
    lent = {name: own.pop(name) for name in gradient_stage.lent(call)}
    first = 0
    for _, _, length, number in sequences(case, call["d_o"], call["d_o"]):
        chunks = slice(number, number - (-length // CHUNK))
        tokens = slice(first, first + length)
        for name, x in lent.items():
            parts = x[chunks].split(CHUNK, 2)
            for part, to in zip(parts, "v" if name == "d_errors" else "qk", strict=False):
                room = call["d_" + to].flatten(0, 1)
                room[tokens] = part.transpose(1, 2).flatten(0, 1)[:length]
        first += length


def call_of(case: Case) -> Call:
    inputs = inputs_of(case)
    return Call(inputs, new_plan(inputs))


ENDS_OF_CHUNKS = "states", "errors", "d_states", "d_errors"


def rounded(
    case: Case, given: tuple[Tensor, Tensor], call: Call, *low: str
) -> dict[str, Tensor | None]:
    """What is around all chunks, in the types in which other kernels leave it."""
    types = dict.fromkeys(low, torch.bfloat16)
    return {
        name: None if x is None else x.detach().to(types.get(name, torch.float32)).contiguous()
        for name, x in around_all(case, given, call.plan.chunks).items()
    }


def run(
    case: Case, given: tuple[Tensor, Tensor], per_window: int | None = None
) -> dict[str, Tensor]:
    """The gradients that the kernel leaves, in the types of their tensors."""
    x = case.tensors
    call = call_of(case)
    assert gradient_stage.can(call.inputs)
    own = {
        name: y for name, y in rounded(case, given, call, *ENDS_OF_CHUNKS).items()
        if y is not None
    }  # fmt: skip
    call.values |= {name: own.get(name) for name in ("states", "errors", "scalings", "chunk_decay")}
    call.values |= {"d_o": given[0].to(torch.bfloat16), "d_beta": None}
    values = x["beta"] is not None and x["v"].shape[2] == x["q"].shape[2]
    for name in ("q", "k", "v"):
        call.values["d_" + name] = torch.full_like(x[name], torch.nan)
    if x["beta"] is not None:
        call.values["d_beta"] = torch.full(x["beta"].shape, torch.nan)
    call.values["d_log_decay"] = None
    if x["log_decay"] is not None:
        call.values["d_log_decay"] = torch.full(x["log_decay"].shape, torch.nan)
    lend(case, own, call)
    if per_window is None:
        gradient_stage.add_gradients(call, own)
    else:
        for window in windows(case, per_window):
            call.values |= {"states": None, "errors": None}
            gradient_stage.add_gradients(call, of_window(case, own, window), window)
    found = {name: call["d_" + name] for name in ("q", "k", "v", "beta", "log_decay")}
    if not values:
        del found["v"]
    return {name: y for name, y in found.items() if y is not None}


def run_whole(case: Case, given: tuple[Tensor, Tensor], scores: bool = True) -> dict[str, Tensor]:
    """The same of the kernel that goes through the scan back, too."""
    call, low = call_of(case), ("states", "errors", "scores", "corrections")
    own = rounded(case, given, call, *low)
    call.values |= {name: own.get(name) for name in (*low, "scalings", "chunk_decay")}
    if not scores:
        call.values["scores"] = None
    if case.tensors["beta"] is None:
        call.values["corrections"] = None
    d_end = given[1]
    if size := call.plan.per_segment:
        # D at the ends of segments of so many chunks.
        each = own["d_states"].unflatten(0, (len(d_end), -1))
        last = [min(end, each.shape[1]) - 1 for end in range(size, each.shape[1] + size, size)]
        d_end = each[:, last].flatten(0, 1)
    found = room_for(call, given, "q", "k", "v", "beta", "log_decay", "initial")
    assert gradient_stage.can_whole(call.inputs, cut=call.plan.per_segment > 0)
    gradient_stage.backward(call, d_end.detach().float().contiguous())
    return found | {"initial_state": found.pop("initial")}


def run_channels(case: Case, given: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """The same of the kernel for a decay per channel; another one goes through the norms."""
    call = call_of(case)
    call.values |= rounded(case, given, call, *ENDS_OF_CHUNKS)
    found = room_for(call, given, "q", "k", "beta", "log_decay")
    assert gradient_stage.can_by_channel(call.inputs)
    gradient_stage.channel_gradients(call)
    return found


def room_for(call: Call, given: tuple[Tensor, Tensor], *names: str) -> dict[str, Tensor]:
    """Gradients that are there, NaN until they are written."""
    call.values["d_o"] = given[0].bfloat16()
    new_gradients(call)
    found = {name: x for name in names if (x := call["d_" + name]) is not None}
    for x in found.values():
        x.fill_(torch.nan)
    return found


class Kernel(NamedTuple):
    """How a kernel is run, and the sizes of its calls."""

    run: Callable[..., dict[str, Tensor]]
    sizes: dict[str, int]

    def case(self, decay: str, erase: str, **options: Any) -> Case:
        return case_of(decay, erase, **(self.sizes | options))

    def check(self, case: Case) -> None:
        given = weights(case)
        given = given[0].bfloat16(), given[1]
        norms = {"constant_norms": self.run is run_channels}
        check_fused_gradients(self.run(case, given), case, given, **norms)


WIDE = {"key_size": 128, "value_size": 128}
KERNELS = {
    "chunks": Kernel(run, {}),
    "whole": Kernel(run_whole, WIDE),
    "whole without scores": Kernel(partial(run_whole, scores=False), WIDE),
    "channels": Kernel(run_channels, WIDE | {"heads": 4, "value_heads": 4}),
}


def saved(case: Case) -> dict[str, Tensor]:
    """What a forward leaves for a backward."""
    inputs = inputs_of(case)
    call = Call(inputs, new_plan(inputs))
    shapes = {
        name: torch.full(shape, torch.nan, dtype=dtype)
        for name, (shape, dtype) in kept_shapes(call, True).items()
    }
    call.values |= shapes
    stage.forward(call, True)
    return shapes


def test_norms_that_a_forward_left_are_not_computed_again(monkeypatch) -> None:
    launched: list[Tensor] = []
    inputs = inputs_of(case_of("head", "tied", normalize_qk=True))
    monkeypatch.setattr(passes, "fused_stage", lambda _: stage)
    monkeypatch.setattr(stage, "pays", lambda *_: True)
    launch = lambda grid, q, k, norms, rows: launched.append(norms)  # noqa: E731
    monkeypatch.setattr(stage, "norms_launch", lambda _: launch)
    call = Call(inputs, new_plan(inputs))
    kept = torch.empty(kept_shapes(call, True)["norms"][0])
    # A forward; a backward of what it kept, and one that computes it again.
    for again, launches in ((None, 1), (False, 1), (True, 2)):
        call.values |= {"norms": kept, "again": again}
        assert stage.norms_of(call) is kept
        assert [*map(id, launched)] == [id(kept)] * launches


@pytest.mark.parametrize("size", [64, 96, 128])
@pytest.mark.parametrize(
    ("decay", "erase"), [(d, e) for d in ("none", "head") for e in ("none", "tied")]
)
def test_the_forward_saves_what_the_backward_asks_for(decay, erase, size) -> None:
    case = case_of(decay, erase, heads=1, value_heads=2, key_size=size, value_size=size)
    given = weights(case)
    shapes = saved(case)
    expected = around(case, given)
    for name, x in shapes.items():
        y = expected[name]
        if name == "scalings":
            rows = (
                [3] if decay == "none" else list(range(6)) if erase == "tied" else [0, 1, 2, 4, 5]
            )
            x, y = x[:, :, rows], y[:, :, rows]
        bar = 1e-5 if x.dtype == torch.float32 else 8e-3
        assert relative_rms(x, y) < bar, name


FORMS = [
    *(("chunks", decay, erase) for decay in ("none", "head") for erase in ("none", "tied")),
    *(("whole without scores", "none", erase) for erase in ("none", "tied")),
    ("whole", "none", "tied"), ("whole", "head", "none"), ("whole", "head", "tied"),
    *(("channels", "channel", erase) for erase in ("none", "tied")),
]  # fmt: skip
every_form = pytest.mark.parametrize(("kernel", "decay", "erase"), FORMS)


@every_form
@pytest.mark.parametrize("normalize", [False, True])
def test_gradients_are_those_of_the_definition(kernel, decay, erase, normalize) -> None:
    of = KERNELS[kernel]
    # With decays per channel errors of few heads spread.
    sizes = {"heads": 8, "value_heads": 8, "tokens": 128} if kernel == "channels" else {}
    of.check(of.case(decay, erase, normalize_qk=normalize, **sizes))


@every_form
@pytest.mark.parametrize("sizes", [{"tokens": 150, "batch": 2}, {"lengths": (3, 0, 70, 64, 1)}])
def test_so_they_are_of_chunks_that_are_not_whole(kernel, decay, erase, sizes) -> None:
    of = KERNELS[kernel]
    grouped = {"normalize_qk": erase == "tied", "value_heads": 4} if kernel == "chunks" else {}
    of.check(of.case(decay, erase, **grouped, **sizes))


@pytest.mark.parametrize(("kernel", "decay", "erase"), FORMS[:4])
def test_value_heads_of_a_key_head_add_up(kernel, decay, erase) -> None:
    KERNELS[kernel].check(case_of(decay, erase, value_heads=6))


@pytest.mark.parametrize("kernel", ["chunks", "whole"])
def test_so_they_are_where_they_are_reset(kernel) -> None:
    case = KERNELS[kernel].case("head", "tied", tokens=100)
    decay = case.tensors["log_decay"] * 0.05
    where = torch.rand_like(decay) < 0.1
    where[:, 64:67] = True
    KERNELS[kernel].check(case.changed(log_decay=decay.masked_fill(where, -200.0)))


def test_so_they_are_of_decays_down_to_the_end_of_the_range() -> None:
    case = KERNELS["channels"].case("channel", "tied")
    # 64 of these come to 2^-152.
    decay = torch.full_like(case.tensors["log_decay"], -1.65)
    half = torch.arange(128) % 2 == 0
    decay = torch.where(half, decay, case.tensors["log_decay"])
    KERNELS["channels"].check(case.changed(log_decay=decay))


@pytest.mark.parametrize("erase", ["none", "tied"])
def test_so_they_are_of_segments(erase, monkeypatch) -> None:
    monkeypatch.setattr(plan, "chunks_per_segment", lambda *shapes: 2)
    KERNELS["whole"].check(case_of("head", erase, batch=2, tokens=300, **WIDE))


@pytest.mark.parametrize(
    ("kernel", "size", "heads"),
    [("chunks", 128, (1, 1)), ("chunks", 96, (2, 4)), ("whole", 96, (4, 4))],
)
def test_so_they_are_of_states_of_other_sizes(kernel, size, heads) -> None:
    sizes = {"key_size": size, "value_size": size, "heads": heads[0], "value_heads": heads[1]}
    KERNELS[kernel].check(case_of("head", "tied", **sizes))


def with_zeros(case: Case, given: tuple[Tensor, Tensor]) -> tuple[Case, tuple[Tensor, Tensor]]:
    """A case and its weights with zeros in place of the channels that tiles of 128 have beside."""
    x = dict(case.tensors)
    rows, states = ("q", "k", "v", "d_o"), ("initial_state", "d_final")
    x |= {"d_o": given[0], "d_final": given[1]}
    for name in (*rows, *states):
        room = (0, 128 - x[name].shape[-1])
        room += (0, 128 - x[name].shape[-2]) if name in states else ()
        x[name] = torch.nn.functional.pad(x[name], room)
    given = x.pop("d_o"), x.pop("d_final")
    return case.changed(**x), given


@pytest.mark.parametrize(
    ("kernel", "erase"), [("chunks", "tied"), ("whole", "none"), ("whole", "tied")]
)
@pytest.mark.parametrize(("key_size", "value_size"), [(96, 96), (112, 128), (128, 80)])
@pytest.mark.parametrize("ends", [{}, {"tokens": 150, "batch": 2}, {"lengths": (3, 0, 70, 64)}])
def test_heads_that_do_not_fill_tiles(
    kernel, erase, key_size, value_size, ends, monkeypatch
) -> None:
    """They have the bits of those with zeros in the rest of the tiles."""
    grouped = {"value_heads": 4, "normalize_qk": "tokens" in ends} if kernel == "chunks" else {}
    sizes = {"key_size": key_size, "value_size": value_size, **ends}
    case, run = case_of("head", erase, **grouped, **sizes), KERNELS[kernel].run
    scale, given = scale_of(case), weights(case)
    found = run(case, given)
    monkeypatch.setitem(globals(), "scale_of", lambda case: scale)
    for name, x in run(*with_zeros(case, given)).items():
        inside = tuple(slice(size) for size in found[name].shape)
        assert torch.equal(found[name], x[inside]), name


@pytest.mark.parametrize(
    ("kernel", "decay", "tokens"),
    [("chunks", "head", 128), ("chunks", "head", 100), ("whole", "head", 300),
     ("channels", "channel", 300), ("channels", "channel", 256)],
)  # fmt: skip
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_whatever_the_order_of_events_the_bits_are_the_same(
    seed, kernel, decay, tokens, monkeypatch
) -> None:
    heads = {"heads": 1} if kernel == "chunks" else {}
    case = KERNELS[kernel].case(decay, "tied", tokens=tokens, **heads)
    given, run = weights(case), KERNELS[kernel].run
    expected = run(case, given)
    monkeypatch.setitem(globals(), "SEED", seed)
    for name, x in run(case, given).items():
        assert torch.equal(x, expected[name]), name


# ---- whole backwards, beside Triton's -----------------------------------------------------------


@interpreted_by_triton
@pytest.mark.parametrize(
    ("erase", "size", "value_heads"),
    [("none", 128, 1), ("tied", 128, 1), ("tied", 64, 2), ("tied", 96, 1)],
)
@pytest.mark.parametrize("states", ["saved", "again", "window after window"])
@pytest.mark.parametrize("segment", [0, 2])
def test_a_whole_backward_finds_what_the_scan_back_left(
    erase, size, value_heads, states, segment, monkeypatch
) -> None:
    monkeypatch.setattr(plan, "chunks_per_segment", lambda *shapes: segment)
    of_windows, parts = triton_windows.cut_into, 2 if states == "window after window" else 1
    monkeypatch.setattr(triton_windows, "windows_of", lambda call: of_windows(call, parts))
    # Triton's interpreter has no arithmetic in bfloat16.
    sizes = {"heads": 1, "value_heads": value_heads, "key_size": size, "value_size": size}
    case = case_of("head", erase, batch=2, tokens=256, **sizes).to(torch.float16)
    compare_backward(case, states == "saved", lambda: of_chunks(monkeypatch))


@interpreted_by_triton
@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize(
    ("erase", "sizes"),
    [("tied", {"tokens": 150, "batch": 2}), ("tied", {"lengths": (3, 0, 70, 150, 64)}),
     ("none", {"lengths": (70, 60)})],
)  # fmt: skip
def test_so_does_one_of_chunks_that_are_not_whole(erase, sizes, cut, monkeypatch) -> None:
    of_windows = triton_windows.cut_into
    monkeypatch.setattr(
        triton_windows, "windows_of", lambda call: of_windows(call, 2) if cut else None
    )
    case = case_of("head", erase, value_heads=4, **sizes).to(torch.float16)
    compare_backward(case, not cut, lambda: of_chunks(monkeypatch))


def of_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_stage, "runs", lambda call: True)


def compare_backward(
    case: Case, save: bool, take: Callable[[], None], forward_too: bool = False
) -> None:
    """A whole backward with the fused gradients, once they are taken, beside Triton's."""
    inputs, (d_o, d_final) = inputs_of(case), weights(case)
    given = d_o.half(), d_final.float(), inputs
    saved = passes.forward(inputs, save)[2]
    expected = passes.backward(*given, saved)
    take()
    saved = passes.forward(inputs, save)[2] if forward_too else saved
    assert_near(passes.backward(*given, saved), expected)


@interpreted_by_triton
@pytest.mark.parametrize("segment", [0, 2])
@pytest.mark.parametrize(("decay", "erase"), [("head", "none"), ("head", "tied"), ("none", "tied")])
def test_a_whole_backward_takes_what_the_forward_saved(decay, erase, segment, monkeypatch) -> None:
    monkeypatch.setattr(plan, "chunks_per_segment", lambda *shapes: segment)
    case, taken = case_of(decay, erase, batch=2, tokens=256, **WIDE), []

    def take() -> None:
        monkeypatch.setattr(gradient_stage, "takes_whole", lambda call: taken.append(1) or True)

    compare_backward(case.to(torch.float16), True, take)
    assert taken


@pytest.mark.parametrize(("decay", "erase"), [("head", "none"), ("head", "tied"), ("none", "tied")])
def test_gradients_may_take_the_place_of_what_was_saved(decay, erase, monkeypatch) -> None:
    for name in ("pays", "taken_in_parts"):
        found = {"pays": True, "taken_in_parts": None}[name]
        monkeypatch.setattr(stage, name, lambda x, *_, found=found: found or x)
    monkeypatch.setattr(gradient_stage, "takes_whole", lambda call: True)
    case = case_of(decay, erase, batch=2, normalize_qk=True, **WIDE)
    inputs, (d_o, d_final) = inputs_of(case), weights(case)
    given = d_o.bfloat16(), d_final.float()

    def gradients(kept: Tensor, spent: bool) -> list[Tensor]:
        found = passes.gradient_stages.run(inputs, *given, kept, spent)
        return [x for x in found if x is not None]

    kept = passes.forward(inputs, True)[2]
    repeated = [gradients(kept, spent=False) for _ in range(2)]
    inside = gradients(kept, spent=True)
    places = [x.data_ptr() - kept.data_ptr() for x in inside]
    count = sum(0 <= place < kept.nbytes for place in places)
    assert count == (2 if erase == "none" else 3)
    # Tensors of their own: what is done to one in place is not done to the others.
    version = inside[0]._version
    inside[1].add_(0)
    assert (inside[0]._version, inside[0]._is_view()) == (version, False)
    monkeypatch.setattr(gradient_stage, "lends", lambda call: False)
    expected = gradients(passes.forward(inputs, True)[2], spent=True)
    for found in (*repeated, inside):
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@interpreted_by_triton
@pytest.mark.parametrize("erase", ["none", "tied"])
@pytest.mark.parametrize("sizes", [{"tokens": 128, "normalize_qk": True}, {"lengths": (70, 60)}])
def test_a_whole_backward_of_channels_writes_flagged_chunks_again(
    erase, sizes, monkeypatch
) -> None:
    case = case_of("channel", erase, heads=1, value_heads=1, **WIDE, **sizes).to(torch.float16)
    decay = case.tensors["log_decay"] * 0.05
    decay[:, 70:120] = -1.0

    def take() -> None:
        # Before it the exact kernels: float16 has less room.
        monkeypatch.setattr(channel_stages, "has_fast_form", lambda inputs: True)
        monkeypatch.setattr(channel_stages, "SHIFT", 0.0)
        monkeypatch.setattr(channel_stages, "RANGE", 8.0)
        monkeypatch.setattr(channel_gradients, "SHIFT", gl.constexpr(0.0))
        monkeypatch.setattr(channel_gradients, "UNSHIFT", gl.constexpr(1.0))
        taken = lambda call: gradient_stage.channel_gradients  # noqa: E731
        monkeypatch.setattr(channel_stages, "fastest_gradients", taken)

    compare_backward(case.changed(log_decay=decay), True, take, forward_too=True)


@interpreted_by_triton
@pytest.mark.parametrize("sizes", [{"tokens": 100, "batch": 2}, {"lengths": (70, 64)}])
@pytest.mark.parametrize(("decay", "erase"), [("head", "tied"), ("none", "tied"), ("head", "none")])
def test_parts_of_heads_have_outputs_and_gradients_of_the_heads(
    decay, erase, sizes, monkeypatch
) -> None:
    case = case_of(decay, erase, value_size=128, value_heads=4, **sizes)

    def take() -> None:
        monkeypatch.setattr(stage, "pays", lambda inputs, *_: inputs.v.shape[3] == 64)
        monkeypatch.setattr(stage, "LEAST_KEYS", 64)
        of_chunks(monkeypatch)

    compare_passes(case, take)


def compare_passes(case: Case, take: Callable[[], None], again: bool = False) -> None:
    """Both passes by the fused kernels, once they are taken, beside Triton's; and once more.

    Forwards that save nothing, too, with and without initial states.
    """
    # Triton's interpreter has no arithmetic in bfloat16.
    case = case.to(torch.float16)
    inputs, (d_o, d_final) = inputs_of(case), weights(case)

    def outputs_and_gradients() -> list[Tensor | None]:
        *found, kept = passes.forward(inputs, True)
        assert kept.shape == passes.saved_shape(inputs)
        found += passes.backward(d_o.half(), d_final.float(), inputs, kept)
        for own in (inputs, inputs._replace(initial_state=None)):
            found += passes.forward(own, False)[:2]
        return found

    expected = outputs_and_gradients()
    take()
    found = outputs_and_gradients()
    assert_near(found, expected)
    for x, y in zip(outputs_and_gradients(), found, strict=True) if again else ():
        assert x is None or torch.equal(x, y), "another order of events"


def assert_near(found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> None:
    """As near as 16 bits allow, and absent where they are."""
    for x, y in zip(found, expected, strict=True):
        assert (None if x is None else x.shape) == (None if y is None else y.shape)
        assert x is None or relative_rms(x, y.double()) < 2e-3


@pytest.mark.parametrize("erase", ["none", "tied"])
def test_windows_have_the_bits_of_the_whole(erase) -> None:
    case = case_of("head", erase, batch=2)
    given = weights(case)
    expected = run(case, given)
    for name, x in run(case, given, 2).items():
        assert torch.equal(x, expected[name]), name


@pytest.mark.parametrize("normalize", [False, True])
def test_of_a_ragged_chunk_the_forward_saves_what_is_there(normalize) -> None:
    sizes = {"tokens": 150, "heads": 1, "value_heads": 1, "normalize_qk": normalize}
    case = case_of("head", "tied", **sizes)
    # The same with empty tokens up to the end of the chunk: of them it saves nothing.
    rest = {"q": 1.0, "k": 0.0, "v": 0.0, "beta": 0.0, "log_decay": 0.0}
    longer = {}
    for name, x in rest.items():
        end = torch.full_like(case.tensors[name][:, :42], x)
        longer[name] = torch.cat([case.tensors[name], end], 1)
    found, expected = saved(case), saved(case.changed(**longer))
    for name in ("states", "errors", "corrections", "chunk_decay"):
        assert torch.equal(found[name], expected[name]), name
    assert torch.equal(found["scores"][2, 0, :22, :22], expected["scores"][2, 0, :22, :22])
    assert not found["scores"][2, 0, 22:].any()
    assert torch.equal(found["scalings"][..., :22], expected["scalings"][..., :22])


# By sequences of 4,096 tokens and heads, on 132 multiprocessors.
@pytest.mark.parametrize(
    ("decay", "erase", "batch", "options", "takes"),
    [
        ("head", "tied", 8, {}, True),
        ("head", "tied", 6, {}, False),
        ("head", "tied", 6, {"value_heads": 32}, False),
        ("none", "tied", 7, {}, True),
        ("head", "none", 5, {}, True),
        ("head", "none", 9, {}, False),
        ("head", "tied", 8, {"normalize_qk": True}, True),
        ("head", "tied", 7, {"normalize_qk": True}, False),
        ("head", "tied", 1, {"lengths": (256,) * 16}, False),
        ("head", "tied", 1, {"lengths": (64,) * 64}, True),
    ],
)
def test_the_whole_is_taken_where_its_programs_fill_the_gpu(
    decay, erase, batch, options, takes, monkeypatch
) -> None:
    monkeypatch.setattr(gradient_stage, "runs", lambda call: True)
    monkeypatch.setattr(gradient_stage, "multiprocessors", lambda device: 132)
    sizes = {"heads": 16, "value_heads": 16, "batch": batch, "tokens": 64, **WIDE}
    assert gradient_stage.takes_whole(call_of(case_of(decay, erase, **(sizes | options)))) == takes
