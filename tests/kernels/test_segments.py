"""Sequences split into segments: the same numbers, and a plan that depends on shapes alone."""

import pytest
import torch

from deltarule.ops.context import Context
from deltarule.ops.context.exchange import Met
from deltarule.ops.delta_rule import spanning as between
from deltarule.ops.delta_rule.spanning import Join
from kernels.interpreted import inputs_of, interpreted, on_the_cpu
from oracle import NAMES, Case, check, compared, make_case, weights, with_gradients
from promised import promised
from tolerance import assert_close, relative_rms

promised("triton")

from deltarule.ops.delta_rule.inputs import Inputs
from deltarule.ops.delta_rule.triton import passes, spanning
from deltarule.ops.delta_rule.triton import plan as launch

__all__ = ["on_the_cpu"]
pytestmark = pytest.mark.usefixtures("on_the_cpu")


def weakly_decaying(**options) -> Case:
    """A case in which what came before a segment still counts after it."""
    case = make_case(**{"heads": 1, "value_heads": 2, "dtype": torch.float32} | options)
    log_decay = case.tensors["log_decay"]
    return case if log_decay is None else case.changed(log_decay=log_decay * 0.01)


CASES = {
    "heads": {"tokens": 200, "value_heads": 1},
    "no decay": {
        "decay": "none", "normalize_qk": True, "tokens": 200, "value_heads": 1, "beta_max": 1.0,
    },
    "constant": {"decay": "constant", "erase": "none", "tokens": 200, "batch": 1},
    "attention": {"decay": "none", "erase": "none", "tokens": 200, "batch": 1},
    "channels": {"decay": "channel", "tokens": 200, "batch": 1, "value_heads": 1},
    "channels only": {
        "decay": "channel", "erase": "none", "tokens": 200, "batch": 1, "value_heads": 1,
    },
    "free": {"erase": "free", "decay": "none", "tokens": 200, "batch": 1, "value_heads": 1},
    "steps": {"n_steps": 3, "tokens": 100, "value_size": 140, "key_size": 17, "batch": 1},
    "full tiles": {"tokens": 256, "key_size": 16, "value_size": 32, "value_heads": 1},
    "packed": {"lengths": (3, 0, 200, 0, 40), "value_heads": 1},
    "packed channels": {
        "lengths": (0, 150, 0, 1), "decay": "channel", "erase": "free", "value_heads": 1,
    },
}  # fmt: skip


@interpreted
@pytest.mark.parametrize("per_segment", [1, 2])
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_segments_equal_the_definition(options, per_segment, monkeypatch) -> None:
    monkeypatch.setattr(launch, "chunks_per_segment", lambda *shapes: per_segment)
    case = weakly_decaying(**options)
    check(case, "triton", save_states=per_segment == 1)


@interpreted
def test_a_reset_between_segments_and_one_within(monkeypatch) -> None:
    monkeypatch.setattr(launch, "chunks_per_segment", lambda *shapes: 1)
    case = weakly_decaying(tokens=260, batch=1)
    log_decay = case.tensors["log_decay"].clone()
    log_decay[:, 128], log_decay[:, 150, 1] = -torch.inf, -1e4
    check(case.changed(log_decay=log_decay), "triton")


def packed(sequences: int) -> dict[str, torch.Tensor]:
    return {"cu_seqlens": torch.zeros(sequences + 1, dtype=torch.int32)}


@pytest.mark.parametrize(
    ("sizes", "options", "chunks"),
    [
        # They fill the GPU and are not too short,
        ((1, 32768, 8), {}, 32), ((4, 32768, 8), {}, 128), ((1, 2048, 16), {}, 4),
        ((1, 512, 2), {}, 0),
        # and sequences stay whole where a split gains nothing,
        ((8, 4096, 16), {}, 0), ((1, 8192, 64), {}, 0), ((1, 8192, 64), {"beta": None}, 64),
        ((1, 32768, 8), {"key_size": 256}, 0),
        # many packed ones, too.
        ((1, 32768, 8), packed(4), 32), ((1, 32768, 8), packed(200), 0),
    ],
)  # fmt: skip
def test_how_long_segments_are(sizes, options, chunks, monkeypatch) -> None:
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 132)
    x = torch.empty(*sizes, options.get("key_size", 128), device="meta")
    changes = {name: y for name, y in options.items() if name != "key_size"}
    call = Inputs(x, x, x, x[..., 0])._replace(**changes)
    assert launch.chunks_per_segment(call, 64, 128) == chunks


