"""Kimi Delta Attention: Gated DeltaNet with one decay for each key channel."""

from typing import Any

import torch
from torch import nn

from deltarule.nn.checks import REASONS, check_that
from deltarule.nn.deltanet import DeltaNet
from deltarule.nn.gated_deltanet import arguments
from deltarule.nn.gates import initial_A_log, low_rank
from deltarule.nn.rule import Rule


class KDA(DeltaNet):
    """Kimi Delta Attention: S = S Diag(a) (I - beta k k^T) + beta v k^T with unit keys.

    a as in `GatedDeltaNet`, of each key channel, or bounded by gate_lower_bound. Decay and output
    gate are each projected through head_v_dim channels; exp(A_log) starts from U(1, 16), from 1
    with gate_lower_bound, and softplus(dt_bias) log-uniform in [1e-3, 1e-1].
    """

    rule = Rule(
        name="kda", title="Kimi Delta Attention", decay="channel", erase="tied",
        recurrence="S = S Diag(a) (I - beta k k^T) + beta v k^T",
        objective="|S - S' Diag(a)|^2 - 2 <S k, beta (v - S' Diag(a) k)>",
        source="arXiv 2510.26692, sections 3 and 4",
        arguments=arguments,
    )  # fmt: skip
    options = DeltaNet.options | {"gate_lower_bound"}
    has_rates = True
    default_output_gate = True
    gate_activation = "sigmoid"

    def build_gates(self) -> None:
        super().build_gates()
        heads, key_size = self.num_v_heads, self.head_k_dim
        self.a_proj = low_rank(self.hidden_size, self.head_v_dim, heads * key_size)
        A_log = initial_A_log(heads, 1)
        # The rates of a bounded decay start at 1.
        bounded = self.gate_lower_bound is not None
        self.build_rates(torch.zeros_like(A_log) if bounded else A_log, heads, key_size)

    def check_options(self) -> None:
        alone = self.gate_lower_bound is None or self.longest_horizon is None
        said = f"longest_horizon must be None with gate_lower_bound: {REASONS['longest_horizon']}"
        check_that(alone, said, self.longest_horizon)

    def adopt(self, config: Any) -> None:
        biased = getattr(config, "output_gate_bias", True)
        if isinstance(self.g_proj, nn.Sequential) and not biased:
            self.g_proj[1].register_parameter("bias", None)

    def output_gate_projection(self) -> nn.Module:
        size = self.num_v_heads * self.head_v_dim
        return low_rank(self.hidden_size, self.head_v_dim, size, bias=True)
