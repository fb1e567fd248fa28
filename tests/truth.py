"""Calls, and changes of calls, by which DESIGN's properties are tested on any device."""

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import NamedTuple, TypeVar

import pytest
import torch
from torch import Tensor

from deltarule import RecurrentOutput, pack
from deltarule.doctor.bars import FORWARD, GRADIENT, relative_rms
from oracle import Case, make_case, on, weights

# The one place that says where the tests run: their logic holds on a CPU, too.
DEVICE = torch.device("cuda")
IMPL = "triton"

Tensors = dict[str, Tensor | None]
TIMED = ("q", "k", "v", "beta", "a", "b", "log_decay")
# Two whole chunks, which a copy engine may fetch; a last chunk of less; sequences in one row.
FORMS = {"whole": {"tokens": 128}, "ragged": {"tokens": 150}, "packed": {"lengths": (3, 0, 70, 64)}}


class Kind(NamedTuple):
    """What is compiled together."""

    decay: str
    erase: str
    n_steps: int
    dtype: torch.dtype

    def __str__(self) -> str:
        """What a test's name says."""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.decay}-{self.erase}-{self.n_steps}-{dtype}"

    def case(self, **options: object) -> Case:
        """A call of this kind, large enough for the tiles of a real one."""
        sizes = {"key_size": 64, "value_size": 64, "beta_max": 1.0, "n_steps": self.n_steps}
        return make_case(self.decay, self.erase, **(sizes | options)).to(self.dtype)


# What one kernel takes by its flags, where decays are per head.
PER_HEAD = [
    Kind(decay, erase, 1, torch.bfloat16)
    for decay in ("none", "head") for erase in ("none", "tied")
]  # fmt: skip


def call(case: Case, x: Tensors, **options: object) -> RecurrentOutput:
    """Call the operator that has this erase; offsets come on the device."""
    # Not where a graph is captured, into which nothing can be copied from the CPU.
    if "cu_seqlens" not in options:
        options["cu_seqlens"] = offsets_of(case, x["q"].device)
    return case.run(options.pop("impl", IMPL), x, **options)


def offsets_of(case: Case, device: torch.device) -> Tensor | None:
    """Where packed sequences begin and end."""
    return None if case.lengths is None else pack(case.lengths).to(device)


def placed(case: Case, device: torch.device | None = None) -> Case:
    """The same call on the device of the tests, or another one."""
    return on(device or DEVICE, case)


class Drawn(NamedTuple):
    """A call on the device, and the gradients by its output and its final state."""

    case: Case
    weights: tuple[Tensor, Tensor]

    def rows(self, row: slice) -> "Drawn":
        """Some rows of the batch."""
        x = self.case.tensors
        own = {name: x[name][row] for name in self.case.present() if x[name].ndim > 1}
        return Drawn(self.case.changed(**own), (self.weights[0][row], self.weights[1][row]))

    def sequence(self, i: int) -> "Drawn":
        """A packed sequence alone."""
        start, length = sum(self.case.lengths[:i]), self.case.lengths[i]
        tokens = slice(start, start + length)
        state = self.case.tensors["initial_state"][i : i + 1]
        tensors = part(self.case, self.case.tensors, tokens) | {"initial_state": state}
        alone = Case(tensors, self.case.n_steps, self.case.normalize_qk)
        return Drawn(alone, (self.weights[0][:, tokens], self.weights[1][i : i + 1]))


def draw(case: Case) -> Drawn:
    """Place a call, with random gradients."""
    d_o, d_state = weights(case)
    d_o, d_state = d_o.to(case.tensors["v"].dtype), d_state.float()
    return Drawn(placed(case), (d_o.to(DEVICE), d_state.to(DEVICE)))


def held(drawn: Drawn) -> list[Tensor]:
    """Every tensor that is given."""
    return [*(drawn.case.tensors[name] for name in drawn.case.present()), *drawn.weights]


def rows_of(case: Case, name: str) -> int:
    """Of a token."""
    return case.n_steps if name in ("k", "v", "beta") else 1


def part(case: Case, x: Tensors, tokens: slice) -> Tensors:
    """The rows of some tokens; a decay that is constant has none."""
    cut = dict(x)
    for name in TIMED:
        if (y := x[name]) is not None and y.ndim > 1:
            n = rows_of(case, name)
            cut[name] = y[:, tokens.start * n : tokens.stop * n]
    return cut


def second_gpu() -> torch.device:
    """One that is not the current one; without it there is no test."""
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU only")
    return torch.device("cuda:1")


@contextmanager
def waits_for_nothing() -> Iterator[None]:
    """Whoever waits for the GPU inside fails."""
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        try:
            torch.cuda.set_sync_debug_mode("error")
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


@contextmanager
def late() -> Iterator[None]:
    """Another stream, on which what is launched inside runs later than any other would."""
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(40_000_000)
        yield
    side.synchronize()


Found = TypeVar("Found")


