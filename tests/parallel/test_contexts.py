"""One sequence, or one row of documents, over processes: what one process computes."""

import itertools

import pytest
import torch
from contexts import OFFSETS, arguments, grid
from processes import Processes
from torch import Tensor

import deltarule
from deltarule.nn import MIXERS

# Of float64: sums in another order, nothing else.
BAR = 1e-12


OVER_FOUR = [pytest.param("four", x, marks=pytest.mark.distributed) for x in (None, [0, 1, 30, 31])]


@pytest.mark.parametrize("exchange", ["gather", "scan"])
@pytest.mark.parametrize(("count", "bounds"), [("two", [0, 22]), *OVER_FOUR])
def test_operators(
    request: pytest.FixtureRequest, exchange: str, count: str, bounds: list[int] | None
) -> None:
    processes, bounds = request.getfixturevalue(count), bounds and [*bounds, 53]
    for cases in processes("contexts.operator_cases", exchange=exchange, bounds=bounds):
        assert max(error for _, error in cases) < BAR, cases


# What looks back in each way: convolution, token shift, the token before, a running maximum, a
# sum of weights, positions, elementwise states, two sums, keys and values.
KINDS = [
    "gated_deltanet", "rwkv6", "rwkv7", "mlstm", "abc", "retnet", "longhorn_released", "mesa",
    "attention", "sliding_window",
]  # fmt: skip
NOT_LINEAR = [name for name, mixer in MIXERS.items() if not mixer.linear_state]


MODELS = [
    *(("two", mixer, "gather", packed, 1) for mixer in KINDS for packed in (False, True)),
    *(
        pytest.param("four", *case, marks=pytest.mark.distributed)
        for case in itertools.product(
            (name for name in MIXERS if name not in NOT_LINEAR), ("gather", "scan"), (False, True),
            (1, 2),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("count", "mixer", "exchange", "packed", "heads"), MODELS)
def test_models(
    request: pytest.FixtureRequest, count: str, mixer: str, exchange: str, packed: bool, heads: int
) -> None:
    given = {"mixer": mixer, "exchange": exchange, "packed": packed, "heads": heads}
    for errors in request.getfixturevalue(count)("whole_models.context_model", **given):
        assert max(errors.values()) < 1e-10, errors


def test_layers_that_are_not_linear_name_themselves(two: Processes) -> None:
    for mixer in NOT_LINEAR:
        for message in two("whole_models.refused", mixer=mixer):
            assert f"context must be None for {mixer}" in message


@pytest.mark.parametrize("exchange", ["gather", "scan"])
def test_what_a_layer_sends_does_not_depend_on_the_tokens(two: Processes, exchange: str) -> None:
    # Two heads of 8 x 16 in float32: M and U forward, dS back. A round of messages sends them once
    # more, to the process that begins with them.
    key, value = 8, 16
    states = 2 * 4 * key * (key + value + value)
    # Of the convolution, from the first process to the second, and their gradients back.
    rows = 4 * 3 * 32
    for tokens in (16, 64):
        for sent in two("whole_models.bytes_of_a_layer", tokens=tokens, exchange=exchange):
            if exchange == "gather":
                assert sent == {"all_gather": states, "batch_isend_irecv": rows}
            else:
                assert rows < sent["batch_isend_irecv"] <= rows + 2 * states


def test_messages_travel_beside_the_local_pass(two: Processes) -> None:
    """What is sent is waited for after the work that needs none of it, forwards and backwards."""
    forward = "rows leave, k, rows come, k, states leave, g, states come"
    backward = "states leave, d g, states come, d k, rows leave, d k, rows come"
    for done in two("whole_models.order_of_a_layer", exchange="gather"):
        assert done == [*forward.split(", "), "forward is done", *backward.split(", ")]
    for done in two("whole_models.order_of_a_layer", exchange="scan"):
        for first, work, last in (("leave", "g", "come"), ("leave", "d g", "come")):
            place = done.index(work)
            assert done[place - 1 : place + 2] == [f"states {first}", work, f"states {last}"]


@pytest.mark.parametrize("mixer", ["mamba1", "s4", "s4d", "abc", "mesa", "gate_loop"])
def test_every_output_gate_is_projected_while_states_travel(two: Processes, mixer: str) -> None:
    for done in two("whole_models.order_of_a_layer", exchange="gather", mixer=mixer, names="g"):
        for gate in ("g", "d g"):
            place = done.index(gate)
            assert done[place - 1 : place + 2] == ["states leave", gate, "states come"]


@pytest.mark.parametrize("mixer", ["gated_deltanet", "mamba1", "mesa", "rwkv7", "attention"])
def test_a_step_leaves_nothing_to_a_garbage_collector(two: Processes, mixer: str) -> None:
    """A graph that knows its caller is freed late, or never: steps then pile up on a GPU."""
    assert list(two("whole_models.kept_after_a_step", mixer=mixer)) == [0, 0]


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_softmax_layers_keep_their_own_keys_alone(two: Processes, kv_heads: int) -> None:
    for errors in two("whole_models.ring_of_attention", kv_heads=kv_heads):
        assert max(errors.values()) < BAR, errors


def test_the_transition_is_what_a_state_is_multiplied_by() -> None:
    for case in grid():
        given = {
            n: x.detach() if isinstance(x, Tensor) else x for n, x in arguments(**case).items()
        }
        operator = deltarule.dplr if case["erase"] == "free" else deltarule.delta_rule
        offsets = torch.tensor(OFFSETS) if case["packed"] else None
        given |= {"cu_seqlens": offsets}
        start = torch.randn(len(OFFSETS) - 1 if case["packed"] else 2, 4, 7, 5).double()
        out = operator(**given, return_transition=True)
        o, final_state = out
        m = out.transition if case["erase"] != "none" else out.transition.diag_embed()
        started = operator(**given, initial_state=start).final_state
        torch.testing.assert_close(started - final_state, start @ m, rtol=0, atol=1e-12)
        torch.testing.assert_close(o, operator(**given).o, rtol=0, atol=1e-12)
