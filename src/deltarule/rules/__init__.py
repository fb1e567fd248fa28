"""The published systems, each a pure map from a layer's projections to an operator's arguments."""

from deltarule.rules import (
    delta_product,
    deltanet,
    gated_delta_product,
    gated_deltanet,
    gla,
    kda,
    lightning,
    linear_attention,
    longhorn,
    mamba2,
    retnet,
    rwkv7,
)
from deltarule.rules.rule import Arguments, Carry, Projections, Rule

_MODULES = (
    linear_attention, retnet, lightning, mamba2, gla, deltanet, gated_deltanet, kda,
    delta_product, gated_delta_product, longhorn, rwkv7,
)  # fmt: skip

RULES: dict[str, Rule] = {module.RULE.name: module.RULE for module in _MODULES}

__all__ = ["RULES", "Arguments", "Carry", "Projections", "Rule"]
