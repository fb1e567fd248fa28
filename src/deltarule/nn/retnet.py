"""RetNet and the gated one of YOCO: a decay for each head, constant or of the token's choice."""

from dataclasses import replace

import torch

from deltarule.nn import gla
from deltarule.nn.delta_mixer import DeltaMixer
from deltarule.nn.rotation import rotate
from deltarule.nn.rule import Arguments, LayerCall, Projections, Rule


def arguments(projections: Projections) -> Arguments:
    dtype = torch.promote_types(projections.v.dtype, torch.float32)
    head = torch.arange(projections.v.shape[2], dtype=dtype, device=projections.v.device)
    log_decay = torch.log1p(-torch.exp2(-5 - head))
    return projections.qkv | {"beta": None, "log_decay": log_decay}


class RetNet(DeltaMixer):
    """RetNet: S = g_h S + v k^T with g_h = 1 - 2^(-5 - h), and RoPE on q and k.

    The state also counts tokens (`length` [N]), which are the positions of the rotation. head_k_dim
    is even.
    """

    rule = Rule(
        name="retnet", title="RetNet", decay="constant", erase="none",
        recurrence="S = g_h S + v k^T",
        objective="|S - g S'|^2 - 2 <S k, v>",
        source="arXiv 2307.08621, eq. 6 and 8",
        arguments=arguments,
    )  # fmt: skip
    counts = True
    even = ("head_k_dim",)
    expand_v = 2
    default_output_gate = True
    options = DeltaMixer.options | {"rope_theta"}
    rope_theta: float

    def project(self, call: LayerCall) -> Projections:
        projections = super().project(call)
        positions = call.positions()
        q, k = (rotate(x, positions, self.rope_theta) for x in (projections.q, projections.k))
        return replace(projections, q=q, k=k)


class GatedRetNet(RetNet):
    """Gated RetNet: S = g S + v k^T with g = sigmoid(a_proj x)^(1/16), and RoPE on q and k."""

    rule = replace(
        RetNet.rule, name="gated_retnet", title="Gated RetNet", decay="head", page="retnet",
        recurrence="S = g S + v k^T",
        source="arXiv 2405.05254, section 3.1",
        arguments=gla.arguments,
    )  # fmt: skip
    gates_heads = True
