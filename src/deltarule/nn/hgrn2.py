"""HGRN-2: what a key channel forgets is what it writes with."""

from dataclasses import replace

import torch.nn.functional as F

from deltarule.nn.delta_mixer import DeltaMixer
from deltarule.nn.hgrn import LowerBounds, bounded_decay
from deltarule.nn.rule import Arguments, LayerCall, Projections, Rule


def arguments(projections: Projections) -> Arguments:
    log_decay, k = bounded_decay(projections.need("decay_logits"), projections.lower_bound)
    given = projections.qkv | {"k": k.to(projections.k.dtype), "beta": None}
    return given | {"log_decay": log_decay}


class HGRN2(LowerBounds, DeltaMixer):
    """HGRN-2: S = S Diag(a) + v (1 - a)^T, a = lb + (1 - lb) sigmoid(f): `k_proj` computes f.

    The least decay lb of each channel grows with depth. The first HGRN-2 layer of a model learns it
    for all of them and passes it on in `shared`; a layer without `shared`, and the first one, have
    lb = 0. SiLU on q, and a norm over all heads together. The paper's heads have 128 channels.
    """

    rule = Rule(
        name="hgrn2", title="HGRN-2", decay="channel", erase="none",
        recurrence="S = S Diag(a) + v (1 - a)^T",
        objective="|S - S' Diag(a)|^2 - 2 <S (1 - a), v>",
        source="arXiv 2404.07904, section 3; lower bounds, arXiv 2311.04823, section 3.2",
        arguments=arguments,
    )  # fmt: skip
    # Each decay is also a key.
    options = DeltaMixer.options - {"num_v_heads"}
    roles = {"k_proj": "gate"}
    norm_of_all = True

    def activates(self, name: str) -> bool:
        """SiLU is for q alone: k is a logit, and v comes as it is."""
        return name == "q"

    def project(self, call: LayerCall) -> Projections:
        p = super().project(call)
        q = p.q if self.conv_size else F.silu(p.q)
        return replace(p, q=q, decay_logits=p.k, lower_bound=self.lower_bound(call.shared))
