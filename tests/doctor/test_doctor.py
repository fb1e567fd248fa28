"""The doctor, under Triton's interpreter: it passes sound kernels and has a broken one refused."""

import os
from types import SimpleNamespace

import pytest
import torch

from promised import promised

promised("triton")

from deltarule.doctor import chunked, command
from deltarule.doctor import examine as module
from deltarule.doctor.command import DoctorRun, diagnose, keep_verdicts
from deltarule.doctor.examine import Configuration, Verdict, commonest, draw, every, examine
from deltarule.ops import dispatch
from deltarule.ops.delta_rule import implementations
from deltarule.ops.delta_rule.triton import passes
from deltarule.ops.delta_rule.triton.plan import LEAST_READS, full_tiles, new_plan
from deltarule.ops.runtime import machine
from kernels.interpreted import interpreted
from tolerance import assert_close

CPU = torch.device("cpu")
TINY = Configuration("tied", "head", 1, "float32", 16, 16)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """No test reads or writes the user's folder."""
    monkeypatch.setattr(machine, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(module, "LENGTHS", (17, 0, 3))
    machine.failures.cache_clear()
    yield tmp_path
    machine.failures.cache_clear()


def test_commonest_are_24_and_lead_the_grid() -> None:
    assert len(set(commonest())) == len(commonest()) == 24
    assert every()[:24] == commonest()
    assert len(set(every())) == len(every())


@interpreted
@pytest.mark.parametrize(
    "of", [TINY, Configuration("none", "none", 1, "float16", 16, 16)], ids=["float32", "float16"]
)
def test_sound_kernels_pass(of) -> None:
    verdict = examine(of, CPU)
    assert verdict.passed, verdict
    assert 0 < verdict.times_bar <= 1


@pytest.mark.parametrize("n_steps", [1, 2, 4])
def test_the_dense_draw_fills_the_tiles_that_a_copy_engine_fetches(n_steps) -> None:
    inputs = draw(Configuration("tied", "head", n_steps, "bfloat16", 64, 64), (), CPU, False)
    plan = new_plan(inputs)
    # In chunks of fewer tokens its reads begin off the grid.
    assert full_tiles(inputs, plan, 64) == (plan.sizes["CT"] >= LEAST_READS)
    assert n_steps > 2 or full_tiles(inputs, plan, 64)


def call_on_a_gpu():
    """What dispatch looks at of a call, said to lie on a GPU."""
    inputs = draw(TINY, (), CPU, False)
    kept = {name: getattr(inputs.q, name) for name in ("shape", "dtype", "numel")}
    q = SimpleNamespace(device=torch.device("cuda"), **kept)
    return implementations.Request(inputs._replace(q=q))


@interpreted
def test_a_broken_kernel_is_caught_and_then_refused(own_cache, monkeypatch) -> None:
    monkeypatch.setattr(dispatch, "triton_missing", lambda device: None)
    assert implementations.why_not_triton(call_on_a_gpu()) is None
    sound = passes.forward

    def broken(inputs, save):
        o, final, saved = sound(inputs, save)
        o[0, 4, 0, 3] *= 1 + 1e-3
        return o, final, saved

    backend = implementations.backend_of("triton")._replace(forward=broken)
    monkeypatch.setattr(implementations.recurrence, "backend_of", lambda name: backend)
    verdict = examine(TINY, CPU)
    assert not verdict.passed
    assert verdict.error.startswith("o (")
    path = keep_verdicts([verdict])
    assert path.parent.parent == own_cache
    reason = implementations.why_not_triton(call_on_a_gpu())
    assert verdict.name in reason
    assert verdict.error in reason
    assert str(path) in reason
    # Another machine, or another version, has other findings.
    monkeypatch.setattr(machine, "identity", lambda: {"gpu": "another"})
    machine.failures.cache_clear()
    assert implementations.why_not_triton(call_on_a_gpu()) is None


@interpreted
def test_a_kernel_that_raises_is_a_finding(monkeypatch) -> None:
    def failing(inputs):
        raise RuntimeError("an illegal memory access\nmore")

    monkeypatch.setattr(module, "triton_run", failing)
    verdict = examine(TINY, CPU)
    assert verdict.error == "dense: RuntimeError: an illegal memory access"
    keep_verdicts([verdict])
    name = implementations.configuration_name(draw(TINY, (), CPU, False))
    assert implementations.refusal_of(name)


def test_a_damaged_file_is_no_finding(own_cache, capsys) -> None:
    path = keep_verdicts([])
    path.write_text("{")
    assert machine.load_findings() == {}
    diagnose(DoctorRun(show=True))
    assert capsys.readouterr().out == "no verdicts yet; deltarule doctor makes them\n"


@pytest.mark.parametrize(
    ("version", "capability", "bad"),
    [
        *((version, (9, 0), True) for version in ("3.4.0", "3.6.0", "3.7.0")),
        ("3.7.1", (9, 0), False), ("3.6.0", (8, 0), False), ("3.3.1", (9, 0), False),
    ],
)  # fmt: skip
def test_known_bad_versions(version, capability, bad, monkeypatch) -> None:
    monkeypatch.setattr(module, "triton_version", lambda: version)
    assert (module.known_bad(capability) is not None) == bad


@interpreted
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(ValueError, match="no CUDA device"):
        diagnose(DoctorRun())


def test_compiled_code_is_refused_too(monkeypatch) -> None:
    inputs = draw(TINY, (), CPU, False)
    keep_verdicts(
        [module.Verdict(implementations.configuration_name(inputs), False, "wrong", 2.0, 0.0)]
    )

    def reason(x):
        name = implementations.configuration_name(inputs._replace(q=x))
        return x + 1, implementations.refusal_of(name)

    _, found = torch.compile(reason, fullgraph=True, backend="eager")(inputs.q)
    assert "wrong" in found


def drawn(of, lengths, heads):
    """Inputs, and gradients by the outputs and the final state."""
    inputs = draw(of, lengths, CPU, bool(lengths), heads)
    generator = torch.Generator().manual_seed(1)
    shapes = inputs.output_shape, inputs.state_shape
    d_o, d_state = (torch.randn(shape, generator=generator) for shape in shapes)
    return inputs, (d_o.to(inputs.q.dtype), module.state_of(d_state))


@pytest.mark.parametrize("erase", ["none", "tied", "free"])
def test_parts_of_the_heads_are_computed_like_all(erase, monkeypatch) -> None:
    of = Configuration(erase, "channel", 1, "bfloat16", 16, 32)
    inputs, weights = drawn(of, (5, 0, 3), 3)
    exact = module.in_float64(inputs)
    whole = module.results(module.exact_run, exact, weights)
    monkeypatch.setattr(module, "STATES_AT_ONCE", 2 * 2 * 16 * 32)
    parts = module.in_parts(module.exact_run, exact, weights)
    assert parts.keys() == whole.keys()
    for name, x in parts.items():
        assert_close(x, whole[name], dtype=torch.float64, name=name)


@pytest.mark.parametrize("lengths", [(), (70, 0, 64, 17)], ids=["dense", "packed"])
def test_a_draw_has_numbers_enough_for_a_ratio(lengths) -> None:
    of = Configuration("tied", "head", 1, "bfloat16", 64, 64)
    inputs, weights = drawn(of, lengths, module.KEY_HEADS)
    exact = module.in_parts(module.exact_run, module.in_float64(inputs), weights)
    own = module.in_parts(module.yardstick_run, inputs, weights)

    def shorter_chunks(given):
        return chunked.run(given, 32, torch.bfloat16)

    found = module.in_parts(shorter_chunks, inputs, weights)
    # As many roundings as the yardstick: one and a half times its mean error is the bar.
    for name in ("dbeta", "dlog_decay"):
        ratio = module.times_yardstick(name, found[name], exact[name], own[name])
        assert 0.55 < ratio < 0.9, name


GOOD = [Configuration("tied", "head", 1, "float32", 16, size) for size in (16, 32)]
BAD = Configuration("free", "head", 1, "float32", 16, 16)


def dies_of_a_free_erase(of: Configuration) -> Verdict:
    """Stands in for the examination."""
    if of.erase == "free":
        os._exit(7)
    return Verdict(str(of), True, None, 1.0, 0.0)


def has_no_memory(of: Configuration) -> None:
    """Stands in for the examination."""


def test_a_process_that_dies_is_a_finding(monkeypatch) -> None:
    monkeypatch.setattr(command, "examine_alone", dies_of_a_free_erase)
    found = list(command.examined_apart([BAD, *GOOD], 1))
    assert [verdict.passed for verdict in found] == [False, True, True]
    assert found[0].error == "the process ended with code 7"
    assert found[0].name.startswith("erase free")


def test_too_little_memory_is_an_error_and_no_finding(monkeypatch) -> None:
    monkeypatch.setattr(command, "examine_alone", has_no_memory)
    with pytest.raises(ValueError, match=r"too little free memory.*--processes"):
        list(command.examined_apart([BAD], 1))


def test_no_memory_in_the_examination_is_told(monkeypatch) -> None:
    def examine(*_: object) -> None:
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(command, "examine", examine)
    assert command.examine_alone(BAD) is None


@interpreted
def test_the_examination_itself_answers() -> None:
    (verdict,) = command.examined_apart([Configuration("none", "none", 1, "float32", 16, 16)], 1)
    assert verdict.passed, verdict


def test_a_broken_context_ends_the_examination_in_one_process(monkeypatch) -> None:
    failed = Verdict("name", False, "illegal access", 1.0, 0.0)
    monkeypatch.setattr(module, "examine", lambda of, device: failed)
    monkeypatch.setattr(module, "gpu_is_lost", lambda: True)
    found = module.examined(GOOD, CPU)
    assert next(found) == failed
    with pytest.raises(ValueError, match="leave out --processes 0"):
        next(found)


@pytest.mark.parametrize(("free", "processes"), [(2**30, 1), (7 * 2**30, 2), (2**40, 16)])
def test_processes_fit_the_memory(monkeypatch, free, processes) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 2**40))
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(64), raising=False)
    assert command.fitting_processes() == processes
