"""Mamba-2: a decay and a step size for each head from one gate; a value skips the state."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltarule.nn.delta_mixer import DeltaMixer
from deltarule.nn.gates import float32_parameter, step_and_log_decay
from deltarule.nn.norm import GroupRMSNorm
from deltarule.nn.rule import Arguments, LayerCall, Projections, Rule


def arguments(projections: Projections) -> Arguments:
    """The read-out is not scaled: beside D v_t its size matters."""
    dt, log_decay = step_and_log_decay(projections)
    v = projections.v * dt.unsqueeze(-1)
    given = projections.qkv | {"v": v.to(projections.v.dtype), "beta": None}
    return given | {"log_decay": log_decay, "scale": 1.0}


def read_out(o: Tensor, projections: Projections) -> Tensor:
    return (o + projections.need("D").unsqueeze(-1) * projections.v).to(o.dtype)


class Mamba2(DeltaMixer):
    """Mamba-2: S = a S + dt v k^T, o = S q + D v, then norm(o * SiLU(z)).

    In the paper's letters q = C, k = B, v = x, z is the output gate; key heads are its groups and
    value heads its heads. `from_config` takes the n_groups of the configuration as key heads (1 if
    it has none), and its heads as value heads; on its own a layer takes num_heads key heads and
    num_v_heads value heads. The norm spans all value heads of a key head. exp(A_log) starts from
    U(1, 16), softplus(dt_bias) log-uniform in [1e-3, 1e-1], D at ones.

    Examples:
        >>> layer = Mamba2(32, num_heads=1, num_v_heads=4)
        >>> y, state = layer(torch.zeros(1, 5, 32))
        >>> state["recurrent"].shape
        torch.Size([1, 4, 16, 128])
    """

    rule = Rule(
        name="mamba2", title="Mamba-2", decay="head", erase="none",
        recurrence="S = a S + dt v k^T", read_out="o = S q + D v",
        objective="|S - a S'|^2 - 2 <S k, dt v>",
        source="arXiv 2405.21060, sections 3 and 7 and listing 1",
        arguments=arguments, read_out_function=read_out,
    )  # fmt: skip
    has_rates = True
    state_size = 128
    shares_values = True
    expand_v = 2
    default_conv_size = 4
    default_output_gate = True
    activates_projections = True

    @classmethod
    def heads(cls, config: Any) -> dict[str, int | None]:
        heads = config.num_v_heads or config.num_heads
        return {"num_heads": getattr(config, "n_groups", 1), "num_v_heads": heads}

    def adopt(self, config: Any) -> None:
        factors = getattr(config, "ssm_multipliers", (1.0,) * 5)
        self.multipliers = {name: x for name, x in zip("gvkqa", factors, strict=True) if x != 1}
        if not getattr(config, "mamba_rms_norm", True):
            self.o_norm = nn.Identity()

    def build_gates(self) -> None:
        super().build_gates()
        self.build_head_decay(1)
        self.D = float32_parameter(torch.ones(self.num_v_heads, dtype=torch.float32))

    def build_norm(self) -> nn.Module:
        size = self.num_v_heads * self.head_v_dim
        return GroupRMSNorm(self.num_heads, size, self.norm_eps)

    def finish(self, o: Tensor, projections: Projections, call: LayerCall) -> Tensor:
        o = self.rule.read_out_function(o, projections)
        if projections.output_gate is not None:
            o = o * F.silu(projections.output_gate)
        return self.o_proj(self.o_norm(o.flatten(-2)))
