"""S4 with a real diagonal: Mamba's recurrence with nothing in it that depends on the input."""

import torch
import torch.nn.functional as F
from torch import Tensor

from deltarule.nn.gates import float32_parameter, initial_log_step
from deltarule.nn.rule import Arguments, LayerCall, System
from deltarule.nn.s4d import Filters, filtered
from deltarule.nn.scan_mixer import ScanMixer
from deltarule.ops.dispatch import without_autocast
from deltarule.ops.few_tokens import MAX_TOKENS


class S4(ScanMixer):
    """S4: S = S * exp(-(dt 1^T) * exp(A_log)) + B * (v 1^T), o = (S * C) 1 + D * v.

    Only v depends on the input. The layer around it is Mamba's block, as in the ablations of
    arXiv 2312.00752; `S4D` has the complex diagonal of S4's own release.

    exp(A_log) starts from 1 to 16, dt log-uniform in [1e-3, 1e-1], B at dt, C normal, D at ones.

    Attributes:
        convolves: Whether calls of more than 16 tokens are convolutions in chunks, as those of
            `S4D` are, in place of a scan: the convolution mode.
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
        """B and C are k and q, each entry with its own constant."""
        delta, rates = self.log_step.exp().expand(v.shape), -self.A_log.exp()
        return {"q": self.C, "k": self.B, "v": v, "delta": delta, "A": rates, "scale": 1.0}

    def scanned(self, stream: Tensor, v: Tensor, call: LayerCall) -> Tensor:
        layout, before, size = call.layout, call.before["recurrent"], self.head_k_dim
        if not self.convolves or layout.tokens <= MAX_TOKENS:
            return super().scanned(stream, v, call)
        # A real number is twice its half, and a complex one without an imaginary part.
        b, c, start = (F.pad(x, (0, size)) for x in (self.B, self.C / 2, before))
        log_decay = -self.log_step.exp().unsqueeze(-1) * self.A_log.exp()
        given = Filters(log_decay, torch.zeros_like(log_decay), b, c)
        with without_autocast(v.device):
            y, state = filtered(v, given, start, layout)
        call.after["recurrent"] = state[..., :size].contiguous()
        return y.to(v.dtype)