OFFSETS = {"cu_seqlens": torch.zeros(4, dtype=torch.int32)}
FIXED, FULL = {"batch_invariant": True}, {"dtype": torch.float32}


# Whether tiles are narrow, which they are where half of the GPU would idle, and chunks of segments.
@pytest.mark.parametrize(
    ("sizes", "options", "expected"),
    [
        ((8, 4096, 16), {}, (False, 0)), ((1, 8192, 64), {}, (True, 0)),
        ((1, 8192, 64), FIXED, (False, 0)), ((1, 32768, 8), {}, (True, 64)),
        ((1, 32768, 8), FIXED, (False, 0)),
        # More segments of wide tiles do as well, unless narrow ones can be split too.
        ((2, 16384, 16), {}, (False, 64)),
        # Nor where one kernel takes the whole backward, if segments are long.
        ((1, 32768, 16), {}, (False, 64)), ((1, 16384, 16), {}, (True, 64)),
        ((1, 2048, 16), {}, (True, 8)), ((1, 8192, 16), OFFSETS, (True, 32)),
        # Tiles of float32 unless their segments are long.
        ((1, 256, 16), FULL, (True, 0)), ((1, 8192, 1), FULL, (True, 8)),
        ((1, 4096, 4), FULL, (True, 16)), ((1, 4096, 8), FULL, (False, 8)),
        ((1, 512, 16), FULL, (False, 4)),
    ],
)  # fmt: skip
def test_which_tiles_are_narrow(sizes, options, expected, monkeypatch) -> None:
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 132)
    dtype = options.get("dtype", torch.bfloat16)
    x = torch.empty(*sizes, 128, dtype=dtype, device="meta")
    changes = {name: y for name, y in options.items() if name != "dtype"}
    plan = launch.new_plan(Inputs(x, x, x, x[..., 0])._replace(**changes))
    assert (plan.tile_key.narrow, plan.per_segment) == expected


SHAPES = {"row": {"tokens": 140}, "packed": {"lengths": (3, 0, 137)}}


@interpreted
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_narrow_tiles_give_the_same_numbers(shape, monkeypatch) -> None:
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 132)
    case = weakly_decaying(key_size=16, value_size=100, value_heads=1, batch=1, **shape)
    case, found = case.to(torch.float16), []
    for wide in (True, False):
        inputs = inputs_of(case)._replace(batch_invariant=wide)
        assert launch.new_plan(inputs).tile_key.narrow is not wide
        torch.manual_seed(1)
        found.append(compared(case, "triton", batch_invariant=wide))
    for name, (wide, exact, _) in found[0].items():
        x = found[1][name].found
        # Summed in another order, some round to another float16; which, depends on the processor.
        assert relative_rms(x, wide.double()) < relative_rms(wide, exact) / 2, name
        assert relative_rms(x, exact) < 2**-8, name


def test_without_a_gpu_nothing_is_split() -> None:
    assert launch.multiprocessors(torch.device("cpu")) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("decay", ["none", "head"])
def test_a_split_is_as_exact_as_whole_sequences(decay, dtype, monkeypatch) -> None:
    case = weakly_decaying(
        decay=decay, batch=2, tokens=1090, value_heads=1, key_size=128, value_size=128,
        beta_max=1.0, dtype=dtype,
    )  # fmt: skip
    inputs = inputs_of(case, "cuda")
    assert launch.make_plan(inputs).per_segment > 0
    split = errors(case)
    monkeypatch.setattr(launch, "chunks_per_segment", lambda *shapes: 0)
    monkeypatch.setattr(passes.plan, "make_plan", launch.new_plan)
    worse = {name: (split[name], error) for name, error in errors(case).items()}
    assert {name: pair for name, pair in worse.items() if pair[0] > 1.1 * pair[1]} == {}


def errors(case: Case) -> dict[str, float]:
    torch.manual_seed(0)
    found = compared(case, "triton", device="cuda")
    return {name: relative_rms(x, exact) for name, (x, exact, _) in found.items()}


# ---- kernels that meet other processes half way --------------------------------------------------

# Two halves of a row equal the definition of it. The meetings are here: the first half goes first
# forwards, the second backwards.


