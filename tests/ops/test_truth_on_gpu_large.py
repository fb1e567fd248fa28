"""Tensors of more elements than 32 bits count, long sequences in segments, and fixed plans."""

import fcntl
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

import truth
from deltarule import delta_rule, recurrent_step
from deltarule.ops.delta_rule.inputs import Inputs
from deltarule.ops.delta_rule.triton.plan import chunks_per_segment
from oracle import Case
from truth import Kind, assert_alike, assert_same, draw, results, results_of

pytestmark = pytest.mark.gpu

GIB = 2**30
# Two rows; the second begins where its numbers still fit, and ends where they do not.
TOKENS = 65600


@pytest.fixture
def roomy() -> Iterator[None]:
    """Memory of a large GPU, for one test at a time; what it took of it goes back."""
    with (Path(tempfile.gettempdir()) / "deltarule-large-gpu-tests.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        if free < 72 * GIB:
            pytest.skip(f"it takes 64 GiB of the GPU's memory, and {free / GIB:.0f} are free")
        yield
        torch.cuda.empty_cache()


def run(x: dict[str, torch.Tensor], rows: slice) -> dict[str, torch.Tensor]:
    """Forward and backward of some rows, on a plan that does not depend on their number."""
    call = partial(delta_rule, batch_invariant=True, impl=truth.IMPL)
    own = {name: y[rows] for name, y in x.items()}
    return results_of(own, call, lambda out: (own["v"], torch.ones_like(out.final_state)))


@pytest.mark.usefixtures("roomy")
@pytest.mark.parametrize(
    ("decay", "tokens"), [("head", TOKENS), ("head", TOKENS + 27), ("channel", TOKENS + 27)]
)
def test_past_two_to_the_31_elements(decay: str, tokens: int) -> None:
    # By head the values are so many, by channel the decays and the copies of the keys.
    heads, key_size, value_size = (32, 16, 512) if decay == "head" else (64, 256, 16)
    largest = value_size if decay == "head" else key_size
    assert 2 * tokens * heads * largest > 2**31

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(2, tokens, *shape, device="cuda", dtype=torch.bfloat16)

    channels = () if decay == "head" else (key_size,)
    log_decay = torch.rand(2, tokens, heads, *channels, device="cuda").mul_(-0.1)
    x = {
        "q": normal(1, key_size), "k": normal(1, key_size).mul_(key_size**-0.5),
        "v": normal(heads, value_size), "beta": normal(heads).sigmoid_(), "log_decay": log_decay,
    }  # fmt: skip
    together = run(x, slice(0, 2))
    last = {
        name: y[1:2].clone() if name == "final_state" else y[1:2, -200:].clone()
        for name, y in together.items()
    }
    del together
    alone = run(x, slice(1, 2))
    for name, y in last.items():
        expected = alone[name] if name == "final_state" else alone[name][:, -200:]
        assert y.isfinite().all(), name
        assert torch.equal(y, expected), name
        assert y.count_nonzero() > 0.9 * y.numel(), name


@pytest.mark.usefixtures("roomy")
def test_a_pool_past_two_to_the_31_elements() -> None:
    slots, heads, key_size, value_size = 1032, 16, 256, 512
    pool = torch.zeros(slots, heads, value_size, key_size, device="cuda", dtype=torch.bfloat16)
    assert pool.numel() > 2**31
    kind = Kind("head", "tied", 1, torch.bfloat16)
    x = draw(
        kind.case(
            batch=2, tokens=2, heads=16, value_heads=16, key_size=key_size, value_size=value_size
        )
    ).case.tensors
    state = x["initial_state"].bfloat16()
    indices = torch.tensor([slots - 1, slots - 2], device="cuda")
    pool[indices] = state
    given = {name: x[name] for name in ("q", "k", "v", "beta", "log_decay")}
    o = recurrent_step(**given, state=pool, state_indices=indices, impl="triton")
    assert torch.equal(o, recurrent_step(**given, state=state, impl="triton"))
    assert torch.equal(pool[indices], state)
    assert pool[: slots - 2].count_nonzero() == 0


SPLIT = [
    Kind("none", "none", 1, torch.bfloat16), Kind("head", "tied", 1, torch.bfloat16),
    Kind("channel", "tied", 1, torch.bfloat16), Kind("head", "free", 1, torch.bfloat16),
    Kind("head", "tied", 1, torch.float32),
]  # fmt: skip
every_split = pytest.mark.parametrize("kind", SPLIT, ids=str)


def remembering(kind: Kind, **options: object) -> Case:
    """Few heads and many tokens, in which what came before a segment still counts after it."""
    case = kind.case(**({"tokens": 1100, "heads": 1, "value_heads": 1, "batch": 1} | options))
    log_decay = case.tensors["log_decay"]
    return case if log_decay is None else case.changed(log_decay=0.01 * log_decay)


def is_split(drawn: truth.Drawn) -> bool:
    """Whether the plan of the call has segments, at the tiles that the tables have at least."""
    x = {name: drawn.case.tensors[name] for name in ("q", "k", "v", "beta", "a", "b", "log_decay")}
    inputs = Inputs(*x.values(), None, None, drawn.case.n_steps, 1.0, False, False)
    return chunks_per_segment(inputs, 64, 64) > 0


@every_split
def test_segments_are_repeatable_and_equal_whole_sequences(kind: Kind) -> None:
    drawn = draw(remembering(kind))
    assert is_split(drawn)
    split = results(drawn)
    assert_same(results(drawn), split)
    assert_same(results(drawn, save_states=False), split)
    assert_alike(split, results(drawn, batch_invariant=True), kind.dtype)


@every_split
def test_no_future_input_changes_the_past_in_segments(kind: Kind) -> None:
    run = lambda case: truth.call(case, case.tensors).o  # noqa: E731
    truth.assert_causal(
        draw(remembering(kind)).case, run, (1, 256, 300, 1099), (300.0,), seen=False
    )


fixed = partial(results, batch_invariant=True)


@every_split
def test_a_fixed_plan_gives_a_row_the_same_bits_in_any_batch(kind: Kind) -> None:
    truth.assert_rows_alone(draw(remembering(kind, batch=5)), (0, 4), fixed)


@every_split
def test_a_fixed_plan_gives_a_packed_sequence_the_same_bits(kind: Kind) -> None:
    drawn = draw(remembering(kind, lengths=(300, 0, 1100, 37)))
    alone = drawn.sequence(2)
    one = alone._replace(case=alone.case._replace(lengths=(1100,)))
    assert_same(truth.own_part(drawn.case, fixed(drawn), 2), fixed(one))
