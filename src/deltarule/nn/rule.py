"""What a published rule is: a map from a layer's projections to the arguments of one operator.

And one call of a layer, as its parts hand it to each other.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn

from deltarule.nn.layout import Layout
from deltarule.nn.linears import linear, linears
from deltarule.nn.state import State
from deltarule.ops.context.rows import LastRows

# Keyword arguments of `delta_rule` or `dplr`, q, k and v among them.
Arguments = dict[str, Any]

Operator = Literal[
    "delta_rule", "dplr", "selective_scan", "long_convolution", "slstm", "two_memories", "mesa",
    "ttt", "titans", "softmax",
]  # fmt: skip
Decay = Literal["none", "constant", "head", "channel", "element"]
Erase = Literal["none", "tied", "free", "solve", "gradient"]
QueryKeyNorm = Literal["none", "l1", "l2"]
OutputNorm = Literal["head", "all", "none"]
Factors = Mapping[str, float]
# The convolutions of a layer, and their histories in its state.
CONVOLUTIONS = ("q_conv", "k_conv", "v_conv")


@dataclass(frozen=True, kw_only=True)
class Projections:
    """What a layer computes from its input; a rule reads what it needs, and the rest is None.

    Args:
        q: Queries [B, T, H, K].
        k: Keys `[B, T*n, H, K]`; step j of token t is row `t*n + j`.
        v: Values `[B, T*n, HV, V]`.
        decay_logits: Logits of the decay, [B, T, HV] or [B, T, HV, K].
        beta_logits: Logits of the write strength, `[B, T*n, HV]`.
        erase_logits: Logits of a free erase, [B, T, HV, K].
        write_logits: Logits of the write strength of each value channel, [B, T, HV, V].
        phase: Angles by which each key channel turns, [B, T, HV, K] (GateLoop).
        running: Memory beside the matrix, at each token and continued from the call before: the
            sum of angles, [B, T, HV, K] (GateLoop); the maxima before and after each token,
            [B, T, HV] (mLSTM). None: the rule computes it, each sequence afresh.
        output_gate: Logits of the layer's output gate, [B, T, HV, V].
        A_log: Natural log of a rate of decay, [HV], float32.
        dt_bias: Bias of decay_logits, [HV] or [HV, K], float32.
        lower_bound: The smallest decay that decay_logits can give, in [0, 1), [HV, K] (HGRN-2).
        gate_lower_bound: The smallest log_decay that they can give, < 0 (KDA). None: no bound.
        D: Weight of the value that skips the state, [HV] (Mamba-2), or of the erased key that the
            query leaves out, [H] (Comba); float32.
        erase_scale: Factor of the key that erases, [H, K] (k_k of RWKV-7), or its logit, [H]
            (Comba).
        replace_scale: How far erase_logits shorten the written key, [H, K] (k_a of RWKV-7).
        bonus: Weight of the current token's own value, [H, K] (r_k of RWKV-7, u of RWKV-6).
        beta_max: Largest write strength; 2.0 gives transitions with eigenvalues in [-1, 1].
        n_steps: Writes for each token.
        slots: Queries, keys or values of each head, side by side (multi-head DeltaNets).
        depth: Where the layer is in its model: 0 the first, 1 the last of several.
        qk_norm: Norm that divides q and k: "none", "l1", "l2". None: the rule's own choice.
        normalizer: Whether the read-out is divided by z^T q, z the sum of the keys.
        layout: Where sequences begin and end, for rules that look back a token. None: a row is a
            sequence, and all its tokens are real.
        decoding: Whether `recurrent_step` follows, which computes gates from their logits itself.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    decay_logits: Tensor | None = None
    beta_logits: Tensor | None = None
    erase_logits: Tensor | None = None
    write_logits: Tensor | None = None
    phase: Tensor | None = None
    running: tuple[Tensor, ...] | None = None
    output_gate: Tensor | None = None
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    lower_bound: Tensor | None = None
    gate_lower_bound: float | None = None
    D: Tensor | None = None
    erase_scale: Tensor | None = None
    replace_scale: Tensor | None = None
    bonus: Tensor | None = None
    beta_max: float = 1.0
    n_steps: int = 1
    slots: int = 1
    depth: float = 0.0
    qk_norm: QueryKeyNorm | None = None
    normalizer: bool = False
    layout: Layout | None = None
    decoding: bool = False

    @property
    def rows(self) -> Layout:
        """The layout, whether or not one is given."""
        batch, tokens = self.q.shape[:2]
        return self.layout or Layout(batch, tokens, self.q.device)

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


def as_it_is(x: Tensor, projections: Projections) -> Tensor:
    """The result unchanged: most rules need no map of the output or of the last state."""
    return x


