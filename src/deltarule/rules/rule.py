"""What a published rule is: a map from a layer's projections to the arguments of one operator."""

from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor

# Keyword arguments of `delta_rule` or `dplr`, q, k and v among them.
Arguments = dict[str, Any]
# What a rule hands from one call to the next beside the state; each tensor has the sequence first.
Carry = dict[str, Tensor]
Mapped = tuple[Arguments, Carry | None]


@dataclass(frozen=True, kw_only=True)
class Projections:
    """What a layer computes from its input; a rule reads what it needs and None is what it lacks.

    Args:
        q: Queries [B, T, H, K].
        k: Keys [B, T*n, H, K]; step j of token t is row t*n + j.
        v: Values [B, T*n, HV, V].
        decay_logits: What the decay is made of, [B, T, HV] or [B, T, HV, K].
        beta_logits: What the write strength is made of, [B, T*n, HV].
        erase_logits: What a free erase is made of, [B, T, HV, K].
        output_gate: What the layer's output gate is made of, [B, T, HV, V].
        A_log: Natural log of a rate of decay, [HV], float32.
        dt_bias: Bias of decay_logits, [HV] or [HV, K], float32.
        D: Weight of the value that skips the state, [HV], float32.
        erase_scale: Factor of the key that erases, [H, K] (k_k of RWKV-7).
        replace_scale: How far erase_logits shorten the written key, [H, K] (k_a of RWKV-7).
        bonus: Weight of the current token's own value, [H, K] (r_k of RWKV-7).
        beta_max: Largest write strength; 2.0 gives transitions with eigenvalues in [-1, 1].
        n_steps: Writes for each token.
        depth: Share of the model's layers that come before this one, in [0, 1).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    decay_logits: Tensor | None = None
    beta_logits: Tensor | None = None
    erase_logits: Tensor | None = None
    output_gate: Tensor | None = None
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    D: Tensor | None = None
    erase_scale: Tensor | None = None
    replace_scale: Tensor | None = None
    bonus: Tensor | None = None
    beta_max: float = 1.0
    n_steps: int = 1
    depth: float = 0.0

    @property
    def qkv(self) -> Arguments:
        """The three tensors that every operator takes first."""
        return {"q": self.q, "k": self.k, "v": self.v}

    def need(self, name: str) -> Tensor:
        """Return the named tensor, or raise a ValueError that names it."""
        value = getattr(self, name)
        if not isinstance(value, Tensor):
            raise ValueError(f"{name} must be a tensor for this rule, got {value!r}")
        return value


class ArgumentMap(Protocol):
    """The first half of a rule: projections to operator arguments."""

    def __call__(self, projections: Projections, carry: Carry | None = None) -> Mapped:
        """Return the operator's keyword arguments, and what the next call must be given."""


class ReadOut(Protocol):
    """The second half of a rule: what the operator read to what the layer puts out."""

    def __call__(self, o: Tensor, projections: Projections) -> Tensor:
        """Return the outputs [B, T, HV, V] in the dtype of o."""


def read_state(o: Tensor, projections: Projections) -> Tensor:
    """o = S q: the read-out of most rules."""
    return o


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One published system as a row of the table.

    Args:
        name: Key in `RULES` and in `deltarule.nn.MIXERS`.
        title: The name its authors gave it.
        operator: Which operator runs it.
        recurrence: One token's update of the state, in the letters of `deltarule.shapes`.
        read_out: One token's output.
        decay: None, one constant a head, one gate a head, or one gate a key channel.
        erase: Nothing, along the key that is written, or along free vectors.
        objective: The online loss whose step the recurrence takes; "" where none is published.
        source: Paper and equation.
        arguments: Projections to operator arguments.
        read_out_function: What is read to what is put out.
        state_size: Numbers kept for each sequence.
    """

    name: str
    title: str
    operator: Literal["delta_rule", "dplr"]
    recurrence: str
    read_out: str
    decay: Literal["none", "constant", "head", "channel"]
    erase: Literal["none", "tied", "free"]
    objective: str
    source: str
    arguments: ArgumentMap
    read_out_function: ReadOut = read_state
    state_size: str = "HV V K"
