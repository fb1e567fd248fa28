"""Comba as a layer."""

from dataclasses import replace
from typing import ClassVar

import torch
from torch import nn

from deltarule.nn.call import Call
from deltarule.nn.gated_deltanet import GatedDeltaNet
from deltarule.rules import Projections, comba


class Comba(GatedDeltaNet):
    """Comba: S = a S (I - beta p k^T) + beta v k^T, o = S (q - D p), p = sigmoid(erase_scale) k.

    Defaults: Gated DeltaNet's, but the output gate is a sigmoid; erase_scale and D of ones for
    each key head (the authors use D = 0.02 in small models).

    Example:
        >>> import torch
        >>> layer = Comba(32, num_heads=2)
        >>> y, state = layer(torch.zeros(1, 5, 32))
        >>> layer.erase_scale.shape, state["recurrent"].shape
        (torch.Size([2]), torch.Size([1, 2, 24, 12]))

    Source: arXiv 2506.02475, section 3.
    """

    rule = comba.RULE
    frees_strength = True
    gate_activation = "sigmoid"
    float32_parameters: ClassVar[tuple[str, ...]] = ("A_log", "dt_bias", "D", "erase_scale")

    erase_scale: nn.Parameter

    def build_gates(self) -> None:
        """Add the write strength, the share of the key that erases, and the query's correction."""
        super().build_gates()
        ones = torch.ones(self.num_heads, dtype=torch.float32)
        self.b_proj = nn.Linear(self.hidden_size, self.num_v_heads, bias=False)
        self.gate_parameter("erase_scale", ones)
        self.gate_parameter("D", ones.clone())

    def project(self, call: Call) -> Projections:
        """Add the share of the key that erases."""
        return replace(super().project(call), erase_scale=self.erase_scale)
