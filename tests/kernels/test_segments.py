"""Sequences split into segments: the same numbers, and a plan that depends on shapes alone."""

import pytest
import torch

from kernels.interpreted import inputs_of, interpreted
from oracle import NAMES, Case, make_case, weights, with_gradients
from promised import promised
from tolerance import assert_close, relative_rms

promised("triton")

from deltarule.ops.delta_rule.inputs import Inputs
from deltarule.ops.delta_rule.triton import passes
from deltarule.ops.delta_rule.triton import plan as launch


def weakly_decaying(**options) -> Case:
    """A case in which what came before a segment still counts after it."""
    case = make_case(**{"heads": 1, "value_heads": 2, "dtype": torch.float32} | options)
    log_decay = case.tensors["log_decay"]
    return case if log_decay is None else case.changed(log_decay=log_decay * 0.01)


def results(inputs: Inputs, case: Case, save: bool) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Outputs, final state and gradients, each with what the definition says."""
    d_o, d_state = (x.float() for x in weights(case))
    exact, gradients = with_gradients(
        case.to(torch.float64), "reference", d_o.double(), d_state.double()
    )
    device, dtype = inputs.q.device, inputs.q.dtype
    o, state, saved = passes.forward(inputs, save)
    found = passes.backward(d_o.to(device, dtype), d_state.to(device), inputs, saved)
    pairs = {
        name: (x, gradients[name])
        for name, x in zip(NAMES, found, strict=True)
        if name in gradients
    }
    if "log_decay" in pairs and case.tensors["log_decay"].ndim == 1:
        pairs["log_decay"] = pairs["log_decay"][0].sum((0, 1)), gradients["log_decay"]
    return pairs | {"o": (o, exact.o), "state": (state, exact.final_state)}


def assert_exact(case: Case, save: bool) -> None:
    for name, (x, exact) in results(inputs_of(case), case, save).items():
        assert_close(x, exact, gradient=name not in ("o", "state"), name=name)


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
    assert_exact(case, save=per_segment == 1)


@interpreted
def test_a_reset_between_segments_and_one_within(monkeypatch) -> None:
    monkeypatch.setattr(launch, "chunks_per_segment", lambda *shapes: 1)
    case = weakly_decaying(tokens=260, batch=1)
    log_decay = case.tensors["log_decay"].clone()
    log_decay[:, 128], log_decay[:, 150, 1] = -torch.inf, -1e4
    assert_exact(case.changed(log_decay=log_decay), save=True)


def planned(batch, tokens, heads, monkeypatch, erase="tied", key_size=128, **options) -> int:
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 132)
    x = torch.empty(batch, tokens, heads, key_size, device="meta")
    call = Inputs(x, x, x, None if erase == "none" else x[..., 0])
    return launch.chunks_per_segment(call._replace(**options), 64, 128)


def test_segments_fill_the_gpu_and_are_not_too_short(monkeypatch) -> None:
    assert planned(1, 32768, 8, monkeypatch) == 32
    assert planned(4, 32768, 8, monkeypatch) == 128
    assert planned(1, 2048, 16, monkeypatch) == 4
    assert planned(1, 512, 2, monkeypatch) == 0


def test_sequences_stay_whole_where_a_split_gains_nothing(monkeypatch) -> None:
    assert planned(8, 4096, 16, monkeypatch) == 0
    assert planned(1, 8192, 64, monkeypatch) == 0
    assert planned(1, 8192, 64, monkeypatch, erase="none") == 64
    assert planned(1, 32768, 8, monkeypatch, key_size=256) == 0


@pytest.fixture
def narrow(monkeypatch):
    """The plan of a call in bfloat16 on an H200."""
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 132)

    def planned(batch, tokens, heads, **options) -> tuple[bool, int]:
        x = torch.empty(batch, tokens, heads, 128, dtype=torch.bfloat16, device="meta")
        call = Inputs(x, x, x, x[..., 0])
        plan = launch.new_plan(call._replace(**options))
        return plan.tile_key.narrow, plan.per_segment

    return planned


def test_tiles_are_narrow_where_half_of_the_gpu_would_idle(narrow) -> None:
    assert narrow(8, 4096, 16) == (False, 0)
    assert narrow(1, 8192, 64) == (True, 0)
    assert narrow(1, 8192, 64, batch_invariant=True) == (False, 0)
    assert narrow(1, 32768, 8) == (True, 64)
    assert narrow(1, 32768, 8, batch_invariant=True) == (False, 0)
    # More segments of wide tiles do as well, unless narrow ones can be split too.
    assert narrow(2, 16384, 16) == (False, 64)
    # Nor where one kernel takes the whole backward, if segments are long.
    assert narrow(1, 32768, 16) == (False, 64)
    assert narrow(1, 16384, 16) == (True, 64)
    assert narrow(1, 2048, 16) == (True, 8)
    assert narrow(1, 8192, 16, cu_seqlens=torch.zeros(4, dtype=torch.int32)) == (True, 32)


SHAPES = {"row": {"tokens": 140}, "packed": {"lengths": (3, 0, 137)}}


@interpreted
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_narrow_tiles_give_the_same_numbers(shape, monkeypatch) -> None:
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 132)
    case = weakly_decaying(key_size=16, value_size=100, value_heads=1, batch=1, **shape)
    case, found = case.to(torch.float16), {}
    for narrow in (False, True):
        inputs = inputs_of(case)._replace(batch_invariant=not narrow)
        assert launch.new_plan(inputs).tile_key.narrow is narrow
        torch.manual_seed(1)
        found[narrow] = results(inputs, case, True)
    for name, (x, exact) in found[True].items():
        wide = found[False][name][0]
        # Summed in another order, some round to another float16; which, depends on the processor.
        assert relative_rms(x, wide) < relative_rms(wide, exact) / 2, name
        assert relative_rms(x, exact) < 2**-8, name


def test_many_packed_sequences_stay_whole_and_one_long_among_few_does_not(monkeypatch) -> None:
    few, many = torch.zeros(5, dtype=torch.int32), torch.zeros(201, dtype=torch.int32)
    assert planned(1, 32768, 8, monkeypatch, cu_seqlens=few) == 32
    assert planned(1, 32768, 8, monkeypatch, cu_seqlens=many) == 0


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
    split = errors(inputs, case)
    monkeypatch.setattr(launch, "chunks_per_segment", lambda *shapes: 0)
    monkeypatch.setattr(passes.plan, "make_plan", launch.new_plan)
    worse = {name: (split[name], error) for name, error in errors(inputs, case).items()}
    assert {name: pair for name, pair in worse.items() if pair[0] > 1.1 * pair[1]} == {}


def errors(inputs: Inputs, case: Case) -> dict[str, float]:
    torch.manual_seed(0)
    found = results(inputs, case, save=True)
    return {name: relative_rms(x.cpu(), exact) for name, (x, exact) in found.items()}
