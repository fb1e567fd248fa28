"""S4 with a real diagonal: Mamba's recurrence with nothing in it that depends on the input.

As one long filter, in its convolution mode, each number a of the state h gives

o_t = sum_j (c . (b a^j)) v_{t-j} + c . (a^{t+1} h)
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deltarule import ops
from deltarule.nn.gates import float32_parameter, initial_log_step
from deltarule.nn.rule import Arguments, LayerCall, System
from deltarule.nn.scan_mixer import ScanMixer
from deltarule.ops.dispatch import without_autocast
from deltarule.ops.few_tokens import MAX_TOKENS

# Tokens of a block, whose powers of a are one matrix of each filter.
BLOCK = 256


def arguments(v: Tensor, *, log_step: Tensor, A_log: Tensor, B: Tensor, C: Tensor) -> Arguments:
    """Arguments of `selective_scan`: B and C are its k and q, each entry with its own constant."""
    delta = log_step.exp().expand(v.shape)
    return {"q": C, "k": B, "v": v, "delta": delta, "A": -A_log.exp(), "scale": 1.0}


class Exponentials(NamedTuple):
    """log a, b and c of F channels with K numbers each, all [F, K] and constant."""

    log_factor: Tensor
    b: Tensor
    c: Tensor

    def blocks(self, tokens: int) -> Tensor:
        """a to the first token of each block, [F, M, K]."""
        place = torch.arange(0, tokens, BLOCK, device=self.b.device)
        return torch.exp(self.log_factor.unsqueeze(-2) * place.unsqueeze(-1))

    def inside(self) -> Tensor:
        """a to each place in a block, [F, K, BLOCK]."""
        return torch.exp(self.log_factor.unsqueeze(-1) * torch.arange(BLOCK, device=self.b.device))

    def read(self, weights: Tensor, tokens: int) -> Tensor:
        """The sum of the weights [.., F, K] times a^0, a^1, ..: [.., F, tokens]."""
        found = (weights.unsqueeze(-2) * self.blocks(tokens)) @ self.inside()
        return found.flatten(-2)[..., :tokens]

    def last(self, v: Tensor, before: Tensor) -> Tensor:
        """The state [B, F, K] after the values [B, F, T], from the one before."""
        tokens = v.shape[-1]
        back = F.pad(v.flip(-1), (0, -tokens % BLOCK)).unflatten(-1, (-1, BLOCK))
        summed = (back @ self.inside().mT * self.blocks(tokens)).sum(-2)
        return torch.exp(self.log_factor * tokens) * before + self.b * summed


class S4(ScanMixer):
    """S4: S = S * exp(-(dt 1^T) * exp(A_log)) + B * (v 1^T), o = (S * C) 1 + D * v.

    Only v depends on the input. The layer around it is Mamba's block, as in the ablations of
    arXiv 2312.00752; `S4D` has the complex diagonal of S4's own release.

    exp(A_log) starts from 1 to 16, dt log-uniform in [1e-3, 1e-1], B at dt, C normal, D at ones.

    Attributes:
        convolves: Whether calls of many tokens are one long convolution in place of a scan: the
            convolution mode. Packed and padded calls are scans either way.
    """

    rule = System(
        name="s4", title="S4 (elementwise form)", operator="selective_scan", decay="element",
        erase="none", state_size="HV V K",
        recurrence="S = S * exp(-(dt 1^T) * exp(A_log)) + B * (v 1^T)",
        read_out="o = (S * C) 1 + D * v",
        source="arXiv 2406.06484, table 4; S4D-Real of arXiv 2206.11893, section 3",
    )  # fmt: skip
    convolves: bool = False
    float32_parameters = ("A_log", "log_step", "B", "C", "D")

    def build_scan(self, inner: int) -> None:
        self.A_log = float32_parameter(self.rates())
        step = initial_log_step(self.num_heads, self.head_v_dim)
        self.log_step = float32_parameter(step)
        # What v is multiplied by in the time that a step takes: the input of Euler's method.
        self.B = float32_parameter(step.exp().unsqueeze(-1).repeat(1, 1, self.head_k_dim))
        self.C = float32_parameter(torch.randn(*step.shape, self.head_k_dim, dtype=torch.float32))

    def scan_arguments(self, stream: Tensor, v: Tensor) -> Arguments:
        return arguments(v, log_step=self.log_step, A_log=self.A_log, B=self.B, C=self.C)

    def scanned(self, stream: Tensor, v: Tensor, call: LayerCall) -> Tensor:
        layout, before = call.layout, call.before["recurrent"]
        marked = layout.real, layout.cu_seqlens, layout.context
        plain = all(x is None for x in marked) and layout.tokens > MAX_TOKENS
        if not self.convolves or not plain:
            return super().scanned(stream, v, call)
        rate = -(self.log_step.exp().unsqueeze(-1) * self.A_log.exp())
        given = Exponentials(*(x.to(before.dtype).flatten(0, 1) for x in (rate, self.B, self.C)))
        wide, start, tokens = v.flatten(2).to(before.dtype), before.flatten(1, 2), v.shape[1]
        with without_autocast(v.device):
            taps = given.read(given.b * given.c, tokens)
            o = ops.long_convolution(wide.unsqueeze(-1), taps, return_state=False).o.squeeze(-1)
            carried = given.read(torch.exp(given.log_factor) * given.c * start, tokens)
            call.after["recurrent"] = given.last(wide.mT, start).view(before.shape)
        return (o + carried.mT).view(v.shape).to(v.dtype)
