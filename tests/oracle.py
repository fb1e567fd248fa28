"""Inputs for every decay and erase, and the calls of whatever is held to the definition."""

from types import ModuleType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

import deltarule
from deltarule import RecurrentOutput, pack
from deltarule.doctor import chunked
from deltarule.ops.delta_rule import definition
from deltarule.ops.delta_rule.inputs import Inputs
from tolerance import assert_close, assert_close_to_yardstick

DECAYS = ("none", "constant", "head", "channel")
ERASES = ("none", "tied", "free")
NAMES = ("q", "k", "v", "beta", "a", "b", "log_decay", "initial_state")


class Case(NamedTuple):
    """The tensors of one call (None where the erase or decay has none) and its options."""

    tensors: dict[str, Tensor | None]
    n_steps: int = 1
    normalize_qk: bool = False
    lengths: tuple[int, ...] | None = None

    def run(
        self, impl: str, tensors: dict[str, Tensor | None] | None = None, **options: object
    ) -> RecurrentOutput:
        """Call the operator that has this erase."""
        case = self if tensors is None else self._replace(tensors=tensors)
        return run_module(deltarule, case, impl=impl, **options)

    def present(self) -> list[str]:
        """Names of the tensors that there are."""
        return [name for name in NAMES if self.tensors[name] is not None]

    def changed(self, **tensors: Tensor | None) -> "Case":
        """The same call with some tensors replaced."""
        return self._replace(tensors=self.tensors | tensors)

    def to(self, dtype: torch.dtype) -> "Case":
        """Round what follows the inputs' dtype; decay, gates and state keep float32 or float64."""
        full = torch.float64 if dtype == torch.float64 else torch.float32
        kept = {"log_decay", "initial_state"}
        return self.changed(
            **{
                name: None if x is None else x.to(full if name in kept else dtype)
                for name, x in self.tensors.items()
            }
        )


def make_case(
    decay: str = "head",
    erase: str = "tied",
    *,
    batch: int = 2,
    tokens: int = 70,
    heads: int = 2,
    value_heads: int = 4,
    key_size: int = 8,
    value_size: int = 6,
    n_steps: int = 1,
    lengths: tuple[int, ...] | None = None,
    normalize_qk: bool = False,
    beta_max: float = 2.0,
    dtype: torch.dtype = torch.float64,
) -> Case:
    """Draw a call: unit keys, log decays of about -0.5, an initial state."""
    if lengths is not None:
        batch, tokens = 1, sum(lengths)
    sequences = batch if lengths is None else len(lengths)
    rows, size = tokens * n_steps, (batch, tokens, value_heads)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64)

    log_decay = {
        "none": None,
        "constant": -torch.rand(value_heads, dtype=torch.float64),
        "head": -torch.rand(size, dtype=torch.float64),
        "channel": -torch.rand(*size, key_size, dtype=torch.float64),
    }[decay]
    unit = F.normalize(normal(*size, key_size), dim=-1)
    tensors = {
        "q": normal(batch, tokens, heads, key_size),
        "k": F.normalize(normal(batch, rows, heads, key_size), dim=-1),
        "v": normal(batch, rows, value_heads, value_size),
        "beta": beta_max * torch.rand(batch, rows, value_heads, dtype=torch.float64),
        "a": -unit,
        "b": unit * torch.rand(*size, 1, dtype=torch.float64),
        "log_decay": log_decay,
        "initial_state": normal(sequences, value_heads, value_size, key_size),
    }
    absent = {"none": ("beta", "a", "b"), "tied": ("a", "b"), "free": ("beta",)}[erase]
    case = Case(tensors | dict.fromkeys(absent), n_steps, normalize_qk, lengths)
    return case.to(dtype)


def with_gradients(
    case: Case, impl: str, d_o: Tensor, d_state: Tensor, **options: object
) -> tuple[RecurrentOutput, dict[str, Tensor]]:
    """Outputs, and the gradient of <d_o, o> + <d_state, final_state> by every tensor."""
    return module_with_gradients(deltarule, case, d_o, d_state, impl=impl, **options)


def module_with_gradients(
    module: ModuleType, case: Case, d_o: Tensor, d_state: Tensor, *,
    constant_norms: bool = False, **options: object,
) -> tuple[RecurrentOutput, dict[str, Tensor]]:  # fmt: skip
    """The same of what `run_module` calls; norms may be constants, through which others go."""
    names = case.present()
    leaves = {name: case.tensors[name].detach().clone().requires_grad_() for name in names}
    called = case.changed(**leaves)
    if constant_norms and case.normalize_qk:
        units = {x: leaves[x] / leaves[x].detach().norm(dim=-1, keepdim=True) for x in "qk"}
        called = called.changed(**units)._replace(normalize_qk=False)
    out = run_module(module, called, **options)
    loss = (out.o * d_o.to(out.o.dtype)).sum() + (out.final_state * d_state).sum()
    # Without tokens the outputs depend on nothing.
    gradients = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    return out, dict(zip(names, gradients, strict=True))


def weights(case: Case) -> tuple[Tensor, Tensor]:
    """Random gradients by the outputs and the final state."""
    q, v = case.tensors["q"], case.tensors["v"]
    d_o = torch.randn(*q.shape[:2], *v.shape[2:], dtype=torch.float64)
    return d_o, torch.randn_like(case.tensors["initial_state"], dtype=torch.float64)


