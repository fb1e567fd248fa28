"""S4D: S4 with a complex diagonal, from the spectrum of HiPPO or one like it.

h_t = e^{dt A} h_{t-1} + B (e^{dt A} - 1) / A v_t        o_t = 2 Re(C h_t) + D * v_t

Half of the eigenvalues are kept, those with positive imaginary parts: hence the 2.
"""

import math

import torch
from torch import Tensor

from deltarule.nn.call import LayerCall
from deltarule.nn.complex_filters import Filters, complex_product, filtered
from deltarule.nn.gates import computed, float32_parameter, initial_log_step
from deltarule.nn.rotation import in_float64, within_a_turn
from deltarule.nn.rule import Arguments, System
from deltarule.nn.scan_mixer import ScanMixer


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


def filters(log_step: Tensor, A_log: Tensor, frequency: Tensor, B: Tensor, C: Tensor) -> Filters:
    """Zero-order hold: a = e^{dt A}, b = B (a - 1) / A, with A = -exp(A_log) + i frequency."""
    step, rate = log_step.exp().unsqueeze(-1), A_log.exp()
    log_decay, angle = -step * rate, step * frequency
    # x + i y = a - 1, without the cancellation for small angles, over A = -rate + i frequency.
    growth = torch.expm1(log_decay)
    x = growth * angle.cos() - 2 * torch.sin(angle / 2).square()
    y = (growth + 1) * angle.sin()
    size = rate.square() + frequency.square()
    held = (frequency * y - rate * x) / size, (-rate * y - frequency * x) / size
    (p, q), (r, s) = held, B.unbind(-2)
    b = torch.cat([p * r - q * s, p * s + q * r], dim=-1)
    return Filters(log_decay, angle, b, C.flatten(-2))


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
    state's `recurrent` [N, H, V, 2 K] has all real parts before all imaginary ones.

    Defaults: 2 hidden_size value channels with 32 complex numbers each (the paper's N = 64),
    convolution of 4, output gate; dt log-uniform in [1e-3, 1e-1], the spectrum of HiPPO-LegS, B of
    ones, C normal, D of ones.

    Examples:
        >>> y, state = S4D(32, num_heads=1)(torch.zeros(1, 5, 32))
        >>> state["recurrent"].shape
        torch.Size([1, 1, 64, 64])
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
    float32_parameters = ("A_log", "frequency", "log_step", "B", "C", "D")

    def default_head_k_dim(self) -> int:
        return 32

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
        """Factors of a token, inputs and read-outs of all channels."""
        return filters(self.log_step, self.A_log, self.frequency, self.B, self.C)

    def taps(self, size: int) -> Tensor:
        """[H V, size] the filter of each channel, for `long_convolution`: 2 Re(sum of C b a^l)."""
        given = self.filters()
        power = given.power(torch.arange(size, device=given.angle.device))
        real = complex_product(complex_product(power, given.b), given.c)[..., : self.head_k_dim]
        return 2 * real.sum(-1).flatten(1).mT

    def scan_arguments(self, stream: Tensor, v: Tensor) -> Arguments:
        return arguments(computed(v), self.filters())

    def scanned(self, stream: Tensor, v: Tensor, call: LayerCall) -> Tensor:
        y, state = filtered(v, self.filters(), call.before["recurrent"], call.layout)
        call.after["recurrent"] = state
        return y.to(v.dtype)