@dataclass(frozen=True, kw_only=True)
class System:
    """One published system as a row of the table, whatever operator runs it.

    Args:
        name: Key in `SYSTEMS` and in `deltarule.nn.MIXERS`.
        title: The name its authors gave it.
        operator: Which operator runs it: "delta_rule" or "dplr" for a `Rule`; else its own.
        recurrence: One token's update of the state, in the letters of `deltarule.shapes`.
        read_out: One token's output.
        decay: None, one constant a head, one gate a head, a gate a key channel, or, for systems
            that are no `Rule`, a gate for each element of the state.
        erase: Nothing, along the key that is written, along free vectors, or, for systems that
            are no `Rule`, by a solve or by gradient steps of a loss.
        objective: The online loss whose step the recurrence takes; "" where none is published.
        source: Paper and equation.
        state_size: Numbers kept for each sequence, without those of convolutions, token shifts and
            counts of tokens. M slots; attention to W tokens; filters that reach L.
        forms: The ways it runs. "", as of every `Rule`: those of its operator's table of
            implementations.
        page: Its page in docs/rules, without the ending. "": its name.
    """

    name: str
    title: str
    operator: Operator
    recurrence: str
    read_out: str
    decay: Decay
    erase: Erase
    source: str
    objective: str = ""
    state_size: str = "HV V K"
    forms: str = "recurrent, chunked, GPU kernel"
    page: str = ""


@dataclass(frozen=True, kw_only=True)
class Rule(System):
    """A system that `delta_rule` or `dplr` runs: pure functions before and after the operator.

    Args:
        arguments: Projections to the operator's keyword arguments.
        read_out_function: The operator's o to the layer's, [B, T, HV, V] in its dtype.
        final_state: The operator's last state to the one after all tokens, [N, HV, V, K], for a
            rule that writes after it reads.
        normalizer: Whether the operator has one more value channel, which divides the others.
    """

    operator: Operator = "delta_rule"
    read_out: str = "o = S q"
    forms: str = ""
    arguments: Callable[[Projections], Arguments]
    read_out_function: Callable[[Tensor, Projections], Tensor] = as_it_is
    final_state: Callable[[Tensor, Projections], Tensor] = as_it_is
    normalizer: bool = False


@dataclass
class LayerCall:
    """What a layer was given, what it has projected, and the state that it leaves behind."""

    x: Tensor
    layout: Layout
    before: State
    after: State
    shared: dict[str, Any]
    projected: dict[str, Tensor] = field(default_factory=dict)
    # What was convolved, and how to convolve it again.
    convolved: list[tuple[Tensor, Callable[[], Tensor]]] = field(default_factory=list)
    # The memory of the gradient by the output gate, beside those by other projections.
    gate_slot: Callable[[Tensor], Tensor] | None = None
    # Convolutions that the product made which made q, k and v.
    within: Any = None
    # Whether `recurrent_step` follows, which makes gates of their logits itself.
    decoding: bool = False
    # Who has the last rows of x on their way to another process, and where those of another come.
    last_rows: tuple[LastRows, Tensor] | None = None

    def keep_convolved(
        self, modules: Sequence[nn.Module], streams: Sequence[Tensor],
        histories: Sequence[Tensor | None], found: Sequence[Tensor], after: Sequence[Tensor],
    ) -> None:  # fmt: skip
        """Keep what became of q, k and v, the next histories, and how to convolve again."""
        self.projected.update(zip("qkv", found, strict=True))
        self.after.update(zip(CONVOLUTIONS, after, strict=True))
        layout = self.layout
        for module, x, history, y in zip(modules, streams, histories, found, strict=True):
            if y.requires_grad:
                run = partial(module, x, history, layout)
                self.convolved.append((y, lambda run=run: run()[0]))  # type: ignore[misc]

    def defer(self, gate: nn.Module) -> None:
        """Let an operator project the output gate while its states travel; there is a context."""
        assert self.layout.context is not None

        # Not this call: it holds the context, and would be freed by the garbage collector alone.
        x, projected = self.x, self.projected

        def meanwhile() -> None:
            # Some layers run several operators.
            if "g" not in projected:
                projected["g"] = linear(x, gate)

        context = self.layout.context._replace(meanwhile=meanwhile)
        self.layout = replace(self.layout, context=context)

    def share(self, modules: dict[str, nn.Module], reach: int, factors: Factors) -> None:
        """Let the last rows of x go to the next process, and take the output gate out, for later.

        There is a context; `modules` are about to be applied to x, `factors` to what comes out.
        """
        assert self.layout.context is not None
        if reach:
            last_rows = LastRows(self.layout.context, reach)
            self.x, coming = last_rows.send(self.x)
            self.last_rows = last_rows, coming
        if "g" not in factors and (gate := modules.pop("g", None)) is not None:
            self.defer(gate)

    def ask_before(self, modules: dict[str, nn.Module], factors: Factors) -> None:
        """Take the rows that were sent here, projected, as what comes before q, k and v.

        This is done once: recomputation in the backward does not communicate.
        """
        assert self.last_rows is not None
        last_rows, coming = self.last_rows
        rows = linears(last_rows.receive(coming), [modules[name] for name in "qkv"])
        for name, x in zip("qkv", rows, strict=True):
            before = last_rows.before(x * factors.get(name, 1.0), self.before[f"{name}_conv"])
            self.before = State(self.before, **{f"{name}_conv": before})

    def positions(self) -> Tensor:
        """[B, T] each token's position, counted on in the state's `length` [N]."""
        length = self.layout.lengths(self.before["length"])
        self.after["length"] = length + self.layout.counts
        return self.layout.positions(length)

    def token_shift(self) -> Tensor:
        """x_{t-1} - x_t within each sequence, the state keeping the last x as `shift` [N, 1, D]."""
        history = self.layout.history(self.x, self.before["shift"])
        self.after["shift"] = self.layout.next_history(self.x, history)
        return self.layout.one_back(self.x, history) - self.x
