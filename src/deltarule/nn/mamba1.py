"""Mamba-1: each entry of the state has its own rate, each value channel its own step size."""

from dataclasses import replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from deltarule.nn.checks import default
from deltarule.nn.gates import computed, float32_parameter, initial_dt_bias, low_rank
from deltarule.nn.norm import RMSNorm
from deltarule.nn.rule import Arguments, System
from deltarule.nn.scan_mixer import ScanMixer


def arguments(
    q: Tensor, k: Tensor, v: Tensor, *, step_logits: Tensor, A_log: Tensor, dt_bias: Tensor
) -> Arguments:
    """Arguments of `selective_scan`; not scaled, because beside D * v_t its size matters."""
    delta = F.softplus(computed(step_logits) + dt_bias)
    write = (delta * v).to(v.dtype)
    return {"q": q, "k": k, "v": write, "delta": delta, "A": -A_log.exp(), "scale": 1.0}


class Mamba1(ScanMixer):
    """Mamba: S = S * exp(-(dt 1^T) * exp(A_log)) + (dt * v) k^T, o = S q + D * v, gated.

    In the paper's letters q = C, k = B, v = x, dt = Delta; all are computed from the convolved x.
    Step sizes come through hidden_size / 16 channels; exp(A_log) starts from 1 to 16,
    softplus(dt_bias) log-uniform in [1e-3, 1e-1], D at ones. The release's convolution has a bias:
    conv_bias=True.
    """

    rule = System(
        name="mamba1", title="Mamba", operator="selective_scan", decay="element", erase="none",
        state_size="HV V K",
        recurrence="S = S * exp(-(dt 1^T) * exp(A_log)) + (dt * v) k^T", read_out="o = S q + D * v",
        source="arXiv 2312.00752, algorithm 2 and sections 3.4 and 3.6",
    )  # fmt: skip
    inner_norm_eps: float = 1e-5
    q_norm: nn.Module | None
    k_norm: nn.Module | None

    def adopt(self, config: Any) -> None:
        """Take another step_rank, and norms of dt's few channels, k and q, before they are used.

        Norms are without weights ("plain") or with them.
        """
        rank = getattr(config, "time_step_rank", None) or self.step_rank()
        norms = getattr(config, "mamba_inner_norm", None)
        if rank == self.step_rank() and norms is None:
            return
        inner, size = self.num_heads * self.head_v_dim, self.head_k_dim
        self.inner_norm_eps = default(config.output_norm_eps, config.norm_eps)
        self.a_proj = low_rank(inner, rank, inner, activation=self.inner_norm(norms, rank))
        if norms is not None:
            self.q_norm, self.k_norm = (self.inner_norm(norms, size) for _ in "qk")

    def inner_norm(self, kind: str | None, size: int) -> nn.Module | None:
        if kind == "weighted":
            return RMSNorm(size, self.inner_norm_eps)
        if kind is None:
            return None
        return nn.RMSNorm(size, self.inner_norm_eps, elementwise_affine=False)

    def build_scan(self, inner: int) -> None:
        self.q_norm = self.k_norm = None
        self.q_proj = nn.Linear(inner, self.head_k_dim, bias=False)
        self.k_proj = nn.Linear(inner, self.head_k_dim, bias=False)
        self.a_proj = low_rank(inner, self.step_rank(), inner)
        self.A_log = float32_parameter(self.rates())
        self.dt_bias = float32_parameter(initial_dt_bias(self.num_heads, self.head_v_dim))

    def scan_arguments(self, stream: Tensor, v: Tensor) -> Arguments:
        q, k = self.q_proj(stream), self.k_proj(stream)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        step = {"step_logits": self.by_head(self.a_proj(stream)), "dt_bias": self.dt_bias}
        return arguments(q.unsqueeze(2), k.unsqueeze(2), v, A_log=self.A_log, **step)


class SignedMamba1(Mamba1):
    """Mamba whose decays a = exp(-(dt 1^T) * exp(A_log)) become 2 a - 1, in (-1, 1].

    An entry that changes its sign with a token can count tokens modulo two, which no positive decay
    can. Nothing else differs.
    """

    rule = replace(
        Mamba1.rule, name="signed_mamba1", title="Mamba with signed decays", page="mamba1",
        recurrence="S = S * (2 exp(-(dt 1^T) * exp(A_log)) - 1) + (dt * v) k^T",
        source="arXiv 2411.12537, section 5",
    )  # fmt: skip

    def scan_arguments(self, stream: Tensor, v: Tensor) -> Arguments:
        return super().scan_arguments(stream, v) | {"signed": True}
