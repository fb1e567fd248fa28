"""S4D: S4 with a complex diagonal, from the spectrum of HiPPO or one like it.

h_t = a h_{t-1} + b v_t    o_t = 2 Re(sum of c h_t) + D * v_t    a = e^{dt A}, b = B (a - 1) / A

Half of the eigenvalues are kept, those with positive imaginary parts: hence the 2. In a chunk of C
tokens from the state h_0, by matrix products, with the filter F_l = 2 Re(sum of c a^l b),

    y_i = sum over j <= i of F_{i-j} v_j + 2 Re(sum of c a^{i+1} h_0)
    h_n = a^n h_0 + sum over j < n of a^{n-1-j} b v_j

The states between chunks are those of `selective_scan` over the chunks, in a frame that turns with
them. A complex number is two channels, one in each half of an axis.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from deltarule import ops
from deltarule.nn.gates import computed, float32_parameter, initial_log_step
from deltarule.nn.layout import Layout
from deltarule.nn.rotation import in_float64, turned, within_a_turn
from deltarule.nn.rule import Arguments, LayerCall, System
from deltarule.nn.scan_mixer import ScanMixer
from deltarule.ops.chunks import chunk_size
from deltarule.ops.context.exchange import starting_state
from deltarule.ops.dispatch import without_autocast


class Filters(NamedTuple):
    """a = exp(log_decay + i angle), b and c: [H, V, K], b and c of complex numbers."""

    log_decay: Tensor
    angle: Tensor
    b: Tensor
    c: Tensor

    def power(self, exponents: Tensor) -> Tensor:
        """a^n [.., H, V, 2 K] of integers [..]."""
        n = exponents.view(*exponents.shape, 1, 1, 1)
        size = torch.exp(n * self.log_decay)
        angle = within_a_turn(in_float64(n) * in_float64(self.angle), size.dtype)
        return torch.cat([size * angle.cos(), size * angle.sin()], dim=-1)


def complex_product(x: Tensor, y: Tensor) -> Tensor:
    (a, b), (c, d) = x.chunk(2, dim=-1), y.chunk(2, dim=-1)
    return torch.cat([a * c - b * d, a * d + b * c], dim=-1)


class Chunks(NamedTuple):
    """Where the tokens of N sequences lie among M chunks of `size`, each of one sequence.

    Args:
        size: Tokens in a chunk, C.
        number: Chunks, M; those that no sequence needs are a sequence of their own.
        places: [B, T] of each token among the M C places; those of padding are M C.
        offsets: [N + 1] the first chunk of each sequence, and the one after the last.
        tokens: [N] of each sequence.
        packed: Whether sequences have numbers of chunks of their own.
    """

    size: int
    number: int
    places: Tensor
    offsets: Tensor
    tokens: Tensor
    packed: bool


def chunks_of(layout: Layout) -> Chunks:
    counts, token = layout.counts, torch.arange(layout.tokens, device=layout.device)
    size = chunk_size(-(-layout.batch * layout.tokens // max(layout.sequences, 1)), 1)
    if layout.cu_seqlens is None or layout.sequence is None:
        each = -(-layout.tokens // size)
        offsets = torch.arange(layout.sequences + 1, device=layout.device) * each
        places, count = offsets[:-1, None] * size + token, layout.sequences * each
        if layout.real is not None:
            places = places.masked_fill(~layout.real, count * size)
        return Chunks(size, count, places, offsets, counts, packed=False)
    needed = -(-counts // size)
    count = layout.tokens // size + layout.sequences
    offsets = torch.cat([needed.new_zeros(1), needed.cumsum(0)])
    within = token - layout.cu_seqlens[layout.sequence]
    places = (offsets[layout.sequence] * size + within)[None]
    return Chunks(size, count, places, offsets, counts, packed=True)


def filtered(u: Tensor, filters: Filters, state: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """y [B, T, H, V] of u, in float32 at least, and the state [N, H, V, 2 K] after that before."""
    # Of a layer in float64 the parameters may be float32.
    cut, filters = chunks_of(layout), Filters(*(x.to(state.dtype) for x in filters))
    if (context := layout.context) is not None:
        # By way of the processes before this one. Turned back to the first token of the row, a
        # state is multiplied by real numbers alone.
        _, ends = in_chunks(u, filters, state, cut)
        first, tail = len(u), context.last - context.first - context.tail
        here, there = (
            within_a_turn(in_float64(filters.angle) * place, ends.dtype)
            for place in (context.first, context.last)
        )
        kept = torch.exp(tail * filters.log_decay) * float(context.goes_on and context.tail == 0)
        kept = kept.repeat(1, 1, 2).expand(first, -1, -1, -1).contiguous()
        before = starting_state(context, turned(ends[-first:], -there), kept)
        state = torch.cat([state[:first] + turned(before, here), state[first:]])
    return in_chunks(u, filters, state, cut)


def in_chunks(u: Tensor, filters: Filters, state: Tensor, cut: Chunks) -> tuple[Tensor, Tensor]:
    """The same result in chunks, continued from the given states."""
    power = filters.power(torch.arange(cut.size + 1, device=u.device))
    if cut.number == 0:
        return computed(u), state.clone()
    # Tokens in their places [M, C, H, V], zeros elsewhere.
    rows = u.new_zeros(cut.number * cut.size + 1, *u.shape[2:], dtype=power.dtype)
    rows = rows.index_copy(0, cut.places.flatten(), computed(u).flatten(0, 1))
    rows = rows[:-1].unflatten(0, (cut.number, cut.size))
    written = weighed(rows, complex_product(power[:-1].flip(0), filters.b))
    starts = chunk_starts(written, filters, state, cut)
    read = complex_product(power, filters.c)
    taps = 2 * complex_product(read[:-1], filters.b)[..., : filters.angle.shape[-1]].sum(-1)
    i = torch.arange(cut.size, device=u.device)
    lag = i[:, None] - i
    toeplitz = taps[lag.clamp(min=0)].masked_fill((lag < 0)[..., None, None], 0)
    y = torch.einsum("ijhv, mjhv -> mihv", toeplitz, rows)
    real, imaginary = read[1:].chunk(2, dim=-1)
    y = y + 2 * torch.einsum("ihvk, mhvk -> mihv", torch.cat([real, -imaginary], dim=-1), starts)
    # Padding reads what comes last.
    places = cut.places.clamp(max=cut.number * cut.size - 1)
    y = y.flatten(0, 1).index_select(0, places.flatten()).unflatten(0, places.shape)
    return y, final_state(rows, filters, starts, state, power, cut)


def weighed(rows: Tensor, weights: Tensor) -> Tensor:
    """[M, H, V, 2 K] sum over the tokens of a chunk: rows [M, C, H, V], weights [C, H, V, 2 K]."""
    return torch.einsum("mjhv, jhvk -> mhvk", rows, weights)


def chunk_starts(written: Tensor, filters: Filters, state: Tensor, cut: Chunks) -> Tensor:
    """[M, H, V, 2 K] the state before each chunk, from what each alone would leave."""
    chunk = torch.arange(cut.number, device=written.device)
    own = torch.searchsorted(cut.offsets[1:], chunk, right=True).clamp(max=len(state) - 1)
    place = chunk - cut.offsets[own]
    turn = in_float64(place + 1).view(-1, 1, 1, 1) * in_float64(filters.angle) * cut.size
    turn = within_a_turn(turn, written.dtype)
    writes = turned(written, -turn).flatten(-2)
    decay = (cut.size * filters.log_decay).repeat(1, 1, 2).flatten(-2)
    one, before, offsets = writes.new_ones(*decay.shape, 1), state, None
    if cut.packed:
        # What lies behind the last sequence is one more.
        before = torch.cat([state, torch.zeros_like(state[:1])])
        offsets = torch.cat([cut.offsets, cut.offsets.new_full((1,), cut.number)])
    writes = writes.unflatten(0, (1 if cut.packed else len(state), -1))
    decays, start = decay.expand(writes.shape).contiguous(), before.flatten(-2).unsqueeze(-1)
    given: Arguments = {"q": one, "k": one, "v": writes, "value_log_decay": decays, "scale": 1.0}
    ends = ops.selective_scan(**given, initial_state=start, cu_seqlens=offsets).o
    ends = turned(ends.view_as(written), turn)
    earlier = torch.cat([ends[:1], ends[:-1]])
    return torch.where((place == 0).view(-1, 1, 1, 1), state[own], earlier)


def final_state(
    rows: Tensor, filters: Filters, starts: Tensor, state: Tensor, power: Tensor, cut: Chunks
) -> Tensor:
    """[N, H, V, 2 K] after the last token of each sequence, which may end within its last chunk."""
    empty = (cut.tokens == 0).view(-1, 1, 1, 1)
    last = cut.offsets[:-1] + (cut.tokens - 1).clamp(min=0) // cut.size
    last = last.clamp(max=cut.number - 1)
    tokens = cut.tokens - (last - cut.offsets[:-1]) * cut.size
    # The tokens at the end of a chunk of their own: what is before them are zeros.
    place = torch.arange(cut.size, device=rows.device) - (cut.size - tokens)[:, None]
    own = rows[last[:, None], place.clamp(min=0)].masked_fill((place < 0)[..., None, None], 0)
    written = weighed(own, complex_product(power[:-1].flip(0), filters.b))
    after = complex_product(power[tokens.clamp(0, cut.size)], starts[last]) + written
    return torch.where(empty, state, after)


def legs(states: int) -> Tensor:
    """Eigenvalues of HiPPO-LegS plus its rank-one part: imaginary parts, ascending.

    The matrix less -1/2 is antisymmetric, -+ sqrt((n + 1/2)(k + 1/2)) below and above its diagonal,
    so that times i it is Hermitian.
    """
    root = torch.sqrt(torch.arange(2 * states, dtype=torch.float64, device="cpu") + 0.5)
    below = torch.tril(torch.outer(root, root), -1)
    values = torch.linalg.eigvalsh(torch.complex(torch.zeros_like(below), below.mT - below))
    return values[states:]


def inverse(states: int) -> Tensor:
    """N / pi (N / (2 n + 1) - 1), ascending, with N = 2 states."""
    n, size = torch.arange(states, dtype=torch.float64, device="cpu").flip(0), 2 * states
    return size / math.pi * (size / (2 * n + 1) - 1)


def evenly_spaced(states: int) -> Tensor:
    return math.pi * torch.arange(states, dtype=torch.float64, device="cpu")


# Imaginary parts of the first A, by the name that `spectrum` says; the real parts are -1/2.
IMAGINARY_PARTS = {"legs": legs, "inv": inverse, "lin": evenly_spaced}


def arguments(v: Tensor, given: Filters) -> Arguments:
    """The definition: `selective_scan` with a head for each channel, in a frame that turns.

    Real and imaginary parts are key channels. No layer runs it: q and k have all that it saves.
    """
    tokens, (heads, values, states) = v.shape[1], given.angle.shape
    place = torch.arange(1, tokens + 1, device=v.device).view(-1, 1, 1, 1)
    angle = within_a_turn(in_float64(place) * in_float64(given.angle), given.angle.dtype)
    cos, sin = angle.cos(), angle.sin()
    (b, b_), (c, c_) = given.b.chunk(2, dim=-1), given.c.chunk(2, dim=-1)
    k = torch.cat([b * cos + b_ * sin, b_ * cos - b * sin], dim=-1)
    q = 2 * torch.cat([c * cos - c_ * sin, -c * sin - c_ * cos], dim=-1)
    sizes = len(v), tokens, heads * values, 2 * states
    q, k = (x.flatten(1, 2).expand(sizes).to(v.dtype) for x in (q, k))
    decay = given.log_decay.repeat(1, 1, 2).flatten(0, 1).expand(sizes)
    return {"q": q, "k": k, "v": v.flatten(2, 3).unsqueeze(-1), "log_decay": decay, "scale": 1.0}


class S4D(ScanMixer):
    """S4D: h = e^{dt A} h + B (e^{dt A} - 1) / A v, o = 2 Re(C h) + D v, in Mamba's block.

    A = -exp(A_log) + i frequency, [H, V, K]; B and C [H, V, 2, K] have the real part first. The
    state's `recurrent` [N, H, V, 2 K] has all real parts before all imaginary ones. head_k_dim
    complex numbers of each value channel (the paper's N = 64). dt starts log-uniform in [1e-3,
    1e-1], A at the spectrum of HiPPO-LegS, B at ones, C normal, D at ones.
    """

    rule = System(
        name="s4d", title="S4D (complex diagonal)", operator="selective_scan", decay="element",
        erase="none", page="s4", state_size="2 HV V K",
        recurrence="h = e^{dt A} * h + B * (e^{dt A} - 1) / A * (v 1^T)",
        read_out="o = 2 Re(h * C) 1 + D * v",
        source="arXiv 2206.11893, sections 3 and 4",
        forms="recurrent, chunked by matrix products",
    )  # fmt: skip
    options = ScanMixer.options | {"spectrum"}
    state_size = 32
    float32_parameters = ("A_log", "frequency", "log_step", "B", "C", "D")

    def memories(self) -> dict[str, tuple[int, ...]]:
        return {"recurrent": (self.num_heads, self.head_v_dim, 2 * self.head_k_dim)}

    def build_scan(self, inner: int) -> None:
        states = self.num_heads, self.head_v_dim, self.head_k_dim
        parts = *states[:2], 2, states[2]
        self.A_log = float32_parameter(torch.full(states, math.log(0.5)))
        spectrum = IMAGINARY_PARTS[self.spectrum](self.head_k_dim).to(torch.get_default_device())
        self.frequency = float32_parameter(spectrum.expand(states).clone())
        self.log_step = float32_parameter(initial_log_step(*states[:2]))
        ones = torch.ones(parts)
        ones[..., 1, :] = 0
        self.B = float32_parameter(ones)
        self.C = float32_parameter(torch.randn(parts) * 0.5**0.5)

    def filters(self) -> Filters:
        """a, b and c of all channels, the input held for the time of a step."""
        step, rate, frequency = self.log_step.exp().unsqueeze(-1), self.A_log.exp(), self.frequency
        log_decay, angle = -step * rate, step * frequency
        # x + i y = a - 1, without the cancellation for small angles, over A = -rate + i frequency.
        growth = torch.expm1(log_decay)
        x = growth * angle.cos() - 2 * torch.sin(angle / 2).square()
        y = (growth + 1) * angle.sin()
        size = rate.square() + frequency.square()
        held = torch.cat([frequency * y - rate * x, -rate * y - frequency * x], dim=-1)
        b = complex_product(held / size.repeat(1, 1, 2), self.B.flatten(-2))
        return Filters(log_decay, angle, b, self.C.flatten(-2))

    def taps(self, size: int) -> Tensor:
        """[H V, size] the filter of each channel, for `long_convolution`: 2 Re(sum of C b a^l)."""
        given = self.filters()
        power = given.power(torch.arange(size, device=given.angle.device))
        real = complex_product(complex_product(power, given.b), given.c)[..., : self.head_k_dim]
        return 2 * real.sum(-1).flatten(1).mT

    def scan_arguments(self, stream: Tensor, v: Tensor) -> Arguments:
        return arguments(computed(v), self.filters())

    def scanned(self, stream: Tensor, v: Tensor, call: LayerCall) -> Tensor:
        with without_autocast(v.device):
            y, state = filtered(v, self.filters(), call.before["recurrent"], call.layout)
        call.after["recurrent"] = state
        return y.to(v.dtype)
