"""The arguments of one call: what the operators check and every backend is given."""

from collections.abc import Callable
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltarule.ops import checks
from deltarule.ops.pack import check_cu_seqlens


class Inputs(NamedTuple):
    """One call of an operator. `beta`, or `a` and `b`, or neither says what is erased."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor | None = None
    a: Tensor | None = None
    b: Tensor | None = None
    log_decay: Tensor | None = None
    initial_state: Tensor | None = None
    cu_seqlens: Tensor | None = None
    n_steps: int = 1
    scale: float = 1.0
    normalize_qk: bool = False
    batch_invariant: bool = False

    @property
    def erase(self) -> str:
        """none, tied or free."""
        return "free" if self.a is not None else "none" if self.beta is None else "tied"

    @property
    def decay(self) -> str:
        """none, head or channel."""
        if self.log_decay is None:
            return "none"
        return "channel" if self.log_decay.ndim == 4 else "head"

    @property
    def by_channel(self) -> bool:
        """Whether pairs of rows take q and k scaled channel by channel."""
        return self.erase == "free" or self.decay == "channel"

    @property
    def per_gate(self) -> int:
        """Value heads that share a gate: 1 of what a caller gives; parts of one where it is cut."""
        gate = self.log_decay if self.beta is None else self.beta
        return 1 if gate is None else self.v.shape[2] // gate.shape[2]

    @property
    def sequences(self) -> int:
        """N: batch rows, or packed sequences."""
        return self.q.shape[0] if self.cu_seqlens is None else len(self.cu_seqlens) - 1

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        """[N, HV, V, K]."""
        return self.sequences, self.v.shape[2], self.v.shape[3], self.q.shape[3]

    @property
    def output_shape(self) -> tuple[int, int, int, int]:
        """[B, T, HV, V]."""
        return self.q.shape[0], self.q.shape[1], self.v.shape[2], self.v.shape[3]

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows of a token in q, k, v, beta, a, b and log_decay, the streams."""
        return 1, self.n_steps, self.n_steps, self.n_steps, 1, 1, 1

    def each(self, f: Callable[[Tensor, int], Tensor]) -> "Inputs":
        """The inputs with f of each stream and its rows of a token."""
        streams = zip(self._fields, self[:7], self.rows, strict=False)
        found: dict[str, Any] = {name: f(x, rows) for name, x, rows in streams if x is not None}
        return self._replace(**found)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the state and of all sums."""
        return torch.float64 if self.q.dtype == torch.float64 else torch.float32


def check_arguments(given: Inputs, scale: float | None) -> Inputs:
    """Refuse what no implementation can mean, naming the argument; then fill in the defaults."""
    q, k, v, beta, a, b, log_decay, initial_state, cu_seqlens, n_steps, *_ = given
    if isinstance(n_steps, bool) or not isinstance(n_steps, Integral) or n_steps < 1:
        raise ValueError(f"n_steps must be an integer of 1 or more, got {n_steps!r}")
    checks.check_flags({n: getattr(given, n) for n in ("normalize_qk", "batch_invariant")})
    checks.check_sequence(q, k, v, n_steps)
    (batch, tokens, _, key_size), heads = q.shape, v.shape[2]
    checks.check_gate("beta", beta, q, {"[B, T*n, HV]": (batch, tokens * n_steps, heads)})
    erase = {"[B, T, HV, K]": (batch, tokens, heads, key_size)}
    checks.check_gate("a", a, q, erase)
    checks.check_gate("b", b, q, erase)
    check_erase(beta, a, b, n_steps, given.normalize_qk)
    checks.check_log_decay(log_decay, q, heads)
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, q)
    checks.check_state("initial_state", initial_state, q, given.state_shape)
    if log_decay is not None and log_decay.ndim == 1:
        log_decay = log_decay.expand(batch, tokens, heads)
    scale = key_size**-0.5 if scale is None else checks.check_scale(scale)
    return given._replace(log_decay=log_decay, n_steps=int(n_steps), scale=float(scale))


def check_erase(
    beta: Tensor | None, a: Tensor | None, b: Tensor | None, n_steps: int, normalize_qk: bool
) -> None:
    """One erase at most, and with a free one none of what only a tied one has."""
    if (a is None) != (b is None):
        raise ValueError(f"a and b go together, got only {'b' if a is None else 'a'}")
    if a is None:
        return
    if beta is not None:
        raise ValueError("beta must be None with a and b: an erase is tied to the key or free")
    if n_steps != 1:
        raise ValueError(f"n_steps must be 1 with a free erase a, b, got {n_steps}")
    if normalize_qk:
        raise ValueError(
            "normalize_qk must be False with a free erase a, b: normalise q and k first"
        )
