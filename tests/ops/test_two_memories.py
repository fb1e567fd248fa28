"""`two_memories` against the recurrence of two matrices with a softmax between them."""

import pytest
import torch

from deltarule import pack, two_memories
from tolerance import assert_close, relative_rms

B, T, H, K, V, M = 2, 70, 2, 3, 4, 5
DOUBLE = torch.float64


def draw(*sizes: int) -> torch.Tensor:
    return torch.randn(sizes, dtype=DOUBLE)


def make(batch: int = B, sequences: int = B) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {
        "q": draw(batch, T, H, K), "k": draw(batch, T, H, K), "v": draw(batch, T, H, V),
        "slots": draw(batch, T, H, M).sigmoid(), "log_decay": -draw(batch, T, H, M).exp(),
        "key_memory": draw(sequences, H, M, K), "value_memory": draw(sequences, H, V, M),
    }  # fmt: skip


def run(x, **others):
    named = {name: x[name] for name in x if name not in ("q", "k", "v")}
    return two_memories(x["q"], x["k"], x["v"], **(named | others))


def loop(x):
    """Table 4 of 001 with the transpose that it leaves out, for every row and head."""
    keys, values, o = x["key_memory"].mT, x["value_memory"], []
    for t in range(T):
        a = x["log_decay"][:, t].exp().diag_embed()
        slots = x["slots"][:, t].unsqueeze(-2)
        keys = keys @ a + x["k"][:, t].unsqueeze(-1) * slots
        values = values @ a + x["v"][:, t].unsqueeze(-1) * slots
        scores = (keys.mT @ x["q"][:, t].unsqueeze(-1)).squeeze(-1) * K**-0.5
        o.append((values @ scores.softmax(-1).unsqueeze(-1)).squeeze(-1))
    return torch.stack(o, 1), keys.mT, values


@pytest.mark.parametrize("impl", ["torch", "reference"])
def test_equals_the_recurrence(impl):
    x = make()
    for found, expected in zip(run(x, impl=impl), loop(x), strict=True):
        assert_close(found, expected)


def test_gradients_equal_those_of_the_recurrence():
    x = {name: value.requires_grad_() for name, value in make().items()}
    found = torch.autograd.grad(sum(y.square().sum() for y in run(x)), list(x.values()))
    expected = torch.autograd.grad(sum(y.square().sum() for y in loop(x)), list(x.values()))
    for name, dx, wanted in zip(x, found, expected, strict=True):
        assert_close(dx, wanted, gradient=True, name=name)


def test_packed_equals_separate():
    lengths = (30, 0, 40)
    x = make(1, 3)
    o, keys, values = run(x, cu_seqlens=pack(lengths))
    start = 0
    for i, length in enumerate(lengths):
        part = {n: y[i : i + 1] if "memory" in n else y[:, start : start + length]
                for n, y in x.items()}  # fmt: skip
        alone = run(part)
        assert_close(o[:, start : start + length], alone.o)
        assert_close(keys[i : i + 1], alone.key_memory)
        assert_close(values[i : i + 1], alone.value_memory)
        start += length


def test_one_slot_is_plain_linear_recurrence_of_values():
    """The softmax over one slot is 1: what is read is the memory of values."""
    x = {name: y[..., :1] if name in ("slots", "log_decay", "value_memory") else y
         for name, y in make().items()}  # fmt: skip
    x["key_memory"] = x["key_memory"][:, :, :1]
    out = run(x)
    assert_close(out.o[:, -1], out.value_memory.squeeze(-1))


def test_bfloat16_keeps_its_memories_in_float32():
    exact = {name: y.float() for name, y in make().items()}
    x = {n: y if n in ("log_decay", "key_memory", "value_memory") else y.bfloat16()
         for n, y in exact.items()}  # fmt: skip
    out = run(x)
    assert (out.o.dtype, out.key_memory.dtype) == (torch.bfloat16, torch.float32)
    assert relative_rms(out.o, run({n: y.double() for n, y in x.items()}).o) < 0.02


BAD = {
    r"q must have 4 axes .*, got \[4\]": {"q": torch.zeros(4)},
    "slots must be a tensor .*, got list": {"slots": [1.0]},
    r"slots must be \[B, T, H, M\]": {"slots": torch.zeros(1, 2, 3, 5)},
    r"log_decay must be \[B, T, H, M\]": {"log_decay": torch.zeros(1, 2, 2)},
    r"v must be \[B, T, H, V\] with the 2 heads of q": {"v": torch.zeros(1, 2, 4, 4)},
    "key_memory must be .* \\[1, 2, 5, 3\\]": {"key_memory": torch.zeros(1, 2, 3, 5)},
    "value_memory must be torch.float32": {"value_memory": torch.zeros(1, 2, 4, 5).double()},
    "impl must be one of": {"impl": "fast"},
}


@pytest.mark.parametrize("message", BAD)
def test_wrong_arguments_are_named(message):
    x = {"q": torch.zeros(1, 2, 2, 3), "k": torch.zeros(1, 2, 2, 3), "v": torch.zeros(1, 2, 2, 4)}
    given = x | {"slots": torch.zeros(1, 2, 2, 5)} | BAD[message]
    with pytest.raises(ValueError, match=message):
        two_memories(given.pop("q"), given.pop("k"), given.pop("v"), **given)
