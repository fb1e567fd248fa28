"""What several operators share: the form that was chosen is run, and what is given is checked."""

from collections.abc import Callable
from numbers import Integral, Real
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from deltarule.ops.checks import check_dense, check_flags, check_gate, check_state, readable, shape
from deltarule.ops.dispatch import Implementation, Result, Table, always, choose, without_autocast
from deltarule.ops.pack import check_cu_seqlens

PlainImpl = Literal["auto", "reference", "torch", "triton"]
Arguments = dict[str, Any]
Given = TypeVar("Given")
Output = TypeVar("Output", bound=tuple[Any, ...])


def forms(
    why_not_triton: Callable[[Given], str | None],
    run: Callable[[Given, str], Result],
    reference: Callable[[Given], Result],
) -> Table[Given, Result]:
    """Kernels in Triton, the same in PyTorch on any device, and the definition.

    The order is that in which impl="auto" prefers them; `run` is also given "triton" or "torch".
    """
    return {
        "triton": Implementation(why_not_triton, lambda call: run(call, "triton")),
        "torch": Implementation(always, lambda call: run(call, "torch")),
        "reference": Implementation(always, reference),
    }


def run_plain(
    table: Table[Given, Output], given: Given, impl: str, device: torch.device, return_state: bool
) -> Output:
    """Run the chosen implementation, with autocast off; drop the state unless it is wanted."""
    check_flags({"return_state": return_state})
    with without_autocast(device):
        output = choose(table, given, impl, device).run(given)
    if return_state:
        return output
    return output._replace(final_state=None)  # type: ignore[attr-defined]


def count_sequences(x: Tensor, lengths: Tensor | None, cu_seqlens: Tensor | None) -> int:
    """N, after a check of what says where the sequences of x [B, T, ...] end."""
    if cu_seqlens is None:
        if lengths is not None:
            check_counts("lengths", lengths, x.shape[0], x.shape[1], x)
        return x.shape[0]
    if lengths is not None:
        raise ValueError("lengths must be None with cu_seqlens: leave padding out of the packing")
    check_cu_seqlens(cu_seqlens, x)
    return len(cu_seqlens) - 1


def of_python(value: Any) -> Any:
    """Numbers of other packages as Python's, lists as tuples; all else as it is, to be checked."""
    if isinstance(value, list) or type(value) is tuple:
        return tuple(map(of_python, value))
    if isinstance(value, int | float) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def check_integer(name: str, value: Any, smallest: int, or_else: str = "") -> int:
    """The value as one of Python's; what is no integer of `smallest` or more is refused."""
    whole: int = of_python(value)
    if isinstance(value, bool) or not isinstance(whole, int | torch.SymInt) or whole < smallest:
        raise ValueError(f"{name} must be an integer of {smallest} or more{or_else}, got {value!r}")
    return whole


def check_state_tensor(
    name: str, x: Tensor, letters: str, size: tuple[int, ...], q: Tensor
) -> None:
    check_dense(name, x)
    check_state(name, x, q, size, letters)


def check_per_head(name: str, x: Tensor, letters: str, size: tuple[int, ...], q: Tensor) -> None:
    check_dense(name, x, f" {letters} = {list(size)}")
    check_gate(name, x, q, {letters: size})


def check_counts(name: str, x: Tensor, size: int, most: int, q: Tensor) -> None:
    """Integers [N] from 0 to `most`; their values are read only where that costs no waiting."""
    check_dense(name, x, f" of int64 [{size}]")
    if x.dtype != torch.int64 or x.shape != (size,):
        raise ValueError(f"{name} must be an int64 tensor [{size}], got {x.dtype} {shape(x)}")
    if x.device != q.device:
        raise ValueError(f"{name} is on {x.device}, but q is on {q.device}")
    if readable(x) and any(not 0 <= count <= most for count in x.tolist()):
        raise ValueError(f"{name} must be from 0 to {most}, got {x.tolist()}")
