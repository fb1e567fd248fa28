"""The norms and gated MLPs of transformers, each in one kernel where there is one for it.

A norm rounds once, at its end, where transformers rounds before the weight, too.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from deltarule.nn.mlp import gated_product, swiglu
from deltarule.nn.norm import gated_norm
from deltarule.ops.sequences import computed


def rms_norm(self: Any, hidden_states: Tensor) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps), in the wider dtype of both."""
    weight, x = self.weight, hidden_states
    if x.dtype != weight.dtype:
        x = x.to(torch.promote_types(x.dtype, weight.dtype))
    return gated_norm(x, None, weight, self.variance_epsilon)


def narrow_rms_norm(self: Any, hidden_states: Tensor) -> Tensor:
    """The same in the dtype of x."""
    return gated_norm(hidden_states, None, self.weight, self.variance_epsilon)


def zero_centered_norm(self: Any, x: Tensor) -> Tensor:
    """(1 + weight) * x / sqrt(mean(x^2) + eps), in the dtype of x."""
    return gated_norm(x, None, self.weight, self.eps, zero_centered=True)


def norm_then_gate(self: Any, hidden_states: Tensor, gate: Tensor) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps) * activation(gate), in the dtype of x."""
    return gated_norm(hidden_states, gate, self.weight, self.variance_epsilon, self.activation)


def gate_then_norm(self: Any, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
    """weight * y / sqrt(mean(y^2) + eps) of y = x * SiLU(gate), over groups of channels."""
    x, size, eps = computed(hidden_states), self.group_size, self.variance_epsilon
    y = x if gate is None else gated_product(computed(gate), x)
    if y.shape[-1] == size:
        y = gated_norm(y, None, self.weight, eps)
    else:
        y = self.weight * F.rms_norm(y.unflatten(-1, (-1, size)), (size,), eps=eps).flatten(-2)
    return y.to(torch.promote_types(hidden_states.dtype, self.weight.dtype))


def gated_mlp(self: Any, x: Tensor, factor: float = 1.0) -> Tensor:
    """down(activation(factor * gate x) * up x)."""
    modules = self.gate_proj, self.up_proj, self.down_proj
    # Without gradients calls of modules take the host less time.
    if torch.is_grad_enabled() and isinstance(self.act_fn, SILU):
        return swiglu(x, modules, factor)
    gate, up, down = modules
    logits = gate(x) if factor == 1 else gate(x) * factor
    y: Tensor = down(activated(self.act_fn, logits, up(x)))
    return y


def scaled_mlp(self: Any, x: Tensor) -> Tensor:
    """The same, multiplied at the end."""
    return gated_mlp(self, x, self.gate_multiplier) * self.down_multiplier


def joined_mlp(self: Any, hidden_states: Tensor) -> Tensor:
    """The same without factors, of one matrix for gate and up."""
    gate, up = self.input_linear(hidden_states).chunk(2, dim=-1)
    y: Tensor = self.output_linear(activated(self.activation, gate, up))
    return y


def activated(function: nn.Module, gate: Tensor, up: Tensor) -> Tensor:
    """function(gate) * up."""
    return gated_product(gate, up) if isinstance(function, SILU) else function(gate) * up


SILU = SiLUActivation, nn.SiLU
# Classes of transformers by the forward that is theirs, too.
CLASSES: dict[Callable[..., Tensor], str] = {
    rms_norm: """
        BailingHybridRMSNorm BambaRMSNorm FalconH1RMSNorm FalconMambaRMSNorm Glm5NextRMSNorm
        Glm5NextTextRMSNorm GraniteMoeHybridRMSNorm JambaRMSNorm KimiLinearRMSNorm Mamba2RMSNorm
        MambaRMSNorm MiniMaxRMSNorm Zamba2RMSNorm ZambaRMSNorm""",
    narrow_rms_norm: "LaraMiniRMSNorm NemotronHRMSNorm OlmoHybridRMSNorm",
    zero_centered_norm: "Qwen3NextRMSNorm Qwen3_5MoeRMSNorm Qwen3_5RMSNorm",
    norm_then_gate: """
        BailingHybridRMSNormGated Glm5NextTextRMSNormGated KimiLinearRMSNormGated
        LaraMiniRMSNormGated
        OlmoHybridRMSNormGated Qwen3NextRMSNormGated Qwen3_5MoeRMSNormGated Qwen3_5RMSNormGated
        Qwen4ExpTextRMSNormGated""",
    gate_then_norm: """
        BambaRMSNormGated GraniteMoeHybridRMSNormGated MambaRMSNormGated NemotronHRMSNormGated
        Zamba2RMSNormGated""",
    gated_mlp: """
        BailingHybridMLP BambaMLP JambaMLP KimiLinearMLP LaraMiniMLP OlmoHybridMLP Qwen3NextMLP
        Qwen3_5MLP Qwen3_5MoeMLP Qwen4ExpTextMLP""",
    scaled_mlp: "FalconH1MLP",
    joined_mlp: "GraniteMoeHybridMLP",
}
NORMS = {name: forward for forward, names in CLASSES.items() for name in names.split()}
