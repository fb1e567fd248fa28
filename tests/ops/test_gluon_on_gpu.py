"""DESIGN's properties of the fused forward in Gluon, on an H100 or H200."""

import pytest
import torch
from torch import Tensor

from deltarule import delta_rule, explain
from deltarule.ops.delta_rule import chunked, definition
from oracle import Case, run_module
from tolerance import assert_close_to_yardstick
from truth import DEVICE, FORMS, Drawn, Kind, assert_same, call, draw, placed, results, surrounded

pytestmark = pytest.mark.gpu

KINDS = [
    Kind(decay, erase, 1, torch.bfloat16)
    for decay in ("none", "constant", "head") for erase in ("none", "tied")
    if (decay, erase) != ("constant", "none")
]  # fmt: skip
KINDS += [Kind("head", "none", 1, torch.float16)]
SIZES = {"key_size": 128, "value_size": 128}


@pytest.fixture(scope="module", autouse=True)
def hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the fused kernel is written for sm_90")


@pytest.fixture(scope="module", params=KINDS, ids=str)
def kind(request) -> Kind:
    return request.param


every_form = pytest.mark.parametrize("form", FORMS)


def fused(case: Case) -> dict[str, Tensor]:
    out = call(case, case.tensors, impl="gluon")
    return {"o": out.o, "final_state": out.final_state}


@every_form
@pytest.mark.parametrize("normalize", [False, True])
def test_it_is_as_near_to_float64_as_its_types_allow(kind: Kind, form: str, normalize) -> None:
    for sizes in ({}, SIZES):
        case = placed(kind.case(**FORMS[form], **sizes, normalize_qk=normalize))
        found = fused(case)
        # Two slots of four heads each: few roundings, whose average the bar must allow for.
        check(case, found, stress=True)


def check(case: Case, found: dict[str, Tensor], stress: bool = False) -> None:
    case, dtype = placed(case, torch.device("cpu")), case.tensors["q"].dtype
    truth = run_module(definition, case.to(torch.float64))
    yardstick = run_module(chunked, case.to(torch.float32), chunk_size=64, matmul_dtype=dtype)
    expected = {"o": truth.o, "final_state": truth.final_state}
    for name, x in (("o", yardstick.o.to(dtype)), ("final_state", yardstick.final_state)):
        assert_close_to_yardstick(
            found[name].cpu(), expected[name], x, dtype=dtype, stress=stress, name=name
        )


@pytest.mark.parametrize("size", [64, 128])
def test_many_tokens_average_to_the_bar(kind: Kind, size: int) -> None:
    sizes = {"key_size": size, "value_size": size, "tokens": 512, "heads": 4, "value_heads": 8}
    case = placed(kind.case(**sizes))
    if case.tensors["log_decay"] is not None:
        case = case.changed(log_decay=case.tensors["log_decay"] * 0.05)
    check(case, fused(case))


@pytest.mark.parametrize("reset", [-torch.inf, -1e4])
@pytest.mark.parametrize("erase", ["none", "tied"])
def test_hard_resets(erase: str, reset: float) -> None:
    sizes = {**SIZES, "tokens": 512, "heads": 4, "value_heads": 8}
    case = placed(Kind("head", erase, 1, torch.bfloat16).case(**sizes))
    decay = case.tensors["log_decay"] * 0.05
    for part in (0.02, 0.3):
        where = torch.rand_like(decay) < part
        changed = case.changed(log_decay=decay.masked_fill(where, reset))
        check(changed, fused(changed))


def test_gradients_are_those_of_a_forward_that_saves_nothing(kind: Kind) -> None:
    drawn = draw(kind.case(**FORMS["ragged"]))
    found = results(drawn, impl="gluon")
    assert_same(results(drawn, impl="gluon"), found)
    expected = results(drawn, impl="triton", save_states=False)
    gradients = {name: x for name, x in expected.items() if name.startswith("d ")}
    assert_same({name: found[name] for name in gradients}, gradients)


def test_a_row_alone_is_the_row_in_a_batch(kind: Kind) -> None:
    drawn = draw(kind.case(tokens=150, batch=3, **SIZES))
    together = fused(drawn.case)
    for row in range(3):
        alone = fused(drawn.rows(slice(row, row + 1)).case)
        assert_same(alone, {name: x[row : row + 1] for name, x in together.items()})


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
def test_no_future_input_changes_the_past_bitwise(kind: Kind, form: str) -> None:
    case = placed(kind.case(**FORMS[form]))
    before = fused(case)["o"]
    for name in ("q", "k", "v", "beta", "log_decay"):
        x = case.tensors[name]
        if x is None or x.ndim < 3:
            continue
        for t in (1, 37, 64, 100):
            changed = x.clone()
            changed[:, t:] *= 1e4 if name == "log_decay" else -0.7
            after = fused(case.changed(**{name: changed}))["o"]
            assert torch.equal(after[:, :t], before[:, :t]), f"{name} from {t} on"
            assert not torch.equal(after, before), name


@every_form
def test_nan_around_a_tensor_is_never_read(kind: Kind, form: str) -> None:
    case = placed(kind.case(**FORMS[form], **SIZES))
    inside = {x: surrounded(case.tensors[x]) for x in case.present()}
    assert_same(fused(case.changed(**inside)), fused(case))


def test_a_thousand_replays_under_load_have_the_same_bits() -> None:
    kind = Kind("head", "tied", 1, torch.bfloat16)
    case = placed(kind.case(tokens=1000, batch=9, heads=8, value_heads=16, **SIZES))
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


def test_it_is_a_stage_of_triton_where_programs_fill_the_gpu() -> None:
    kind = Kind("head", "tied", 1, torch.bfloat16)
    case = placed(kind.case(tokens=128, batch=8, heads=16, value_heads=16, **SIZES))
    x = case.tensors
    assert_same(
        dict(enumerate(call(case, x, impl="triton"))), dict(enumerate(call(case, x, impl="gluon")))
    )
    rows = {row.impl: row for row in explain(x["q"], x["k"], x["v"], beta=x["beta"])}
    assert rows["triton"].runs
    assert "takes it" in rows["gluon"].reason
    few = {n: None if y is None else y[:1] for n, y in x.items()}
    rows = {row.impl: row for row in explain(few["q"], few["k"], few["v"], beta=few["beta"])}
    assert "few heads and rows" in rows["gluon"].reason


def test_what_it_cannot_do_it_says() -> None:
    case = placed(Kind("channel", "tied", 1, torch.bfloat16).case())
    with pytest.raises(ValueError, match="impl='gluon' cannot run this: the fused kernel of"):
        call(case, case.tensors, impl="gluon")
    case = placed(Kind("head", "tied", 1, torch.bfloat16).case())
    with pytest.raises(ValueError, match="batch_invariant"):
        call(case, case.tensors, impl="gluon", batch_invariant=True)


def test_compiled_calls_run_it() -> None:
    drawn: Drawn = draw(Kind("head", "tied", 1, torch.bfloat16).case(tokens=128))
    x = drawn.case.tensors

    def function(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor) -> Tensor:
        return delta_rule(q, k, v, beta=beta, log_decay=decay, impl="gluon").o

    given = x["q"], x["k"], x["v"], x["beta"], x["log_decay"]
    compiled = torch.compile(function, fullgraph=True)
    assert torch.equal(compiled(*given), function(*given))
