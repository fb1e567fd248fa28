"""Every operator over sequences as one value: how a call is drawn, run and cut.

What holds for all of them is tested over this table, in test_contract.py.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deltarule import (
    MesaState,
    delta_rule,
    dplr,
    long_convolution,
    mesa,
    pack,
    selective_scan,
    slstm,
    two_memories,
)
from ops import memories
from oracle import make_case
from tolerance import assert_close

Tensors = dict[str, Tensor]
DOUBLE = torch.float64
H, HV, K, V = 2, 4, 6, 5


class Operator(NamedTuple):
    """One operator at one choice of its arguments.

    make: (batch, tokens, sequences) -> every tensor of a call by name, in float64.
    run: (*tensors by name, *options) -> (o, *tensors of the final state).
    states: The tensors of the initial state, in the order in which `run` returns the final ones.
    constant: The tensors beside them that have no tokens.
    rows: Rows for each token, where they are several.
    narrow: What may come in 16 bits.
    written: What a NaN is put into.
    differentiated: What has a first derivative only.
    shared: How many tokens are computed together, all of which one NaN may spoil.
    """

    make: Callable[..., Tensors]
    run: Callable[..., tuple[Tensor, ...]]
    states: tuple[str, ...] = ("initial_state",)
    constant: tuple[str, ...] = ()
    rows: Mapping[str, int] = {}
    narrow: tuple[str, ...] = ("q", "k", "v")
    written: str = "v"
    differentiated: str = "v"
    shared: int = 1

    def draw(self, batch: int = 2, tokens: int = 75, lengths: tuple[int, ...] | None = None):
        """Tensors, and the offsets of packed sequences among them."""
        if lengths is None:
            return self.make(batch, tokens, batch)
        return self.make(1, sum(lengths), len(lengths)) | {"cu_seqlens": pack(lengths)}

    def timed(self, x: Tensors) -> list[str]:
        """What has tokens."""
        others = (*self.states, *self.constant, "cu_seqlens")
        return [name for name in x if name not in others]

    def leaves(self, x: Tensors) -> list[str]:
        """What has a gradient."""
        return [name for name in x if x[name].is_floating_point()]

    def part(self, x: Tensors, first: int, last: int, state: tuple[Tensor, ...] = ()) -> Tensors:
        """Some of the tokens, from another state."""
        rows = {name: self.rows.get(name, 1) for name in self.timed(x)}
        cut = {name: x[name][:, first * n : last * n] for name, n in rows.items()}
        whole = {name: y for name, y in x.items() if name != "cu_seqlens"}
        return whole | cut | dict(zip(self.states, state, strict=False))

    def sequence(self, x: Tensors, lengths: tuple[int, ...], i: int) -> Tensors:
        """One of the packed sequences alone."""
        start = sum(lengths[:i])
        state = tuple(x[name][i : i + 1] for name in self.states)
        return self.part(x, start, start + lengths[i], state)


def weighted(outputs: tuple[Tensor, ...]) -> Tensor:
    """A sum of all that is returned, each number with a weight of its own."""
    loss = torch.zeros((), dtype=DOUBLE, device=outputs[0].device)
    for x in outputs:
        if x.is_floating_point() and x.requires_grad:
            weight = torch.linspace(-1, 1, x.numel(), dtype=DOUBLE, device=x.device).cos()
            loss = loss + (x.double() * weight.view(x.shape)).sum()
    return loss


def gradients(operator: Operator, x: Tensors, **options: object) -> tuple[tuple, Tensors]:
    """Everything that a call returns, and the gradient of its weighted sum by every tensor."""
    names = operator.leaves(x)
    leaves = {name: x[name].detach().clone().requires_grad_() for name in names}
    outputs = operator.run(**(x | leaves), **options)
    found = torch.autograd.grad(
        weighted(outputs), list(leaves.values()), materialize_grads=True, allow_unused=True
    )
    return outputs, dict(zip(names, found, strict=True))


def assert_alike(found: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    for i, (x, y) in enumerate(zip(found, expected, strict=True)):
        if x.is_floating_point():
            assert_close(x, y, name=f"output {i}")
        else:
            assert torch.equal(x, y)


def check(operator: Operator, x: Tensors) -> None:
    """Outputs and gradients of the fast form are those of the definition, in float64."""
    outputs, found = gradients(operator, x, impl="torch")
    expected, exact = gradients(operator, x, impl="reference")
    assert_alike(outputs, expected)
    for name, gradient in found.items():
        assert_close(gradient, exact[name], gradient=True, name=name)


def draw(*sizes: int) -> Tensor:
    return torch.randn(sizes, dtype=DOUBLE)


def unit(*sizes: int) -> Tensor:
    return F.normalize(draw(*sizes), dim=-1)


# ---- delta_rule and dplr ------------------------------------------------------------------------


def recurrence(decay: str, erase: str, n_steps: int = 1) -> Operator:
    """`delta_rule`, or `dplr` where the erase is free."""
    ask = dplr if erase == "free" else partial(delta_rule, n_steps=n_steps)
    absent = {"beta": None} if erase == "none" else {}

    def make(batch: int, tokens: int, sequences: int) -> Tensors:
        sizes = {"n_steps": n_steps, "key_size": K, "value_size": V}
        case = make_case(decay, erase, batch=batch, tokens=tokens, **sizes)
        given = {name: case.tensors[name] for name in case.present()}
        return given | {"initial_state": draw(sequences, HV, V, K)}

    def run(**given: object) -> tuple[Tensor, ...]:
        return tuple(ask(**(absent | given)))

    rows = {} if n_steps == 1 else dict.fromkeys(("k", "v", "beta"), n_steps)
    constant = ("log_decay",) if decay == "constant" else ()
    return Operator(make, run, constant=constant, rows=rows)


# ---- selective_scan -----------------------------------------------------------------------------

# Which arguments each published form has; "constant" q and k are those of S4.
FORMS = {
    "mamba": {"delta", "A"},
    "s4": {"delta", "A", "constant"},
    "dfw": {"value_log_decay", "log_decay"},
    "longhorn": {"beta"},
    "all": {"delta", "A", "value_log_decay", "log_decay", "beta"},
    "all constant": {"delta", "A", "value_log_decay", "log_decay", "beta", "constant"},
    "none": set(),
}


def scan(form: str, *, signed: bool = False, key_size: int = 3, value_size: int = V) -> Operator:
    """`selective_scan` with the arguments of a published form."""
    constant = ("q", "k", "A") if "constant" in FORMS[form] else ("A",)

    def make(batch: int, tokens: int, sequences: int) -> Tensors:
        each_value, each_key = (batch, tokens, HV, value_size), (batch, tokens, HV, key_size)
        state = HV, value_size, key_size
        channels = state if "q" in constant else (batch, tokens, H, key_size)
        given = {
            "q": draw(*channels), "k": 0.5 * draw(*channels), "v": draw(*each_value),
            "delta": draw(*each_value).exp(), "A": -draw(*state).exp(),
            "value_log_decay": -0.1 * draw(*each_value).exp(),
            "log_decay": -0.1 * draw(*each_key).exp(), "beta": draw(*each_value).sigmoid(),
            "initial_state": draw(sequences, *state),
        }  # fmt: skip
        kept = FORMS[form] | {"q", "k", "v", "initial_state"}
        return {name: x for name, x in given.items() if name in kept}

    def run(**given: object) -> tuple[Tensor, ...]:
        return tuple(selective_scan(**given, signed=signed))

    return Operator(make, run, constant=constant)


# ---- the others ---------------------------------------------------------------------------------


def least_squares(key_size: int = K, **options: object) -> Operator:
    """`mesa`; one token forgets everything."""

    def make(batch: int, tokens: int, sequences: int) -> Tensors:
        spread, log_decay = draw(sequences, HV, key_size, key_size), -draw(batch, tokens, HV).abs()
        log_decay[:, 7:8] = -torch.inf
        return {
            "q": draw(batch, tokens, H, key_size), "k": unit(batch, tokens, H, key_size),
            "v": draw(batch, tokens, HV, V), "beta": torch.rand(batch, tokens, HV, dtype=DOUBLE),
            "regularizer": 0.25 + torch.rand(HV, key_size, dtype=DOUBLE), "log_decay": log_decay,
            "covariance": spread @ spread.mT, "values": draw(sequences, HV, V, key_size),
        }  # fmt: skip

    def run(covariance: Tensor, values: Tensor, **given: object) -> tuple[Tensor, ...]:
        out = mesa(**(options | given), initial_state=MesaState(covariance, values))
        return out.o, *out.final_state

    states, constant = ("covariance", "values"), ("regularizer",)
    return Operator(make, run, states, constant, differentiated="k", shared=64)


def slots(count: int = 7) -> Operator:
    """`two_memories`."""

    def make(batch: int, tokens: int, sequences: int) -> Tensors:
        size = batch, tokens, H
        return {
            "q": draw(*size, K), "k": draw(*size, K), "v": draw(*size, V),
            "slots": draw(*size, count).sigmoid(), "log_decay": -draw(*size, count).exp(),
            "key_memory": draw(sequences, H, count, K),
            "value_memory": draw(sequences, H, V, count),
        }  # fmt: skip

    run = lambda **given: tuple(two_memories(**given))  # noqa: E731
    # Between the two stands a softmax, of what is rounded in 16 bits.
    return Operator(make, run, states=("key_memory", "value_memory"), narrow=())


def convolution(keys: int | None, taps: int) -> Operator:
    """`long_convolution`, with so many channels of q and k; None has neither."""

    def make(batch: int, tokens: int, sequences: int) -> Tensors:
        size, values = (batch, tokens, H), 1 if keys == 1 else 2
        given = {"v": draw(*size, values), "taps": draw(H, taps)}
        if keys:
            given |= {"q": draw(*size, keys), "k": draw(*size, keys)}
        return given | {"initial_state": draw(sequences, taps - 1, H, values + (keys or 0))}

    run = lambda **given: tuple(long_convolution(**given))  # noqa: E731
    return Operator(make, run, constant=("taps",), shared=128 if keys and keys > 1 else 1)


def cells(size: int = V) -> Operator:
    """`slstm`, whose input gates rise far above and fall far below those before."""

    def make(batch: int, tokens: int, sequences: int) -> Tensors:
        gates, recurrent = draw(batch, tokens, H, 4, size), 0.5 * draw(H, 4, size, size)
        gates[:, :, :, 0] *= 8
        state = slstm(draw(sequences, 3, H, 4, size), recurrent, impl="torch").final_state
        return {"gates": gates, "recurrent": recurrent, "initial_state": state}

    def run(**given: object) -> tuple[Tensor, ...]:
        o, state = slstm(**given)
        # No gradient goes through the stabilizer.
        return o, torch.cat([state[:, :, :3], state[:, :, 3:].detach()], 2)

    given = {"narrow": ("gates",), "written": "gates", "differentiated": "gates"}
    return Operator(make, run, constant=("recurrent",), **given)


def memory(operator: str, maps: int, size: int = 5, channels: int = 4, inner: int = 7) -> Operator:
    """`ttt` or `titans`: sequences that have begun, in mini-batches of so many tokens."""
    parts = ("weights", "summed", "anchor")[: 2 if operator == "ttt" else 3]
    states = tuple(f"{part}_{i + 1}" for part in parts for i in range(maps))

    def make(*counts: int) -> Tensors:
        return memories.make(operator, maps, *counts, size=size, channels=channels, inner=inner)

    def run(**given: object) -> tuple[Tensor, ...]:
        options = {n: given.pop(n) for n in ("cu_seqlens", "impl", "lengths") if n in given}
        return memories.run(operator, given, size, **options)

    constant = ("step_scale", "norm_weight", "norm_bias")
    return Operator(make, run, (*states, "position"), constant, shared=size)


OPERATORS = {
    "no decay": recurrence("none", "tied"),
    "constant decay": recurrence("constant", "tied"),
    "gated attention": recurrence("head", "none"),
    "gated delta": recurrence("head", "tied"),
    "gated delta of 3 steps": recurrence("head", "tied", 3),
    "channels": recurrence("channel", "tied"),
    "free erase": recurrence("channel", "free"),
    **{form: scan(form) for form in FORMS},
    **{f"{form}, signed": scan(form, signed=True) for form in ("mamba", "s4", "dfw", "all")},
    "mesa": least_squares(),
    "mesa, 30 iterations": least_squares(iterations=30),
    "two memories": slots(),
    "long convolution": convolution(None, 80),
    "hyena": convolution(1, 11),
    "multi-head hyena": convolution(3, 200),
    "one tap": convolution(3, 1),
    "slstm": cells(),
    "ttt": memory("ttt", 1),
    "ttt of two maps": memory("ttt", 2),
    "titans": memory("titans", 1),
    "titans of two maps": memory("titans", 2),
}
