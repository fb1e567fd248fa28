"""DESIGN's properties of the fused forward with a decay per channel, on an H100 or H200."""

import pytest
import torch
from torch import Tensor

from deltarule import delta_rule, explain
from deltarule.ops.delta_rule import chunked, definition
from oracle import Case, run_module
from tolerance import assert_close_to_yardstick
from truth import DEVICE, FORMS, Kind, assert_same, call, draw, placed, results, surrounded

pytestmark = pytest.mark.gpu

KINDS = [Kind("channel", erase, 1, torch.bfloat16) for erase in ("none", "tied")]
SIZES = {"key_size": 128, "value_size": 128}
# Times the log decays of some -0.5: all in the fast form, some tokens beyond it, nearly all.
STRENGTHS = (0.05, 1.0, 6.0, 1000.0)

every_form = pytest.mark.parametrize("form", FORMS)
every_strength = pytest.mark.parametrize("strength", STRENGTHS)


@pytest.fixture(scope="module", autouse=True)
def hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the fused kernel is written for sm_90")


@pytest.fixture(scope="module", params=KINDS, ids=str)
def kind(request) -> Kind:
    return request.param


def case_of(kind: Kind, strength: float = 1.0, **options: object) -> Case:
    case = kind.case(**(SIZES | options))
    return placed(case.changed(log_decay=case.tensors["log_decay"] * strength))


def fused(case: Case) -> dict[str, Tensor]:
    out = call(case, case.tensors, impl="gluon")
    return {"o": out.o, "final_state": out.final_state}


def check(case: Case, stress: bool = False) -> None:
    found = fused(case)
    case = placed(case, torch.device("cpu"))
    truth = run_module(definition, case.to(torch.float64))
    yardstick = run_module(
        chunked, case.to(torch.float32), chunk_size=64, matmul_dtype=torch.bfloat16
    )
    expected = {"o": truth.o, "final_state": truth.final_state}
    for name, x in (("o", yardstick.o.bfloat16()), ("final_state", yardstick.final_state)):
        assert_close_to_yardstick(
            found[name].cpu(), expected[name], x, dtype=torch.bfloat16, stress=stress, name=name
        )


# Chunks: fewer than slots, as many, more.
@pytest.mark.parametrize("tokens", [1, 64, 128, 192, 256, 300])
def test_it_runs_to_its_end(kind: Kind, tokens: int) -> None:
    check(case_of(kind, tokens=tokens), stress=True)


@every_form
@every_strength
@pytest.mark.parametrize("normalize", [False, True])
def test_it_is_as_near_to_float64_as_its_types_allow(kind, form, strength, normalize) -> None:
    # Two slots of four heads each: few roundings, whose average the bar must allow for.
    check(case_of(kind, strength, **FORMS[form], normalize_qk=normalize), stress=True)


@every_strength
def test_many_tokens_average_to_the_bar(kind: Kind, strength: float) -> None:
    check(case_of(kind, strength, tokens=512, heads=4, value_heads=8))


@pytest.mark.parametrize("reset", [-torch.inf, -1e4])
def test_hard_resets(kind: Kind, reset: float) -> None:
    case = case_of(kind, 0.05, tokens=512, heads=4, value_heads=8)
    decay = case.tensors["log_decay"]
    for part in (0.02, 0.3):
        for of in (decay.shape, (*decay.shape[:3], 1)):
            where = torch.rand(of, device=DEVICE) < part
            check(case.changed(log_decay=decay.masked_fill(where, reset)))


def test_gradients_are_those_of_a_forward_that_saves_nothing(kind: Kind) -> None:
    drawn = draw(kind.case(**FORMS["ragged"], **SIZES))
    found = results(drawn, impl="gluon")
    assert_same(results(drawn, impl="gluon"), found)
    expected = results(drawn, impl="triton", save_states=False)
    gradients = {name: x for name, x in expected.items() if name.startswith("d ")}
    assert_same({name: found[name] for name in gradients}, gradients)


@every_strength
def test_a_row_alone_is_the_row_in_a_batch(kind: Kind, strength: float) -> None:
    case = case_of(kind, strength, tokens=150, batch=3)
    together = fused(case)
    for row in range(3):
        alone = {n: None if x is None else x[row : row + 1] for n, x in case.tensors.items()}
        assert_same(
            fused(case._replace(tensors=alone)),
            {name: x[row : row + 1] for name, x in together.items()},
        )


def test_packed_sequences_are_the_sequences_alone(kind: Kind) -> None:
    drawn = draw(kind.case(lengths=(3, 0, 70, 64, 130), **SIZES))
    together, start = fused(drawn.case), 0
    for i, length in enumerate(drawn.case.lengths):
        expected = {
            "o": together["o"][:, start : start + length],
            "final_state": together["final_state"][i : i + 1],
        }
        start += length
        if length:
            assert_same(fused(drawn.sequence(i).case), expected)


@every_form
@every_strength
def test_no_future_input_changes_the_past_bitwise(kind: Kind, form: str, strength: float) -> None:
    case = case_of(kind, strength, **FORMS[form])
    before = fused(case)["o"]
    for name in ("q", "k", "v", "beta", "log_decay"):
        if (x := case.tensors[name]) is None:
            continue
        for t in (1, 37, 64, 100):
            changed = x.clone()
            changed[:, t:] *= 1e4 if name == "log_decay" else -0.7
            after = fused(case.changed(**{name: changed}))["o"]
            assert torch.equal(after[:, :t], before[:, :t]), f"{name} from {t} on"


@every_form
@every_strength
def test_nan_around_a_tensor_is_never_read(kind: Kind, form: str, strength: float) -> None:
    case = case_of(kind, strength, **FORMS[form])
    inside = {x: surrounded(case.tensors[x]) for x in case.present()}
    assert_same(fused(case.changed(**inside)), fused(case))


@every_strength
def test_a_thousand_replays_under_load_have_the_same_bits(strength: float) -> None:
    case = case_of(KINDS[1], strength, tokens=1000, batch=9, heads=8, value_heads=16)
    first, other = fused(case), torch.randn(4096, 4096, device=DEVICE)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.graph(graph):
        captured = fused(case)
    wrong = torch.zeros((), device=DEVICE)
    for _ in range(1000):
        with torch.cuda.stream(stream):
            other @ other
        captured["o"].fill_(torch.nan)
        graph.replay()
        wrong += (captured["o"] != first["o"]).any()
        wrong += (captured["final_state"] != first["final_state"]).any()
    assert wrong.item() == 0


def test_explain_says_that_nobody_has_timed_it() -> None:
    x = case_of(KINDS[1], batch=8, heads=16, value_heads=16).tensors
    given = {"beta": x["beta"], "log_decay": x["log_decay"]}
    rows = {row.impl: row for row in explain(x["q"], x["k"], x["v"], **given)}
    assert rows["triton"].runs
    assert "no GPU has timed" in rows["gluon"].reason


def test_compiled_calls_run_it() -> None:
    x = draw(KINDS[1].case(tokens=128, **SIZES)).case.tensors

    def function(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor) -> Tensor:
        return delta_rule(q, k, v, beta=beta, log_decay=decay, impl="gluon").o

    given = x["q"], x["k"], x["v"], x["beta"], x["log_decay"]
    compiled = torch.compile(function, fullgraph=True)
    assert torch.equal(compiled(*given), function(*given))
