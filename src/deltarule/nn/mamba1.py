"""Mamba-1: each entry of the state has its own rate, each value channel its own step size.

S_t = S_{t-1} * exp(-(dt_t 1^T) * exp(A_log)) + (dt_t * v_t) k_t^T        o_t = S_t q_t + D * v_t
dt_t = softplus(step_logits_t + dt_bias)
"""

from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor, nn

from deltarule.nn.gates import computed, initial_dt_bias, low_rank
from deltarule.nn.rule import Arguments, System
from deltarule.nn.scan import ScanMixer


def arguments(
    q: Tensor, k: Tensor, v: Tensor, *, step_logits: Tensor, A_log: Tensor, dt_bias: Tensor
) -> Arguments:
    """Arguments of `selective_scan`; not scaled, because beside D * v_t its size matters."""
    delta = F.softplus(computed(step_logits) + dt_bias)
    write = (delta * v).to(v.dtype)
    return {"q": q, "k": k, "v": write, "delta": delta, "A": -A_log.exp(), "scale": 1.0}


SYSTEM = System(
    name="mamba1",
    title="Mamba",
    operator="selective_scan",
    recurrence="S = S * exp(-(dt 1^T) * exp(A_log)) + (dt * v) k^T",
    read_out="o = S q + D * v",
    decay="element",
    erase="none",
    objective="",
    source="arXiv 2312.00752, algorithm 2 and section 3.6",
    state_size="HV V K",
    forms="recurrent, chunked, GPU kernel",
)

SIGNED = replace(
    SYSTEM,
    name="signed_mamba1",
    title="Mamba with signed decays",
    recurrence="S = S * (2 exp(-(dt 1^T) * exp(A_log)) - 1) + (dt * v) k^T",
    source="arXiv 2411.12537, section 5",
    page="mamba1",
)


class Mamba1(ScanMixer):
    """Mamba: S = S * exp(-(dt 1^T) * exp(A_log)) + (dt * v) k^T, o = S q + D * v, gated.

    In the paper's letters q = C, k = B, v = x, dt = Delta; all are computed from the convolved x.

    Defaults: 2 hidden_size value channels with a state of 16 each, convolution of 4 (the
    release's has a bias: conv_bias=True), step sizes through hidden_size / 16 channels; exp(A_log)
    from 1 to 16, softplus(dt_bias) log-uniform in [1e-3, 1e-1], D of ones.

    Examples:
        >>> import torch
        >>> y, state = Mamba1(32, num_heads=1)(torch.zeros(1, 5, 32))
        >>> state["recurrent"].shape
        torch.Size([1, 1, 64, 16])

    Source: arXiv 2312.00752, section 3.4 and algorithm 2.
    """

    rule = SYSTEM
    A_log: nn.Parameter
    dt_bias: nn.Parameter

    def build_scan(self, inner: int) -> None:
        self.q_proj = nn.Linear(inner, self.head_k_dim, bias=False)
        self.k_proj = nn.Linear(inner, self.head_k_dim, bias=False)
        self.a_proj = low_rank(inner, self.step_rank(), inner)
        self.gate_parameter("A_log", self.rates())
        self.gate_parameter("dt_bias", initial_dt_bias(self.num_heads, self.head_v_dim))

    def scan_arguments(self, stream: Tensor, v: Tensor) -> Arguments:
        return arguments(
            self.q_proj(stream).unsqueeze(2), self.k_proj(stream).unsqueeze(2), v,
            step_logits=self.per_head(self.a_proj(stream)), A_log=self.A_log, dt_bias=self.dt_bias,
        )  # fmt: skip


class SignedMamba1(Mamba1):
    """Mamba whose decays a = exp(-(dt 1^T) * exp(A_log)) become 2 a - 1, in (-1, 1].

    An entry that changes its sign with a token can count tokens modulo two, which no positive decay
    can. Nothing else differs.

    Defaults: as `Mamba1`.

    Examples:
        >>> import torch
        >>> y, state = SignedMamba1(32, num_heads=1)(torch.zeros(1, 5, 32))
        >>> state["recurrent"].shape
        torch.Size([1, 1, 64, 16])

    Source: arXiv 2411.12537, section 5.
    """

    rule = SIGNED

    def scan_arguments(self, stream: Tensor, v: Tensor) -> Arguments:
        return super().scan_arguments(stream, v) | {"signed": True}
