"""DESIGN's properties of the fused forwards in Gluon, on an H100 or H200."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import truth
from deltarule import delta_rule, explain
from oracle import Case, check_fused
from truth import DEVICE, FORMS, Drawn, Kind, assert_same, call, draw, placed, results, surrounded

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

BRAIN = torch.bfloat16
SIZES = {"key_size": 128, "value_size": 128}
# Times log decays of some -0.5: all in the fast form (twice), some tokens beyond it, nearly all.
STRENGTHS = (1.0, 0.05, 6.0, 1000.0)


class Call(NamedTuple):
    """What is compiled together, and what the drawn log decays are multiplied by."""

    kind: Kind
    strength: float = 1.0

    def __str__(self) -> str:
        return f"{self.kind}-{self.strength}"

    @property
    def of_channels(self) -> bool:
        return self.kind.decay == "channel"

    def case(self, **options: object) -> Case:
        """A call of 128 by 128, if nothing else is said; one per channel has no other size."""
        case = self.kind.case(**(SIZES | options))
        decay = case.tensors["log_decay"]
        return case if decay is None else case.changed(log_decay=decay * self.strength)

    def drawn(self, **options: object) -> Drawn:
        return draw(self.case(**options))


HEADS = [
    Call(Kind(decay, erase, 1, BRAIN))
    for decay in ("none", "constant", "head") for erase in ("none", "tied")
    if (decay, erase) != ("constant", "none")
]  # fmt: skip
HEADS += [Call(Kind("head", "none", 1, torch.float16))]
CHANNELS = [
    Call(Kind("channel", erase, 1, BRAIN), strength)
    for erase in ("none", "tied") for strength in STRENGTHS
]  # fmt: skip
TIED = Call(Kind("head", "tied", 1, BRAIN))
TIED_CHANNELS = [of for of in CHANNELS if of.kind.erase == "tied"]

every_form = pytest.mark.parametrize("form", FORMS)


@pytest.fixture(scope="module", params=HEADS + CHANNELS, ids=str)
def of(request) -> Call:
    return request.param


def fused(case: Case) -> dict[str, Tensor]:
    out = call(case, case.tensors, impl="gluon")
    return {"o": out.o, "final_state": out.final_state}


def check(case: Case, stress: bool = False) -> None:
    check_fused(tuple(fused(placed(case)).values()), case, stress=stress)


# Chunks: fewer than slots, as many, more.
@pytest.mark.parametrize("tokens", [1, 64, 128, 192, 256, 300])
@pytest.mark.parametrize("of", [of for of in CHANNELS if of.strength == 1.0], ids=str)
def test_it_runs_to_its_end(of: Call, tokens: int) -> None:
    check(of.case(tokens=tokens), stress=True)


# Whole heads, those in parts, and those that do not fill tiles.
SIZES_OF_HEADS = [
    *((size, size, normalize) for size in (128, 64) for normalize in (False, True)),
    (64, 192, False), (128, 256, False), (96, 192, True), (112, 128, False), (80, 80, False),
]  # fmt: skip


@every_form
def test_it_is_as_near_to_float64_as_its_types_allow(of: Call, form: str) -> None:
    for key_size, value_size, normalize in SIZES_OF_HEADS[: 2 if of.of_channels else None]:
        sizes = {"key_size": key_size, "value_size": value_size, "normalize_qk": normalize}
        # Two slots of four heads each: few roundings, whose average the bar must allow for.
        check(of.case(**FORMS[form], **sizes), stress=True)


@every_form
@pytest.mark.parametrize("sizes", [(96, 96), (112, 128)])
def test_heads_that_do_not_fill_tiles_have_the_bits_of_zeros_in_the_rest(form, sizes) -> None:
    case = placed(TIED.case(**FORMS[form], key_size=sizes[0], value_size=sizes[1]))
    wide = {}
    for name in ("q", "k", "v", "initial_state"):
        x = case.tensors[name]
        room = (0, 128 - x.shape[-1], *((0, 128 - x.shape[-2]) if x.dtype == torch.float32 else ()))
        wide[name] = torch.nn.functional.pad(x, room)
    scale = sizes[0] ** -0.5
    found = call(case, case.tensors, impl="gluon")
    padded = case.changed(**wide)
    expected = call(padded, padded.tensors, impl="gluon", scale=scale)
    assert torch.equal(found.o, expected.o[..., : sizes[1]])
    assert torch.equal(found.final_state, expected.final_state[..., : sizes[1], : sizes[0]])


@every_form
def test_a_head_knows_nothing_of_the_next(form: str) -> None:
    """Whose channels follow its own, where its tiles have more."""
    case = placed(TIED.case(**FORMS[form], heads=2, value_heads=2, key_size=96, value_size=96))
    expected, others = fused(case), {}
    for name in case.present():
        x = others[name] = case.tensors[name].clone()
        x.select(1 if name == "initial_state" else 2, 1).fill_(torch.nan)
    found = fused(case.changed(**others))
    assert torch.equal(found["o"][:, :, 0], expected["o"][:, :, 0])
    assert torch.equal(found["final_state"][:, 0], expected["final_state"][:, 0])


def test_many_tokens_average_to_the_bar(of: Call) -> None:
    slow = of if of.of_channels else of._replace(strength=0.05)
    for size in (128,) if of.of_channels else (64, 128):
        sizes = {"key_size": size, "value_size": size, "heads": 4, "value_heads": 8}
        check(slow.case(tokens=512, **sizes))


@pytest.mark.parametrize("reset", [-torch.inf, -1e4])
@pytest.mark.parametrize("decay", ["head", "channel"])
@pytest.mark.parametrize("erase", ["none", "tied"])
def test_hard_resets(erase: str, decay: str, reset: float) -> None:
    slow = Call(Kind(decay, erase, 1, BRAIN), 0.05)
    case = slow.case(tokens=512, heads=4, value_heads=8)
    log_decay = case.tensors["log_decay"]
    # Of channels, and of all channels of a head together.
    for shape in {log_decay.shape, (*log_decay.shape[:3], *[1] * (log_decay.ndim - 3))}:
        for part in (0.02, 0.3):
            where = torch.rand(shape) < part
            check(case.changed(log_decay=log_decay.masked_fill(where, reset)))


def test_gradients_are_those_of_a_forward_that_saves_nothing(of: Call) -> None:
    sizes = {} if of.of_channels else {"key_size": 64, "value_size": 64}
    drawn = of.drawn(**FORMS["ragged"], **sizes)
    found = results(drawn, impl="gluon")
    assert_same(results(drawn, impl="gluon"), found)
    expected = results(drawn, impl="triton", save_states=False)
    gradients = {name: x for name, x in expected.items() if name.startswith("d ")}
    assert_same({name: found[name] for name in gradients}, gradients)


def test_a_row_alone_is_the_row_in_a_batch(of: Call) -> None:
    drawn = of.drawn(tokens=150, batch=3)
    truth.assert_rows_alone(drawn, range(3), lambda drawn: fused(drawn.case))


def test_packed_sequences_are_the_sequences_alone(of: Call) -> None:
    drawn = of.drawn(lengths=(3, 0, 70, 64, 130))
    together = fused(drawn.case)
    for i in (0, 2, 3, 4):
        assert_same(fused(drawn.sequence(i).case), truth.own_part(drawn.case, together, i))


@every_form
def test_no_future_input_changes_the_past_bitwise(of: Call, form: str) -> None:
    sizes = {} if of.of_channels else {"key_size": 64, "value_size": 64}
    case, run = placed(of.case(**FORMS[form], **sizes)), lambda case: fused(case)["o"]
    # What decays to nothing in a token may decay further.
    truth.assert_causal(case, run, (1, 37, 64, 100), (1e4,), seen=of.strength <= 1)


@every_form
def test_nan_around_a_tensor_is_never_read(of: Call, form: str) -> None:
    case = placed(of.case(**FORMS[form]))
    inside = {x: surrounded(case.tensors[x]) for x in case.present()}
    assert_same(fused(case.changed(**inside)), fused(case))


@pytest.mark.parametrize("of", [TIED, *TIED_CHANNELS], ids=str)
def test_a_thousand_replays_under_load_have_the_same_bits(of: Call) -> None:
    case = placed(of.case(tokens=1000, batch=9, heads=8, value_heads=16))
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


def explained(x: dict[str, Tensor | None], *names: str) -> dict[str, object]:
    given = {name: x[name] for name in names}
    return {row.impl: row for row in explain(x["q"], x["k"], x["v"], **given)}


def test_it_is_a_stage_of_triton_where_programs_fill_the_gpu() -> None:
    case = placed(TIED.case(tokens=128, batch=8, heads=16, value_heads=16))
    x = case.tensors
    assert_same(
        dict(enumerate(call(case, x, impl="triton"))), dict(enumerate(call(case, x, impl="gluon")))
    )
    rows = explained(x, "beta")
    assert rows["triton"].runs
    assert "uses this kernel here" in rows["gluon"].reason
    rows = explained({n: None if y is None else y[:1] for n, y in x.items()}, "beta")
    assert "few heads and rows" in rows["gluon"].reason


@pytest.mark.parametrize("erase", ["none", "tied"])
def test_explain_says_where_channels_are_taken(erase: str) -> None:
    of = next(x for x in CHANNELS if x.kind.erase == erase)
    case = placed(of.case(batch=8, heads=16, value_heads=16))
    rows = explained(case.tensors, "beta", "log_decay")
    assert rows["triton"].runs
    assert "uses this kernel here" in rows["gluon"].reason


@pytest.mark.parametrize(
    ("of", "options", "reason"),
    [(TIED_CHANNELS[0], {}, "impl='gluon' cannot run this: the fused kernel of"),
     (TIED, {"batch_invariant": True}, "batch_invariant")],
)  # fmt: skip
def test_what_it_cannot_do_it_says(of: Call, options: dict[str, bool], reason: str) -> None:
    case = placed(of.case(key_size=64, value_size=64))
    with pytest.raises(ValueError, match=reason):
        call(case, case.tensors, impl="gluon", **options)


@pytest.mark.parametrize("of", [TIED, TIED_CHANNELS[0]], ids=str)
def test_compiled_calls_run_it(of: Call) -> None:
    x = placed(of.case(tokens=128)).tensors

    def function(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor) -> Tensor:
        return delta_rule(q, k, v, beta=beta, log_decay=decay, impl="gluon").o

    given = x["q"], x["k"], x["v"], x["beta"], x["log_decay"]
    compiled = torch.compile(function, fullgraph=True)
    assert torch.equal(compiled(*given), function(*given))