@pytest.fixture
def met(monkeypatch):
    """What the two halves have left for each other."""
    left = {}

    def meet(context, end, transition, diagonal):
        if context.rank == 0:
            left["end"] = end
        reaches = context.rank == 1 and context.goes_on
        start = left["end"] if reaches else torch.zeros_like(end)
        return lambda: Met(start, transition)

    def meet_back(context, d_start, met, diagonal):
        if context.rank == 1:
            left["d_start"] = d_start if context.goes_on else torch.zeros_like(d_start)
            return lambda: torch.zeros_like(d_start)
        return lambda: left["d_start"]

    monkeypatch.setattr(between, "meet", meet)
    monkeypatch.setattr(between, "meet_back", meet_back)
    return left


def part_of(inputs: Inputs, context: Context, first_state: bool) -> Inputs:
    """The arguments of one half."""
    rows = {name: inputs.n_steps if name in ("k", "v", "beta") else 1 for name in NAMES[:7]}
    own = {
        name: None
        if (x := getattr(inputs, name)) is None
        else x[:, context.first * n : context.last * n].clone()
        for name, n in rows.items()
    }
    state = inputs.initial_state
    if context.offsets is not None:
        starts = [context.offsets.index(x) for x in context.starts]
        state = None if state is None else state[starts]
        if state is not None and context.goes_on:
            state = torch.cat([torch.zeros_like(inputs.initial_state[:1]), state])
    elif not first_state:
        state = None
    return inputs._replace(**own, initial_state=state, cu_seqlens=context.cu_seqlens())


PACKED = {
    "goes on": {"lengths": (40, 120, 40), "value_heads": 1},
    "begins": {"lengths": (100, 100), "value_heads": 1, "decay": "channel"},
    "one": {"lengths": (200,), "value_heads": 1, "erase": "none"},
    "free": {"lengths": (190, 10), "erase": "free", "decay": "channel", "value_heads": 1},
}


# Chunks in a segment: 0 leaves sequences whole, of one segment then.
HALVED = PACKED | {name: x for name, x in CASES.items() if "lengths" not in x}
KINDS = [("heads", 2), ("heads", 0), ("goes on", 2), ("channels", 0), *[(x, 1) for x in HALVED]]


@interpreted
@pytest.mark.parametrize(("name", "per_segment"), KINDS)
def test_two_halves_equal_the_definition_of_the_row(name, per_segment, met, monkeypatch):
    monkeypatch.setattr(launch, "chunks_per_segment", lambda *shapes: per_segment)
    case = weakly_decaying(**HALVED[name])
    inputs, (d_o, d_state) = inputs_of(case), [x.float() for x in weights(case)]
    exact, gradients = with_gradients(
        case.to(torch.float64), "reference", d_o.double(), d_state.double()
    )
    tokens, lengths = inputs.q.shape[1], case.lengths
    offsets = None if lengths is None else (0, *torch.tensor(lengths).cumsum(0).tolist())
    contexts = [Context(None, rank, (0, 100, tokens), offsets) for rank in (0, 1)]
    if tokens == 100:
        contexts = [Context(None, rank, (0, 37, tokens), offsets) for rank in (0, 1)]
    done = []
    for context in contexts:
        part = part_of(inputs, context, context.rank == 0)
        join = Join(context, inputs.erase == "none", len(inputs.q))
        save = per_segment != 2
        done.append((part, join, *spanning.forward(part, save, join, None)()))
        if per_segment == 0:
            assert spanning.split(part).per_segment > 0
    o = torch.cat([x[2] for x in done], 1)
    assert_close(o, exact.o, gradient=False, name="o")
    assert_close(done[1][3][-1:], exact.final_state[-1:], gradient=False, name="state")
    found = [None, None]
    # Only what all documents end with in the last process is asked for here.
    for rank in (1, 0):
        part, join, _, final, saved, start = done[rank]
        d_final, context = torch.zeros_like(final), contexts[rank]
        if offsets is None:
            d_final = d_state if rank == 1 else d_final
        else:
            ends = enumerate(context.offsets[1:])
            ending = [n for n, end in ends if context.first < end <= context.last]
            d_final[: len(ending)] = d_state[ending]
        found[rank] = spanning.backward(
            contexts[rank].part(d_o).contiguous(), d_final, part._replace(initial_state=start),
            saved, join,
        )()  # fmt: skip
    for place, name in enumerate(NAMES[:7]):
        if name not in gradients:
            continue
        x = torch.cat([found[0][place], found[1][place]], 1)
        if name == "log_decay" and case.tensors["log_decay"].ndim == 1:
            x = x.sum((0, 1))
        assert_close(x, gradients[name], gradient=True, name=name)
