import pytest

from bench import counts
from bench.cases import OPERATIONS, SHAPES

TRAIN = SHAPES["8x4096-h16"]
TOKENS_AND_HEADS = 8 * 4096 * 16


def count(name, shape, *, backward=False):
    return counts.count(OPERATIONS[name], shape, backward=backward)


def test_a_gated_forward_pass_moves_1032_bytes_a_token_and_head():
    state = 4 * 8 * 16 * 128 * 128
    # q, k, v and o of 128 bfloat16 numbers; beta and the decay in float32.
    assert count("gdn", TRAIN).bytes == 1032 * TOKENS_AND_HEADS + state


def test_the_backward_pass_reads_inputs_and_writes_their_gradients():
    both = count("gdn", TRAIN, backward=True).bytes - count("gdn", TRAIN).bytes
    # q, k, v, dO, dQ, dK, dV; both gates and their gradients.
    assert both == (7 * 256 + 4 * 4) * TOKENS_AND_HEADS


# Products of 64 x 128, forward and with the backward pass; one with the state of 128 x 128 is two.
# The delta rule has three with the state and four others, then 7 and 11; two steps of a token share
# its read-out.
UNITS = {
    "delta": (2 * 3 + 4, 2 * 3 + 4 + 2 * 7 + 11),
    "simple_gla": (2 * 2 + 2, 2 * 2 + 2 + 2 * 4 + 5),
    "dplr": (2 * 4 + 8, 2 * 4 + 8 + 2 * 9 + 22),
    "product2": (2 * 5 + 6, 2 * 5 + 6 + 2 * 12 + 17),
}


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", UNITS)
def test_operations(name, backward):
    done = count(name, TRAIN, backward=backward).operations
    assert done == 2 * UNITS[name][backward] * 64 * 128 * TOKENS_AND_HEADS


def test_decoding_reads_and_writes_every_state():
    shape = SHAPES["decode-256"]
    states = 2 * 4 * 256 * 32 * 128 * 128
    assert count("decode", shape).bytes == pytest.approx(states, rel=0.02)
    assert count("decode", shape).floor_ms == pytest.approx(0.253, abs=0.005)


def test_attention_counts_half_of_all_pairs():
    pairs = 8 * 16 * 4096 * 4096 // 2
    assert count("softmax", TRAIN).operations == 2 * pairs * 256


def test_the_floor_is_the_larger_of_both_times():
    least = [counts.Count(int(4.25e9), operations).floor_ms for operations in (0, int(2 * 790e9))]
    assert least == pytest.approx([1.0, 2.0])