def captured(run: Callable[[], Found]) -> tuple[torch.cuda.CUDAGraph, Found]:
    """A graph of a call that ran before, and what its replays write."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    return graph, found


Run = Callable[[Case, Tensors], RecurrentOutput]


def results(drawn: Drawn, run: Run = call, **options: object) -> dict[str, Tensor]:
    """The output, the final state, and the gradient by every tensor."""
    case = drawn.case
    given = {name: case.tensors[name] for name in case.present()}
    return results_of(
        given, lambda **x: run(case, case.tensors | x, **options), lambda out: drawn.weights
    )


def results_of(
    given: dict[str, Tensor],
    run: Callable[..., RecurrentOutput],
    weights: Callable[[RecurrentOutput], tuple[Tensor, Tensor]],
) -> dict[str, Tensor]:
    """The same of tensors by name, and of what is called with them."""
    leaves = {name: x.detach().requires_grad_() for name, x in given.items()}
    out = run(**leaves)
    gradients = torch.autograd.grad(
        tuple(out), list(leaves.values()), weights(out), materialize_grads=True
    )
    found = dict(zip((f"d {name}" for name in leaves), gradients, strict=True))
    return {"o": out.o.detach(), "final_state": out.final_state.detach(), **found}


def in_two_parts(case: Case, x: Tensors, split: int) -> RecurrentOutput:
    """One call up to a token and another from its final state on."""
    tokens = x["q"].shape[1]
    first = call(case, part(case, x, slice(0, split)))
    rest = part(case, x, slice(split, tokens)) | {"initial_state": first.final_state}
    second = call(case, rest)
    return RecurrentOutput(torch.cat([first.o, second.o], 1), second.final_state)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Bit by bit, NaN nowhere."""
    assert found.keys() == expected.keys()
    for name, x in found.items():
        assert x.isfinite().all(), f"{name} is not finite"
        assert torch.equal(x, expected[name]), name


def assert_alike(found: dict[str, Tensor], expected: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Two ways to compute the same, each of which may be off as far as `tolerance` allows."""
    for name, x in found.items():
        error = relative_rms(x, expected[name].double())
        assert error <= apart(dtype, name.startswith("d ")), f"{name} differs by {error:.2e}"


def apart(dtype: torch.dtype, gradient: bool) -> float:
    """How far apart two results may be: twice a bar, and in 16 bits the last digits of both."""
    if dtype == torch.float32:
        return 2 * (GRADIENT if gradient else FORWARD)[dtype]
    return (2 if gradient else 1) * torch.finfo(dtype).eps


def surrounded(x: Tensor, edge: int = 4096) -> Tensor:
    """The same values in the middle of a buffer of NaN; the edge is counted in elements."""
    buffer = torch.full((x.numel() + 2 * edge,), torch.nan, dtype=x.dtype, device=x.device)
    inner = buffer[edge : edge + x.numel()].view(x.shape)
    return inner.copy_(x)


def within_nan(drawn: Drawn) -> Drawn:
    """The same numbers with nothing but NaN around every tensor."""
    inside = {name: surrounded(drawn.case.tensors[name]) for name in drawn.case.present()}
    return Drawn(drawn.case.changed(**inside), tuple(map(surrounded, drawn.weights)))


def assert_same_again_and_alone(drawn: Drawn) -> None:
    """20 more calls, and each row by itself, have the bits of the first call."""
    together = results(drawn)
    for _ in range(20):
        assert_same(results(drawn), together)
    assert_rows_alone(drawn, range(len(drawn.case.tensors["q"])))


def assert_rows_alone(
    drawn: Drawn, rows: Iterable[int], run: Callable[[Drawn], dict[str, Tensor]] = results
) -> None:
    """Rows by themselves have their bits; the gradient of a constant decay is a sum over them."""
    together = {name: x for name, x in run(drawn).items() if x.ndim > 1}
    for i in rows:
        row = slice(i, i + 1)
        alone = run(drawn.rows(row))
        assert_same({x: alone[x] for x in together}, {x: y[row] for x, y in together.items()})


def own_part(case: Case, found: dict[str, Tensor], i: int) -> dict[str, Tensor]:
    """What is of one packed sequence; a constant decay's gradient is of all."""
    start, length, own = sum(case.lengths[:i]), case.lengths[i], {}
    for name, x in found.items():
        n = rows_of(case, name.removeprefix("d "))
        if x.ndim > 1:
            tokens = slice(start * n, (start + length) * n)
            own[name] = x[i : i + 1] if "state" in name else x[:, tokens]
    return own


def assert_causal(
    case: Case, run: Callable[[Case], Tensor], tokens: Iterable[int], factors: Iterable[float],
    seen: bool = True,
) -> None:  # fmt: skip
    """What changes from a token on changes no bit before it; `factors` are of decays."""
    before = run(case)
    for name in TIMED:
        x = case.tensors[name]
        if x is None or x.ndim < 3:
            continue
        for t, factor in product(tokens, factors if name == "log_decay" else (-0.7,)):
            changed = x.clone()
            changed[:, t * rows_of(case, name) :] *= factor
            after = run(case.changed(**{name: changed}))
            assert torch.equal(after[:, :t], before[:, :t]), f"{name} from {t} on"
            assert not seen or not torch.equal(after, before), name


def assert_same_under_load(drawn: Drawn) -> None:
    """100 calls beside products on another stream have the bits of a call alone."""
    first, other = results(drawn), torch.randn(4096, 4096, device=DEVICE)
    stream = torch.cuda.Stream()
    for _ in range(100):
        with torch.cuda.stream(stream):
            other @ other
        assert_same(results(drawn), first)
    assert all(x.isfinite().all() for x in held(drawn))