def run_module(module: ModuleType, case: Case, **options: object) -> RecurrentOutput:
    """Call the package's function that has this erase, the definition or the yardstick."""
    offsets = None if case.lengths is None else pack(case.lengths)
    x = case.tensors | {"cu_seqlens": options.pop("cu_seqlens", offsets)}
    own = {"n_steps": case.n_steps, "normalize_qk": case.normalize_qk}
    if module is chunked:
        return chunked.run(Inputs(**x, **own, scale=x["q"].shape[-1] ** -0.5), **options)
    if module is definition:
        return definition.delta_rule(**x, **own, **options)
    given = {name: y for name, y in x.items() if name not in ("a", "b", "beta")}
    if x["a"] is not None:
        return module.dplr(a=x["a"], b=x["b"], **given, **options)
    return module.delta_rule(beta=x["beta"], **given, **own, **options)


def on(device: torch.device | str, case: Case) -> Case:
    """The same call on a device."""
    return case.changed(**{name: case.tensors[name].to(device) for name in case.present()})


class Compared(NamedTuple):
    """One result of a call, the same from the definition, and from the yardstick."""

    found: Tensor
    exact: Tensor
    own: Tensor


def compared(
    case: Case, impl: str, *, size: float = 1.0, device: str = "cpu", **options: object
) -> dict[str, Compared]:
    """Outputs, final state and every gradient of a call as it is rounded; `size` is of weights.

    What is compared runs on `device`, the definition and the yardstick on the CPU.
    """
    dtype = case.tensors["q"].dtype
    d_o, d_state = (size * x for x in weights(case))
    d_o = d_o.to(dtype).double()
    d_state = d_state if dtype == torch.float64 else d_state.float().double()
    runs = [
        with_gradients(on(device, case), impl, d_o.to(device), d_state.to(device), **options),
        with_gradients(case.to(torch.float64), "reference", d_o, d_state),
    ]
    if dtype != torch.float64:
        # The yardstick: the reference algorithm with its operands rounded.
        rounded = {"chunk_size": 64, "matmul_dtype": dtype}
        runs.append(module_with_gradients(chunked, case, d_o, d_state, **rounded))
    found = [
        {"o": out.o, "final_state": out.final_state} | {f"d {n}": x for n, x in gradients.items()}
        for out, gradients in (*runs, runs[-1])[:3]
    ]
    return {name: Compared(*(x[name].detach().cpu() for x in found)) for name in found[0]}


def check(
    case: Case, impl: str, *, cancels: float = 0.0, stress: bool = False, **options: object
) -> None:
    """Hold a call to the definition, in 16 bits and under `stress` as near as the yardstick is.

    `cancels` is the floor for the gradient of a constant decay, a sum over all tokens.
    """
    dtype = case.tensors["q"].dtype
    for name, (found, exact, own) in compared(case, impl, **options).items():
        bars = {"dtype": dtype, "gradient": name.startswith("d "), "name": name}
        if name.startswith("d "):
            assert found.dtype == case.tensors[name[2:]].dtype
        bars["floor"] = cancels if found.ndim == 1 else 0.0
        if dtype in (torch.float32, torch.float64) and not stress:
            assert_close(found, exact, **bars)
        else:
            assert_close_to_yardstick(found, exact, own, **bars, stress=stress)


def check_fused(out: tuple[Tensor, Tensor], case: Case, *, stress: bool = False) -> None:
    """Outputs and final state in 16 bits against float64, by the error of whole chunks of 64."""
    dtype = case.tensors["q"].dtype
    truth = run_module(definition, case.to(torch.float64))
    options = {"chunk_size": 64 // case.n_steps, "matmul_dtype": dtype}
    own = run_module(chunked, case.to(torch.float32), **options)
    for name, x, y, z in zip(("o", "state"), out, truth, own, strict=True):
        bars = {"dtype": dtype, "stress": stress, "name": name}
        assert_close_to_yardstick(x.cpu(), y, z.to(x.dtype), **bars)


def check_fused_gradients(
    found: dict[str, Tensor], case: Case, given: tuple[Tensor, Tensor], *,
    constant_norms: bool = False, stress: bool = False,
) -> None:  # fmt: skip
    """Gradients in bfloat16 in the same way."""
    d_o, d_state = given[0].bfloat16(), given[1]

    def gradients(module: ModuleType, dtype: torch.dtype, **options: object) -> dict[str, Tensor]:
        norms = {"constant_norms": constant_norms}
        return module_with_gradients(module, case.to(dtype), d_o, d_state, **norms, **options)[1]

    truth = gradients(definition, torch.float64)
    own = gradients(chunked, torch.float32, chunk_size=64, matmul_dtype=torch.bfloat16)
    for name, x in found.items():
        bars = {"dtype": torch.bfloat16, "gradient": True, "stress": stress, "name": name}
        assert_close_to_yardstick(x.cpu(), truth[name], own[name].to(x.dtype), **bars)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Case, int]:
    erase = draw(st.sampled_from(ERASES))
    free = erase == "free"
    heads = draw(st.integers(1, 2))
    lengths = draw(st.none() | st.lists(st.integers(0, 70), min_size=1, max_size=5).map(tuple))
    normalize = False if free else draw(st.booleans())
    # One channel of unit norm is a sign: its gradient is rounding alone.
    key_size = draw(st.integers(2 if normalize else 1, 7))
    torch.manual_seed(draw(st.integers(0, 2**31)))
    case = make_case(
        draw(st.sampled_from(DECAYS)), erase,
        batch=draw(st.integers(1, 2)), tokens=draw(st.integers(0, 200)), heads=heads,
        value_heads=heads * draw(st.integers(1, 3)), key_size=key_size,
        value_size=draw(st.integers(1, 7)), n_steps=1 if free else draw(st.integers(1, 4)),
        lengths=lengths, normalize_qk=normalize,
    )  # fmt: skip
    return case, draw(st.sampled_from((1, 3, 16, 64)))
